"""The tables of the Unified Harness Protocol: sessions, their responses, and files.

The `kind` of a file says whether it is an upload, which belongs to no session; an input that came
inline with a task; or an artifact of a session's container. `sessions` and `scope_usage` carry
running totals, so that a quota is one look, whatever the number of files is. Deleting a session's
row takes everything of it along. Its `newest_task` is the response that began last in it, by which
a machine knows whether the folder that it has of the session is the one that task worked in.

A response is `hidden` once its client deleted it, or asked that it is not retained: nobody finds it
any more, but whoever began it still gets its result.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    Text,
    literal_column,
)

from app.store.tables import DIGEST_BYTES, metadata, row_number

sessions = Table(
    "sessions",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("session_id", Text, nullable=False, unique=True),
    Column("container_id", Text, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("harness_id", Text),
    Column("title", Text),
    Column("status", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("expired_at", BigInteger),
    Column("files", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("newest_task", Text),
    sqlite_autoincrement=True,
)


def _index(name: str, *columns: Column[Any], where: ColumnElement[bool], unique: bool) -> None:
    Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


IN_PROGRESS = "in_progress"
"""The status of a running task, and of its session."""

# Conditions of partial indexes. Their values are part of the statement, not parameters: only then
# can a database see that a query may use the index.
is_unexpired = sessions.c.expired_at.is_(None)
_index("ix_sessions_scope", sessions.c.scope, sessions.c.id, where=is_unexpired, unique=False)
_index(
    "ix_sessions_scope_harness",
    sessions.c.scope,
    sessions.c.harness_id,
    sessions.c.id,
    where=is_unexpired,
    unique=False,
)
_index("ix_sessions_updated_at", sessions.c.updated_at, where=is_unexpired, unique=False)
_index(
    "ix_sessions_expired_at",
    sessions.c.expired_at,
    where=sessions.c.expired_at.is_not(None),
    unique=False,
)


def _of_session() -> ForeignKey:
    return ForeignKey("sessions.session_id", ondelete="CASCADE")


responses = Table(
    "responses",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("response_id", Text, nullable=False, unique=True),
    Column("session_id", Text, _of_session(), nullable=False),
    Column("scope", Text, nullable=False),
    Column("previous_response_id", Text),
    Column("status", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("response", Text, nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("seen_at", BigInteger, nullable=False),
    Column("finished_at", BigInteger),
    Column("cancel_requested", Integer, nullable=False),
    Column("hidden", Integer, nullable=False),
    sqlite_autoincrement=True,
)
Index("ix_responses_session", responses.c.session_id, responses.c.id)
is_running = responses.c.status == literal_column(f"'{IN_PROGRESS}'")
is_hidden = responses.c.hidden != literal_column("0")
_index("uq_responses_running", responses.c.session_id, where=is_running, unique=True)
_index("ix_responses_hidden", responses.c.finished_at, where=is_hidden, unique=False)

response_events = Table(
    "response_events",
    metadata,
    Column(
        "response_id",
        Text,
        ForeignKey("responses.response_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("sequence_number", Integer, primary_key=True),
    Column("payload", Text, nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("principal", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_digest", LargeBinary(DIGEST_BYTES), nullable=False),
    Column("response_id", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
Index("ix_idempotency_keys_created_at", idempotency_keys.c.created_at)

files = Table(
    "files",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("file_id", Text, nullable=False, unique=True),
    Column("scope", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("session_id", Text, _of_session()),
    Column("container_id", Text),
    Column("response_id", Text),
    Column("filename", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("purpose", Text),
    Column(
        "digest",
        LargeBinary(DIGEST_BYTES),
        ForeignKey("blobs.digest", ondelete="RESTRICT"),
        nullable=False,
    ),
    Column("size", BigInteger, nullable=False),
    Column("current", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    sqlite_autoincrement=True,
)
Index("ix_files_digest", files.c.digest)
Index("ix_files_session", files.c.session_id, files.c.id)
is_upload = files.c.kind == literal_column("'upload'")
is_artifact = files.c.kind == literal_column("'artifact'")
is_current = files.c.current == literal_column("1")
_index("ix_files_uploads", files.c.scope, files.c.id, where=is_upload, unique=False)
_index(
    "ix_files_expires_at",
    files.c.expires_at,
    where=files.c.expires_at.is_not(None),
    unique=False,
)
_index("uq_files_current", files.c.container_id, files.c.path, where=is_current, unique=True)

scope_usage = Table(
    "scope_usage",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("files", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)
