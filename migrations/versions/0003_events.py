"""Events as they came, and the bytes that each of them uses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_events()
    _create_event_refs()


def _text(name: str, *, nullable: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _NUMBER, nullable=False),
        _text("scope"),
        _text("event_id"),
        _text("type"),
        _text("mode"),
        _text("principal"),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger()),
        _text("outcome", nullable=True),
        sa.Column("result", sa.LargeBinary()),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    expires = sa.text("expires_at IS NOT NULL")
    op.create_index("uq_events_event_id", "events", ["scope", "event_id"], unique=True)
    op.create_index("ix_events_scope", "events", ["scope", "id"])
    op.create_index(
        "ix_events_expires_at",
        "events",
        ["expires_at"],
        sqlite_where=expires,
        postgresql_where=expires,
    )


def _create_event_refs() -> None:
    op.create_table(
        "event_refs",
        sa.Column("event", _NUMBER, nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        _text("ref"),
        sa.Column("blob_id", _NUMBER, nullable=False),
        sa.PrimaryKeyConstraint("event", "place", name="pk_event_refs"),
        sa.ForeignKeyConstraint(
            ["event"], ["events.id"], name="fk_event_refs_event", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["blob_id"], ["blobs.id"], name="fk_event_refs_blob_id", ondelete="RESTRICT"
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_event_refs_ref", "event_refs", ["ref"])
    op.create_index("ix_event_refs_blob_id", "event_refs", ["blob_id"])
