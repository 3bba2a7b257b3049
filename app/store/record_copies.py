"""Records on their way from one database to another: the target becomes what the source is.

Both are read in the order of their keys, side by side; what differs is written. So a copy needs to
remember nothing to go on where it was, and one more copy brings just what has changed meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Table,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from app.settings import MIB
from app.store.body_copies import BodyCopier, CopyReport, Observer
from app.store.catalogue import Place
from app.store.database import Database
from app.store.database_errors import database_border
from app.store.event_tables import event_refs, events
from app.store.session_tables import (
    files,
    idempotency_keys,
    response_events,
    responses,
    scope_usage,
    sessions,
)
from app.store.snapshots import Snapshot, Values
from app.store.tables import blobs, condemned, content_refs
from app.store.threads import Workers

TABLES: Final = (
    blobs,
    content_refs,
    condemned,
    sessions,
    responses,
    response_events,
    idempotency_keys,
    files,
    scope_usage,
    events,
    event_refs,
)
"""Everything that is copied, in an order in which nothing comes before what it refers to. What
processes need while they run is not: marks of commits, and what is left of a rate."""

NUMBERED: Final = tuple(table for table in TABLES if "id" in table.c)

BATCH_ROWS: Final = 200
BATCH_BYTES: Final = 4 * MIB
"""What one transaction takes at most, apart from a last row: it is in memory."""

Pair = tuple[Values | None, Values | None]


def keys_of(table: Table) -> tuple[Column[Any], ...]:
    """By what a row is known. SQLite may give the number of a deleted body to another one."""
    return (blobs.c.id, blobs.c.digest) if table is blobs else tuple(table.primary_key.columns)


def columns_of(table: Table) -> tuple[Column[Any], ...]:
    """What is compared, the keys first. Bytes in a row are what its digest says."""
    keys = keys_of(table)
    rest = (column for column in table.columns if column not in keys and column is not blobs.c.data)
    return (*keys, *rest)


async def paired(
    source: AsyncIterator[Values], target: AsyncIterator[Values], keys: int
) -> AsyncGenerator[Pair]:
    """The rows of both, in pairs by their first `keys` values, in whose order both come."""
    one, other = await anext(source, None), await anext(target, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one[:keys] < other[:keys]):
            yield one, None
            one = await anext(source, None)
        elif one is None or other[:keys] < one[:keys]:
            yield None, other
            other = await anext(target, None)
        else:
            yield one, other
            one, other = await anext(source, None), await anext(target, None)


@dataclass(slots=True)
class _Batch:
    """Rows of one table that are written together."""

    inserted: list[dict[str, Any]] = field(default_factory=list)
    updated: list[dict[str, Any]] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    """Locations that rows of the target name until they are updated."""
    weight: int = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.inserted + self.updated

    @property
    def is_full(self) -> bool:
        return len(self.inserted) + len(self.updated) >= BATCH_ROWS or self.weight >= BATCH_BYTES


class RecordCopier:
    """Makes the tables of a `target` equal to a snapshot of the source, with the bodies."""

    def __init__(
        self,
        source: Snapshot,
        target: Database,
        bodies: BodyCopier,
        workers: Workers,
        observer: Observer,
        report: CopyReport,
    ) -> None:
        self._source = source
        self._target = target
        self._bodies = bodies
        self._workers = workers
        self._observer = observer
        self._report = report

    async def remove(self, table: Table, held: Snapshot) -> None:
        """Take those rows away that are `held` at the target and not in the source."""
        keys = keys_of(table)
        shown = (*keys, blobs.c.location) if table is blobs else keys
        gone: list[Values] = []
        async with self._beside(held, table, shown) as pairs:
            async for one, other in pairs:
                if one is None and other is not None:
                    gone.append(other)
                if len(gone) >= BATCH_ROWS:
                    await self._remove(table, gone)
                    gone = []
        await self._remove(table, gone)

    async def _remove(self, table: Table, gone: Sequence[Values]) -> None:
        if not gone:
            return
        keys = keys_of(table)
        values = [dict(zip(map(_bound, keys), row, strict=False)) for row in gone]
        await self._write(lambda connection: _delete(connection, table, values))
        self._report.removed += len(gone)
        if table is blobs:
            for location in filter(None, (row[-1] for row in gone)):
                await self._bodies.take_away(location)

    async def bring(self, table: Table, held: Snapshot) -> None:
        """Write what the source has and what is not `held` at the target, or not the same."""
        total = await self._source.read(_counting(table))
        self._observer.begin(table.name, total)
        batch = _Batch()
        columns = columns_of(table)
        async with self._beside(held, table, columns) as pairs:
            async for one, other in pairs:
                self._add(batch, columns, one, other)
                if batch.is_full:
                    await self._flush(table, batch)
                    batch = _Batch()
        await self._flush(table, batch)

    @asynccontextmanager
    async def _beside(
        self, held: Snapshot, table: Table, columns: Sequence[Column[Any]]
    ) -> AsyncIterator[AsyncIterator[Pair]]:
        """The rows of the source, and those of the target beside them."""
        keys = keys_of(table)
        async with AsyncExitStack() as opened:
            ours = await opened.enter_async_context(aclosing(self._source.rows(*columns, by=keys)))
            theirs = await opened.enter_async_context(aclosing(held.rows(*columns, by=keys)))
            yield await opened.enter_async_context(aclosing(paired(ours, theirs, len(keys))))

    def _add(
        self,
        batch: _Batch,
        columns: Sequence[Column[Any]],
        one: Values | None,
        other: Values | None,
    ) -> None:
        if one is None:
            return
        if one == other:
            self._report.unchanged += 1
            self._observer.advance(1)
            return
        row = {column.name: value for column, value in zip(columns, one, strict=True)}
        batch.weight += _weight(row)
        if other is None:
            batch.inserted.append(row)
        else:
            batch.updated.append(row)
            batch.replaced += [place for place in _locations(columns, other) if place not in one]

    async def _flush(self, table: Table, batch: _Batch) -> None:
        if not batch.rows:
            return
        if table is blobs:
            await self._with_bytes(batch)
        await self._write(lambda connection: _apply(connection, table, batch))
        self._report.inserted += len(batch.inserted)
        self._report.updated += len(batch.updated)
        self._observer.advance(len(batch.rows))
        for location in batch.replaced:
            await self._bodies.take_away(location)

    async def _with_bytes(self, batch: _Batch) -> None:
        """Have the bytes of bodies there before their rows are."""
        within = [row["id"] for row in batch.rows if row["location"] is None]
        found: dict[int, bytes] = dict(await self._source.read(_data_of(within)))
        for row in batch.rows:
            row["data"] = found.get(row["id"])
            if row["data"] is not None:
                await self._verify(row)
        places = (
            Place(row["digest"], row["size"], row["location"], row["data"]) for row in batch.rows
        )
        await self._bodies.bring(place for place in places if place.location is not None)

    async def _verify(self, row: dict[str, Any]) -> None:
        data: bytes = row["data"]
        digest = await self._workers.run(_digest_of, data)
        if digest != row["digest"]:
            place = Place(row["digest"], row["size"], None, data)
            detail = f"the stored bytes have SHA-256 {digest.hex()}"
            self._bodies.report(place, "wrong_digest", detail)

    async def _write(self, work: Callable[[Connection], Any]) -> None:
        await written(self._target, work)


async def written(database: Database, work: Callable[[Connection], Any]) -> Any:
    """Commit `work`, which may be run again. Raises Conflict, Exhausted, Unavailable."""
    with database_border():
        return await database.write(work, alone=True)


def _bound(column: Column[Any]) -> str:
    """The name of a key's value in a statement; what is named like a column is set."""
    return f"key_{column.name}"


