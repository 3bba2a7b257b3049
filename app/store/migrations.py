"""The schema of the database: where it stands, and bringing it up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from app.settings import Settings
from app.store.database import is_postgres
from app.store.database_errors import database_border
from app.store.postgres import on_server
from app.store.records import StoreError
from app.store.sqlite import create_database_file, database_file, opened_file

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
    if is_postgres(settings):
        return on_server(settings, _state, alone=False)
    if not database_file(settings).exists():
        return "missing"
    with opened_file(settings) as file:
        return file.read(_state)


def require_current_schema(settings: Settings) -> None:
    """Raise StoreError, with what to do, unless the schema is exactly that of this code."""
    state = schema_state(settings)
    if state != "current":
        raise StoreError(_ADVICE[state])


def migrate(settings: Settings) -> None:
    """Bring the database up to date; creates it when it is a file that is missing. Blocks.

    All of it is one transaction: two processes that migrate at once wait for each other. Raises
    StoreError when the database is newer than this code, Unavailable when it is busy.
    """
    if is_postgres(settings):
        on_server(settings, _upgrade, alone=True)
        return
    create_database_file(settings)
    with opened_file(settings) as file, database_border():
        file.commit(_upgrade)


def _upgrade(connection: Connection) -> None:
    state = _state(connection)
    if state == "ahead":
        raise StoreError(_NEWER)
    if state != "current":
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


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
