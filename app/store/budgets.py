"""Requests of one principal, counted over all processes that share the database.

No clock of a process counts: on a server it is the server's, and a file has one machine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, select, text
from sqlalchemy.dialects import postgresql, sqlite

from app.store.catalogue import Catalogue
from app.store.worker_tables import request_budgets

SECOND = 1_000_000
"""In microseconds, as the table has times."""

_SERVER_TIME = text("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)")

_full_at = select(request_budgets.c.full_at).where(
    request_budgets.c.scope == bindparam("scope"),
    request_budgets.c.principal == bindparam("principal"),
)
_inserts: dict[str, sqlite.Insert | postgresql.Insert] = {
    "sqlite": sqlite.insert(request_budgets),
    "postgresql": postgresql.insert(request_budgets),
}
_put_off = {
    name: insert.on_conflict_do_update(
        index_elements=[request_budgets.c.scope, request_budgets.c.principal],
        set_={"full_at": insert.excluded.full_at},
    )
    for name, insert in _inserts.items()
}


@dataclass(frozen=True, slots=True)
class Rate:
    """A bucket that fills by `per_second` and holds `burst` requests at most."""

    per_second: float
    burst: float


@dataclass(frozen=True, slots=True)
class Share:
    """Requests that were taken out of a bucket; with none, the seconds until there is one."""

    requests: int
    wait_seconds: float = 0.0


class RequestBudgets:
    """The buckets of all principals."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def take(self, scope: str, principal: str, rate: Rate, most: int) -> Share:
        """Take as many requests as there are, `most` at most."""
        values = {"scope": scope, "principal": principal}

        def work(connection: Connection) -> Share:
            now = _now(connection)
            full_at = connection.execute(_full_at, values).scalar()
            share, full_at = _taken(now, now if full_at is None else full_at, rate, most)
            if share.requests:
                connection.execute(
                    _put_off[connection.dialect.name], {**values, "full_at": full_at}
                )
            return share

        return await self._catalogue.write(work)

    async def forget_full(self) -> int:
        """Drop the buckets that are full: they say nothing; how many there were."""

        def work(connection: Connection) -> int:
            full = delete(request_budgets).where(request_budgets.c.full_at < _now(connection))
            return connection.execute(full).rowcount

        return await self._catalogue.write(work)


def _taken(now: int, full_at: int, rate: Rate, most: int) -> tuple[Share, int]:
    """A share of the bucket, and when it is full again."""
    # A clock that was set back must not lock anybody out: nothing is emptier than empty.
    full_at = min(max(full_at, now), now + _microseconds(rate.burst, rate))
    level = rate.burst - (full_at - now) / SECOND * rate.per_second
    requests = min(most, int(level + 1e-6))
    if requests < 1:
        return Share(0, (1.0 - level) / rate.per_second), full_at
    return Share(requests), full_at + _microseconds(requests, rate)


def _microseconds(requests: float, rate: Rate) -> int:
    return round(requests / rate.per_second * SECOND)


def _now(connection: Connection) -> int:
    if connection.dialect.name == "sqlite":
        return time.time_ns() // 1000
    return int(connection.execute(_SERVER_TIME).scalar_one())
