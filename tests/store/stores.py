"""What the store's tests share: settings, bodies, and looking at what really lies on the disk."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from app.settings import Settings
from app.store import ContentStore, Reference, migrate

SMALL = b"small"
LARGE = bytes(range(256)) * 40
INLINE_BYTES = 1024


def store_settings(data_dir: Path, **changes: Any) -> Settings:
    """Settings of a store in `data_dir`, in which LARGE does not fit into a row."""
    given: dict[str, Any] = {"inline_bytes": INLINE_BYTES, "io_threads": 4, **changes}
    return Settings(data_dir=data_dir, **given)


async def new_store(data_dir: Path, **changes: Any) -> ContentStore:
    """A store with its tables, in `data_dir`."""
    settings = store_settings(data_dir, **changes)
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


def crash(store: ContentStore) -> None:
    """Let go of a store as the end of its process does: nothing is cleared up."""
    store._catalogue._committer._thread.close()
    store._workers.close()
    store._database.close()
    lock = store._staging._lock
    assert lock is not None
    os.close(lock)


def stored_files(data_dir: Path) -> list[Path]:
    """Every file of a body, published or staged."""
    found = [path for path in data_dir.rglob("*") if path.is_file()]
    return [path for path in found if path.parent != data_dir and not path.name.startswith(".")]


def published(data_dir: Path) -> list[Path]:
    return [path for path in stored_files(data_dir) if path.is_relative_to(data_dir / "blobs")]


def staged(data_dir: Path) -> list[Path]:
    return [path for path in stored_files(data_dir) if path.is_relative_to(data_dir / "staging")]


@contextmanager
def database(data_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection of another process, as it were; commits at the end."""
    with closing(sqlite3.connect(data_dir / "consignee.db")) as connection:
        yield connection
        connection.commit()


def count(data_dir: Path, table: str) -> int:
    with database(data_dir) as connection:
        return int(connection.execute(f"select count(*) from {table}").fetchone()[0])


def make_old(data_dir: Path, age: timedelta = timedelta(days=1)) -> None:
    """Let every published file look as if it came `age` ago."""
    for path in published(data_dir):
        modified = path.stat().st_mtime - age.total_seconds()
        os.utime(path, (modified, modified))
