"""Files of the Unified Harness Protocol: uploads, and the artifacts of a session's container.

A file's bytes never change. An artifact written again under the same path is another file; the
newest of each path is `current` (UHP-14, UHP-16). Everything is looked up together with the scope
of the caller, so that a foreign file and an unknown one are the same (UHP-29).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from app import audit
from app.audit import Fact
from app.errors import NotFound, QuotaExhausted
from app.settings import Settings
from app.store.catalogue import Catalogue
from app.store.session_tables import (
    files,
    is_artifact,
    is_current,
    is_unexpired,
    is_upload,
    scope_usage,
    sessions,
)
from app.store.tables import blobs

FileKind = Literal["upload", "input", "artifact"]


@dataclass(frozen=True, slots=True)
class Quota:
    """Budgets of one scope and of one session; None is no limit."""

    scope_bytes: int | None = None
    scope_files: int | None = None
    session_bytes: int | None = None
    session_files: int | None = None


def quota_of(settings: Settings) -> Quota:
    """The budgets that the configuration gives."""
    return Quota(
        scope_bytes=settings.max_scope_bytes,
        scope_files=settings.max_scope_files,
        session_bytes=settings.max_session_bytes,
        session_files=settings.max_session_files,
    )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file. `size` in bytes, `sha256` as 64 lowercase hex, times in unix seconds.

    `position` is its place in the order of arrival, for paging.
    """

    id: str
    scope: str
    principal: str
    filename: str
    path: str
    media_type: str
    size: int
    sha256: str
    created_at: int
    container_id: str | None
    session_id: str | None
    response_id: str | None
    kind: FileKind
    purpose: str | None
    current: bool
    expires_at: int | None
    position: int

    @property
    def audited(self) -> dict[str, Fact]:
        """What an audit record says of it: whose it is, its ids, its digest and its bytes."""
        return {
            "scope": self.scope,
            "file_id": self.id,
            "session_id": self.session_id,
            "container_id": self.container_id,
            "response_id": self.response_id,
            "path": self.path,
            "sha256": self.sha256,
            "bytes": self.size,
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """What a scope keeps: files, and their bytes as they count against its quota."""

    files: int
    bytes: int


OpenBody = Callable[[str, int, int | None], AbstractAsyncContextManager[AsyncIterator[bytes]]]


class SessionKey(Protocol):
    """What names a session: its id, and that of its container."""

    @property
    def id(self) -> str: ...

    @property
    def container_id(self) -> str: ...


def new_file_id() -> str:
    """A fresh, meaningless id (UHP-32)."""
    return f"file_{secrets.token_hex(16)}"


def file_not_found() -> NotFound:
    """One answer for unknown, foreign, expired and deleted files."""
    return NotFound("file_not_found", "There is no such file.")


def session_not_found() -> NotFound:
    """One answer for unknown, foreign and deleted sessions."""
    return NotFound("session_not_found", "There is no such session.")


def refuse_expiry(expired_at: int | None) -> None:
    """Raise NotFound `session_expired` for a session past its time (UHP-35)."""
    if expired_at is not None:
        raise NotFound("session_expired", "This session existed and is past its retention.")


_columns = (
    files.c.file_id,
    files.c.scope,
    files.c.principal,
    files.c.filename,
    files.c.path,
    files.c.media_type,
    files.c.size,
    files.c.digest,
    files.c.created_at,
    files.c.container_id,
    files.c.session_id,
    files.c.response_id,
    files.c.kind,
    files.c.purpose,
    files.c.current,
    files.c.expires_at,
    files.c.id,
)
_DIGEST = _columns.index(files.c.digest)
_CURRENT = _columns.index(files.c.current)
_live: ColumnElement[bool] = or_(
    files.c.expires_at.is_(None), files.c.expires_at > bindparam("now")
)
_own = and_(files.c.scope == bindparam("scope"), files.c.file_id == bindparam("file_id"), _live)
_find = select(*_columns).where(_own)
_find_in_container = _find.where(files.c.container_id == bindparam("container_id"), is_artifact)
_find_upload = _find.where(is_upload)
_uploads = (
    select(*_columns)
    .where(
        files.c.scope == bindparam("scope"),
        is_upload,
        files.c.id < bindparam("before"),
        _live,
    )
    .order_by(files.c.id.desc())
    .limit(bindparam("limit"))
)
_of_session = (
    select(*_columns)
    .where(files.c.session_id == bindparam("session_id"), is_artifact)
    .order_by(files.c.id)
)
_session = select(sessions.c.expired_at).where(
    sessions.c.session_id == bindparam("session_id"), sessions.c.scope == bindparam("scope")
)
_FIRST_PAGE = 2**62


def record_of(row: Any) -> FileRecord:
    """The record that a selected row holds."""
    values = list(row)
    values[_DIGEST] = row[_DIGEST].hex()
    values[_CURRENT] = bool(row[_CURRENT])
    return FileRecord(*values)


class Files:
    """The files of every scope.

    `bind` commits a staged body together with the rows of a file; `open_body` reads the bytes
    `[start, stop)` of a digest; `release` takes bodies away that may have no owner now.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        bind: Callable[..., Any],
        open_body: OpenBody,
        local_path: Callable[[str], Path | None],
        release: Callable[[Sequence[bytes]], None],
        quota: Quota,
    ) -> None:
        self._catalogue = catalogue
        self._bind = bind
        self._open_body = open_body
        self._local_path = local_path
        self._release = release
        self._quota = quota

    def open(
        self, record: FileRecord, *, start: int = 0, stop: int | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes `[start, stop)` of a file that was looked up for its owner.

        Raises NotFound on entry when the file went meanwhile, Unavailable when its bytes did.
        """
        return self._open_body(record.sha256, start, stop)

    async def location(self, record: FileRecord) -> Path | None:
        """The file on this machine that holds the bytes, for a proxy that sends it; else None."""
        place = await self._catalogue.place(bytes.fromhex(record.sha256))
        if place is None or place.location is None:
            return None
        return self._local_path(place.location)

    async def small(self, records: Sequence[FileRecord]) -> Mapping[str, bytes]:
        """The bytes of those files whose bytes lie in the database, by file id."""
        digests = {bytes.fromhex(record.sha256) for record in records}
        statement = select(blobs.c.digest, blobs.c.data).where(
            blobs.c.digest.in_(digests), blobs.c.data.is_not(None)
        )
        rows = await self._catalogue.read(lambda connection: connection.execute(statement).all())
        found = {digest.hex(): data for digest, data in rows}
        return {record.id: found[record.sha256] for record in records if record.sha256 in found}

    async def add_upload(
        self,
        sealed: Any,
        *,
        scope: str,
        principal: str,
        filename: str,
        media_type: str,
        purpose: str,
        expires_at: int | None,
    ) -> FileRecord:
        """Keep a staged body as an upload. Raises QuotaExhausted, Exhausted, Unavailable."""
        row = {
            **_row(sealed, scope, principal, filename, media_type),
            "filename": filename,
            "kind": "upload",
            "purpose": purpose,
            "current": 0,
            "expires_at": expires_at,
        }
        added: FileRecord = await self._bind(
            sealed, lambda connection: _add(connection, row, self._quota)
        )
        return added

    async def add_artifact(
        self,
        sealed: Any,
        *,
        scope: str,
        principal: str,
        session: SessionKey,
        response_id: str | None,
        path: str,
        media_type: str,
    ) -> FileRecord:
        """Keep a staged body as the current file of `path` in a session's container.

        Raises NotFound when the session is gone, QuotaExhausted, Exhausted, Unavailable.
        """
        row = {
            **_row(sealed, scope, principal, path, media_type),
            "filename": path.rpartition("/")[2],
            "session_id": session.id,
            "container_id": session.container_id,
            "response_id": response_id,
            "kind": "artifact",
            "current": 1,
        }
        added: FileRecord = await self._bind(
            sealed, lambda connection: _add_artifact(connection, row, self._quota)
        )
        return added

    async def add_input(
        self,
        sealed: Any,
        *,
        scope: str,
        principal: str,
        session: SessionKey,
        response_id: str,
        filename: str,
        media_type: str,
    ) -> FileRecord:
        """Keep a file that came inline with a task, for as long as its session lives."""
        row = {
            **_row(sealed, scope, principal, filename, media_type),
            "filename": filename,
            "session_id": session.id,
            "container_id": session.container_id,
            "response_id": response_id,
            "kind": "input",
            "current": 0,
        }

        def work(connection: Connection) -> FileRecord:
            _count_against_session(connection, row, self._quota)
            return _add(connection, row, self._quota)

        added: FileRecord = await self._bind(sealed, work)
        return added

    async def get(self, scope: str, file_id: str) -> FileRecord:
        """An upload or artifact of the scope, or NotFound."""
        return await self._one(_find, scope=scope, file_id=file_id)

    async def get_upload(self, scope: str, file_id: str) -> FileRecord:
        """An upload of the scope, or NotFound."""
        return await self._one(_find_upload, scope=scope, file_id=file_id)

    async def get_in_container(self, scope: str, container_id: str, file_id: str) -> FileRecord:
        """An artifact of exactly this container of the scope, or NotFound (UHP-30)."""
        return await self._one(
            _find_in_container, scope=scope, file_id=file_id, container_id=container_id
        )

    async def uploads(
        self, scope: str, *, before: int | None = None, limit: int = 20
    ) -> list[FileRecord]:
        """Uploads of the scope, newest first, from behind position `before`."""
        values: dict[str, Any] = {"scope": scope, "limit": limit}
        values["before"] = _FIRST_PAGE if before is None else before
        return await self._many(_uploads, values)

    async def of_session(self, scope: str, session_id: str) -> list[FileRecord]:
        """Every artifact of a session, oldest first; NotFound without such a session."""
        values = {"scope": scope, "session_id": session_id}

        def query(connection: Connection) -> list[FileRecord]:
            session = connection.execute(_session, values).first()
            if session is None:
                raise session_not_found()
            refuse_expiry(session.expired_at)
            return [record_of(row) for row in connection.execute(_of_session, values)]

        return await self._catalogue.read(query)

    async def delete_upload(self, scope: str, file_id: str) -> None:
        """End an upload, or NotFound; its bytes go with the last file that has them."""
        values = {"scope": scope, "file_id": file_id, "now": int(time.time())}

        def work(connection: Connection) -> list[bytes]:
            row = connection.execute(_find_upload, values).first()
            if row is None:
                raise file_not_found()
            return _drop(connection, [record_of(row)])

        self._release(await self._catalogue.write(work))

    async def expire(self, *, limit: int = 500) -> int:
        """End uploads whose time is over; how many there were."""
        statement = select(*_columns).where(files.c.expires_at <= int(time.time())).limit(limit)

        def work(connection: Connection) -> list[FileRecord]:
            over = [record_of(row) for row in connection.execute(statement)]
            _drop(connection, over)
            return over

        over = await self._catalogue.write(work)
        for record in over:
            audit.record("file.expire", principal=record.principal, **record.audited)
        self._release(_digests(over))
        return len(over)

    async def totals(self, scope: str) -> Totals:
        """What the scope keeps."""
        statement = select(scope_usage.c.files, scope_usage.c.bytes).where(
            scope_usage.c.scope == scope
        )
        row = await self._catalogue.read(lambda connection: connection.execute(statement).first())
        return Totals(*row) if row is not None else Totals(0, 0)

    async def _one(self, statement: Any, **values: Any) -> FileRecord:
        found = await self._many(statement, values)
        if not found:
            raise file_not_found()
        return found[0]

    async def _many(self, statement: Any, values: dict[str, Any]) -> list[FileRecord]:
        now = int(time.time())
        rows = await self._catalogue.read(
            lambda connection: connection.execute(statement, {**values, "now": now}).all()
        )
        return [record_of(row) for row in rows]


def count_against_scope(connection: Connection, scope: str, count: int, size: int) -> Totals:
    """Add to what a scope keeps; negative numbers give back. Returns the new totals."""
    values = {"scope": scope, "files": count, "bytes": size}
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(scope_usage).values(values)
    statement = insert.on_conflict_do_update(
        index_elements=[scope_usage.c.scope],
        set_={
            "files": scope_usage.c.files + insert.excluded.files,
            "bytes": scope_usage.c.bytes + insert.excluded.bytes,
        },
    ).returning(scope_usage.c.files, scope_usage.c.bytes)
    return Totals(*connection.execute(statement).one())


def _row(sealed: Any, scope: str, principal: str, path: str, media_type: str) -> dict[str, Any]:
    return {
        "file_id": new_file_id(),
        "scope": scope,
        "principal": principal,
        "path": path,
        "media_type": media_type,
        "digest": sealed.digest,
        "size": sealed.size,
        "created_at": int(time.time()),
    }


def _add(connection: Connection, row: dict[str, Any], quota: Quota) -> FileRecord:
    totals = count_against_scope(connection, row["scope"], 1, row["size"])
    _hold("files in this scope", totals.files, quota.scope_files)
    _hold("bytes in this scope", totals.bytes, quota.scope_bytes)
    inserted = connection.execute(files.insert().values(row).returning(*_columns)).one()
    return record_of(inserted)


def _add_artifact(connection: Connection, row: dict[str, Any], quota: Quota) -> FileRecord:
    _count_against_session(connection, row, quota)
    connection.execute(
        update(files)
        .where(
            files.c.container_id == row["container_id"],
            files.c.path == row["path"],
            is_current,
        )
        .values(current=0)
    )
    return _add(connection, row, quota)


def _count_against_session(connection: Connection, row: dict[str, Any], quota: Quota) -> None:
    statement = (
        update(sessions)
        .where(
            sessions.c.session_id == row["session_id"],
            sessions.c.container_id == row["container_id"],
            sessions.c.scope == row["scope"],
            is_unexpired,
        )
        .values(
            files=sessions.c.files + 1,
            bytes=sessions.c.bytes + row["size"],
            updated_at=func.max(sessions.c.updated_at, row["created_at"])
            if connection.dialect.name == "sqlite"
            else func.greatest(sessions.c.updated_at, row["created_at"]),
        )
        .returning(sessions.c.files, sessions.c.bytes)
    )
    totals = connection.execute(statement).first()
    if totals is None:
        raise session_not_found()
    _hold("files in this session", totals.files, quota.session_files)
    _hold("bytes in this session", totals.bytes, quota.session_bytes)


def _hold(of: str, count: int, limit: int | None) -> None:
    if limit is not None and count > limit:
        raise QuotaExhausted(of, limit)


def _drop(connection: Connection, records: list[FileRecord]) -> list[bytes]:
    """Delete files and give back what they counted for; their digests, one for each."""
    for record in records:
        connection.execute(delete(files).where(files.c.file_id == record.id))
        count_against_scope(connection, record.scope, -1, -record.size)
    return _digests(records)


def _digests(records: list[FileRecord]) -> list[bytes]:
    return [bytes.fromhex(record.sha256) for record in records]
