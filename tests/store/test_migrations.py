"""The schema of SQLite: fresh, repeated, newer than the code, and the same as the tables.

The same of PostgreSQL is in test_postgres_migrations.
"""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from app.errors import Unavailable
from app.settings import Settings
from app.store import ContentStore, StoreError, SweepReport, migrate, schema_state
from app.store import migrations as migrations_module
from app.store.sqlite import create_database_file, opened_file
from app.store.tables import metadata
from tests.store.events import deliver
from tests.store.stores import SMALL, get, put, sha256
from tests.store.stores import new_sqlite_store as new_store
from tests.store.stores import sqlite_rows as database
from tests.store.stores import sqlite_settings as store_settings


def test_a_fresh_database_is_private_and_current(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "new")
    assert schema_state(settings) == "missing"
    assert not (tmp_path / "new").exists()
    migrate(settings)
    assert schema_state(settings) == "current"
    modes = [
        path.stat().st_mode & 0o777 for path in (tmp_path / "new", tmp_path / "new/consignee.db")
    ]
    assert modes == [0o700, 0o600]


def test_an_empty_file_is_a_database_without_tables(tmp_path: Path) -> None:
    (tmp_path / "consignee.db").touch()
    assert schema_state(store_settings(tmp_path)) == "missing"


@pytest.mark.anyio
async def test_migrating_again_keeps_what_is_there(tmp_path: Path) -> None:
    store = await new_store(tmp_path)
    reference = await put(store, SMALL)
    await store.close()
    store = await new_store(tmp_path)
    assert await get(store, reference.ref) == SMALL
    await store.close()


def test_the_migrations_give_the_tables_that_the_code_names(tmp_path: Path) -> None:
    settings = store_settings(tmp_path)
    migrate(settings)
    with opened_file(settings) as file:
        differences = file.read(
            lambda connection: compare_metadata(MigrationContext.configure(connection), metadata)
        )
    known = {table.name for table in metadata.sorted_tables}
    assert [d for d in differences if d[0] != "remove_table" or d[1].name in known] == []


@pytest.mark.anyio
async def test_a_database_newer_than_the_code_is_refused_and_untouched(tmp_path: Path) -> None:
    settings = store_settings(tmp_path)
    migrate(settings)
    with database(tmp_path) as rows:
        rows.execute("update alembic_version set version_num = '9999'")
    assert schema_state(settings) == "ahead"
    with pytest.raises(StoreError, match="newer version"):
        migrate(settings)
    with pytest.raises(StoreError, match="newer version"):
        await ContentStore.start(settings)
    with database(tmp_path) as rows:
        assert rows.execute("select version_num from alembic_version").fetchone() == ("9999",)


@pytest.mark.anyio
async def test_a_database_behind_the_code_is_refused_until_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "scripts"
    source = next(place for place in migrations_module._PLACES if place.is_dir())
    shutil.copytree(source, scripts)
    (scripts / "versions" / "9998_next.py").write_text(_NEXT.format(down=_head()))
    settings = store_settings(tmp_path / "data")
    migrate(settings)
    monkeypatch.setattr(migrations_module, "_PLACES", (scripts,))
    assert schema_state(settings) == "behind"
    with pytest.raises(StoreError, match="older version"):
        await ContentStore.start(settings)
    migrate(settings)
    assert schema_state(settings) == "current"


UPLOADED, FILED = b"uploaded long ago", b"filed long ago"
ROWS_OF: dict[str, list[tuple[str, tuple[object, ...]]]] = {
    "0001": [
        (
            "insert into blobs (id, digest, size, created_at, data) values (7, ?, 17, 1, ?)",
            (bytes.fromhex(sha256(UPLOADED)), UPLOADED),
        ),
        (
            (
                "insert into content_refs (id, ref, scope, blob_id, principal, created_at)"
                " values (9, ?, 'a', 7, 'alice', 1)"
            ),
            (f"ref_{'x' * 32}",),
        ),
    ],
    "0002": [
        (
            "insert into blobs (id, digest, size, created_at, data) values (8, ?, 14, 1, ?)",
            (bytes.fromhex(sha256(FILED)), FILED),
        ),
        (
            (
                "insert into files (file_id, scope, principal, filename, path, media_type, kind,"
                " digest, size, current, created_at)"
                " values ('file_1', 'a', 'alice', 'f', 'f', 'text/plain', 'upload', ?, 14, 0, 1)"
            ),
            (bytes.fromhex(sha256(FILED)),),
        ),
        (
            (
                "insert into sessions (id, session_id, container_id, scope, principal, status,"
                " created_at, updated_at, files, bytes)"
                " values (3, 'sess_1', 'cntr_1', 'a', 'alice', 'completed', 1, 1, 0, 0)"
            ),
            (),
        ),
        (
            (
                "insert into responses (response_id, session_id, scope, status, request, response,"
                " owner, created_at, seen_at, finished_at, cancel_requested, hidden)"
                " values ('resp_1', 'sess_1', 'a', 'completed', '{}', '{}', 'o', 1, 1, 1, 0, 0)"
            ),
            (),
        ),
    ],
    "0003": [
        (
            (
                "insert into events"
                " (id, scope, event_id, type, mode, principal, received_at, message)"
                " values (5, 'a', 'evt_1', 'turn.start', 'observe', 'alice', 1, ?)"
            ),
            (b"{}",),
        ),
        (
            "insert into event_refs (event, place, ref, blob_id) values (5, 0, ?, 7)",
            (f"ref_{'x' * 32}",),
        ),
    ],
    "0004": [("insert into writers (writer, batch, written_at) values ('w', 1, 1)", ())],
}
"""What a database of each revision holds, beside what those before it held."""


