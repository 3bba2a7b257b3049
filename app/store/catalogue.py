"""The records: every statement over the tables, and the transactions that they make up."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    and_,
    bindparam,
    delete,
    exists,
    func,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from app import audit
from app.errors import NotFound, Refusal, Unavailable
from app.store.commits import Committer, Joint, Row, Write, in_savepoint
from app.store.database import Database
from app.store.observing import Observer, observed
from app.store.prepared import Prepared, parameters_of
from app.store.records import Listed, Reference, Usage
from app.store.tables import blobs, condemned, content_refs, referring_columns, writers

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a digest are: `data` in the row, or `location` in the blob store."""

    digest: bytes
    size: int
    location: str | None
    data: bytes | None


@dataclass(frozen=True, slots=True)
class Collected:
    """Blobs that nothing referred to: how many, their bytes, and the locations now condemned."""

    blobs: int
    bytes: int
    locations: tuple[str, ...]


def not_found() -> NotFound:
    """One answer for unknown, foreign, expired and removed references (AHP-R36)."""
    return NotFound("content_not_found", "There is no such content in this scope.")


def insert_unless_there(table: Any, *columns: Any) -> Callable[[Connection], Insert]:
    """`insert … on conflict do nothing` in the dialect of the connection."""
    statements: dict[str, Insert] = {
        "sqlite": sqlite.insert(table).on_conflict_do_nothing(index_elements=list(columns)),
        "postgresql": postgresql.insert(table).on_conflict_do_nothing(index_elements=list(columns)),
    }
    return lambda connection: statements[connection.dialect.name]


_insert_blob = insert_unless_there(blobs, blobs.c.digest)
_insert_condemned = insert_unless_there(condemned, condemned.c.location)
_insert_reference = content_refs.insert().values(
    **parameters_of(content_refs, "id", "blob_id"),
    blob_id=select(blobs.c.id).where(blobs.c.digest == bindparam("digest")).scalar_subquery(),
)
_add_blobs = Prepared(
    lambda connection: _insert_blob(connection).values(parameters_of(blobs, "id")).inline()
)
_add_references = Prepared(_insert_reference.inline())

_locations_of = select(blobs.c.digest, blobs.c.location).where(
    blobs.c.location.is_not(None), blobs.c.digest.in_(bindparam("digests", expanding=True))
)
_condemned_of = select(condemned.c.location).where(
    condemned.c.location.in_(bindparam("locations", expanding=True))
)
_live: ColumnElement[bool] = or_(
    content_refs.c.expires_at.is_(None), content_refs.c.expires_at > bindparam("now")
)
_joined = content_refs.join(blobs, blobs.c.id == content_refs.c.blob_id)
_reference = (
    content_refs.c.ref,
    blobs.c.size,
    blobs.c.digest,
    content_refs.c.scope,
    content_refs.c.principal,
    content_refs.c.created_at,
    content_refs.c.expires_at,
)
_own: ColumnElement[bool] = and_(
    content_refs.c.ref == bindparam("ref"), content_refs.c.scope == bindparam("scope"), _live
)
_find = select(*_reference).select_from(_joined).where(_own)
_find_place = select(*_reference, blobs.c.location, blobs.c.data).select_from(_joined).where(_own)
_page = (
    select(*_reference, content_refs.c.id)
    .select_from(_joined)
    .where(
        content_refs.c.scope == bindparam("scope"), content_refs.c.id > bindparam("after"), _live
    )
    .order_by(content_refs.c.id)
    .limit(bindparam("limit"))
)
_place = select(blobs.c.digest, blobs.c.size, blobs.c.location, blobs.c.data)


def _unreferenced() -> ColumnElement[bool]:
    # Built when asked: tables of other modules may refer to blobs too.
    return and_(*(not_(exists().where(column == key)) for column, key in referring_columns()))


def _reference_of(row: Any) -> Reference:
    ref, size, digest, scope, principal, created_at, expires_at = row[:7]
    return Reference(ref, size, digest.hex(), scope, principal, created_at, expires_at)


