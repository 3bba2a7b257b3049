"""Events as they were delivered, and the bytes that they use.

An event is accepted in one transaction: every reference in it is resolved in the event's scope, and
a row for each of them names the blob from then on. So no sweep can come between, and the bytes stay
for as long as the event does, whatever becomes of the references (AHP-R38, R43). One event for each
id and scope; `position` is the order of arrival.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import Connection, bindparam, delete, func, or_, select, update

from app import audit
from app.errors import Conflict, Malformed, NotFound, Refusal
from app.store.catalogue import Catalogue, not_found
from app.store.database_errors import sqlite_driver
from app.store.event_tables import event_refs, events
from app.store.prepared import Prepared, parameters_of
from app.store.records import Reference
from app.store.tables import blobs, content_refs
from app.store.text import is_text, require_text

if TYPE_CHECKING:
    from app.store.content import Content

MAX_EVENT_ID_BYTES = 1024
"""The longest id: it is in an index, whose entries every database limits."""

LOOKED_UP_AT_ONCE = 500
"""References or events that one statement asks for: databases limit its parameters."""

Mode = Literal["observe", "intercept"]
Outcome = Literal["done", "failed", "timed_out"]
Key = tuple[str, str]
"""A scope, and an event's id or a reference in it."""


class Arrival(NamedTuple):
    """An event as it came in, checked by whoever received it.

    `message` is the JSON-RPC message, the octets as received; `refs` are all body references in it,
    each once, in the order of the document.
    """

    event_id: str
    type: str
    mode: Mode
    scope: str
    principal: str
    message: bytes
    refs: tuple[str, ...]

    @property
    def key(self) -> Key:
        """What no second event has."""
        return self.scope, self.event_id


@dataclass(frozen=True, slots=True)
class Attached:
    """A reference that an event uses: `size` in bytes, `sha256` as 64 lowercase hex."""

    ref: str
    size: int
    sha256: str


# Not frozen: to set each field of a frozen one takes as long as to store its row.
@dataclass(slots=True)
class ListedEvent:
    """What is known of an event, apart from its contents.

    `position` is its place in the order of arrival; the next page starts after it. Times are unix
    seconds. `outcome` is None until the event is settled.
    """

    position: int
    event_id: str
    type: str
    mode: Mode
    scope: str
    principal: str
    received_at: int
    outcome: Outcome | None
    attachments: tuple[Attached, ...]


@dataclass(slots=True)
class StoredEvent(ListedEvent):
    """An event with its `message` as received, and the `result` that an intercept was answered."""

    result: bytes | None
    message: bytes


Accepted = tuple[StoredEvent, bool]
"""An event, and whether this arrival of it was the first."""

OpenKept = Callable[[Reference, int, int | None], AbstractAsyncContextManager["Content"]]


def event_not_found() -> NotFound:
    """One answer for unknown and foreign events."""
    return NotFound("event_not_found", "There is no such event in this scope.")


