"""The tables of the events that the Agent Hooks Protocol delivers.

An event is stored as it came, once for each id and scope. Its rows in `event_refs` name the bytes
that it uses, so that these stay for as long as the event does, whatever becomes of the reference.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, LargeBinary, Table, Text

from app.store.tables import metadata, row_number

events = Table(
    "events",
    metadata,
    Column("id", row_number, primary_key=True),
    Column("scope", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("type", Text, nullable=False),
    Column("mode", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("received_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("outcome", Text),
    Column("result", LargeBinary),
    Column("message", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
Index("uq_events_event_id", events.c.scope, events.c.event_id, unique=True)
Index("ix_events_scope", events.c.scope, events.c.id)
Index(
    "ix_events_expires_at",
    events.c.expires_at,
    sqlite_where=events.c.expires_at.is_not(None),
    postgresql_where=events.c.expires_at.is_not(None),
)

event_refs = Table(
    "event_refs",
    metadata,
    Column("event", row_number, ForeignKey("events.id", ondelete="CASCADE"), primary_key=True),
    Column("place", Integer, primary_key=True),
    Column("ref", Text, nullable=False),
    Column("blob_id", row_number, ForeignKey("blobs.id", ondelete="RESTRICT"), nullable=False),
    sqlite_with_rowid=False,
)
Index("ix_event_refs_ref", event_refs.c.ref)
Index("ix_event_refs_blob_id", event_refs.c.blob_id)
