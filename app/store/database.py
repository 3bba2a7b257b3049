"""The database: how it is opened, and the one border where its errors are translated."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError

from app.errors import Conflict, Exhausted, Refusal, Unavailable
from app.settings import Settings
from app.store.disk import PRIVATE_FILE, disk_border, make_folder
from app.store.records import StoreError

WRITER_CACHE_KIB = 128 * 1024
"""The indexes of a million references fit in it, so that an upload reads no page from disk."""

READER_CACHE_KIB = 2 * 1024
"""For each reading connection; the system's page cache stands behind it."""

CHECKPOINT_PAGES = 8000
"""About 32 MiB of write-ahead log: many uploads touch the same index page before it is copied."""

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_ROOM_EXTENDED = frozenset({sqlite3.SQLITE_IOERR_SHMSIZE})


class Database:
    """Two engines over one database: `writer` for immediate transactions, `reader` for the rest.

    Reads are single statements in autocommit mode, each with its own snapshot, so a read can
    never turn into a write that fails at once whatever the timeout is.
    """

    def __init__(self, settings: Settings, *, readers: int | None = None) -> None:
        url = database_url(settings)
        timeout = settings.database_timeout_seconds
        self.writer = create_engine(url, pool_size=1, max_overflow=0)
        self.reader = create_engine(
            url, pool_size=readers or settings.io_threads, isolation_level="AUTOCOMMIT"
        )
        event.listen(self.writer, "connect", _on_connect(timeout, WRITER_CACHE_KIB, writes=True))
        event.listen(self.writer, "begin", _begin_immediate)
        event.listen(self.writer, "commit", _commit)
        event.listen(self.reader, "connect", _on_connect(timeout, READER_CACHE_KIB, writes=False))

    def read(self, query: Callable[[Connection], Any]) -> Any:
        """Run `query` on a reading connection."""
        with database_border(), self.reader.connect() as connection:
            return query(connection)

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """One immediate, durable transaction."""
        with database_border(), self.writer.begin() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection. Legal twice."""
        self.writer.dispose()
        self.reader.dispose()


def database_url(settings: Settings) -> URL:
    """The URL in force, with the driver that threads use. Raises StoreError."""
    try:
        url = make_url(settings.database)
    except ArgumentError:
        raise StoreError("database_url: is not an SQLAlchemy URL") from None
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        raise StoreError("database_url: must be sqlite:/// and the absolute path of a file")
    if not Path(str(url.database)).is_absolute():
        raise StoreError("database_url: the path of the database must be absolute")
    return url.set(drivername="sqlite+pysqlite")


def database_file(settings: Settings) -> Path:
    """Where an SQLite database lies."""
    return Path(str(database_url(settings).database))


def create_database_file(settings: Settings) -> None:
    """Make sure that the file and its folder are there, private to this user."""
    path = database_file(settings)
    with disk_border():
        make_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


@contextmanager
def database_border() -> Iterator[None]:
    """Translate every error of SQLAlchemy and its driver inside into a refusal."""
    try:
        yield
    except SQLAlchemyError as error:
        raise refusal_of(error) from error


def refusal_of(error: SQLAlchemyError) -> Refusal:
    """What an error of the database means for the one who asked."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    extended = getattr(cause, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    primary = extended & 0xFF
    if primary == sqlite3.SQLITE_FULL or extended in _NO_ROOM_EXTENDED:
        return Exhausted()
    if isinstance(error, IntegrityError):
        return Conflict("conflict", "What this refers to has changed meanwhile; try again.")
    if primary in _BUSY:
        return Unavailable("database_busy", "The database is busy; try again.")
    return Unavailable(
        "storage_unavailable", "The database cannot be read or written at the moment; try again."
    )


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _commit(connection: Connection) -> None:
    # The driver's own commit() does nothing, silently, when SQLite has rolled back already (as it
    # does on a full disk); the statement fails then.
    connection.exec_driver_sql("COMMIT")


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
