"""Responses: one task each, from its beginning to a terminal state that never changes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, bindparam, case, delete, func, select, update
from sqlalchemy.exc import IntegrityError

from app import audit
from app.errors import Conflict, NotFound
from app.store.catalogue import Catalogue, insert_unless_there
from app.store.files import refuse_expiry
from app.store.session_tables import (
    IN_PROGRESS,
    idempotency_keys,
    is_hidden,
    is_running,
    response_events,
    responses,
    sessions,
)
from app.store.sessions import (
    SessionRecord,
    drop_session,
    find_session,
    insert_session,
    session_row,
)

_SHOWN, _DELETED, _NOT_RETAINED = range(3)
"""Values of `hidden`."""


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """One task. `request` is what the client sent, `response` the object as it stands."""

    id: str
    session_id: str
    scope: str
    previous_response_id: str | None
    status: str
    request: dict[str, Any]
    response: dict[str, Any]
    owner: str
    created_at: int
    finished_at: int | None
    cancel_requested: bool
    position: int

    @property
    def is_terminal(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.status != IN_PROGRESS


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """The key of a repeated request, and the digest of what was asked for."""

    key: str
    principal: str
    request_digest: bytes


Describe = Callable[[str, SessionRecord, int], dict[str, Any]]
"""The response as it begins, from its id, its session and the time."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a new task is: where it belongs, what was asked, who runs it.

    Without `previous_response_id` a new session begins with it.
    """

    scope: str
    principal: str
    harness_id: str
    request: dict[str, Any]
    describe: Describe
    owner: str
    title: str | None = None
    previous_response_id: str | None = None
    idempotency: IdempotencyKey | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A task that began, or with `repeated` the one that an earlier request began.

    `session` is as it was before, so that its `newest_task` is the one before this.
    """

    response: ResponseRecord
    session: SessionRecord
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A task without an end: who runs it, and when that last showed (unix seconds)."""

    id: str
    scope: str
    owner: str
    seen_at: int


@dataclass(frozen=True, slots=True)
class Other:
    """Whose tasks are meant: those of a scope on a harness that `owner` does not run."""

    scope: str
    harness_id: str
    owner: str


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A task that another process runs; `position` is its place in the order of beginning."""

    id: str
    position: int


def new_response_id() -> str:
    """A fresh, meaningless id."""
    return f"resp_{secrets.token_hex(16)}"


def response_not_found() -> NotFound:
    """One answer for unknown, foreign and deleted responses."""
    return NotFound("response_not_found", "There is no such response.")


_columns = (
    responses.c.response_id,
    responses.c.session_id,
    responses.c.scope,
    responses.c.previous_response_id,
    responses.c.status,
    responses.c.request,
    responses.c.response,
    responses.c.owner,
    responses.c.created_at,
    responses.c.finished_at,
    responses.c.cancel_requested,
    responses.c.id,
)
_by_id = select(*_columns).where(
    responses.c.scope == bindparam("scope"), responses.c.response_id == bindparam("response_id")
)
_find = _by_id.where(~is_hidden)
_to_cancel = _by_id.where(responses.c.hidden != _DELETED)
_by_id_with_expiry, _find_with_expiry = (
    statement.add_columns(sessions.c.expired_at).join(
        sessions, sessions.c.session_id == responses.c.session_id
    )
    for statement in (_by_id, _find)
)
_turns = (
    select(*_columns)
    .where(responses.c.session_id == bindparam("session_id"), ~is_hidden)
    .order_by(responses.c.id)
)
_running = select(*_columns).where(responses.c.session_id == bindparam("session_id"), is_running)
_of_others = (
    select(responses.c.response_id, responses.c.id)
    .join(sessions, sessions.c.session_id == responses.c.session_id)
    .where(
        responses.c.scope == bindparam("scope"),
        sessions.c.harness_id == bindparam("harness_id"),
        responses.c.owner != bindparam("owner"),
    )
    .order_by(responses.c.id)
    .limit(1000)
)
_events = (
    select(response_events.c.sequence_number, response_events.c.payload)
    .where(
        response_events.c.response_id == bindparam("response_id"),
        response_events.c.sequence_number > bindparam("after"),
    )
    .order_by(response_events.c.sequence_number)
    .limit(bindparam("limit"))
)
_insert_event = insert_unless_there(
    response_events, response_events.c.response_id, response_events.c.sequence_number
)
_known_key = select(idempotency_keys.c.request_digest, idempotency_keys.c.response_id).where(
    idempotency_keys.c.scope == bindparam("scope"),
    idempotency_keys.c.principal == bindparam("principal"),
    idempotency_keys.c.key == bindparam("key"),
)


