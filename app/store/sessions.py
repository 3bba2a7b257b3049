"""Sessions: one working folder, one conversation, one container of artifacts.

An expired session keeps its row for a while, so that it can be told from one that never was
(UHP-35). Its files and texts are gone, and it is not listed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, exists, select, update

from app import audit
from app.audit import Fact
from app.errors import Conflict
from app.store.catalogue import Catalogue
from app.store.files import (
    count_against_scope,
    file_not_found,
    refuse_expiry,
    session_not_found,
)
from app.store.session_tables import (
    files,
    is_running,
    is_unexpired,
    response_events,
    responses,
    sessions,
)

ACTIVE = "active"
"""The status of a session without a task: made for artifacts that come from elsewhere."""

_FIRST_PAGE = 2**62
_ASKED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session. Times in unix seconds; `position` is its place in the order of creation.

    `newest_task` is the response that began last in it, deleted or not.
    """

    id: str
    container_id: str
    scope: str
    principal: str
    harness_id: str | None
    title: str | None
    status: str
    created_at: int
    updated_at: int
    expired_at: int | None
    files: int
    bytes: int
    position: int
    newest_task: str | None

    @property
    def audited(self) -> dict[str, Fact]:
        """What an audit record says of it: whose it is, its ids, and what it keeps."""
        return {
            "scope": self.scope,
            "principal": self.principal,
            "session_id": self.id,
            "container_id": self.container_id,
            "files": self.files,
            "bytes": self.bytes,
        }


_columns = (
    sessions.c.session_id,
    sessions.c.container_id,
    sessions.c.scope,
    sessions.c.principal,
    sessions.c.harness_id,
    sessions.c.title,
    sessions.c.status,
    sessions.c.created_at,
    sessions.c.updated_at,
    sessions.c.expired_at,
    sessions.c.files,
    sessions.c.bytes,
    sessions.c.id,
    sessions.c.newest_task,
)
_find = select(*_columns).where(
    sessions.c.scope == bindparam("scope"), sessions.c.session_id == bindparam("session_id")
)
_find_by_container = select(*_columns).where(
    sessions.c.scope == bindparam("scope"), sessions.c.container_id == bindparam("container_id")
)
_page = (
    select(*_columns)
    .where(
        sessions.c.scope == bindparam("scope"), sessions.c.id < bindparam("before"), is_unexpired
    )
    .order_by(sessions.c.id.desc())
    .limit(bindparam("limit"))
)
_page_of_harness = _page.where(sessions.c.harness_id == bindparam("harness_id"))
_runs = exists().where(responses.c.session_id == sessions.c.session_id, is_running)
_idle = select(*_columns).where(
    sessions.c.updated_at < bindparam("idle_since"), is_unexpired, ~_runs
)


def _record(row: Any) -> SessionRecord:
    return SessionRecord(*row)


def session_row(
    *, scope: str, principal: str, harness_id: str | None, title: str | None, status: str
) -> dict[str, Any]:
    """The row of a new session, with fresh ids."""
    now = int(time.time())
    return {
        "session_id": f"hsess_{secrets.token_hex(16)}",
        "container_id": f"cntr_{secrets.token_hex(16)}",
        "scope": scope,
        "principal": principal,
        "harness_id": harness_id,
        "title": title,
        "status": status,
        "created_at": now,
        "updated_at": now,
        "files": 0,
        "bytes": 0,
    }


def insert_session(connection: Connection, row: dict[str, Any]) -> SessionRecord:
    """Insert a session inside a transaction."""
    return _record(connection.execute(sessions.insert().values(row).returning(*_columns)).one())


def find_session(
    connection: Connection, scope: str, session_id: str, *, also_expired: bool = False
) -> SessionRecord:
    """The session of the scope inside a transaction, or NotFound."""
    row = connection.execute(_find, {"scope": scope, "session_id": session_id}).first()
    if row is None:
        raise session_not_found()
    record = _record(row)
    if not also_expired:
        refuse_expired(record)
    return record


def drop_session(connection: Connection, record: SessionRecord) -> list[bytes]:
    """Delete a session inside a transaction, and give back what it counted for.

    Returns the digests of its files: bodies that may have no owner now.
    """
    digests = _digests(connection, record.id)
    connection.execute(delete(sessions).where(sessions.c.session_id == record.id))
    count_against_scope(connection, record.scope, -record.files, -record.bytes)
    return digests