def _is(table: Table) -> ColumnElement[bool]:
    return and_(*(column == bindparam(_bound(column)) for column in keys_of(table)))


def _delete(connection: Connection, table: Table, keys: list[dict[str, Any]]) -> None:
    connection.execute(delete(table).where(_is(table)), keys)


def _apply(connection: Connection, table: Table, batch: _Batch) -> None:
    if batch.updated:
        changes = [_change(table, row) for row in batch.updated]
        connection.execute(update(table).where(_is(table)), changes)
    if batch.inserted:
        connection.execute(insert(table), batch.inserted)


def _change(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    keys = {column.name: _bound(column) for column in keys_of(table)}
    return {keys.get(name, name): value for name, value in row.items()}


def _counting(table: Table) -> Callable[[Connection], int]:
    statement = select(func.count()).select_from(table)
    return lambda connection: int(connection.execute(statement).scalar_one())


def _data_of(ids: Sequence[int]) -> Callable[[Connection], list[Values]]:
    statement = select(blobs.c.id, blobs.c.data).where(blobs.c.id.in_(ids))
    return lambda connection: [tuple(row) for row in connection.execute(statement)]


def _digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _locations(columns: Sequence[Column[Any]], row: Values) -> list[str]:
    """Where a row of `blobs` says that its bytes lie."""
    return [
        value
        for column, value in zip(columns, row, strict=True)
        if column is blobs.c.location and value is not None
    ]


def _weight(row: dict[str, Any]) -> int:
    """About the bytes of a row, with those of a body that come with it."""
    within = row["size"] if row.get("location", "") is None else 0
    return int(within) + sum(len(each) for each in row.values() if isinstance(each, str | bytes))