def _record(row: Any) -> ResponseRecord:
    record = ResponseRecord(*row[: len(_columns)])
    return replace(
        record,
        request=json.loads(row.request),
        response=json.loads(row.response),
        cancel_requested=bool(record.cancel_requested),
    )


class Responses:
    """The tasks of every scope."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def begin(self, beginning: Beginning) -> Begun:
        """Claim the session and the idempotency key for a new task, in one transaction.

        Raises NotFound (`response_not_found`, `session_expired`), Conflict (`session_busy`,
        `harness_mismatch`, `consignee_idempotency_mismatch`).
        """
        return await self._catalogue.write(lambda connection: _begin(connection, beginning))

    async def known(self, scope: str, key: IdempotencyKey) -> Begun | None:
        """The task that an earlier request with this key began, or None.

        Raises Conflict (`consignee_idempotency_mismatch`), and NotFound for one that is gone: the
        work is never done a second time.
        """
        return await self._catalogue.read(lambda connection: _known(connection, scope, key))

    async def get(
        self, scope: str, response_id: str, *, also_hidden: bool = False
    ) -> ResponseRecord:
        """The response of the scope, or NotFound; `also_hidden` for whoever began it."""
        values = {"scope": scope, "response_id": response_id}
        statement = _by_id_with_expiry if also_hidden else _find_with_expiry

        def query(connection: Connection) -> ResponseRecord:
            row = connection.execute(statement, values).first()
            if row is None:
                raise response_not_found()
            refuse_expiry(row.expired_at)
            return _record(row)

        return await self._catalogue.read(query)

    async def turns(self, scope: str, session_id: str) -> list[ResponseRecord]:
        """The tasks of a session, oldest first, or NotFound."""

        def query(connection: Connection) -> list[ResponseRecord]:
            find_session(connection, scope, session_id)
            rows = connection.execute(_turns, {"session_id": session_id})
            return [_record(row) for row in rows]

        return await self._catalogue.read(query)

    async def running(self, scope: str, session_id: str) -> ResponseRecord | None:
        """The task that runs in a session, or None; NotFound without such a session."""

        def query(connection: Connection) -> ResponseRecord | None:
            find_session(connection, scope, session_id, also_expired=True)
            row = connection.execute(_running, {"session_id": session_id}).first()
            return _record(row) if row is not None else None

        return await self._catalogue.read(query)

    async def append_events(self, response_id: str, events: Sequence[tuple[int, str]]) -> None:
        """Keep events, each a sequence number and its JSON, and show that the task is alive.

        Raises NotFound when the response is gone, or has its end already.
        """
        rows = _event_rows(response_id, events)

        def work(connection: Connection) -> None:
            alive = (
                update(responses)
                .where(responses.c.response_id == response_id, is_running)
                .values(seen_at=int(time.time()))
            )
            if connection.execute(alive).rowcount == 0:
                raise response_not_found()
            _insert_events(connection, rows)

        await self._catalogue.write(work)

    async def show_life(self, response_ids: Sequence[str]) -> None:
        """Note that whoever runs these tasks is alive."""
        statement = (
            update(responses)
            .where(responses.c.response_id.in_(response_ids), is_running)
            .values(seen_at=int(time.time()))
        )
        await self._catalogue.write(lambda connection: connection.execute(statement).rowcount)

    async def events(
        self, response_id: str, *, after: int = -1, limit: int = 1000
    ) -> list[tuple[int, str]]:
        """Kept events behind a sequence number, in order."""
        values = {"response_id": response_id, "after": after, "limit": limit}
        rows = await self._catalogue.read(
            lambda connection: connection.execute(_events, values).all()
        )
        return [(row.sequence_number, row.payload) for row in rows]

    async def finish(
        self, response_id: str, response: dict[str, Any], events: Sequence[tuple[int, str]] = ()
    ) -> bool:
        """Bring a running task to the terminal state in `response`, with its last events.

        Returns whether it still ran: a terminal state never changes.
        """
        rows = _event_rows(response_id, events)

        def work(connection: Connection) -> bool:
            if not _finish(connection, response_id, response):
                return False
            _insert_events(connection, rows)
            return True

        return await self._catalogue.write(work)

    async def undo(self, begun: Begun) -> None:
        """Take back a task that could not be started: its key, itself, and a session of its own."""
        response = begun.response
        key = delete(idempotency_keys).where(idempotency_keys.c.response_id == response.id)
        own = delete(responses).where(responses.c.response_id == response.id)

        def work(connection: Connection) -> None:
            connection.execute(key)
            if connection.execute(own).rowcount == 0:
                return  # deleted meanwhile, together with its session
            if response.previous_response_id is None:
                drop_session(connection, find_session(connection, response.scope, begun.session.id))
            else:
                session = begun.session
                _touch(connection, session.id, session.status, newest_task=session.newest_task)

        await self._catalogue.write(work)

    async def delete(self, scope: str, response_id: str) -> None:
        """Take a response out of the history, or NotFound. A running task runs on (Tasks 7)."""
        statement = (
            update(responses)
            .where(
                responses.c.scope == scope,
                responses.c.response_id == response_id,
                ~is_hidden,
            )
            .values(hidden=_DELETED)
        )

        def work(connection: Connection) -> None:
            if connection.execute(statement).rowcount == 0:
                raise response_not_found()

        await self._catalogue.write(work)

    async def request_cancel(
        self, scope: str, response_id: str, *, also_deleted: bool = False
    ) -> ResponseRecord:
        """Ask whoever runs the task to end it; the response as it stands, or NotFound.

        A response that is not retained can be cancelled again after its end; `also_deleted` is for
        whoever ends the session of a task.
        """
        values = {"scope": scope, "response_id": response_id}
        statement = _by_id if also_deleted else _to_cancel
        ask = (
            update(responses)
            .where(responses.c.response_id == response_id, is_running)
            .values(cancel_requested=1)
        )

        def work(connection: Connection) -> ResponseRecord:
            row = connection.execute(statement, values).first()
            if row is None:
                raise response_not_found()
            connection.execute(ask)
            return _record(row)

        return await self._catalogue.write(work)

    async def cancelled(self, owner: str) -> list[str]:
        """The running tasks of `owner` that somebody asked to end."""
        statement = select(responses.c.response_id).where(
            responses.c.owner == owner, is_running, responses.c.cancel_requested == 1
        )
        rows = await self._catalogue.read(lambda connection: connection.execute(statement).all())
        return [row.response_id for row in rows]

    async def unfinished(self) -> list[Unfinished]:
        """Every task without an end, of every process."""
        statement = select(
            responses.c.response_id, responses.c.scope, responses.c.owner, responses.c.seen_at
        ).where(is_running)
        rows = await self._catalogue.read(lambda connection: connection.execute(statement).all())
        return [Unfinished(*row) for row in rows]

    async def position(self) -> int:
        """The place of the newest task of all, in the order in which they began; 0 without any."""
        statement = select(func.coalesce(func.max(responses.c.id), 0))
        return int(await self._catalogue.read(lambda c: c.execute(statement).scalar_one()))

    async def begun_elsewhere(self, after: int, by: Other) -> list[Elsewhere]:
        """Tasks behind position `after` that are not `by.owner`'s, in the order of beginning."""
        statement = _of_others.where(responses.c.id > after)
        return await self._elsewhere(statement, by)

    async def running_elsewhere(self, by: Other) -> list[Elsewhere]:
        """Tasks without an end that are not `by.owner`'s, in the order of beginning."""
        return await self._elsewhere(_of_others.where(is_running), by)

    async def newest_event(self, response_id: str) -> int:
        """The sequence number of the newest kept event of a task; -1 without any."""
        statement = select(func.coalesce(func.max(response_events.c.sequence_number), -1)).where(
            response_events.c.response_id == response_id
        )
        return int(await self._catalogue.read(lambda c: c.execute(statement).scalar_one()))

    async def _elsewhere(self, statement: Any, by: Other) -> list[Elsewhere]:
        values = {"scope": by.scope, "harness_id": by.harness_id, "owner": by.owner}
        rows = await self._catalogue.read(
            lambda connection: connection.execute(statement, values).all()
        )
        return [Elsewhere(*row) for row in rows]

    async def purge(self, *, before: int, limit: int = 500) -> int:
        """Drop hidden responses that ended before a time; how many there were."""
        old = (
            select(responses.c.response_id)
            .where(is_hidden, responses.c.finished_at < before)
            .limit(limit)
        )
        named = (responses.c.scope, responses.c.response_id, responses.c.session_id)
        statement = delete(responses).where(responses.c.response_id.in_(old)).returning(*named)
        over = await self._catalogue.write(lambda connection: connection.execute(statement).all())
        for scope, response_id, session_id in over:
            facts = {"response_id": response_id, "session_id": session_id}
            audit.record("response.expire", scope=scope, **facts)
        return len(over)

    async def drop_events(self, *, before: int, limit: int = 100) -> int:
        """Drop the events of tasks that ended before a time; of how many tasks these were."""
        kept = select(response_events.c.response_id).distinct()
        old = (
            select(responses.c.response_id)
            .where(responses.c.finished_at < before, responses.c.response_id.in_(kept))
            .limit(limit)
        )

        def work(connection: Connection) -> int:
            ids = connection.scalars(old).all()
            connection.execute(
                delete(response_events).where(response_events.c.response_id.in_(ids))
            )
            return len(ids)

        return await self._catalogue.write(work)

    async def forget_keys(self, *, before: int) -> int:
        """Drop idempotency keys from before a time; how many there were."""
        statement = delete(idempotency_keys).where(idempotency_keys.c.created_at < before)
        return await self._catalogue.write(
            lambda connection: connection.execute(statement).rowcount
        )


