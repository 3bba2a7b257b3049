"""SQLite: a file on this machine, written by one process at a time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, create_engine, event

from app.settings import Settings
from app.store.database import database_url
from app.store.database_errors import database_border, sqlite_driver
from app.store.disk import PRIVATE_FILE, disk_border, make_folder
from app.store.records import StoreError
from app.store.threads import Workers

T = TypeVar("T")

WRITER_CACHE_KIB = 4 * 1024
"""What a batch changes fits in it; the system's page cache stands behind it. More costs time:
SQLite walks through all of it at the end of a transaction that has balanced a tree."""

READER_CACHE_KIB = 2 * 1024
"""For each reading connection; the system's page cache stands behind it."""

CHECKPOINT_PAGES = 8000
"""About 32 MiB of write-ahead log: many uploads touch the same index page before it is copied."""


class SqliteFile:
    """Two engines over one file: `writer` for immediate transactions, `reader` for the rest.

    Reads are single statements in autocommit mode, each with its own snapshot, so a read can
    never turn into a write that fails at once whatever the timeout is.
    """

    def __init__(self, settings: Settings, *, readers: int | None = None) -> None:
        url = _file_url(settings)
        timeout = settings.database_timeout_seconds
        self.writer = create_engine(url, pool_size=1, max_overflow=0)
        self.reader = create_engine(
            url, pool_size=readers or settings.io_threads, isolation_level="AUTOCOMMIT"
        )
        event.listen(self.writer, "connect", _on_connect(timeout, WRITER_CACHE_KIB, writes=True))
        event.listen(self.writer, "begin", _begin_immediate)
        event.listen(self.writer, "commit", _commit)
        event.listen(self.reader, "connect", _on_connect(timeout, READER_CACHE_KIB, writes=False))

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` on a reading connection. Blocks."""
        with database_border(), self.reader.connect() as connection:
            return query(connection)

    def commit(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one immediate, durable transaction. Blocks; raises what the driver does."""
        with self.writer.begin() as connection:
            return work(connection)

    def close(self) -> None:
        """Close every connection. Legal twice."""
        self.writer.dispose()
        self.reader.dispose()


class SqliteDatabase:
    """A file for an event loop: one thread that commits, reads in the pool of `workers`.

    Every transaction is alone in it.
    """

    parallel = 1

    def __init__(self, settings: Settings, workers: Workers) -> None:
        self.file = SqliteFile(settings)
        self._workers = workers
        self._thread = Workers(1, name="consignee-commit")

    def write(self, work: Callable[[Connection], T], *, alone: bool) -> asyncio.Future[T]:
        """See Database."""
        del alone
        return self._thread.submit(self.file.commit, work)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """See Database."""
        return await self._workers.run(self.file.read, query)

    async def close(self) -> None:
        """See Database."""
        self._thread.close()
        self.file.close()


def _file_url(settings: Settings) -> URL:
    """The URL in force, with the driver that threads use. Raises StoreError."""
    url = database_url(settings)
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        raise StoreError("database_url: must be sqlite:/// and the absolute path of a file")
    if not Path(str(url.database)).is_absolute():
        raise StoreError("database_url: the path of the database must be absolute")
    return url.set(drivername="sqlite+pysqlite")


def database_file(settings: Settings) -> Path:
    """Where an SQLite database lies."""
    return Path(str(_file_url(settings).database))


def create_database_file(settings: Settings) -> None:
    """Make sure that the file and its folder are there, private to this user."""
    path = database_file(settings)
    with disk_border():
        make_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


@contextmanager
def opened_file(settings: Settings) -> Iterator[SqliteFile]:
    """The file for as long as the block lasts."""
    opened = SqliteFile(settings)
    try:
        yield opened
    finally:
        opened.close()


def _begin_immediate(connection: Connection) -> None:
    with sqlite_driver(connection, "BEGIN IMMEDIATE") as driver:
        driver.execute("BEGIN IMMEDIATE")


def _commit(connection: Connection) -> None:
    # The driver's own commit() does nothing, silently, when SQLite has rolled back already (as it
    # does on a full disk); the statement fails then.
    with sqlite_driver(connection, "COMMIT") as driver:
        driver.execute("COMMIT")


def _on_connect(timeout: float, cache_kib: int, *, writes: bool) -> Callable[[Any, Any], None]:
    pragmas = [
        f"busy_timeout = {round(timeout * 1000)}",
        f"cache_size = -{cache_kib}",
        "foreign_keys = ON",
    ]
    if writes:
        pragmas += [
            "journal_mode = WAL",
            "synchronous = FULL",
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        ]
    else:
        pragmas.append("query_only = ON")

    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None  # transactions begin where we say, not where it guesses
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    return prepare