class Catalogue:
    """The records of one store. Reads run at once, writes in group commits."""

    def __init__(self, database: Database, observer: Observer | None = None) -> None:
        self._database = database
        self._observer = observer
        self._committer = Committer(database, _apply)

    async def close(self) -> None:
        """Commit what waits; the database stays open."""
        await self._committer.close()

    async def add(self, blob: Row, reference: Row) -> str | None:
        """Commit a reference and its blob; the location that holds the bytes, None for the row."""
        location: str | None = await self._submit(Write(blob, reference))
        return location

    async def add_with(self, blob: Row, work: Callable[[Connection], T]) -> tuple[T, str | None]:
        """Commit a blob together with rows that `work` writes; its outcome, and the location."""
        outcome: tuple[T, str | None] = await self._submit(Write(blob, work=work))
        return outcome

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Commit `work`, which runs in a savepoint of a group commit."""
        outcome: T = await self._submit(Write(work=work))
        return outcome

    def join(self, joint: Joint, item: Any, *, size: int) -> Awaitable[Any]:
        """Commit an item of `size` bytes by `joint` work, with all others of its batch."""
        return self._submit(Write(joint=joint, item=item, size=size))

    async def _submit(self, write: Write) -> Any:
        if self._observer is None:
            return await self._committer.submit(write)
        with observed(self._observer, "database", "commit"):
            return await self._committer.submit(write)

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` on a reading connection."""
        return await self._database.read(query)

    async def find(self, scope: str, ref: str) -> Reference:
        """The live reference of `scope`, or NotFound."""
        values = {"scope": scope, "ref": ref, "now": int(time.time())}
        row = await self.read(lambda connection: connection.execute(_find, values).first())
        if row is None:
            raise not_found()
        return _reference_of(row)

    async def find_place(self, scope: str, ref: str) -> tuple[Reference, Place]:
        """The live reference of `scope` and where its bytes are, or NotFound."""
        values = {"scope": scope, "ref": ref, "now": int(time.time())}
        row = await self.read(lambda connection: connection.execute(_find_place, values).first())
        if row is None:
            raise not_found()
        return _reference_of(row), Place(row.digest, row.size, row.location, row.data)

    async def page(self, scope: str, after: int, limit: int) -> list[Listed]:
        """Live references of `scope` behind position `after`."""
        values = {"scope": scope, "after": after, "limit": limit, "now": int(time.time())}
        rows = await self.read(lambda connection: connection.execute(_page, values).all())
        return [
            Listed(ref, size, digest.hex(), of, principal, created, expires, position)
            for ref, size, digest, of, principal, created, expires, position in rows
        ]

    async def remove(self, scope: str, ref: str) -> None:
        """End a live reference of `scope`, or NotFound."""
        values = {"scope": scope, "ref": ref, "now": int(time.time())}
        await self.write(lambda connection: _remove(connection, values))

    async def forget(self, ref: str) -> None:
        """Undo a reference that its caller no longer waits for; there may be none."""
        await self.write(
            lambda connection: (
                connection.execute(delete(content_refs).where(content_refs.c.ref == ref)).rowcount
            )
        )

    async def repoint(self, blob: Row, gone: str) -> str | None:
        """Let a digest whose location `gone` holds nothing have the bytes of `blob` instead.

        Returns the location that is in force now, as `add` does.
        """
        return await self.write(lambda connection: _repoint(connection, blob, gone))

    async def place(self, digest: bytes) -> Place | None:
        """Where the bytes of a digest are, if they are kept."""
        statement = _place.where(blobs.c.digest == digest)
        row = await self.read(lambda connection: connection.execute(statement).first())
        return Place(*row) if row is not None else None

    async def names(self, location: str) -> bool:
        """Whether a blob's row names `location`."""
        statement = select(blobs.c.id).where(blobs.c.location == location)
        row = await self.read(lambda connection: connection.execute(statement).first())
        return row is not None

    async def usage(self) -> Usage:
        """Counts over everything stored."""
        return await self.read(_usage)

    async def probe(self) -> None:
        """Commit a change that changes nothing, and read."""
        await self.write(_touch)
        await self.read(_touch_read)

    async def expire(self, limit: int) -> int:
        """End at most `limit` references whose time is over; how many there were."""
        now = int(time.time())
        over = await self.write(lambda connection: _expire(connection, now, limit))
        for row in over:
            audit.record("reference.expire", scope=row.scope, principal=row.principal, ref=row.ref)
        return len(over)

    async def expired(self) -> int:
        """How many references are over and still there."""
        statement = select(func.count()).where(content_refs.c.expires_at <= int(time.time()))
        return await self.read(lambda connection: int(connection.execute(statement).scalar_one()))

    async def unreferenced(self, after: bytes, limit: int) -> list[Place]:
        """Blobs that nothing refers to, in the order of digests, without their bytes."""
        statement = (
            select(blobs.c.digest, blobs.c.size, blobs.c.location)
            .where(blobs.c.digest > after, _unreferenced())
            .order_by(blobs.c.digest)
            .limit(limit)
        )
        rows = await self.read(lambda connection: connection.execute(statement).all())
        return [Place(digest, size, location, None) for digest, size, location in rows]

    async def collect(self, digests: Sequence[bytes]) -> Collected:
        """Delete those of `digests` that nothing refers to, and condemn their locations."""
        now = int(time.time())
        return await self.write(lambda connection: _collect(connection, digests, now))

    async def unnamed(self, locations: Sequence[str]) -> list[str]:
        """Those of `locations` that no record names: no blob, and no verdict still to be done."""
        return await self.read(lambda connection: _unnamed(connection, locations))

    async def condemn(self, locations: Sequence[str]) -> tuple[str, ...]:
        """Condemn those of `locations` that no blob's row names; these are returned."""
        now = int(time.time())
        return await self.write(lambda connection: _condemn(connection, locations, now))

    async def condemned(self, limit: int) -> list[str]:
        """Condemned locations whose bytes may still be there."""
        statement = select(condemned.c.location).where(condemned.c.removed_at.is_(None))
        rows = await self.read(lambda connection: connection.execute(statement.limit(limit)).all())
        return [row.location for row in rows]

    async def removed(self, locations: Sequence[str]) -> None:
        """Record that the bytes at condemned `locations` are gone."""
        statement = (
            update(condemned)
            .where(condemned.c.location.in_(locations))
            .values(removed_at=int(time.time()))
        )
        await self.write(lambda connection: connection.execute(statement).rowcount)

    async def purge(self, keep_seconds: int) -> None:
        """Drop verdicts that were carried out, and marks of writers that were seen last, more than
        `keep_seconds` ago."""
        before = int(time.time()) - keep_seconds
        verdicts = delete(condemned).where(condemned.c.removed_at < before)
        marks = delete(writers).where(writers.c.written_at < before)
        await self.write(
            lambda connection: [connection.execute(each).rowcount for each in (verdicts, marks)]
        )

    async def places(self, after: int, limit: int) -> list[tuple[int, Place]]:
        """Blobs in the order of their rows, with the bytes that are in the row."""
        statement = (
            select(blobs.c.id, blobs.c.digest, blobs.c.size, blobs.c.location, blobs.c.data)
            .where(blobs.c.id > after)
            .order_by(blobs.c.id)
            .limit(limit)
        )
        rows = await self.read(lambda connection: connection.execute(statement).all())
        return [(row.id, Place(row.digest, row.size, row.location, row.data)) for row in rows]

    async def referrers(self, digest: bytes) -> int:
        """How many rows keep a digest alive."""
        counts = [
            select(func.count())
            .select_from(column.table.join(blobs, column == key))
            .where(blobs.c.digest == digest)
            .scalar_subquery()
            for column, key in referring_columns()
        ]
        total = select(sum(counts[1:], counts[0]))
        return await self.read(lambda connection: int(connection.execute(total).scalar_one()))

    async def dangling(self) -> int:
        """How many references and files name a body that has no row."""
        return await self.read(_dangling)


