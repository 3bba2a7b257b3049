"""The database that the configuration names, opened."""

from __future__ import annotations

from app.settings import Settings
from app.store.database import Database, is_postgres
from app.store.postgres import PostgresDatabase
from app.store.sqlite import SqliteDatabase
from app.store.threads import Workers


def open_database(settings: Settings, workers: Workers) -> Database:
    """The database in force; a file is read in the pool of `workers`. Raises StoreError."""
    if is_postgres(settings):
        return PostgresDatabase(settings)
    return SqliteDatabase(settings, workers)
