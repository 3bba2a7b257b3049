"""Group commit: many waiters, one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, insert, select, text

from app.errors import Conflict, Exhausted, Unavailable
from app.settings import Settings
from app.store import commits as commits_module
from app.store import migrate
from app.store.commits import Committer, Write, in_savepoint
from app.store.databases import open_database
from app.store.tables import condemned
from app.store.threads import Workers
from tests.store.stores import count, database, sqlite_rows, sqlite_settings, store_settings

pytestmark = pytest.mark.anyio


class Batches:
    """Applies the work of each write and remembers what came together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, connection: Connection, batch: Sequence[Write]) -> list[Any]:
        self.sizes.append(len(batch))
        return [in_savepoint(connection, write.work) if write.work else None for write in batch]


@pytest.fixture
def batches() -> Batches:
    return Batches()


@asynccontextmanager
async def committing(settings: Settings, batches: Batches) -> AsyncIterator[Committer]:
    migrate(settings)
    workers = Workers(2)
    opened = open_database(settings, workers)
    committer = Committer(opened, batches)
    try:
        yield committer
    finally:
        await committer.close()
        await opened.close()
        workers.close()


@pytest.fixture
async def committer(tmp_path: Path, batches: Batches) -> AsyncIterator[Committer]:
    async with committing(store_settings(tmp_path), batches) as opened:
        yield opened


@pytest.fixture
async def sqlite_committer(tmp_path: Path, batches: Batches) -> AsyncIterator[Committer]:
    settings = sqlite_settings(tmp_path, database_timeout_seconds=0.2)
    async with committing(settings, batches) as opened:
        yield opened


def condemns(location: str) -> Write:
    row = {"location": location, "condemned_at": 0}
    return Write(work=lambda connection: connection.execute(insert(condemned), row).rowcount)


def refuses(connection: Connection) -> None:
    connection.execute(insert(condemned), {"location": "refused", "condemned_at": 0})
    raise Conflict("no", "No.")


async def test_all_that_wait_are_one_transaction(
    committer: Committer, batches: Batches, tmp_path: Path
) -> None:
    await asyncio.gather(*(committer.submit(condemns(str(n))) for n in range(50)))
    assert batches.sizes == [50]
    assert count(tmp_path, "condemned") == 50


async def test_a_batch_is_bounded_in_count_and_bytes(
    committer: Committer, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits_module, "BATCH_WRITES", 4)
    monkeypatch.setattr(commits_module, "BATCH_BYTES", 10)
    writes = [Write(blob={"data": bytes(size)}) for size in (6, 4, 6, 20, 1, 1, 1, 1, 1)]
    await asyncio.gather(*(committer.submit(write) for write in writes))
    assert sorted(batches.sizes) == [1, 1, 1, 2, 4]


async def test_a_refusal_undoes_its_own_work_alone(committer: Committer, tmp_path: Path) -> None:
    outcomes = await asyncio.gather(
        committer.submit(condemns("a")),
        committer.submit(Write(work=refuses)),
        committer.submit(condemns("a")),
        committer.submit(condemns("b")),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [int, Conflict, Conflict, int]
    with database(tmp_path) as rows:
        assert rows.execute("select location from condemned order by 1").fetchall() == [
            ("a",), ("b",)
        ]  # fmt: skip


async def test_a_batch_that_fails_fails_each_waiter_with_its_own_refusal(
    committer: Committer, tmp_path: Path
) -> None:
    broken = Write(work=lambda connection: connection.execute(text("select nonsense")))
    outcomes = await asyncio.gather(
        committer.submit(condemns("a")), committer.submit(broken), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
    assert outcomes[0] is not outcomes[1]
    assert count(tmp_path, "condemned") == 0
    assert await committer.submit(condemns("a")) == 1


async def test_what_sqlite_rolled_back_by_itself_is_never_confirmed(
    sqlite_committer: Committer, tmp_path: Path
) -> None:
    def rolled_back(connection: Connection) -> None:
        connection.execute(insert(condemned), {"location": "lost", "condemned_at": 0})
        connection.exec_driver_sql("ROLLBACK")

    with pytest.raises(Unavailable):
        await sqlite_committer.submit(Write(work=rolled_back))
    with sqlite_rows(tmp_path) as rows:
        assert rows.execute("select count(*) from condemned").fetchone() == (0,)


async def test_an_unexpected_error_reaches_every_waiter(committer: Committer) -> None:
    def wrong(connection: Connection) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await committer.submit(Write(work=wrong))
    assert await committer.submit(condemns("a")) == 1


async def test_a_batch_that_the_end_of_the_loop_cuts_off_is_told_so(
    committer: Committer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: object, **__: object) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.cancel()
        return future

    with monkeypatch.context() as patched:
        patched.setattr(committer._database, "write", cut_off)
        with pytest.raises(Unavailable):
            await committer.submit(condemns("a"))
    assert await committer.submit(condemns("a")) == 1


async def test_a_cancelled_caller_does_not_break_the_batch(
    committer: Committer, tmp_path: Path
) -> None:
    tasks = [asyncio.create_task(committer.submit(condemns(str(n)))) for n in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [outcome == 1 for outcome in outcomes] == [True, False, True]
    assert count(tmp_path, "condemned") == 3


async def test_close_commits_what_waits(committer: Committer, tmp_path: Path) -> None:
    tasks = [asyncio.create_task(committer.submit(condemns(str(n)))) for n in range(3)]
    await asyncio.sleep(0)
    await committer.close()
    assert await asyncio.gather(*tasks) == [1, 1, 1]
    assert count(tmp_path, "condemned") == 3


@pytest.mark.requirement("B76")
async def test_an_sqlite_lock_beyond_the_limit_is_database_busy(
    sqlite_committer: Committer, tmp_path: Path
) -> None:
    with sqlite_rows(tmp_path) as other:
        other.execute("begin immediate")
        with pytest.raises(Unavailable) as refusal:
            await sqlite_committer.submit(condemns("a"))
    assert refusal.value.code == "database_busy"
    assert await sqlite_committer.submit(condemns("a")) == 1


@pytest.mark.requirement("B76")
async def test_readers_of_sqlite_do_not_wait_for_a_writer(
    sqlite_committer: Committer, tmp_path: Path
) -> None:
    with sqlite_rows(tmp_path) as other:
        other.execute("begin immediate")
        rows = await sqlite_committer._database.read(lambda c: c.execute(select(condemned)).all())
    assert rows == []


@pytest.mark.requirement("B73")
async def test_a_full_sqlite_database_is_exhausted_and_recovers(
    sqlite_committer: Committer,
) -> None:
    committer = sqlite_committer

    def pages(number: int) -> Write:
        return Write(work=lambda c: c.exec_driver_sql(f"PRAGMA max_page_count = {number}").all())

    await committer.submit(pages(1))
    with pytest.raises(Exhausted):
        await committer.submit(condemns("x" * 10**6))
    await committer.submit(pages(2**31))
    assert await committer.submit(condemns("x" * 10**6)) == 1
