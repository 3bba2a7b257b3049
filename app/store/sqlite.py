"""SQLite: a file on this machine, written by one process at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, create_engine, event

from app.settings import Settings
from app.store.database import database_url, nothing
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

CHECKPOINT_ROWS = 8000
"""So many rows later, what the write-ahead log holds is copied into the file, beside the commits
that go on. Many rows touch the same page of an index, which is copied once: rarely is better."""

CHECKPOINT_PAGES = 32_000
"""About 128 MiB of write-ahead log: with so much in it, a commit itself copies what is left, and
the log begins anew. It cannot while others write to it."""


_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"

logger = logging.getLogger("consignee.store")


class SqliteFile:
    """Two engines over one file: `writer` for immediate transactions, `reader` for the rest.

    Reads are single statements in autocommit mode, each with its own snapshot, so a read can
    never turn into a write that fails at once whatever the timeout is.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        readers: int | None = None,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """`meanwhile` is called where a transaction begins to wait for the disk."""
        self._meanwhile = meanwhile
        self._writing: Connection | None = None
        self.changed_rows = 0
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
        # Taking a connection out of its pool for each transaction would cost more than SQLite does.
        connection = self._writing = self._writing or self.writer.connect()
        try:
            with connection.begin():
                before = _changed_rows(connection)
                outcome = work(connection)
                self.changed_rows += _changed_rows(connection) - before
                self._meanwhile()
        except BaseException:
            self._give_back()
            raise
        return outcome

    def checkpoint(self) -> None:
        """Copy what is committed from the write-ahead log into the file. Blocks, but no commit."""
        self.read(lambda connection: connection.exec_driver_sql(_CHECKPOINT).close())

    def close(self) -> None:
        """Close every connection. Legal twice."""
        self._give_back()
        self.writer.dispose()
        self.reader.dispose()

    def _give_back(self) -> None:
        """Let the pool undo what is left of a transaction; the next one takes a connection anew."""
        if self._writing is not None:
            self._writing.close()
            self._writing = None


class SqliteDatabase:
    """A file for an event loop: one thread that commits, reads in the pool of `workers`.

    Every transaction is alone in it.
    """

    parallel = 1

    def __init__(
        self, settings: Settings, workers: Workers, meanwhile: Callable[[], None] = nothing
    ) -> None:
        self.file = SqliteFile(settings, meanwhile=meanwhile)
        self._checkpoint: asyncio.Future[None] | None = None
        self._rows_copied = 0
        self._workers = workers
        self._thread = Workers(1, name="consignee-commit")

    def write(self, work: Callable[[Connection], T], *, alone: bool) -> asyncio.Future[T]:
        """See Database."""
        del alone
        written = self._thread.submit(self.file.commit, work)
        written.add_done_callback(self._copy_when_due)
        return written

    async def read(self, query: Callable[[Connection], T]) -> T:
        """See Database."""
        return await self._workers.run(self.file.read, query)

    async def close(self) -> None:
        """See Database."""
        self._thread.close()
        self.file.close()

    def _copy_when_due(self, _: asyncio.Future[Any]) -> None:
        is_due = self.file.changed_rows - self._rows_copied >= CHECKPOINT_ROWS
        if is_due and self._checkpoint is None:
            self._rows_copied = self.file.changed_rows
            self._checkpoint = self._workers.submit(self.file.checkpoint)
            self._checkpoint.add_done_callback(self._copied)

    def _copied(self, checkpoint: asyncio.Future[None]) -> None:
        self._checkpoint = None
        if not checkpoint.cancelled() and (error := checkpoint.exception()):
            # Nothing is lost by it: the log is longer than it should be.
            logger.warning("the write-ahead log was not copied", exc_info=error)


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


def _changed_rows(connection: Connection) -> int:
    """How many rows this connection to the file has changed; another one begins at 0."""
    driver: Any = connection.connection.driver_connection
    changed: int = driver.total_changes
    return changed


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