# The names of the columns are those of the facts in `ListedEvent` and `StoredEvent`.
_listed = (
    events.c.id.label("position"),
    events.c.event_id,
    events.c.type,
    events.c.mode,
    events.c.scope,
    events.c.principal,
    events.c.received_at,
    events.c.outcome,
)
_whole = (*_listed, events.c.result, events.c.message)
_FACTS = [column.name for column in _whole]
_own = (events.c.scope == bindparam("scope"), events.c.event_id == bindparam("event_id"))
_find = select(*_whole).where(*_own)
_find_all = select(*_whole).where(
    events.c.scope == bindparam("scope"), events.c.event_id.in_(bindparam("ids", expanding=True))
)
_page = (
    select(*_listed)
    .where(events.c.scope == bindparam("scope"), events.c.id > bindparam("after"))
    .order_by(events.c.id)
    .limit(bindparam("limit"))
)
_latest = (
    select(*_listed)
    .where(events.c.scope == bindparam("scope"))
    .order_by(events.c.id.desc())
    .limit(bindparam("limit"))
)
_of_blobs = event_refs.join(blobs, blobs.c.id == event_refs.c.blob_id)
_attached = (
    select(event_refs.c.event, event_refs.c.ref, blobs.c.size, blobs.c.digest)
    .select_from(_of_blobs)
    .where(event_refs.c.event.in_(bindparam("events", expanding=True)))
    .order_by(event_refs.c.event, event_refs.c.place)
)
_live_bodies = (
    select(content_refs.c.scope, content_refs.c.ref, blobs.c.id, blobs.c.size, blobs.c.digest)
    .select_from(content_refs.join(blobs, blobs.c.id == content_refs.c.blob_id))
    .where(
        content_refs.c.ref.in_(bindparam("refs", expanding=True)),
        or_(content_refs.c.expires_at.is_(None), content_refs.c.expires_at > bindparam("now")),
    )
)
_kept = (
    select(
        event_refs.c.ref,
        blobs.c.size,
        blobs.c.digest,
        events.c.scope,
        events.c.principal,
        events.c.received_at,
        events.c.expires_at,
    )
    .select_from(_of_blobs.join(events, events.c.id == event_refs.c.event))
    .where(event_refs.c.ref == bindparam("ref"), events.c.scope == bindparam("scope"))
    .order_by(events.c.id)
    .limit(1)
)
_kept_by_event = _kept.where(events.c.event_id == bindparam("event_id"))
_using = (
    select(events.c.event_id)
    .select_from(event_refs.join(events, events.c.id == event_refs.c.event))
    .where(event_refs.c.ref == bindparam("ref"), events.c.scope == bindparam("scope"))
    .order_by(events.c.id)
)
_settle = update(events).where(
    events.c.scope == bindparam("of_scope"),
    events.c.event_id == bindparam("of_event"),
    events.c.outcome.is_(None),
)
_insert_event = events.insert().returning(events.c.id, sort_by_parameter_order=True)
_insert_at = events.insert().values(parameters_of(events, "outcome", "result"))
_insert_use = event_refs.insert().values(parameters_of(event_refs))
_LAST_POSITION = "SELECT max(seq) FROM sqlite_sequence WHERE name = 'events'"

_known_events = Prepared(_find_all)
_bodies_of = Prepared(_live_bodies)
_events_at = Prepared(_insert_at.inline())
_uses_of_events = Prepared(_insert_use.inline())


