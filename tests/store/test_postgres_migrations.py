"""The schema on PostgreSQL, and the way to it from every revision, on both databases."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from app.errors import Unavailable
from app.settings import Settings
from app.store import ContentStore, StoreError, migrate, schema_state
from app.store import migrations as migrations_module
from app.store.postgres import LOCK, on_server
from app.store.sqlite import create_database_file, opened_file
from app.store.tables import metadata
from tests import backends
from tests.backends import Rows
from tests.postgres import connected
from tests.store.servers import opened, other_processes, server_settings
from tests.store.stores import get, put, sqlite_rows, sqlite_settings

SCRIPTS = ScriptDirectory.from_config(migrations_module._config())
REVISIONS = [script.revision for script in reversed(list(SCRIPTS.walk_revisions()))]


@pytest.fixture
def empty() -> Iterator[str]:
    """A database without any table; its URL."""
    name = f"empty_{secrets.token_hex(8)}"
    yield backends.new_database(name, template="template0")
    backends.cluster().execute(f"drop database {name} with (force)")


def test_a_fresh_database_becomes_current(tmp_path: Path, empty: str) -> None:
    settings = server_settings(tmp_path, empty)
    assert schema_state(settings) == "missing"
    for _ in range(2):
        migrate(settings)
        assert schema_state(settings) == "current"


def test_the_migrations_give_the_tables_that_the_code_names(tmp_path: Path, empty: str) -> None:
    settings = server_settings(tmp_path, empty)
    migrate(settings)
    differences = on_server(
        settings,
        lambda connection: compare_metadata(MigrationContext.configure(connection), metadata),
        alone=False,
    )
    assert differences == []


@pytest.mark.anyio
async def test_a_database_newer_than_the_code_is_refused_and_untouched(
    tmp_path: Path, empty: str
) -> None:
    settings = server_settings(tmp_path, empty)
    migrate(settings)
    with connected(empty) as rows:
        rows.execute("update alembic_version set version_num = '9999'")
    assert schema_state(settings) == "ahead"
    with pytest.raises(StoreError, match="newer version"):
        migrate(settings)
    with pytest.raises(StoreError, match="newer version"):
        await ContentStore.start(settings)
    with connected(empty) as rows:
        assert rows.execute("select version_num from alembic_version").fetchone() == ("9999",)


@pytest.mark.anyio
@pytest.mark.parametrize("revision", REVISIONS[:-1])
async def test_an_older_database_is_refused_until_migrated(
    tmp_path: Path, empty: str, revision: str
) -> None:
    settings = server_settings(tmp_path, empty)
    on_server(settings, _upgrade_to(revision), alone=True)
    assert schema_state(settings) == "behind"
    with pytest.raises(StoreError, match="older version"):
        await ContentStore.start(settings)


def test_processes_that_migrate_at_once_wait_for_each_other(tmp_path: Path, empty: str) -> None:
    settings = server_settings(tmp_path, empty)
    with other_processes(2) as processes, ThreadPoolExecutor(2) as threads:
        migrating = [
            pool.submit(migrate, settings) for pool in (processes, processes, threads, threads)
        ]
        for each in migrating:
            each.result()
    assert schema_state(settings) == "current"


def test_a_migration_waits_for_a_writer_no_longer_than_the_limit(
    tmp_path: Path, empty: str
) -> None:
    settings = server_settings(tmp_path, empty, database_timeout_seconds=0.2)
    with connected(empty, transaction=True) as other:
        other.execute(f"select pg_advisory_xact_lock_shared({LOCK})")
        with pytest.raises(Unavailable) as refusal:
            migrate(settings)
    assert refusal.value.code == "database_busy"
    assert schema_state(settings) == "missing"


def test_a_migration_that_fails_leaves_nothing(
    tmp_path: Path, empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(connection: Connection) -> None:
        _upgrade_to(REVISIONS[0])(connection)
        raise ZeroDivisionError

    settings = server_settings(tmp_path, empty)
    with pytest.raises(ZeroDivisionError):
        on_server(settings, fails, alone=True)
    assert schema_state(settings) == "missing"


# --- From every revision, with data in it ---------------------------------------------------------

BODY = b"from before"
DIGEST = hashlib.sha256(BODY).digest()
REF = "ref_" + "b" * 32


def _upgrade_to(revision: str) -> Callable[[Connection], None]:
    def upgrade(connection: Connection) -> None:
        config = migrations_module._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)

    return upgrade


def _insert(rows: Rows, table: str, **values: Any) -> None:
    marks = ", ".join("?" * len(values))
    rows.execute(f"insert into {table} ({', '.join(values)}) values ({marks})", [*values.values()])


def _fill_0001(rows: Rows) -> None:
    _insert(rows, "blobs", id=1, digest=DIGEST, size=len(BODY), created_at=1, data=BODY)
    _insert(rows, "content_refs", id=1, ref=REF, scope="a", blob_id=1, principal="p", created_at=1)
    _insert(rows, "condemned", location="old", condemned_at=1, removed_at=2)


def _fill_0002(rows: Rows) -> None:
    _insert(
        rows, "sessions",
        id=1, session_id="hsess_1", container_id="cntr_1", scope="a", principal="p",
        status="completed", created_at=1, updated_at=1, files=1, bytes=len(BODY),
    )  # fmt: skip
    _insert(
        rows, "files",
        id=1, file_id="file_1", scope="a", principal="p", session_id="hsess_1",
        container_id="cntr_1", filename="a.txt", path="a.txt", media_type="text/plain",
        kind="artifact", digest=DIGEST, size=len(BODY), current=1, created_at=1,
    )  # fmt: skip
    _insert(rows, "scope_usage", scope="a", files=1, bytes=len(BODY))


def _fill_0003(rows: Rows) -> None:
    _insert(
        rows, "events",
        id=1, scope="a", event_id="e1", type="t", mode="observe", principal="p",
        received_at=1, message=b"{}",
    )  # fmt: skip
    _insert(rows, "event_refs", event=1, place=0, ref=REF, blob_id=1)


def _fill_0004(rows: Rows) -> None:
    _insert(rows, "writers", writer="w", batch=1, written_at=1)


def _fill_0005(rows: Rows) -> None:
    _insert(rows, "request_budgets", scope="a", principal="p", full_at=1)


FILLERS = {
    "0001": _fill_0001,
    "0002": _fill_0002,
    "0003": _fill_0003,
    "0004": _fill_0004,
    "0005": _fill_0005,
}
"""What a database of each revision has in the tables that came with it."""


def _fill(rows: Rows, revision: str) -> None:
    for name in REVISIONS[: REVISIONS.index(revision) + 1]:
        FILLERS[name](rows)


async def _still_works(settings: Settings, revision: str) -> None:
    async with opened(settings) as store:
        assert await get(store, REF) == BODY
        if revision >= "0002":
            (record,) = await store.files.of_session("a", "hsess_1")
            assert (record.id, record.current) == ("file_1", True)
        if revision >= "0003":
            await store.remove("a", REF)  # the event keeps the bytes
            await store.sweep()
        assert [finding async for finding in store.verify()] == []
        assert (await store.usage()).blobs == 1


@pytest.mark.anyio
@pytest.mark.parametrize("revision", REVISIONS)
async def test_postgres_with_data_is_upgraded_from_every_revision(
    tmp_path: Path, empty: str, revision: str
) -> None:
    settings = server_settings(tmp_path, empty)
    on_server(settings, _upgrade_to(revision), alone=True)
    with connected(empty, transaction=True) as rows:
        _fill(rows, revision)
        for table in ("blobs", "content_refs", "sessions", "files", "events"):
            if rows.execute("select to_regclass(?::text)", [table]).fetchone() != (None,):
                rows.execute(f"select setval('{table}_id_seq', 100)")
    migrate(settings)
    assert schema_state(settings) == "current"
    await _still_works(settings, revision)
    async with opened(settings) as store:
        assert await get(store, (await put(store, b"new")).ref) == b"new"


@pytest.mark.anyio
@pytest.mark.parametrize("revision", REVISIONS)
async def test_sqlite_with_data_is_upgraded_from_every_revision(
    tmp_path: Path, revision: str
) -> None:
    settings = sqlite_settings(tmp_path)
    create_database_file(settings)
    with opened_file(settings) as file:
        file.commit(_upgrade_to(revision))
    given: AbstractContextManager[Rows] = sqlite_rows(tmp_path)
    with given as rows:
        _fill(rows, revision)
    migrate(settings)
    assert schema_state(settings) == "current"
    await _still_works(settings, revision)
    async with opened(settings) as store:
        assert await get(store, (await put(store, b"new")).ref) == b"new"


def test_every_revision_that_brings_tables_has_data_to_be_upgraded() -> None:
    assert [*FILLERS] == REVISIONS
