"""Bytes and their records."""

from app.store.content import Content, ContentStore
from app.store.migrations import SchemaState, migrate, schema_state
from app.store.records import Finding, Listed, Reference, StoreError, SweepReport, Usage

__all__ = [
    "Content",
    "ContentStore",
    "Finding",
    "Listed",
    "Reference",
    "SchemaState",
    "StoreError",
    "SweepReport",
    "Usage",
    "migrate",
    "schema_state",
]
