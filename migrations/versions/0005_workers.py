"""What is left of each principal's rate of requests; the newest task of each session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "request_budgets",
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("principal", sa.Text(), nullable=False),
        sa.Column("full_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("scope", "principal", name="pk_request_budgets"),
    )
    op.create_index("ix_request_budgets_full_at", "request_budgets", ["full_at"])
    op.add_column("sessions", sa.Column("newest_task", sa.Text(), nullable=True))
