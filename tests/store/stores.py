"""What the store's tests share: settings, bodies, and looking at what really lies on the disk."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from app.settings import Settings
from app.store import ContentStore, Reference, Usage, migrate
from app.store.postgres import PostgresDatabase
from app.store.sqlite import SqliteDatabase
from tests import backends
from tests.backends import Rows

SMALL = b"small"
LARGE = bytes(range(256)) * 40
INLINE_BYTES = 1024


def store_settings(data_dir: Path, **changes: Any) -> Settings:
    """Settings of a store in `data_dir`, in which LARGE does not fit into a row."""
    given: dict[str, Any] = {"inline_bytes": INLINE_BYTES, "io_threads": 4}
    given |= backends.settings_of(data_dir) | changes
    return Settings(data_dir=data_dir, **given)


def sqlite_settings(data_dir: Path, **changes: Any) -> Settings:
    """The same on SQLite, whatever the other tests run on: for what is about SQLite itself."""
    url = f"sqlite:///{data_dir / 'consignee.db'}"
    return store_settings(data_dir, **{"database_url": url, **changes})


async def new_store(data_dir: Path, **changes: Any) -> ContentStore:
    """A store with its tables, in `data_dir`."""
    settings = store_settings(data_dir, **changes)
    migrate(settings)
    return await ContentStore.start(settings)


async def new_sqlite_store(data_dir: Path, **changes: Any) -> ContentStore:
    """A store on SQLite, whatever the other tests run on."""
    settings = sqlite_settings(data_dir, **changes)
    migrate(settings)
    return await ContentStore.start(settings)


async def stream(data: bytes, piece: int = 4096) -> AsyncIterator[bytes]:
    """`data` in pieces, as a body arrives."""
    for start in range(0, len(data), piece):
        yield data[start : start + piece]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def put(store: ContentStore, data: bytes, scope: str = "a", **changes: Any) -> Reference:
    """Receive `data`, declared as it is unless `changes` say otherwise."""
    declared: dict[str, Any] = {"size": len(data), "sha256": sha256(data), **changes}
    return await store.receive(stream(data), scope=scope, principal="alice", **declared)


async def get(store: ContentStore, ref: str, scope: str = "a", **bounds: Any) -> bytes:
    async with store.open(scope, ref, **bounds) as content:
        return b"".join([chunk async for chunk in content])


async def counted(store: ContentStore) -> Usage:
    """What is stored now: `usage` may tell what was a moment ago."""
    return await store._catalogue.usage()


def crash(store: ContentStore) -> None:
    """Let go of a store as the end of its process does: nothing is cleared up."""
    store._workers.close()
    _cut_off(store._database)
    lock = store._staging._lock
    assert lock is not None
    os.close(lock)


def _cut_off(database: Any) -> None:
    if isinstance(database, SqliteDatabase):
        database._thread.close()
        database.file.close()
    if isinstance(database, PostgresDatabase):
        for engine in (database.writer, database.reader):
            for entry in list(engine.sync_engine.pool._pool._queue._queue):  # type: ignore[attr-defined]  # idle
                entry.driver_connection.terminate()


def stored_files(data_dir: Path) -> list[Path]:
    """Every file of a body, published or staged."""
    return [*_other_files(data_dir), *published(data_dir)]


def published(data_dir: Path) -> list[Path]:
    return backends.bodies_of(data_dir)


def staged(data_dir: Path) -> list[Path]:
    return [p for p in _other_files(data_dir) if p.is_relative_to(data_dir / "staging")]


def _other_files(data_dir: Path) -> list[Path]:
    found = [path for path in data_dir.rglob("*") if path.is_file() and path.parent != data_dir]
    own = [path for path in found if not path.name.startswith(".")]
    return [path for path in own if not path.is_relative_to(data_dir / "blobs")]


def database(data_dir: Path) -> AbstractContextManager[Rows]:
    """A connection of another process, as it were; commits at the end."""
    return backends.rows_of(data_dir)


@contextmanager
def sqlite_rows(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """The same for a store on SQLite."""
    with closing(sqlite3.connect(data_dir / "consignee.db")) as connection:
        yield connection
        connection.commit()


def count(data_dir: Path, table: str) -> int:
    with database(data_dir) as connection:
        return int(connection.execute(f"select count(*) from {table}").fetchone()[0])


def make_old(data_dir: Path, age: timedelta = timedelta(days=1)) -> None:
    """Let every published file look as if it came `age` ago."""
    backends.make_bodies_old(data_dir, age.total_seconds())