class Events:
    """The events of every scope.

    `retention` is how long an event is kept, None for ever; `open_kept` reads the bytes
    `[start, stop)` of a reference that was looked up for its owner.
    """

    def __init__(
        self, catalogue: Catalogue, open_kept: OpenKept, retention: timedelta | None
    ) -> None:
        self._catalogue = catalogue
        self._open_kept = open_kept
        self._retention = None if retention is None else int(retention.total_seconds())

    async def accept(self, arrival: Arrival) -> Accepted:
        """Keep an event and the bytes that it uses, durably, in one transaction.

        An event that is there already, with the same message, is given back, and False. Raises
        NotFound (`content_not_found`) unless every reference is live in the event's scope, Conflict
        (`event_mismatch`) for a known id with another message, Malformed (`event_id_invalid`);
        then nothing is stored.
        """
        _require_storable(arrival)
        accepted: Accepted = await self._catalogue.join(
            self._accept_all, arrival, size=len(arrival.message)
        )
        return accepted

    async def settle(
        self, scope: str, event_id: str, outcome: Outcome, result: bytes | None
    ) -> None:
        """Record how an event ended, and what an intercept was answered (JSON).

        What was recorded first stays. Raises NotFound (`event_not_found`).
        """
        _require_findable(scope, event_id)
        values = {"of_scope": scope, "of_event": event_id, "outcome": outcome, "result": result}
        await self._catalogue.write(lambda connection: _settle_once(connection, values))

    async def find(self, scope: str, event_id: str) -> StoredEvent:
        """The event of that id, or NotFound (`event_not_found`)."""
        _require_findable(scope, event_id)
        values = {"scope": scope, "event_id": event_id}
        found = await self._catalogue.read(
            lambda connection: _stored(
                connection, connection.execute(_find, values).mappings().all()
            )
        )
        if not found:
            raise event_not_found()
        return found[0]

    async def page(self, scope: str, *, after: int = 0, limit: int = 100) -> list[ListedEvent]:
        """Events of `scope` in the order of arrival, from behind position `after`."""
        if not is_text(scope):
            return []
        values = {"scope": scope, "after": after, "limit": limit}
        return await self._catalogue.read(lambda connection: _list(connection, _page, values))

    async def latest(self, scope: str, limit: int) -> list[ListedEvent]:
        """The last `limit` events of `scope`, in the order of arrival."""
        if not is_text(scope):
            return []
        values = {"scope": scope, "limit": limit}
        found = await self._catalogue.read(lambda connection: _list(connection, _latest, values))
        return found[::-1]

    async def using(self, scope: str, ref: str) -> list[str]:
        """The ids of the events that use a reference, in the order of arrival."""
        if not (is_text(scope) and is_text(ref)):
            return []
        values = {"scope": scope, "ref": ref}
        return await self._catalogue.read(
            lambda connection: list(connection.scalars(_using, values))
        )

    async def resolve(self, scope: str, ref: str) -> Reference:
        """A reference of `scope` that is live, or that an event of it keeps, or NotFound.

        One that has ended is told as its first event knows it: principal and times are of the
        event.
        """
        if not (is_text(scope) and is_text(ref)):
            raise not_found()
        try:
            return await self._catalogue.find(scope, ref)
        except NotFound:
            return await self._kept(_kept, scope=scope, ref=ref)

    def read(
        self, reference: Reference, *, start: int = 0, stop: int | None = None
    ) -> AbstractAsyncContextManager[Content]:
        """The bytes `[start, stop)` of a reference that `resolve` gave, cut to its size.

        Raises NotFound on entry when nothing keeps them any more, ValueError for a negative bound.
        """
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError("start and stop must not be negative")
        return self._open_kept(reference, start, stop)

    @asynccontextmanager
    async def open(
        self, scope: str, event_id: str, ref: str, *, start: int = 0, stop: int | None = None
    ) -> AsyncIterator[Content]:
        """The bytes `[start, stop)` of a reference that an event uses, also when it has ended.

        Raises NotFound (`content_not_found`) on entry, ValueError for a negative bound.
        """
        if not (is_text(scope) and is_text(event_id) and is_text(ref)):
            raise not_found()
        reference = await self._kept(_kept_by_event, scope=scope, event_id=event_id, ref=ref)
        async with self.read(reference, start=start, stop=stop) as content:
            yield content

    async def expire(self, limit: int) -> int:
        """End at most `limit` events whose time is over; how many there were."""
        now = int(time.time())
        over = await self._catalogue.write(lambda connection: _expire(connection, now, limit))
        for row in over:
            facts = {"principal": row.principal, "event_id": row.event_id}
            audit.record("event.expire", scope=row.scope, **facts)
        return len(over)

    async def expired(self) -> int:
        """How many events are over and still there."""
        statement = select(func.count()).where(events.c.expires_at <= int(time.time()))
        return await self._catalogue.read(
            lambda connection: int(connection.execute(statement).scalar_one())
        )

    def _accept_all(
        self, connection: Connection, arrivals: Sequence[Arrival]
    ) -> list[Accepted | Refusal]:
        now = int(time.time())
        expires_at = None if self._retention is None else now + self._retention
        return accept_all(connection, arrivals, now, expires_at)

    async def _kept(self, statement: Any, **values: str) -> Reference:
        row = await self._catalogue.read(
            lambda connection: connection.execute(statement, values).first()
        )
        if row is None:
            raise not_found()
        ref, size, digest, *rest = row
        return Reference(ref, size, digest.hex(), *rest)


