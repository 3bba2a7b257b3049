"""The table that worker processes share: what is left of each principal's rate of requests.

A bucket is one number, the time at which it is full again (microseconds of the database's clock,
unix time). Who takes from it puts that time off; one that is full needs no row.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Table, Text

from app.store.tables import metadata

request_budgets = Table(
    "request_budgets",
    metadata,
    Column("scope", Text, primary_key=True),
    Column("principal", Text, primary_key=True),
    Column("full_at", BigInteger, nullable=False),
)
Index("ix_request_budgets_full_at", request_budgets.c.full_at)
