"""Sessions, their responses with events, idempotency keys, files, and what a scope keeps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_sessions()
    _create_responses()
    _create_response_events()
    _create_idempotency_keys()
    _create_files()
    op.create_table(
        "scope_usage",
        _text("scope"),
        _number("files"),
        _number("bytes"),
        sa.PrimaryKeyConstraint("scope", name="pk_scope_usage"),
    )


def _row_number() -> sa.Column[int]:
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _flag(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False)


def _digest(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(32), nullable=False)


def _partial(name: str, table: str, columns: list[str], where: str, *, unique: bool) -> None:
    condition = sa.text(where)
    op.create_index(
        name,
        table,
        columns,
        unique=unique,
        sqlite_where=condition,
        postgresql_where=condition,
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        _row_number(),
        _text("session_id"),
        _text("container_id"),
        _text("scope"),
        _text("principal"),
        _text("harness_id", nullable=True),
        _text("title", nullable=True),
        _text("status"),
        _number("created_at"),
        _number("updated_at"),
        _number("expired_at", nullable=True),
        _number("files"),
        _number("bytes"),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.UniqueConstraint("session_id", name="uq_sessions_session_id"),
        sa.UniqueConstraint("container_id", name="uq_sessions_container_id"),
        sqlite_autoincrement=True,
    )
    unexpired = "expired_at IS NULL"
    _partial("ix_sessions_scope", "sessions", ["scope", "id"], unexpired, unique=False)
    by_harness = ["scope", "harness_id", "id"]
    _partial("ix_sessions_scope_harness", "sessions", by_harness, unexpired, unique=False)
    _partial("ix_sessions_updated_at", "sessions", ["updated_at"], unexpired, unique=False)
    expired = "expired_at IS NOT NULL"
    _partial("ix_sessions_expired_at", "sessions", ["expired_at"], expired, unique=False)


def _create_responses() -> None:
    op.create_table(
        "responses",
        _row_number(),
        _text("response_id"),
        _text("session_id"),
        _text("scope"),
        _text("previous_response_id", nullable=True),
        _text("status"),
        _text("request"),
        _text("response"),
        _text("owner"),
        _number("created_at"),
        _number("seen_at"),
        _number("finished_at", nullable=True),
        _flag("cancel_requested"),
        _flag("hidden"),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
        sa.UniqueConstraint("response_id", name="uq_responses_response_id"),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.session_id"],
            name="fk_responses_session_id",
            ondelete="CASCADE",
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_responses_session", "responses", ["session_id", "id"])
    _partial(
        "uq_responses_running", "responses", ["session_id"], "status = 'in_progress'", unique=True
    )
    _partial("ix_responses_hidden", "responses", ["finished_at"], "hidden != 0", unique=False)


def _create_response_events() -> None:
    op.create_table(
        "response_events",
        _text("response_id"),
        sa.Column("sequence_number", sa.Integer(), nullable=False),
        _text("payload"),
        sa.PrimaryKeyConstraint("response_id", "sequence_number", name="pk_response_events"),
        sa.ForeignKeyConstraint(
            ["response_id"],
            ["responses.response_id"],
            name="fk_response_events_response_id",
            ondelete="CASCADE",
        ),
    )


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        _text("scope"),
        _text("principal"),
        _text("key"),
        _digest("request_digest"),
        _text("response_id"),
        _number("created_at"),
        sa.PrimaryKeyConstraint("scope", "principal", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"])


def _create_files() -> None:
    op.create_table(
        "files",
        _row_number(),
        _text("file_id"),
        _text("scope"),
        _text("principal"),
        _text("session_id", nullable=True),
        _text("container_id", nullable=True),
        _text("response_id", nullable=True),
        _text("filename"),
        _text("path"),
        _text("media_type"),
        _text("kind"),
        _text("purpose", nullable=True),
        _digest("digest"),
        _number("size"),
        _flag("current"),
        _number("created_at"),
        _number("expires_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
        sa.UniqueConstraint("file_id", name="uq_files_file_id"),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.session_id"],
            name="fk_files_session_id",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["digest"], ["blobs.digest"], name="fk_files_digest", ondelete="RESTRICT"
        ),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_files_digest", "files", ["digest"])
    op.create_index("ix_files_session", "files", ["session_id", "id"])
    _partial("ix_files_uploads", "files", ["scope", "id"], "kind = 'upload'", unique=False)
    _partial("ix_files_expires_at", "files", ["expires_at"], "expires_at IS NOT NULL", unique=False)
    _partial("uq_files_current", "files", ["container_id", "path"], "current = 1", unique=True)