def test_there_is_data_of_every_earlier_revision() -> None:
    scripts = ScriptDirectory.from_config(migrations_module._config())
    revisions = {script.revision for script in scripts.walk_revisions()}
    assert revisions - {_head()} == set(ROWS_OF)


@pytest.mark.anyio
@pytest.mark.parametrize("revision", sorted(ROWS_OF))
async def test_a_database_of_each_earlier_revision_keeps_what_is_in_it(
    revision: str, tmp_path: Path
) -> None:
    settings = store_settings(tmp_path)
    _migrate_to(settings, revision)
    assert schema_state(settings) == "behind"
    filled = [number for number in ROWS_OF if number <= revision]
    with database(tmp_path) as rows:
        for statement, values in (row for number in filled for row in ROWS_OF[number]):
            rows.execute(statement, values)
    migrate(settings)
    assert schema_state(settings) == "current"
    store = await ContentStore.start(settings)
    assert [f async for f in store.verify()] == []
    assert await store.sweep() == SweepReport()
    await _check_rows(store, filled)
    await store.close()


def _migrate_to(settings: Settings, revision: str) -> None:
    """Bring a new database to an earlier revision, as the code of that time did."""

    def upgrade(connection: Connection) -> None:
        config = migrations_module._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    create_database_file(settings)
    with opened_file(settings) as file:
        file.commit(upgrade)


async def _check_rows(store: ContentStore, filled: list[str]) -> None:
    """What was in the database is there, and what is new can be put beside it."""
    ref = f"ref_{'x' * 32}"
    assert await get(store, ref) == UPLOADED
    if "0002" in filled:
        async with store.files.open(await store.files.get("a", "file_1")) as chunks:
            assert b"".join([chunk async for chunk in chunks]) == FILED
        assert (await store.responses.get("a", "resp_1")).status == "completed"
        assert (await store.sessions.get("a", "sess_1")).container_id == "cntr_1"
    if "0003" in filled:
        assert [attached.ref for attached in (await store.events.page("a"))[0].attachments] == [ref]
    event = await deliver(store, ref, event_id="new")
    assert event.position == 1 + 5 * ("0003" in filled)
    assert await get(store, (await put(store, SMALL)).ref) == SMALL


_NEXT = """
revision = "9998"
down_revision = "{down}"

def upgrade():
    pass
"""


def _head() -> str:
    scripts = ScriptDirectory.from_config(migrations_module._config())
    head = scripts.get_current_head()
    assert head is not None
    return head


def test_two_processes_that_migrate_at_once_wait_for_each_other(tmp_path: Path) -> None:
    settings = store_settings(tmp_path)
    migrate(settings)
    with database(tmp_path) as rows:
        rows.execute("pragma foreign_keys = off")
        for table in [name for (name,) in rows.execute(_OWN_TABLES).fetchall()]:
            rows.execute(f"drop table {table}")
    with database(tmp_path) as other, ThreadPoolExecutor(1) as pool:
        other.execute("begin immediate")
        waiting = pool.submit(migrate, settings)
        other.commit()
        waiting.result()
    assert schema_state(settings) == "current"


_OWN_TABLES = "select name from sqlite_master where type = 'table' and name not like 'sqlite_%'"


def test_a_locked_database_is_busy_after_the_limit(tmp_path: Path) -> None:
    settings = store_settings(tmp_path, database_timeout_seconds=0.1)
    migrate(settings)
    with database(tmp_path) as other:
        other.execute("begin immediate")
        with pytest.raises(Unavailable) as refusal:
            migrate(settings)
    assert refusal.value.code == "database_busy"


def test_logging_is_left_as_it_was(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = (root.level, list(root.handlers), logging.getLogger("alembic").level)
    migrate(store_settings(tmp_path))
    assert (root.level, list(root.handlers), logging.getLogger("alembic").level) == before


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite:///relative.db",
        "oracle://x/y",
        "no url",
    ],
)
def test_a_database_that_cannot_be_used_is_one_clear_error(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError, match="database_url"):
        schema_state(store_settings(tmp_path, database_url=url))


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "consignee.db").write_bytes(b"no database" * 1000)
    with pytest.raises(Unavailable) as refusal:
        schema_state(store_settings(tmp_path))
    assert refusal.value.code == "storage_unavailable"
    with database(_migrated(tmp_path / "other")) as rows:
        assert rows.execute("select count(*) from blobs").fetchone() == (0,)


def _migrated(data_dir: Path) -> Path:
    migrate(store_settings(data_dir))
    return data_dir