def accept_all(
    connection: Connection, arrivals: Sequence[Arrival], now: int, expires_at: int | None
) -> list[Accepted | Refusal]:
    """Accept `arrivals` in this order; what each of them is told.

    All are judged before the first row is written, so a refusal leaves nothing and needs no
    savepoint, and the number of statements grows with that of the scopes alone.
    """
    known = _known(connection, arrivals)
    bodies = _bodies(connection, arrivals, now)
    fresh: dict[Key, Arrival] = {}
    refused: set[int] = set()
    for number, arrival in enumerate(arrivals):
        if arrival.key in known or arrival.key in fresh:
            continue
        if all((arrival.scope, ref) in bodies for ref in arrival.refs):
            fresh[arrival.key] = arrival
        else:
            refused.add(number)
    stored = known | _insert(connection, list(fresh.values()), bodies, now, expires_at)
    return [
        not_found()
        if number in refused
        else _verdict(arrival, stored[arrival.key], is_new=fresh.get(arrival.key) is arrival)
        for number, arrival in enumerate(arrivals)
    ]


@dataclass(frozen=True, slots=True)
class _Body:
    blob_id: int
    attached: Attached


def _known(connection: Connection, arrivals: Sequence[Arrival]) -> dict[Key, StoredEvent]:
    """Those of `arrivals` that came before."""
    ids: dict[str, list[str]] = {}
    for arrival in arrivals:
        ids.setdefault(arrival.scope, []).append(arrival.event_id)
    rows: list[Any] = []
    for scope, all_of_scope in ids.items():
        for part in _parts(all_of_scope):
            found = _known_events.find(connection, {"scope": scope, "ids": part})
            rows += (dict(zip(_FACTS, row, strict=True)) for row in found)
    return {(event.scope, event.event_id): event for event in _stored(connection, rows)}


def _bodies(connection: Connection, arrivals: Sequence[Arrival], now: int) -> dict[Key, _Body]:
    """The bodies of the live references among those of `arrivals`, by scope and reference."""
    bodies = {}
    used = {ref for arrival in arrivals for ref in arrival.refs if is_text(ref)}
    for refs in _parts(list(used)):
        for scope, ref, blob_id, size, digest in _bodies_of.find(
            connection, {"refs": refs, "now": now}
        ):
            bodies[scope, ref] = _Body(blob_id, Attached(ref, size, digest.hex()))
    return bodies


def _insert(
    connection: Connection,
    arrivals: Sequence[Arrival],
    bodies: Mapping[Key, _Body],
    now: int,
    expires_at: int | None,
) -> dict[Key, StoredEvent]:
    if not arrivals:
        return {}
    rows = [_event_row(arrival, now, expires_at) for arrival in arrivals]
    positions = _insert_rows(connection, rows)
    inserted = [
        _stored_arrival(arrival, position, bodies, now)
        for arrival, position in zip(arrivals, positions, strict=True)
    ]
    if uses := [use for event in inserted for use in _uses(event, bodies)]:
        _uses_of_events.run(connection, uses)
    return {(event.scope, event.event_id): event for event in inserted}


def _insert_rows(connection: Connection, rows: Sequence[dict[str, Any]]) -> Sequence[int]:
    """Insert events; their positions, in the order of `rows`."""
    if connection.dialect.name != "sqlite":
        return connection.scalars(_insert_event, rows).all()
    # Nobody else writes meanwhile, so that the next numbers are known. Asking for that of each row
    # takes a statement for each.
    with sqlite_driver(connection, _LAST_POSITION) as driver:
        (last,) = driver.execute(_LAST_POSITION).fetchone()
    first = (last or 0) + 1
    positions = range(first, first + len(rows))
    for row, position in zip(rows, positions, strict=True):
        row["id"] = position
    _events_at.run(connection, rows)
    return positions