class Sessions:
    """The sessions of every scope. `release` takes bodies away that may have no owner now."""

    def __init__(self, catalogue: Catalogue, release: Callable[[Sequence[bytes]], None]) -> None:
        self._catalogue = catalogue
        self._release = release

    async def create(
        self, *, scope: str, principal: str, harness_id: str | None = None, title: str | None = None
    ) -> SessionRecord:
        """A session without a task yet, with its container."""
        row = session_row(
            scope=scope, principal=principal, harness_id=harness_id, title=title, status=ACTIVE
        )
        return await self._catalogue.write(lambda connection: insert_session(connection, row))

    async def get(self, scope: str, session_id: str) -> SessionRecord:
        """The session of the scope, or NotFound (`session_not_found`, `session_expired`)."""
        return await self._catalogue.read(
            lambda connection: find_session(connection, scope, session_id)
        )

    async def of_container(self, scope: str, container_id: str) -> SessionRecord:
        """The session that a container of the scope belongs to, expired or not, or NotFound."""
        values = {"scope": scope, "container_id": container_id}
        row = await self._catalogue.read(
            lambda connection: connection.execute(_find_by_container, values).first()
        )
        if row is None:
            raise file_not_found()
        return _record(row)

    async def page(
        self,
        scope: str,
        *,
        before: int | None = None,
        limit: int = 20,
        harness_id: str | None = None,
    ) -> list[SessionRecord]:
        """Sessions of the scope, newest first, from behind position `before`."""
        values: dict[str, Any] = {
            "scope": scope,
            "before": _FIRST_PAGE if before is None else before,
            "limit": limit,
        }
        statement = _page
        if harness_id is not None:
            statement, values = _page_of_harness, {**values, "harness_id": harness_id}
        rows = await self._catalogue.read(
            lambda connection: connection.execute(statement, values).all()
        )
        return [_record(row) for row in rows]

    async def delete(self, scope: str, session_id: str, *, running: bool = False) -> None:
        """End a session with everything in it, and give back what it counted for.

        The second of two deletions gets NotFound. While a task runs in it, this is Conflict
        (`session_busy`): whoever deletes ends it first, unless `running` says not to look.
        """

        def work(connection: Connection) -> list[bytes]:
            record = find_session(connection, scope, session_id, also_expired=True)
            if not running and _is_busy(connection, session_id):
                raise Conflict("session_busy", "A task is still running in this session.")
            return drop_session(connection, record)

        self._release(await self._catalogue.write(work))

    async def expire(self, *, idle_since: int, limit: int = 200) -> list[SessionRecord]:
        """Let sessions expire that nothing touched since `idle_since`; gives them.

        A session whose task runs is not idle. Each is a transaction of its own: a large one does
        not hold up uploads for the sake of many.
        """
        statement, values = _idle.limit(limit), {"idle_since": idle_since}
        rows = await self._catalogue.read(
            lambda connection: connection.execute(statement, values).all()
        )
        over = [_record(row) for row in rows if await self._expire(row.session_id, idle_since)]
        for session in over:
            audit.record("session.expire", **session.audited)
        return over

    async def expired(self, *, before: int, limit: int = 200) -> list[SessionRecord]:
        """Sessions that expired before a time: kept so long only to say that they expired."""
        statement = select(*_columns).where(sessions.c.expired_at < before).limit(limit)
        rows = await self._catalogue.read(lambda connection: connection.execute(statement).all())
        return [_record(row) for row in rows]

    async def exists(self, session_id: str) -> bool:
        """Whether any scope has this session, unexpired: for folders that may have lost theirs."""
        return session_id not in await self.missing([session_id])

    async def missing(self, session_ids: Collection[str]) -> set[str]:
        """Those of `session_ids` that no scope has, or that are expired."""
        left = sorted(session_ids)
        missing = set(left)
        for start in range(0, len(left), _ASKED_AT_ONCE):
            some = left[start : start + _ASKED_AT_ONCE]
            statement = select(sessions.c.session_id).where(
                sessions.c.session_id.in_(some), is_unexpired
            )
            missing.difference_update(await self._catalogue.read(_scalars(statement)))
        return missing

    async def _expire(self, session_id: str, idle_since: int) -> bool:
        def work(connection: Connection) -> list[bytes] | None:
            still_idle = _idle.where(sessions.c.session_id == session_id)
            row = connection.execute(still_idle, {"idle_since": idle_since}).first()
            return None if row is None else _empty(connection, _record(row))

        digests = await self._catalogue.write(work)
        if digests is None:
            return False
        self._release(digests)
        return True


def refuse_expired(record: SessionRecord) -> None:
    """Raise NotFound `session_expired` for a session past its time (UHP-35)."""
    refuse_expiry(record.expired_at)


def _scalars(statement: Any) -> Callable[[Connection], Sequence[Any]]:
    return lambda connection: connection.scalars(statement).all()


def _is_busy(connection: Connection, session_id: str) -> bool:
    statement = select(responses.c.id).where(responses.c.session_id == session_id, is_running)
    return connection.execute(statement).first() is not None


def _digests(connection: Connection, session_id: str) -> list[bytes]:
    statement = select(files.c.digest).where(files.c.session_id == session_id).distinct()
    return list(connection.scalars(statement))


def _empty(connection: Connection, record: SessionRecord) -> list[bytes]:
    """Take everything out of an expired session but what says that it, and its tasks, were."""
    digests = _digests(connection, record.id)
    of_session = select(responses.c.response_id).where(responses.c.session_id == record.id)
    connection.execute(delete(files).where(files.c.session_id == record.id))
    connection.execute(delete(response_events).where(response_events.c.response_id.in_(of_session)))
    connection.execute(
        update(responses)
        .where(responses.c.session_id == record.id)
        .values(request="{}", response="{}")
    )
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == record.id)
        .values(expired_at=int(time.time()), files=0, bytes=0, title=None)
    )
    count_against_scope(connection, record.scope, -record.files, -record.bytes)
    return digests
