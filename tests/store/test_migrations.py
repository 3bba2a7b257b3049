"""The schema: fresh, repeated, newer than the code, and the same as the tables."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from app.errors import Unavailable
from app.store import ContentStore, StoreError, migrate, schema_state
from app.store import migrations as migrations_module
from app.store.database import Database
from app.store.tables import metadata
from tests.store.stores import SMALL, count, database, get, new_store, put, store_settings


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
    opened = Database(settings)
    differences = opened.read(
        lambda connection: compare_metadata(MigrationContext.configure(connection), metadata)
    )
    opened.close()
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
    assert count(_migrated(tmp_path / "other"), "blobs") == 0


def _migrated(data_dir: Path) -> Path:
    migrate(store_settings(data_dir))
    return data_dir
