"""The database and the blob store that the tests run on: one switch, `TEST_BACKENDS`.

`sqlite+files` (when not set), `postgres+files` or `postgres+s3`. A data folder has a database of
its own on the server, as it has a file of its own otherwise; a test that is about SQLite itself
names its database itself.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import pytest

from app.settings import Settings
from app.store import migrate
from tests.objects import (
    CREDENTIALS,
    StoredObject,
    make_object_old,
    object_server,
    stored_objects,
)
from tests.postgres import Cluster, connected

DATABASE, _, BLOBS = os.environ.get("TEST_BACKENDS", "sqlite+files").partition("+")
assert DATABASE in ("sqlite", "postgres"), "TEST_BACKENDS names no database"
assert BLOBS in ("files", "s3"), "TEST_BACKENDS names no blob store"

ON_POSTGRES = DATABASE == "postgres"
IN_OBJECTS = BLOBS == "s3"
if IN_OBJECTS:
    os.environ |= CREDENTIALS  # where every process looks that the tests start

COMMIT = (
    "app.store.postgres:_Transaction.attempt"
    if ON_POSTGRES
    else "app.store.sqlite:SqliteFile.commit"
)
"""The step in which a batch is committed."""

PUBLISH, CONFIRM, UNLINK = (
    ("app.store.objects:ObjectBlobs." if IN_OBJECTS else "app.store.local:LocalBlobs._") + name
    for name in ("publish", "size", "delete")
)
"""The steps in which a body gets to its location, is found there, and is taken away."""

_TEMPLATE = "consignee_template"
_clusters: list[Cluster] = []
_databases: dict[Path, str] = {}


class Rows(Protocol):
    """A connection of another process, as it were."""

    def execute(self, statement: str, values: Any = ..., /) -> Any: ...


def settings_of(data_dir: Path) -> dict[str, Any]:
    """The settings that name the back ends of a data folder."""
    return database_settings(data_dir) | blob_settings(data_dir)


def database_settings(data_dir: Path) -> dict[str, Any]:
    """`database_url` of a data folder, where it is not the file in it."""
    return {"database_url": _database_of(data_dir)} if ON_POSTGRES else {}


def blob_settings(data_dir: Path) -> dict[str, Any]:
    """`blob_url` of a data folder, where it is not a folder in it."""
    return {"blob_url": object_server().blob_url(_name_of(data_dir))} if IN_OBJECTS else {}


def bodies_of(data_dir: Path) -> list[Path]:
    """What a data folder has published: files, or objects that can do what tests do to files."""
    if IN_OBJECTS:
        return cast("list[Path]", stored_objects(blob_settings(data_dir)["blob_url"]))
    found = [path for path in (data_dir / "blobs").rglob("*") if path.is_file()]
    return [path for path in found if not path.name.startswith(".")]


def new_body(data_dir: Path, location: str) -> Path:
    """Where a body of that location is, or would be, published."""
    if IN_OBJECTS:
        return cast("Path", StoredObject(blob_settings(data_dir)["blob_url"], location))
    folder = data_dir / "blobs" / location[:2]
    folder.mkdir(exist_ok=True)
    return folder / location


def open_descriptors() -> int:
    """Descriptors of this process less its connections, of which the engines' pools keep some."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that the folder was read by
            found += not os.readlink(descriptor).startswith("socket:")
    return found


def make_bodies_old(data_dir: Path, seconds: float) -> None:
    """Let everything published look as if it came so long before it did."""
    for body in bodies_of(data_dir):
        if IN_OBJECTS:
            make_object_old(body.name, seconds)
        else:
            modified = body.stat().st_mtime - seconds
            os.utime(body, (modified, modified))


def environment_of(data_dir: Path) -> dict[str, str]:
    """The same for a server process, as variables."""
    return {f"CONSIGNEE_{key.upper()}": str(value) for key, value in settings_of(data_dir).items()}


def name_in_environment(data_dir: Path, patch: pytest.MonkeyPatch) -> None:
    """Let the commands that run in this process find the back ends of a data folder."""
    for name, value in environment_of(data_dir).items():
        patch.setenv(name, value)


@contextmanager
def rows_of(data_dir: Path) -> Iterator[Rows]:
    """The database of a data folder, in one transaction, which is committed at the end.

    Nobody looks after foreign keys in it: a test may leave a database as damage leaves it.
    """
    if ON_POSTGRES:
        with connected(_database_of(data_dir), transaction=True) as client:
            client.execute("set local session_replication_role = replica")
            yield client
        return
    with closing(sqlite3.connect(data_dir / "consignee.db")) as connection:
        yield connection
        connection.commit()


def drop_databases(below: Path | None = None) -> None:
    """Drop the databases of data folders that are gone, or `below` a folder."""
    gone = [
        folder
        for folder in _databases
        if not folder.exists() or (below is not None and folder.is_relative_to(below))
    ]
    for folder in gone:
        cluster().execute(f"drop database if exists {_databases.pop(folder)} with (force)")


def close() -> None:
    """End every server that was started."""
    while _clusters:
        _clusters.pop().close()


@cache
def cluster() -> Cluster:
    """The server of this session, with the database that all others are copies of."""
    started = Cluster()
    _clusters.append(started)
    started.execute(f"create database {_TEMPLATE}")
    migrate(Settings(database_url=started.url(_TEMPLATE)))
    return started


def new_database(name: str, template: str = _TEMPLATE) -> str:
    """A database with every table, or a copy of another `template`; its URL."""
    cluster().execute(f"create database {name} template {template}")
    return cluster().url(name)


def _database_of(data_dir: Path) -> str:
    data_dir = Path(os.path.abspath(data_dir))
    if data_dir not in _databases:
        name = _name_of(data_dir)
        new_database(name)
        _databases[data_dir] = name
    return cluster().url(_databases[data_dir])


def _name_of(data_dir: Path) -> str:
    """What a data folder has on a server of every test."""
    return "test_" + hashlib.sha256(os.fsencode(os.path.abspath(data_dir))).hexdigest()[:24]
