"""The database that the configuration names, opened."""

from __future__ import annotations

from collections.abc import Callable

from app.settings import Settings
from app.store.database import Database, is_postgres, nothing
from app.store.postgres import PostgresDatabase
from app.store.sqlite import SqliteDatabase
from app.store.threads import Workers


def open_database(
    settings: Settings, workers: Workers, meanwhile: Callable[[], None] = nothing
) -> Database:
    """The database in force; a file is read in the pool of `workers`. Raises StoreError.

    `meanwhile` is called, in any thread, where a transaction begins to wait for the disk. Of a
    server nobody here waits for that but who asked.
    """
    if is_postgres(settings):
        return PostgresDatabase(settings)
    return SqliteDatabase(settings, workers, meanwhile)
