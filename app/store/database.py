"""The database: what the store asks of it, and which one the configuration names.

Everything that talks to a database is a function of a `Connection`. SQLite runs it in a thread of
its own, PostgreSQL on the event loop. Either way no two transactions that are `alone` run at
once, in this process or in any other, and none that is not runs beside one that is: a function that
looks before it writes finds nobody changing what it looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from sqlalchemy import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError

from app.store.records import StoreError

if TYPE_CHECKING:
    from app.settings import Settings

T = TypeVar("T")


class Database(Protocol):
    """One database, for one event loop."""

    @property
    def parallel(self) -> int:
        """How many transactions that are not `alone` may run at once."""
        ...

    def write(self, work: Callable[[Connection], T], *, alone: bool) -> asyncio.Future[T]:
        """Run `work` in one durable transaction. It may be run again: it must do nothing else.

        The future has errors as the driver raised them. A commit that was not answered is looked
        up, never taken for either; where that cannot be done either, it is an error, and whether
        it was committed is not known.
        """
        ...

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` outside of any transaction: each statement has a snapshot of its own.

        Raises Unavailable.
        """
        ...

    async def close(self) -> None:
        """Close every connection. Legal twice."""
        ...


def nothing() -> None:
    """What is done meanwhile where there is nothing to do."""


def database_url(settings: Settings) -> URL:
    """The URL in force. Raises StoreError."""
    try:
        url = make_url(settings.database)
    except ArgumentError:
        raise StoreError("database_url: is not an SQLAlchemy URL") from None
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StoreError("database_url: must begin with sqlite:/// or postgresql+asyncpg://")
    return url


def is_postgres(settings: Settings) -> bool:
    """Whether the database is a server and not a file."""
    return database_url(settings).get_backend_name() == "postgresql"
