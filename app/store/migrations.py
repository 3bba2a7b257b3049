"""The schema of the database: where it stands, and bringing it up to date."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from app.settings import Settings
from app.store.database import Database, create_database_file, database_file
from app.store.records import StoreError

SchemaState = Literal["missing", "behind", "current", "ahead"]

_PACKAGE = Path(__file__).resolve().parents[1]
_PLACES = (_PACKAGE / "_migrations", _PACKAGE.parent / "migrations")
"""In an installed package, and in a source tree."""

_NEWER = (
    "The database was written by a newer version of consignee; "
    "run that version, or restore the backup that was made before it."
)
_ADVICE = {
    "missing": "The database has no tables yet; run `consignee migrate` first.",
    "behind": "The database is of an older version; run `consignee migrate` first.",
    "ahead": _NEWER,
}


def schema_state(settings: Settings) -> SchemaState:
    """Where the database stands against this code. Blocks; raises StoreError, Unavailable."""
    if not database_file(settings).exists():
        return "missing"
    with _opened(settings) as database:
        state: SchemaState = database.read(_state)
    return state


def require_current_schema(settings: Settings) -> None:
    """Raise StoreError, with what to do, unless the schema is exactly that of this code."""
    state = schema_state(settings)
    if state != "current":
        raise StoreError(_ADVICE[state])


def migrate(settings: Settings) -> None:
    """Bring the database up to date; creates it when it is missing. Blocks.

    All of it is one transaction: two processes that migrate at once wait for each other. Raises
    StoreError when the database is newer than this code, Unavailable when it is busy.
    """
    create_database_file(settings)
    with _opened(settings) as database, database.transaction() as connection:
        state = _state(connection)
        if state == "ahead":
            raise StoreError(_NEWER)
        if state != "current":
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


@contextmanager
def _opened(settings: Settings) -> Iterator[Database]:
    database = Database(settings)
    try:
        yield database
    finally:
        database.close()


def _config() -> Config:
    config = Config()
    place = next(place for place in _PLACES if place.is_dir())
    config.set_main_option("script_location", str(place).replace("%", "%%"))
    return config


def _state(connection: Connection) -> SchemaState:
    current = set(MigrationContext.configure(connection).get_current_heads())
    scripts = ScriptDirectory.from_config(_config())
    if not current:
        return "missing"
    if current == set(scripts.get_heads()):
        return "current"
    known = {script.revision for script in scripts.walk_revisions()}
    return "behind" if current <= known else "ahead"