def _uses(event: StoredEvent, bodies: Mapping[Key, _Body]) -> Iterator[dict[str, Any]]:
    for place, attached in enumerate(event.attachments):
        blob_id = bodies[event.scope, attached.ref].blob_id
        yield {"event": event.position, "place": place, "ref": attached.ref, "blob_id": blob_id}


def _event_row(arrival: Arrival, now: int, expires_at: int | None) -> dict[str, Any]:
    return {
        "scope": arrival.scope,
        "event_id": arrival.event_id,
        "type": arrival.type,
        "mode": arrival.mode,
        "principal": arrival.principal,
        "received_at": now,
        "expires_at": expires_at,
        "message": arrival.message,
    }


def _stored_arrival(
    arrival: Arrival, position: int, bodies: Mapping[Key, _Body], now: int
) -> StoredEvent:
    return StoredEvent(
        position=position,
        event_id=arrival.event_id,
        type=arrival.type,
        mode=arrival.mode,
        scope=arrival.scope,
        principal=arrival.principal,
        received_at=now,
        outcome=None,
        attachments=tuple(bodies[arrival.scope, ref].attached for ref in arrival.refs),
        result=None,
        message=arrival.message,
    )


def _verdict(arrival: Arrival, stored: StoredEvent, *, is_new: bool) -> Accepted | Refusal:
    if stored.message != arrival.message:
        return Conflict("event_mismatch", "Another event with this id was accepted before.")
    return stored, is_new


def _stored(connection: Connection, rows: Sequence[Any]) -> list[StoredEvent]:
    attachments = _attachments(connection, [row["position"] for row in rows])
    return [StoredEvent(**row, attachments=tuple(attachments[row["position"]])) for row in rows]


def _list(connection: Connection, statement: Any, values: Mapping[str, Any]) -> list[ListedEvent]:
    rows: Sequence[Any] = connection.execute(statement, values).mappings().all()
    attachments = _attachments(connection, [row["position"] for row in rows])
    return [ListedEvent(**row, attachments=tuple(attachments[row["position"]])) for row in rows]


def _attachments(connection: Connection, positions: Sequence[int]) -> dict[int, list[Attached]]:
    """What each of the events at `positions` uses, in the order of its document."""
    found: dict[int, list[Attached]] = {position: [] for position in positions}
    for part in _parts(positions):
        for position, ref, size, digest in connection.execute(_attached, {"events": part}):
            found[position].append(Attached(ref, size, digest.hex()))
    return found


def _parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), LOOKED_UP_AT_ONCE):
        yield items[start : start + LOOKED_UP_AT_ONCE]


def _settle_once(connection: Connection, values: Mapping[str, Any]) -> None:
    if connection.execute(_settle, values).rowcount:
        return
    key = {"scope": values["of_scope"], "event_id": values["of_event"]}
    if connection.execute(select(events.c.id).where(*_own), key).first() is None:
        raise event_not_found()


def _expire(connection: Connection, now: int, limit: int) -> Sequence[Any]:
    over = select(events.c.id).where(events.c.expires_at <= now).limit(limit)
    removal = delete(events).where(events.c.id.in_(over))
    named = removal.returning(events.c.event_id, events.c.scope, events.c.principal)
    return connection.execute(named).all()


def _require_storable(arrival: Arrival) -> None:
    require_text(scope=arrival.scope, principal=arrival.principal, event_id=arrival.event_id)
    if len(arrival.event_id.encode()) > MAX_EVENT_ID_BYTES:
        raise Malformed(
            "event_id_invalid", f"An event's id may have {MAX_EVENT_ID_BYTES} bytes at most."
        )


def _require_findable(scope: str, event_id: str) -> None:
    if not (is_text(scope) and is_text(event_id)):
        raise event_not_found()
