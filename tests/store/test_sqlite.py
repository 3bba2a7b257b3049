"""The file of SQLite: its writing connection, and the log that is copied into it beside commits."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import ProgrammingError

from app.errors import NotFound
from app.settings import Settings
from app.store.migrations import migrate
from app.store.sqlite import SqliteDatabase, SqliteFile, database_file, opened_file
from app.store.threads import Workers
from tests.store.events import arrival
from tests.store.stores import LARGE, SMALL, new_sqlite_store, put, sqlite_settings

pytestmark = pytest.mark.anyio

PATIENCE = 10
PROBE = "INSERT INTO condemned (location, condemned_at) VALUES (:location, 0)"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = sqlite_settings(tmp_path)
    migrate(settings)
    return settings


@pytest.fixture
def file(settings: Settings) -> Iterator[SqliteFile]:
    with opened_file(settings) as file:
        yield file


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def writing(*locations: str) -> Callable[[Connection], int]:
    """Work that writes a row for each of `locations`."""

    def write(connection: Connection) -> int:
        values = [{"location": location} for location in locations]
        return connection.execute(text(PROBE), values).rowcount

    return write


def rows(connection: Connection) -> list[str]:
    return list(connection.scalars(text("SELECT location FROM condemned ORDER BY location")))


def written(file: SqliteFile) -> list[str]:
    return file.read(rows)


def test_transactions_follow_each_other_on_one_connection(file: SqliteFile) -> None:
    seen: set[Any] = set()

    def look(connection: Connection) -> None:
        seen.add(connection.connection.driver_connection)

    for name in "abc":
        file.commit(writing(name))
        file.commit(look)
    assert written(file) == ["a", "b", "c"]
    assert len(seen) == 1


def failing(connection: Connection) -> None:
    """Work that fails by itself."""
    writing("lost")(connection)
    raise RuntimeError("a fault of ours")


def cutting(connection: Connection) -> None:
    """Work whose connection to the file breaks."""
    writing("lost")(connection)
    driver: Any = connection.connection.driver_connection
    driver.close()


@pytest.mark.parametrize(("work", "error"), [(failing, RuntimeError), (cutting, ProgrammingError)])
def test_work_that_fails_leaves_nothing_and_hurts_no_other(
    file: SqliteFile, work: Callable[[Connection], None], error: type[Exception]
) -> None:
    file.commit(writing("a"))
    with pytest.raises(error):
        file.commit(work)
    file.commit(writing("b"))
    assert written(file) == ["a", "b"]


def test_rows_are_counted_on_from_one_connection_to_the_next(file: SqliteFile) -> None:
    file.commit(writing("a", "b", "c"))
    with pytest.raises(ProgrammingError):
        file.commit(cutting)
    counted = file.changed_rows
    file.commit(writing("d", "e"))
    assert file.changed_rows == counted + 2


def test_a_closed_file_opens_again_for_whoever_writes(file: SqliteFile) -> None:
    file.commit(writing("a"))
    file.close()
    file.close()
    file.commit(writing("b"))
    assert written(file) == ["a", "b"]


def test_whoever_has_time_at_the_end_of_a_transaction_is_told_before_it_is_over(
    settings: Settings,
) -> None:
    def look() -> None:
        seen.append(written(file))

    seen: list[list[str]] = []
    file = SqliteFile(settings, meanwhile=look)
    file.commit(writing("a"))
    assert seen == [[]]
    assert written(file) == ["a"]
    file.close()


async def test_between_two_transactions_nothing_holds_the_log(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path)
    reference = await put(store, SMALL)
    await put(store, LARGE)
    await store.events.accept(arrival(reference.ref, event_id="e"))
    await store.events.accept(arrival(reference.ref, event_id="e"))
    with pytest.raises(NotFound):
        await store.events.accept(arrival("ref_unknown", event_id="f"))
    await store.remove(reference.scope, reference.ref)
    with closing(sqlite3.connect(tmp_path / "consignee.db")) as other:
        (found,) = other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert found == (0, 0, 0)
    await store.close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is copied after very few rows."""
    monkeypatch.setattr("app.store.sqlite.CHECKPOINT_ROWS", 3)


