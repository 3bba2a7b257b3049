"""What each scope keeps: counts, bytes, and how many of these are stored once for several uses.

One grouped query for each kind of record. Counts and times come from the indexes that listings
use, what a scope's files add up to from its running totals; only bytes are looked up for each
record. What has expired counts until a sweep takes it away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    func,
    literal,
    select,
    true,
    union_all,
)

from app.store.catalogue import Catalogue
from app.store.event_tables import event_refs, events
from app.store.session_tables import files, is_unexpired, is_upload, scope_usage, sessions
from app.store.tables import blobs, content_refs


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """What one scope keeps. `logical_bytes` are those of its references and files, each for itself;

    `stored_bytes` those of the distinct bodies that they and the scope's events use. `oldest` and
    `newest` are the times (unix seconds) of its references, events, sessions and uploads.
    """

    scope: str
    references: int = 0
    files: int = 0
    sessions: int = 0
    events: int = 0
    logical_bytes: int = 0
    stored_bytes: int = 0
    oldest: int | None = None
    newest: int | None = None


@dataclass(frozen=True, slots=True)
class Population:
    """Sessions that are not expired, and the files of every scope with their bytes."""

    sessions: int
    files: int
    bytes: int


@dataclass(slots=True)
class _Account:
    counts: dict[str, int] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)

    def closed(self, scope: str) -> ScopeUsage:
        oldest, newest = (min(self.times), max(self.times)) if self.times else (None, None)
        return ScopeUsage(scope, **self.counts, oldest=oldest, newest=newest)


_KINDS: Final[Mapping[str, tuple[Table, ColumnElement[int], ColumnElement[bool]]]] = {
    "references": (content_refs, content_refs.c.created_at, true()),
    "events": (events, events.c.received_at, true()),
    "sessions": (sessions, sessions.c.created_at, is_unexpired),
    "uploads": (files, files.c.created_at, is_upload),
}


class Accounts:
    """The accounts of every scope."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def of_scopes(self, scope: str | None = None) -> list[ScopeUsage]:
        """What every scope keeps that keeps anything, or only this one; in order of their names."""
        accounts: dict[str, _Account] = {}
        for kind in _KINDS:
            rows = await self._rows(_ends(kind, scope))
            for name, count, first, last in rows:
                account = accounts.setdefault(name, _Account())
                account.times += [first, last]
                if kind != "uploads":  # they are among the files
                    account.counts[kind] = count
        for name, logical, stored in await self._rows(_bytes(scope)):
            counts = accounts.setdefault(name, _Account()).counts
            counts |= {"logical_bytes": int(logical), "stored_bytes": int(stored)}
        for name, count, size in await self._rows(_totals(scope)):
            _add_files(accounts.setdefault(name, _Account()).counts, count, size)
        return [accounts[name].closed(name) for name in sorted(accounts)]

    async def population(self) -> Population:
        """Counts over all scopes; cheap."""
        totals = select(
            func.coalesce(func.sum(scope_usage.c.files), 0),
            func.coalesce(func.sum(scope_usage.c.bytes), 0),
        )
        living = select(func.count()).select_from(sessions).where(is_unexpired)
        ((count, size),) = await self._rows(totals)
        ((alive,),) = await self._rows(living)
        return Population(int(alive), int(count), int(size))

    async def _rows(self, statement: Select[Any]) -> Iterable[Any]:
        def query(connection: Connection) -> Iterable[Any]:
            return connection.execute(statement).all()

        return await self._catalogue.read(query)


def _add_files(counts: dict[str, int], count: int, size: int) -> None:
    counts["files"] = count
    counts["logical_bytes"] = counts.get("logical_bytes", 0) + size


def _ends(kind: str, scope: str | None) -> Select[Any]:
    """How many there are by scope, and the times of the first and the last."""
    table, time, counted = _KINDS[kind]
    grouped = (
        select(
            table.c.scope,
            func.count().label("count"),
            func.min(table.c.id).label("first"),
            func.max(table.c.id).label("last"),
        )
        .where(counted, _is(table.c.scope, scope))
        .group_by(table.c.scope)
        .subquery()
    )
    first, last = table.alias(), table.alias()
    return select(
        grouped.c.scope, grouped.c.count, first.c[time.key or ""], last.c[time.key or ""]
    ).where(first.c.id == grouped.c.first, last.c.id == grouped.c.last)


def _bytes(scope: str | None) -> Select[Any]:
    """The bytes of references by scope, each for itself, and those of all distinct bodies."""
    uses = union_all(
        select(content_refs.c.scope, content_refs.c.blob_id, literal(1).label("counted")).where(
            _is(content_refs.c.scope, scope)
        ),
        select(events.c.scope, event_refs.c.blob_id, literal(0))
        .join_from(event_refs, events, events.c.id == event_refs.c.event)
        .where(_is(events.c.scope, scope)),
        select(files.c.scope, blobs.c.id, literal(0))
        .join_from(files, blobs, blobs.c.digest == files.c.digest)
        .where(_is(files.c.scope, scope)),
    ).subquery()
    used = (
        select(uses.c.scope, uses.c.blob_id, func.sum(uses.c.counted).label("counted"))
        .group_by(uses.c.scope, uses.c.blob_id)
        .subquery()
    )
    return (
        select(used.c.scope, func.sum(blobs.c.size * used.c.counted), func.sum(blobs.c.size))
        .join_from(used, blobs, blobs.c.id == used.c.blob_id)
        .group_by(used.c.scope)
    )


def _totals(scope: str | None) -> Select[Any]:
    return select(scope_usage.c.scope, scope_usage.c.files, scope_usage.c.bytes).where(
        scope_usage.c.files > 0, _is(scope_usage.c.scope, scope)
    )


def _is(column: ColumnElement[str], scope: str | None) -> ColumnElement[bool]:
    return true() if scope is None else column == scope
