"""PostgreSQL: a server that any number of processes share.

Transactions take an advisory lock first, which PostgreSQL lets go of at their end: exclusive for
those that are `alone`, shared for the others. So they run as SQLite runs them, one after another
where that matters, and no statement looks at anything older than itself: READ COMMITTED is right,
and nothing has to be run again because of somebody else's transaction. A process that stalls with
the lock in its hands loses it after `database_statement_timeout_seconds`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sqlalchemy import URL, Connection, NullPool, select, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from app.errors import Refusal
from app.settings import Settings
from app.store.database import database_url
from app.store.database_errors import (
    DATABASE_ERRORS,
    database_border,
    is_passing,
    leaves_doubt,
    refusal_of,
    sqlstate_of,
)
from app.store.records import StoreError
from app.store.tables import writers
from app.store.threads import uninterrupted

T = TypeVar("T")

LOCK = 0x636F6E7369676E65
"""The advisory lock of every transaction, and of migrations. Locks are of one database."""

CONNECT_SECONDS = 10
"""How long one attempt to connect may take."""

MARGIN_SECONDS = 5
"""How much later than the server this side gives a statement up: then nobody answers any more."""

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
"""Pauses between attempts begin with the one, after one attempt without any, and double up to the
other."""

PARAMETERS = frozenset(
    {"host", "port", "user", "password", "passfile", "service", "servicefile", "ssl", "direct_tls"}
    | {"krbsrvname", "gsslib", "prepared_statement_cache_size"}
)
"""What the URL may have behind its question mark."""

_WRONG_CONFIGURATION = ("28", "3D")
"""SQLSTATEs of credentials that are refused, and of a database that does not exist."""

# The lock and the mark in one trip. A mark is its writer's own: to see it, no statement has to
# begin after the lock was given.
_TURN = """
WITH held AS MATERIALIZED (SELECT {lock}({key}))
INSERT INTO writers (writer, batch, written_at)
SELECT CAST(:writer AS text), CAST(:batch AS bigint), CAST(:now AS bigint) FROM held
ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch, written_at = excluded.written_at
"""
_ALONE = text(_TURN.format(lock="pg_advisory_xact_lock", key=LOCK))
_SHARED = text(_TURN.format(lock="pg_advisory_xact_lock_shared", key=LOCK))
_LOCK = text(f"SELECT pg_advisory_xact_lock({LOCK})")


class PostgresDatabase:
    """A server for an event loop: `writer` for transactions, `reader` for single statements."""

    def __init__(self, settings: Settings) -> None:
        self.parallel = settings.database_commits
        self._patience = settings.database_timeout_seconds
        limits = _limits(settings)
        self.writer = _engine(settings, limits, pool_size=self.parallel)
        self.reader = _engine(
            settings,
            {**limits, "default_transaction_read_only": "on"},
            pool_size=settings.database_connections,
            isolation_level="AUTOCOMMIT",
        )
        process = secrets.token_hex(16)
        self._writers = [f"{process}-{number}" for number in range(self.parallel)]
        self._batches = itertools.count(1)

    def write(self, work: Callable[[Connection], T], *, alone: bool) -> asyncio.Future[T]:
        """See Database."""
        return asyncio.get_running_loop().create_task(self._write(work, alone=alone))

    async def read(self, query: Callable[[Connection], T]) -> T:
        """See Database. A cancelled caller waits: a connection cut short is a connection lost."""
        return await uninterrupted(self._read(query))

    async def close(self) -> None:
        """See Database."""
        await self.writer.dispose()
        await self.reader.dispose()

    async def _write(self, work: Callable[[Connection], T], *, alone: bool) -> T:
        writer = self._writers.pop()
        mark = Mark(writer, next(self._batches))
        try:
            transaction = _Transaction(self.writer, work, mark, alone=alone)
            return await insist(transaction.attempt, self._patience)
        finally:
            self._writers.append(writer)

    async def _read(self, query: Callable[[Connection], T]) -> T:
        async def attempt() -> T:
            async with _connected(self.reader) as connection:
                return await connection.run_sync(query)

        with database_border():
            return await insist(attempt, self._patience)


@dataclass(frozen=True, slots=True)
class Mark:
    """What a transaction leaves behind, so that it can be seen whether it was committed."""

    writer: str
    batch: int


class _Transaction(Generic[T]):
    """One transaction of `work`, which is attempted until it is known what became of it."""

    def __init__(
        self, engine: AsyncEngine, work: Callable[[Connection], T], mark: Mark, *, alone: bool
    ) -> None:
        self._engine = engine
        self._work = work
        self._mark = mark
        self._turn = _ALONE if alone else _SHARED
        self._unanswered: list[T] = []

    async def attempt(self) -> T:
        """Commit `work`, unless an attempt before has done so; its outcome."""
        async with _connected(self._engine) as connection:
            if self._unanswered:
                committed: bool = await connection.run_sync(self._was_committed)
                if committed:
                    return self._unanswered[0]
            outcome = await connection.run_sync(self._run)
            self._unanswered = [outcome]
            await connection.commit()
            return outcome

    def _run(self, connection: Connection) -> T:
        values = {"writer": self._mark.writer, "batch": self._mark.batch, "now": int(time.time())}
        connection.execute(self._turn, values)
        return self._work(connection)

    def _was_committed(self, connection: Connection) -> bool:
        # Whoever gets the lock knows that the transaction that had it is over.
        connection.execute(_LOCK)
        statement = select(writers.c.batch).where(writers.c.writer == self._mark.writer)
        return connection.execute(statement).scalar() == self._mark.batch


class _connected:  # noqa: N801 - a context manager that reads as a verb
    """A connection, thrown away when an error leaves it in doubt."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def __aenter__(self) -> AsyncConnection:
        self._connection = await self._engine.connect()
        return self._connection

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and leaves_doubt(error):
            await self._connection.invalidate()
        await self._connection.close()