def _apply(connection: Connection, batch: Sequence[Write]) -> list[Any]:
    """Run a batch: first every blob and reference in three statements, then joint work, then each
    one's own.

    Those who bring a blob come before those who do not: among the latter may be one that collects
    the blobs that nothing refers to, and a blob of this batch is referred to only by its work.
    """
    refused = _refuse_condemned(connection, batch)
    accepted = [write for write in batch if write not in refused]
    # In one order, or two batches that bring the same blobs at once could wait for each other.
    blobs_given = sorted((w.blob for w in accepted if w.blob), key=itemgetter("digest"))
    all_fresh = _insert_all(connection, _add_blobs, blobs_given) == len(blobs_given)
    _insert_all(connection, _add_references, [w.reference for w in accepted if w.reference])
    locations = _own_locations(blobs_given) if all_fresh else _locations(connection, blobs_given)
    outcomes: dict[Write, Any] = refused | _joint_outcomes(connection, accepted)
    for write in sorted(accepted, key=lambda write: write.blob is None):
        if write.joint is None:
            outcomes[write] = _outcome(connection, write, locations)
    return [outcomes[write] for write in batch]


def _joint_outcomes(connection: Connection, batch: Sequence[Write]) -> dict[Write, Any]:
    kinds: dict[Joint, list[Write]] = {}
    for write in batch:
        if write.joint is not None:
            kinds.setdefault(write.joint, []).append(write)
    outcomes: dict[Write, Any] = {}
    for joint, writes in kinds.items():
        told = joint(connection, [write.item for write in writes])
        outcomes |= zip(writes, told, strict=True)
    return outcomes


def _insert_all(connection: Connection, statement: Prepared, rows: Sequence[Row]) -> int:
    """Insert `rows`; how many really went in."""
    return statement.run(connection, rows) if rows else 0


def _refuse_condemned(connection: Connection, batch: Sequence[Write]) -> dict[Write, Refusal]:
    fresh = {write.blob["location"]: write for write in batch if write.blob}
    fresh.pop(None, None)
    if not fresh:
        return {}
    rows = connection.execute(_condemned_of, {"locations": list(fresh)})
    return {fresh[row.location]: _overtaken() for row in rows}


