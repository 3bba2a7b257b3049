"""Bodies, the references to them, and the locations that are to be emptied."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_blobs()
    _create_content_refs()
    op.create_table(
        "condemned",
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("condemned_at", sa.BigInteger(), nullable=False),
        sa.Column("removed_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("location", name="pk_condemned"),
    )


def _row_number() -> sa.Column[int]:
    return sa.Column("id", _NUMBER, nullable=False)


def _create_blobs() -> None:
    op.create_table(
        "blobs",
        _row_number(),
        sa.Column("digest", sa.LargeBinary(32), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("location", sa.Text()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("id", name="pk_blobs"),
        sa.UniqueConstraint("digest", name="uq_blobs_digest"),
        sa.CheckConstraint("(data IS NULL) <> (location IS NULL)", name=op.f("ck_blobs_one_place")),
    )
    is_located = sa.text("location IS NOT NULL")
    op.create_index(
        "uq_blobs_location",
        "blobs",
        ["location"],
        unique=True,
        sqlite_where=is_located,
        postgresql_where=is_located,
    )


def _create_content_refs() -> None:
    op.create_table(
        "content_refs",
        _row_number(),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("blob_id", _NUMBER, nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("id", name="pk_content_refs"),
        sa.UniqueConstraint("ref", name="uq_content_refs_ref"),
        sa.ForeignKeyConstraint(
            ["blob_id"], ["blobs.id"], name="fk_content_refs_blob_id", ondelete="RESTRICT"
        ),
        sqlite_autoincrement=True,
    )
    expires = sa.text("expires_at IS NOT NULL")
    op.create_index("ix_content_refs_scope", "content_refs", ["scope", "id"])
    op.create_index("ix_content_refs_blob_id", "content_refs", ["blob_id"])
    op.create_index(
        "ix_content_refs_expires_at",
        "content_refs",
        ["expires_at"],
        sqlite_where=expires,
        postgresql_where=expires,
    )