async def insist(attempt: Callable[[], Awaitable[T]], patience: float) -> T:
    """Attempt again what failed for a reason that passes, for `patience` seconds at most."""
    deadline = time.monotonic() + patience
    pauses = _pauses()
    while True:
        try:
            return await attempt()
        except DATABASE_ERRORS as error:
            pause = next(pauses)
            if not is_passing(error) or time.monotonic() + pause > deadline:
                raise
        await asyncio.sleep(pause)


def _pauses() -> Iterator[float]:
    # Nothing before the second attempt: a connection of the pool may have ended long ago.
    yield 0
    pause = FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def on_server(settings: Settings, work: Callable[[Connection], T], *, alone: bool) -> T:
    """Run `work` in one transaction without a limit of time, `alone` or only to look.

    Blocks, also where an event loop runs. Raises StoreError where the configuration is at fault,
    Unavailable.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _once(settings, work, alone=alone)).result()


async def _once(settings: Settings, work: Callable[[Connection], T], *, alone: bool) -> T:
    def locked(connection: Connection) -> T:
        if alone:
            connection.execute(_LOCK)
        return work(connection)

    async def attempt() -> T:
        async with engine.begin() as connection:
            return await connection.run_sync(locked)

    lock = {"lock_timeout": _milliseconds(settings.database_timeout_seconds)}
    engine = _engine(settings, lock, poolclass=NullPool)
    try:
        return await insist(attempt, settings.database_timeout_seconds)
    except DATABASE_ERRORS as error:
        raise _fault_of(error) from error
    finally:
        await engine.dispose()


def _fault_of(error: Exception) -> StoreError | Refusal:
    if sqlstate_of(error).startswith(_WRONG_CONFIGURATION):
        return StoreError(
            "database_url: the server refuses this user or password, or has no such database; "
            "create the database first"
        )
    return refusal_of(error)


def _limits(settings: Settings) -> dict[str, str]:
    """How long the server bears with a statement, a lock, and a client that stalls."""
    statement = _milliseconds(settings.database_statement_timeout_seconds)
    return {
        "statement_timeout": statement,
        "idle_in_transaction_session_timeout": statement,
        "lock_timeout": _milliseconds(settings.database_timeout_seconds),
    }


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _engine(settings: Settings, session: dict[str, str], **options: Any) -> AsyncEngine:
    """An engine whose connections have `session` as their settings."""
    url = server_url(settings)
    options.setdefault("isolation_level", "READ COMMITTED")
    if "pool_size" in options:
        options |= {"max_overflow": 0, "pool_timeout": settings.database_timeout_seconds}
    limit = settings.database_statement_timeout_seconds
    arguments = {
        "timeout": CONNECT_SECONDS,
        "command_timeout": limit + MARGIN_SECONDS if "statement_timeout" in session else None,
        "target_session_attrs": "primary",  # a standby may not know yet what was confirmed
        # A 201 says that the commit is durable, whatever the server's own default is.
        "server_settings": {"application_name": "consignee", "synchronous_commit": "on"} | session,
    }
    return create_async_engine(url, connect_args=arguments, **options)


def server_url(settings: Settings) -> URL:
    """The URL in force, with the driver of event loops. Raises StoreError."""
    url = database_url(settings)
    if url.drivername not in ("postgresql", "postgresql+asyncpg"):
        raise StoreError("database_url: must begin with postgresql+asyncpg://")
    if unknown := sorted(url.query.keys() - PARAMETERS):
        raise StoreError(f"database_url: has a parameter that is unknown: {unknown[0]}")
    url = url.set(drivername="postgresql+asyncpg")
    try:
        create_async_engine(url).dialect.create_connect_args(url)
    except (ArgumentError, ValueError):
        raise StoreError("database_url: its hosts or ports cannot be read") from None
    return url