def _overtaken() -> Unavailable:
    return Unavailable(
        "storage_unavailable", "The upload took so long that its bytes were swept; send it again."
    )


def _own_locations(given: Sequence[Row]) -> dict[bytes, str]:
    return {blob["digest"]: blob["location"] for blob in given if blob["location"] is not None}


def _locations(connection: Connection, given: Sequence[Row]) -> dict[bytes, str]:
    """Where the bytes are of which another upload was first, and of the others."""
    rows = connection.execute(_locations_of, {"digests": [blob["digest"] for blob in given]})
    return {digest: location for digest, location in rows}  # noqa: C416 - rows are no pairs to dict()


def _outcome(connection: Connection, write: Write, locations: dict[bytes, str]) -> Any:
    location = locations.get(write.blob["digest"]) if write.blob else None
    if write.work is None:
        return location
    outcome = in_savepoint(connection, write.work)
    if write.blob is None or isinstance(outcome, Refusal):
        return outcome
    return outcome, location


def _remove(connection: Connection, values: Row) -> None:
    if connection.execute(delete(content_refs).where(_own), values).rowcount == 0:
        raise not_found()


def _repoint(connection: Connection, blob: Row, gone: str) -> str | None:
    if blob["location"] is not None:
        fresh = {"locations": [blob["location"]]}
        if connection.execute(_condemned_of, fresh).first() is not None:
            raise _overtaken()
    connection.execute(
        update(blobs)
        .where(blobs.c.digest == blob["digest"], blobs.c.location == gone)
        .values(location=blob["location"], data=blob["data"])
    )
    row = connection.execute(_locations_of, {"digests": [blob["digest"]]}).first()
    return None if row is None else row.location


def _usage(connection: Connection) -> Usage:
    count, size = connection.execute(
        select(func.count(), func.coalesce(func.sum(blobs.c.size), 0)).select_from(blobs)
    ).one()
    references = connection.execute(select(func.count()).select_from(content_refs)).scalar_one()
    return Usage(int(count), int(size), int(references))


_NOTHING = "consignee-probe"


def _touch(connection: Connection) -> None:
    connection.execute(_insert_condemned(connection), {"location": _NOTHING, "condemned_at": 0})
    connection.execute(delete(condemned).where(condemned.c.location == _NOTHING))


def _touch_read(connection: Connection) -> None:
    connection.execute(select(blobs.c.id).limit(1)).first()


def _expire(connection: Connection, now: int, limit: int) -> Sequence[Any]:
    over = select(content_refs.c.id).where(content_refs.c.expires_at <= now).limit(limit)
    removal = delete(content_refs).where(content_refs.c.id.in_(over))
    named = removal.returning(content_refs.c.ref, content_refs.c.scope, content_refs.c.principal)
    return connection.execute(named).all()


def _collect(connection: Connection, digests: Sequence[bytes], now: int) -> Collected:
    rows = connection.execute(
        delete(blobs)
        .where(blobs.c.digest.in_(digests), _unreferenced())
        .returning(blobs.c.size, blobs.c.location)
    ).all()
    locations = tuple(row.location for row in rows if row.location is not None)
    _pass_sentence(connection, locations, now)
    return Collected(len(rows), sum(row.size for row in rows), locations)


def _unnamed(connection: Connection, locations: Sequence[str]) -> list[str]:
    of_blobs = select(blobs.c.location).where(blobs.c.location.in_(locations))
    due = select(condemned.c.location).where(
        condemned.c.location.in_(locations), condemned.c.removed_at.is_(None)
    )
    named = {*connection.scalars(of_blobs), *connection.scalars(due)}
    return [location for location in locations if location not in named]


def _condemn(connection: Connection, locations: Sequence[str], now: int) -> tuple[str, ...]:
    of_blobs = select(blobs.c.location).where(blobs.c.location.in_(locations))
    named = set(connection.scalars(of_blobs))
    guilty = tuple(location for location in locations if location not in named)
    _pass_sentence(connection, guilty, now)
    return guilty


def _pass_sentence(connection: Connection, locations: Sequence[str], now: int) -> None:
    """Condemn `locations`; one whose bytes came back after a crash is due again."""
    if not locations:
        return
    connection.execute(
        _insert_condemned(connection),
        [{"location": location, "condemned_at": now} for location in locations],
    )
    connection.execute(
        update(condemned).where(condemned.c.location.in_(locations)).values(removed_at=None)
    )


def _dangling(connection: Connection) -> int:
    counts = [
        connection.execute(
            select(func.count())
            .select_from(column.table)
            .where(not_(exists().where(key == column)))
        ).scalar_one()
        for column, key in referring_columns()
    ]
    return sum(counts)