def _event_rows(response_id: str, events: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    return [
        {"response_id": response_id, "sequence_number": number, "payload": payload}
        for number, payload in events
    ]


def _insert_events(connection: Connection, rows: list[dict[str, Any]]) -> None:
    # Whoever could not learn whether they were kept hands the same ones in again.
    if rows:
        connection.execute(_insert_event(connection), rows)


def _begin(connection: Connection, beginning: Beginning) -> Begun:
    key = beginning.idempotency
    if key is not None and (known := _known(connection, beginning.scope, key)) is not None:
        return known
    session = _session_of(connection, beginning)
    row = _response_row(beginning, session)
    try:
        with connection.begin_nested():
            inserted = connection.execute(responses.insert().values(row).returning(*_columns)).one()
    except IntegrityError:
        raise Conflict("session_busy", "A task is already running in this session.") from None
    _touch(connection, session.id, IN_PROGRESS, newest_task=row["response_id"])
    _claim_key(connection, beginning, row["response_id"])
    return Begun(_record(inserted), session)


def _known(connection: Connection, scope: str, key: IdempotencyKey) -> Begun | None:
    values = {"scope": scope, "principal": key.principal, "key": key.key}
    row = connection.execute(_known_key, values).first()
    if row is None:
        return None
    if row.request_digest != key.request_digest:
        raise Conflict(
            "consignee_idempotency_mismatch",
            "This Idempotency-Key was used for another request; use a fresh key.",
        )
    found = connection.execute(_by_id, {"scope": scope, "response_id": row.response_id}).first()
    if found is None:
        raise response_not_found()
    record = _record(found)
    return Begun(record, find_session(connection, scope, record.session_id), repeated=True)


def _session_of(connection: Connection, beginning: Beginning) -> SessionRecord:
    if beginning.previous_response_id is None:
        row = session_row(
            scope=beginning.scope,
            principal=beginning.principal,
            harness_id=beginning.harness_id,
            title=beginning.title,
            status=IN_PROGRESS,
        )
        return insert_session(connection, row)
    values = {"scope": beginning.scope, "response_id": beginning.previous_response_id}
    previous = connection.execute(_find, values).first()
    if previous is None:
        raise response_not_found()
    session = find_session(connection, beginning.scope, previous.session_id)
    if session.harness_id != beginning.harness_id:
        raise Conflict(
            "harness_mismatch", "The session belongs to another harness; start a new session."
        )
    return session


def _response_row(beginning: Beginning, session: SessionRecord) -> dict[str, Any]:
    now = int(time.time())
    response_id = new_response_id()
    return {
        "response_id": response_id,
        "session_id": session.id,
        "scope": beginning.scope,
        "previous_response_id": beginning.previous_response_id,
        "status": IN_PROGRESS,
        "request": json.dumps(beginning.request),
        "response": json.dumps(beginning.describe(response_id, session, now)),
        "owner": beginning.owner,
        "created_at": now,
        "seen_at": now,
        "cancel_requested": 0,
        "hidden": _SHOWN,
    }


def _claim_key(connection: Connection, beginning: Beginning, response_id: str) -> None:
    key = beginning.idempotency
    if key is None:
        return
    connection.execute(
        idempotency_keys.insert().values(
            scope=beginning.scope,
            principal=key.principal,
            key=key.key,
            request_digest=key.request_digest,
            response_id=response_id,
            created_at=int(time.time()),
        )
    )


def _finish(connection: Connection, response_id: str, response: dict[str, Any]) -> bool:
    statement = (
        update(responses)
        .where(responses.c.response_id == response_id, is_running)
        .values(
            status=response["status"],
            response=json.dumps(response),
            finished_at=int(time.time()),
            hidden=_hidden_at_end(response),
        )
        .returning(responses.c.session_id)
    )
    row = connection.execute(statement).first()
    if row is None:
        return False
    _touch(connection, row.session_id, response["status"])
    return True


def _hidden_at_end(response: dict[str, Any]) -> Any:
    if response.get("store", True):
        return responses.c.hidden
    return case((is_hidden, responses.c.hidden), else_=_NOT_RETAINED)


def _touch(connection: Connection, session_id: str, status: str, **noted: str | None) -> None:
    now = int(time.time())
    latest = func.max if connection.dialect.name == "sqlite" else func.greatest
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == session_id)
        .values(status=status, updated_at=latest(sessions.c.updated_at, now), **noted)
    )
