"""One moment of a database, for as long as somebody reads it.

A long reading holds nobody up who writes, but SQLite's log grows meanwhile, and PostgreSQL keeps
what is dead: whoever opens one does first what can be done without.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, TypeVar

from sqlalchemy import Column, ColumnElement, Connection, NullPool, Select, Text, collate, select
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from app.settings import Settings
from app.store.database import is_postgres
from app.store.database_errors import database_border
from app.store.postgres import CONNECT_SECONDS, server_url
from app.store.sqlite import SqliteFile
from app.store.tables import blobs
from app.store.threads import Workers, uninterrupted

T = TypeVar("T")

Values = tuple[Any, ...]

PAGE = 50
"""Rows that are fetched at once: a row may be a whole response."""

_SESSION = {
    "application_name": "consignee copy",
    "default_transaction_read_only": "on",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
}


class Snapshot(Protocol):
    """The rows of one moment. Every method raises Unavailable."""

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` on them."""
        ...

    def rows(
        self, *columns: ColumnElement[Any], by: Sequence[Column[Any]]
    ) -> AsyncGenerator[Values]:
        """These columns of every row, in the order of the columns `by`.

        Text is in the order of its code points on every database, as Python has it.
        """
        ...


@asynccontextmanager
async def open_snapshot(settings: Settings) -> AsyncIterator[Snapshot]:
    """What the database of `settings` holds now. Raises StoreError, Unavailable."""
    opened = _of_server(settings) if is_postgres(settings) else _of_file(settings)
    async with opened as snapshot:
        await snapshot.read(_begin)
        yield snapshot


def _begin(connection: Connection) -> None:
    connection.execute(select(blobs.c.id).limit(1)).first()


class _FileSnapshot:
    def __init__(self, connection: Connection, thread: Workers) -> None:
        self._connection = connection
        self._thread = thread

    async def read(self, query: Callable[[Connection], T]) -> T:
        with database_border():
            return await self._thread.run(query, self._connection)

    async def rows(
        self, *columns: ColumnElement[Any], by: Sequence[Column[Any]]
    ) -> AsyncGenerator[Values]:
        statement = select(*columns).order_by(*by)
        result = await self.read(lambda connection: connection.execute(statement))
        try:
            while page := await self.read(lambda _: result.fetchmany(PAGE)):
                for row in page:
                    yield tuple(row)
        finally:
            result.close()


@asynccontextmanager
async def _of_file(settings: Settings) -> AsyncIterator[_FileSnapshot]:
    async with AsyncExitStack() as undo:
        thread = Workers(1, name="consignee-snapshot")
        undo.callback(thread.close)
        file = SqliteFile(settings, readers=1)
        undo.callback(file.close)
        with database_border():
            connection = await thread.run(file.reader.connect)
            undo.callback(connection.close)
            await thread.run(connection.exec_driver_sql, "BEGIN")
        yield _FileSnapshot(connection, thread)


class _ServerSnapshot:
    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def read(self, query: Callable[[Connection], T]) -> T:
        with database_border():
            return await uninterrupted(self._connection.run_sync(query))

    async def rows(
        self, *columns: ColumnElement[Any], by: Sequence[Column[Any]]
    ) -> AsyncGenerator[Values]:
        statement: Select[Any] = select(*columns).order_by(*map(_by_code_points, by))
        with database_border():
            result = await self._connection.stream(statement)
        try:
            while page := await self._page(result.fetchmany(PAGE)):
                for row in page:
                    yield tuple(row)
        finally:
            await result.close()

    async def _page(self, fetched: Any) -> Sequence[Any]:
        with database_border():
            page: Sequence[Any] = await fetched
            return page


@asynccontextmanager
async def _of_server(settings: Settings) -> AsyncIterator[_ServerSnapshot]:
    engine = create_async_engine(
        server_url(settings),
        poolclass=NullPool,
        isolation_level="REPEATABLE READ",
        connect_args={"timeout": CONNECT_SECONDS, "server_settings": _SESSION},
    )
    try:
        with database_border():
            connection = await engine.connect()
        try:
            yield _ServerSnapshot(connection)
        finally:
            await connection.close()
    finally:
        await engine.dispose()


def _by_code_points(column: Column[Any]) -> ColumnElement[Any]:
    return collate(column, "C") if isinstance(column.type, Text) else column
