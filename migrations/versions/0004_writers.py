"""The newest batch of everybody who writes; what is condemned and not yet removed, at once."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "writers",
        sa.Column("writer", sa.Text(), nullable=False),
        sa.Column("batch", sa.BigInteger(), nullable=False),
        sa.Column("written_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("writer", name="pk_writers"),
    )
    is_due = sa.text("removed_at IS NULL")
    op.create_index(
        "ix_condemned_due",
        "condemned",
        ["location"],
        sqlite_where=is_due,
        postgresql_where=is_due,
    )