async def copied(database: SqliteDatabase) -> None:
    """Wait until no copying is under way."""
    async with asyncio.timeout(PATIENCE):
        while database._checkpoint is not None:
            await asyncio.sleep(0.001)


def in_the_file_itself(settings: Settings, tmp_path: Path) -> list[str]:
    """What whoever has only the file, without its log, would find in it."""
    copy = tmp_path / "copy.db"
    copy.write_bytes((settings.data_dir / "consignee.db").read_bytes())
    connection = sqlite3.connect(f"file:{copy}?immutable=1", uri=True)
    found = connection.execute("SELECT location FROM condemned ORDER BY location").fetchall()
    connection.close()
    return [location for (location,) in found]


@pytest.mark.usefixtures("often")
async def test_the_log_is_copied_into_the_file_after_so_many_rows(
    settings: Settings, workers: Workers, tmp_path: Path
) -> None:
    database = SqliteDatabase(settings, workers)
    await database.write(writing("a", "b"), alone=True)
    await copied(database)
    assert in_the_file_itself(settings, tmp_path) == []
    await database.write(writing("c"), alone=True)
    await copied(database)
    assert in_the_file_itself(settings, tmp_path) == ["a", "b", "c"]
    await database.write(writing("d"), alone=True)
    await copied(database)
    assert in_the_file_itself(settings, tmp_path) == ["a", "b", "c"]
    await database.close()


@pytest.mark.usefixtures("often")
async def test_commits_go_on_while_the_log_is_copied(
    settings: Settings, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    copy = SqliteFile.checkpoint

    def hesitate(file: SqliteFile) -> None:
        begun.set()
        assert go.wait(PATIENCE)
        copy(file)

    monkeypatch.setattr(SqliteFile, "checkpoint", hesitate)
    database = SqliteDatabase(settings, workers)
    await database.write(writing("a", "b", "c"), alone=True)
    assert await asyncio.to_thread(begun.wait, PATIENCE)
    await database.write(writing("d", "e", "f"), alone=True)
    assert await database.read(rows) == list("abcdef")
    go.set()
    await copied(database)
    await database.close()


@pytest.mark.usefixtures("often")
async def test_a_log_that_cannot_be_copied_is_told_of_and_tried_again(
    settings: Settings,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def fail(_: SqliteFile) -> None:
        raise OSError("the disk is gone")

    database = SqliteDatabase(settings, workers)
    with monkeypatch.context() as patched:
        patched.setattr(SqliteFile, "checkpoint", fail)
        await database.write(writing("a", "b", "c"), alone=True)
        await copied(database)
    assert "the write-ahead log was not copied" in caplog.text
    await database.write(writing("d", "e", "f"), alone=True)
    await copied(database)
    assert in_the_file_itself(settings, tmp_path) == list("abcdef")
    await database.close()


WRITER = """
import asyncio, itertools, sys
from pathlib import Path
from app.store import sqlite
from app.store.threads import Workers
from tests.store.stores import sqlite_settings
from tests.store.test_sqlite import writing

async def write_for_ever():
    database = sqlite.SqliteDatabase(sqlite_settings(Path(sys.argv[1])), Workers(2))
    for number in itertools.count(100_000):
        await database.write(writing(str(number)), alone=True)
        print(number, flush=True)

sqlite.CHECKPOINT_ROWS = 3
asyncio.run(write_for_ever())
"""


@pytest.mark.parametrize("confirmations", [20, 50, 111])
def test_nothing_confirmed_is_lost_when_it_dies_while_the_log_is_copied(
    settings: Settings, tmp_path: Path, confirmations: int
) -> None:
    before = database_file(settings).read_bytes()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    confirmed = [writer.stdout.readline().strip() for _ in range(confirmations)]
    writer.kill()
    confirmed += writer.stdout.read().split()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    assert database_file(settings).read_bytes() != before  # something was copied into it
    with opened_file(settings) as file:
        assert set(confirmed) <= set(written(file))
        assert file.read(lambda each: each.exec_driver_sql("PRAGMA integrity_check").all()) == [
            ("ok",)
        ]
