"""A store on PostgreSQL: what its transactions promise, also to several processes."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from asyncpg.exceptions import InternalClientError
from asyncpg.prepared_stmt import PreparedStatement
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from app.errors import Conflict, NotFound, QuotaExhausted, Refusal, Unavailable
from app.store import ContentStore, StoreError, migrate
from app.store import postgres as postgres_module
from app.store.commits import Write
from app.store.database_errors import is_passing, leaves_doubt, refusal_of
from app.store.postgres import LOCK, PostgresDatabase, server_url
from app.store.tables import condemned, content_refs
from tests import backends
from tests.postgres import Cluster, connected
from tests.store.servers import fresh_database, in_a_store, opened, other_processes, server_settings
from tests.store.sessions import add_artifact, add_upload, begin, finish, key_of
from tests.store.stores import LARGE, SMALL, get, put, staged

pytestmark = pytest.mark.anyio


@pytest.fixture
def url() -> Iterator[str]:
    with fresh_database(f"store_{secrets.token_hex(8)}") as fresh:
        yield fresh


@pytest.fixture
async def store(tmp_path: Path, url: str) -> AsyncIterator[ContentStore]:
    async with opened(server_settings(tmp_path, url)) as fresh:
        yield fresh


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with other_processes(2) as pool:
        yield pool


def server_of(store: ContentStore) -> PostgresDatabase:
    assert isinstance(store._database, PostgresDatabase)
    return store._database


async def findings(store: ContentStore) -> list[object]:
    return [finding async for finding in store.verify()]


def condemns(location: str) -> Any:
    row = {"location": location, "condemned_at": 0}
    return lambda connection: connection.execute(insert(condemned), row).rowcount


async def _somebody_waits(url: str) -> None:
    """Until the server has somebody wait for the lock."""
    waiting = "select count(*) from pg_locks where locktype = 'advisory' and not granted"
    with connected(url) as other:
        while (await asyncio.to_thread(other.execute, waiting)).fetchone() == (0,):
            await asyncio.sleep(0.005)


# --- One writer at a time ------------------------------------------------------------------------


async def test_a_batch_with_work_waits_for_that_of_another_process(
    store: ContentStore, url: str
) -> None:
    with connected(url, transaction=True) as other:
        other.execute(f"select pg_advisory_xact_lock_shared({LOCK})")
        await put(store, LARGE)  # only brings a blob and a reference: in nobody's way
        waiting = asyncio.ensure_future(store._catalogue.write(condemns("a")))
        await _somebody_waits(url)
        assert not waiting.done()
    assert await waiting == 1


async def test_uploads_wait_for_a_batch_with_work_of_another_process(
    store: ContentStore, url: str
) -> None:
    kept = await put(store, SMALL)
    with connected(url, transaction=True) as other:
        other.execute(f"select pg_advisory_xact_lock({LOCK})")
        waiting = asyncio.ensure_future(put(store, LARGE))
        await _somebody_waits(url)
        assert await get(store, kept.ref) == SMALL  # readers wait for nobody
        assert not waiting.done()
    assert await get(store, (await waiting).ref) == LARGE


async def test_what_changes_things_is_committed_in_the_order_of_submission(
    store: ContentStore,
) -> None:
    """A reference that is taken back right behind its upload, while others are on their way."""
    committer = store._catalogue._committer
    blob = {"digest": b"d" * 32, "size": 1, "location": None, "data": b"x", "created_at": 1}
    row = {"scope": "a", "principal": "p", "created_at": 1, "expires_at": None}
    refs = [f"ref_{number}" for number in range(50)]
    references = [{**row, "ref": ref, "digest": b"d" * 32} for ref in refs]
    added = [asyncio.ensure_future(committer.submit(Write(blob, one))) for one in references]
    gone = [asyncio.ensure_future(store._catalogue.forget(ref)) for ref in refs]
    await asyncio.gather(*added, *gone)
    assert await store.references("a") == []


async def test_uploads_of_one_process_run_side_by_side(tmp_path: Path, url: str) -> None:
    async with opened(server_settings(tmp_path, url, database_commits=2)) as store:
        with connected(url, transaction=True) as other:
            other.execute("lock table blobs in exclusive mode")  # the first stops at its insert
            first = asyncio.ensure_future(put(store, b"first"))
            while len(server_of(store)._writers) == 2:
                await asyncio.sleep(0.005)
            second = asyncio.ensure_future(put(store, b"second"))
            while server_of(store)._writers:
                await asyncio.sleep(0.005)
            third = asyncio.ensure_future(put(store, b"third"))
            while not store._catalogue._committer._waiting:
                await asyncio.sleep(0)
        references = await asyncio.gather(first, second, third)
    assert len({reference.ref for reference in references}) == 3


# --- Several processes ---------------------------------------------------------------------------


async def _upload_and_remove(store: ContentStore, rounds: int) -> int:
    async def one(data: bytes) -> int:
        for _ in range(rounds):
            reference = await put(store, data)
            assert await get(store, reference.ref) == data
            await store.remove("a", reference.ref)
        return rounds

    bodies = [LARGE, LARGE[::-1], SMALL, SMALL[::-1]]
    return sum(await asyncio.gather(*(one(data) for data in bodies)))


@pytest.mark.requirement("B74", "B76")
async def test_two_sweepers_beside_eight_uploaders_of_two_processes(
    tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    settings = server_settings(tmp_path, url)
    loop = asyncio.get_running_loop()
    async with opened(settings) as first, opened(settings) as second:
        kept = [await put(first, data) for data in (LARGE, b"kept")]
        uploaders = [
            loop.run_in_executor(processes, in_a_store, settings, _upload_and_remove, 15)
            for _ in range(2)
        ]
        while not all(uploader.done() for uploader in uploaders):
            await asyncio.gather(first.sweep(), second.sweep())
        assert [uploader.result() for uploader in uploaders] == [60, 60]
        await first.sweep()
        assert [await get(first, reference.ref) for reference in kept] == [LARGE, b"kept"]
        assert await findings(first) == []
        assert (await first.usage()).blobs == 2


async def _begin(store: ContentStore, previous: str, key: str | None, times: int) -> list[str]:
    async def one() -> str:
        idempotency = None if key is None else key_of(key)
        try:
            begun = await begin(store, previous_response_id=previous, idempotency=idempotency)
        except Conflict as refusal:
            return refusal.code
        return f"{begun.response.id} {begun.repeated}"

    return list(await asyncio.gather(*(one() for _ in range(times))))


async def _race(
    processes: ProcessPoolExecutor, settings: Any, deed: Any, *arguments: Any
) -> list[Any]:
    loop = asyncio.get_running_loop()
    racers = [
        loop.run_in_executor(processes, in_a_store, settings, deed, *arguments) for _ in range(2)
    ]
    return [outcome for outcomes in await asyncio.gather(*racers) for outcome in outcomes]


@pytest.mark.requirement("UHP-34")
async def test_two_processes_that_race_for_a_session_have_one_winner(
    store: ContentStore, tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    first = await begin(store)
    await finish(store, first)
    settings = server_settings(tmp_path, url)
    told = Counter(await _race(processes, settings, _begin, first.response.id, None, 10))
    assert told.pop("session_busy") == 19
    (winner,) = told
    assert winner.endswith(" False")


@pytest.mark.requirement("B89")
async def test_two_processes_with_one_idempotency_key_begin_one_task(
    store: ContentStore, tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    first = await begin(store)
    await finish(store, first)
    settings = server_settings(tmp_path, url)
    told = Counter(await _race(processes, settings, _begin, first.response.id, "K", 10))
    assert sorted(told.values()) == [1, 19]
    assert len({one.split()[0] for one in told}) == 1


async def _fill(store: ContentStore, times: int) -> list[str]:
    async def one(number: int) -> str:
        try:
            await add_upload(store, b"%d" % number)
        except QuotaExhausted:
            return "exhausted"
        return "kept"

    return list(await asyncio.gather(*(one(number) for number in range(times))))


async def test_a_quota_holds_over_processes(
    store: ContentStore, tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    settings = server_settings(tmp_path, url, max_scope_files=7)
    told = Counter(await _race(processes, settings, _fill, 10))
    assert told == {"kept": 7, "exhausted": 13}
    assert (await store.files.totals("a")).files == 7


async def _delete(store: ContentStore, ids: list[str]) -> list[int]:
    async def one(file_id: str) -> int:
        try:
            await store.files.delete_upload("a", file_id)
        except NotFound:
            return 0
        return 1

    return list(await asyncio.gather(*(one(file_id) for file_id in ids)))


async def test_an_upload_that_two_processes_delete_is_counted_once(
    store: ContentStore, tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    ids = [(await add_upload(store, b"%d" % number)).id for number in range(10)]
    settings = server_settings(tmp_path, url)
    assert sum(await _race(processes, settings, _delete, ids)) == 10
    totals = await store.files.totals("a")
    assert (totals.files, totals.bytes) == (0, 0)


async def _write_artifacts(store: ContentStore, session_id: str, times: int) -> list[str]:
    session = await store.sessions.get("a", session_id)
    written = [add_artifact(store, session, b"%d" % number) for number in range(times)]
    return [record.id for record in await asyncio.gather(*written)]


async def test_two_processes_that_write_one_path_leave_one_current_file(
    store: ContentStore, tmp_path: Path, url: str, processes: ProcessPoolExecutor
) -> None:
    session = await store.sessions.create(scope="a", principal="alice")
    settings = server_settings(tmp_path, url)
    ids = await _race(processes, settings, _write_artifacts, session.id, 10)
    listed = await store.files.of_session("a", session.id)
    assert {record.id for record in listed} == set(ids)
    assert [record.current for record in listed] == [False] * 19 + [True]
    assert (await store.sessions.get("a", session.id)).files == 20


# --- Connections that end ------------------------------------------------------------------------

_CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


async def test_connections_that_were_cut_while_idle_are_replaced(
    store: ContentStore, url: str
) -> None:
    kept = await put(store, SMALL)
    with connected(url) as other:
        other.execute(_CUT)
    again = await put(store, LARGE)
    with connected(url) as other:
        other.execute(_CUT)
    assert await get(store, kept.ref) == SMALL
    assert await get(store, again.ref) == LARGE


async def test_uploads_outlast_connections_that_are_cut_all_the_time(
    store: ContentStore, url: str
) -> None:
    async def cut() -> None:
        with connected(url) as other:
            for _ in range(10):
                await asyncio.to_thread(other.execute, _CUT)
                await asyncio.sleep(0.02)

    cutting = asyncio.ensure_future(cut())
    confirmed: dict[str, bytes] = {}
    number = 0
    while not cutting.done():
        bodies = [b"%d-%d" % (number, n) + (LARGE if n % 4 == 0 else b"") for n in range(8)]
        for body, reference in zip(
            bodies, await asyncio.gather(*(put(store, body) for body in bodies)), strict=True
        ):
            confirmed[reference.ref] = body
        number += 1
    await cutting
    assert {ref: await get(store, ref) for ref in confirmed} == confirmed
    assert (await store.usage()).references == len(confirmed)  # and nothing was done twice
    assert await findings(store) == []


class Unanswered:
    """Cuts a connection in its commit, before the server has it or after."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, committed: bool, times: int = 1) -> None:
        self.left = times
        self._committed = committed
        self._commit = AsyncConnection.commit
        monkeypatch.setattr(AsyncConnection, "commit", self._cut(self))

    @staticmethod
    def _cut(plan: Unanswered) -> Any:
        async def commit(connection: Any) -> None:
            if plan.left == 0:
                await plan._commit(connection)
                return
            plan.left -= 1
            if plan._committed:
                await plan._commit(connection)
            raw = await connection.get_raw_connection()
            raw.driver_connection.terminate()
            raise ConnectionResetError("connection reset by peer")

        return commit


@pytest.mark.parametrize("committed", [True, False], ids=["committed", "lost"])
@pytest.mark.requirement("AHP-R26")
async def test_a_commit_that_was_not_answered_is_looked_up_and_never_done_twice(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    runs = 0

    def work(connection: Connection) -> int:
        nonlocal runs
        runs += 1
        connection.execute(insert(condemned), {"location": f"run {runs}", "condemned_at": 0})
        return runs

    cut = Unanswered(monkeypatch, committed=committed)
    assert await store._catalogue.write(work) == (1 if committed else 2)
    assert cut.left == 0
    rows = await store._catalogue.read(lambda c: c.scalars(select(condemned.c.location)).all())
    assert rows == [f"run {1 if committed else 2}"]


async def test_a_commit_that_cannot_be_looked_up_in_time_is_refused_and_loses_nothing(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server_settings(tmp_path, url, database_timeout_seconds=0.3)) as store:
        with monkeypatch.context() as patched:
            Unanswered(patched, committed=False, times=1000)
            with pytest.raises(Unavailable) as refusal:
                await put(store, LARGE)
        assert refusal.value.code == "storage_unavailable"
        again = await put(store, LARGE)
        assert await get(store, again.ref) == LARGE
        assert staged(tmp_path) == []
    async with opened(server_settings(tmp_path, url)) as store:
        assert await findings(store) == []


async def test_a_cancelled_reader_costs_no_connection(store: ContentStore) -> None:
    await put(store, SMALL)
    task = asyncio.ensure_future(
        store._catalogue.read(lambda c: c.execute(text("select pg_sleep(0.1)")).all())
    )
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    pool: Any = server_of(store).reader.sync_engine.pool
    assert (pool.checkedout(), pool.checkedin()) == (0, 1)


# --- Limits --------------------------------------------------------------------------------------


async def test_a_statement_beyond_its_time_is_busy_and_leaves_nothing(
    tmp_path: Path, url: str
) -> None:
    def slow(connection: Connection) -> None:
        connection.execute(insert(condemned), {"location": "a", "condemned_at": 0})
        connection.execute(text("select pg_sleep(60)"))

    settings = server_settings(tmp_path, url, database_statement_timeout_seconds=0.2)
    async with opened(settings) as store:
        for call in (store._catalogue.write, store._catalogue.read):
            with pytest.raises(Unavailable) as refusal:
                await call(slow if call == store._catalogue.write else _sleeps)
            assert refusal.value.code == "database_busy"
        assert await store._catalogue.condemned(10) == []
        assert await get(store, (await put(store, LARGE)).ref) == LARGE


def _sleeps(connection: Connection) -> None:
    connection.execute(text("select pg_sleep(60)"))


async def test_a_server_that_says_nothing_at_all_is_given_up(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own limit is off: only this side's is left."""
    monkeypatch.setattr(postgres_module, "MARGIN_SECONDS", 0)

    def silent(connection: Connection) -> None:
        connection.execute(text("set local statement_timeout = 0"))
        connection.execute(text("select pg_sleep(60)"))

    settings = server_settings(tmp_path, url, database_statement_timeout_seconds=0.3)
    async with opened(settings) as store:
        with pytest.raises(Unavailable):
            await store._catalogue.write(silent)
        assert await store._catalogue.write(condemns("a")) == 1


async def test_a_process_that_stalls_in_a_transaction_does_not_hold_up_the_others_for_ever(
    tmp_path: Path, url: str
) -> None:
    settings = server_settings(tmp_path, url, database_statement_timeout_seconds=0.3)
    async with (
        opened(settings) as stalls,
        opened(server_settings(tmp_path, url)) as store,
        server_of(stalls).writer.connect() as connection,
    ):
        await connection.execute(text(f"select pg_advisory_xact_lock({LOCK})"))
        assert await get(store, (await put(store, SMALL)).ref) == SMALL
        with pytest.raises(DBAPIError):
            await connection.execute(text("select 1"))


async def test_a_lock_beyond_the_limit_is_database_busy(tmp_path: Path, url: str) -> None:
    async with opened(server_settings(tmp_path, url, database_timeout_seconds=0.2)) as store:
        with connected(url, transaction=True) as other:
            other.execute(f"select pg_advisory_xact_lock({LOCK})")
            for data in (SMALL, LARGE):
                with pytest.raises(Unavailable) as refusal:
                    await put(store, data)
                assert refusal.value.code == "database_busy"
        assert await get(store, (await put(store, LARGE)).ref) == LARGE


async def test_more_readers_than_connections_take_turns(tmp_path: Path, url: str) -> None:
    async with opened(server_settings(tmp_path, url, database_connections=2)) as store:
        kept = await put(store, SMALL)
        assert await asyncio.gather(*(get(store, kept.ref) for _ in range(50))) == [SMALL] * 50
        pool: Any = server_of(store).reader.sync_engine.pool
        assert pool.checkedin() <= 2


async def test_readers_cannot_write(tmp_path: Path, url: str) -> None:
    async with opened(server_settings(tmp_path, url, database_timeout_seconds=0.1)) as store:
        with pytest.raises(Unavailable):
            await store._catalogue.read(condemns("a"))


async def test_a_confirmation_is_durable_whatever_the_default_of_the_database_is(
    tmp_path: Path, url: str
) -> None:
    name = url.rpartition("/")[2]
    backends.cluster().execute(f"alter database {name} set synchronous_commit = off")
    async with opened(server_settings(tmp_path, url)) as store:
        seen = await store._catalogue.write(
            lambda connection: connection.execute(text("show synchronous_commit")).scalar()
        )
    assert seen == "on"


# --- Errors --------------------------------------------------------------------------------------


async def _error_of(store: ContentStore, statement: str) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, it is looked at
        async with server_of(store).writer.begin() as connection:
            await connection.execute(text(statement))
    return caught.value


STATES = [
    ("40001", "database_busy", True), ("40P01", "database_busy", True),
    ("53300", "database_busy", True), ("55P03", "database_busy", False),
    ("57014", "database_busy", False), ("25P03", "database_busy", False),
    ("25006", "storage_unavailable", True), ("57P01", "storage_unavailable", True),
    ("57P02", "storage_unavailable", True), ("57P03", "storage_unavailable", True),
    ("08006", "storage_unavailable", True), ("53100", "storage_exhausted", False),
    ("53200", "storage_unavailable", False), ("42P01", "storage_unavailable", False),
    ("23505", "conflict", False), ("23503", "conflict", False),
]  # fmt: skip


@pytest.mark.parametrize(("state", "code", "passes"), STATES, ids=[state for state, *_ in STATES])
async def test_what_each_error_of_the_server_means(
    store: ContentStore, state: str, code: str, passes: bool
) -> None:
    error = await _error_of(
        store, f"do $$ begin raise exception 'x' using errcode = '{state}'; end $$"
    )
    refusal = refusal_of(error)
    assert (refusal.code, is_passing(error)) == (code, passes)
    assert isinstance(error, IntegrityError) == isinstance(refusal, Conflict)


async def test_a_connection_that_its_driver_has_lost_track_of_is_replaced(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As happens where it is cut off in the middle of an answer."""
    fetch = PreparedStatement.fetch
    fault = InternalClientError("cannot switch to state 12; another operation (2) is in progress")
    faults = [fault, fault]

    async def fetch_or_fail(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return await fetch(*args)

    kept = await put(store, SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(PreparedStatement, "fetch", fetch_or_fail)
        error = await _error_of(store, "select 1")
        again = await put(store, LARGE)
    assert faults == []
    assert (is_passing(error), leaves_doubt(error)) == (True, True)
    assert await get(store, kept.ref) == SMALL
    assert await get(store, again.ref) == LARGE
    assert (await store.usage()).references == 2


async def test_a_server_that_became_a_standby_is_left_for_the_new_one(store: ContentStore) -> None:
    """A connection that turns out to be read-only is not used again."""
    tries = 0

    def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            connection.execute(text("set transaction_read_only = on"))
        return int(
            connection.execute(insert(condemned), {"location": "a", "condemned_at": 0}).rowcount
        )

    assert await store._catalogue.write(work) == 1
    assert tries == 2


async def test_a_broken_constraint_undoes_one_write_alone(store: ContentStore) -> None:
    outcomes = await asyncio.gather(
        *(store._catalogue.write(condemns(location)) for location in ("a", "a", "b")),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [int, Conflict, int]


async def test_deadlocks_and_serialization_failures_are_tried_again(store: ContentStore) -> None:
    tries = 0

    def work(connection: Connection) -> int:
        nonlocal tries
        tries += 1
        state = {1: "40P01", 2: "40001"}.get(tries)
        connection.execute(insert(condemned), {"location": f"{tries}", "condemned_at": 0})
        if state is not None:
            connection.execute(text(f"do $$ begin raise using errcode = '{state}'; end $$"))
        return tries

    assert await store._catalogue.write(work) == 3
    assert await store._catalogue.condemned(10) == ["3"]


@pytest.mark.parametrize(
    "fault",
    [
        "postgresql+psycopg2://u@h/d",
        "postgresql+asyncpg://u:s3cret@h/d?nonsense=1",
        "postgresql+asyncpg://u:s3cret@/d?host=a&host=b:1",
    ],
)
async def test_a_url_that_cannot_be_used_is_one_clear_error(tmp_path: Path, fault: str) -> None:
    with pytest.raises(StoreError, match="database_url") as caught:
        await ContentStore.start(server_settings(tmp_path, fault))
    assert "s3cret" not in str(caught.value)


async def test_a_plain_scheme_means_the_driver_that_is_here(tmp_path: Path) -> None:
    settings = server_settings(tmp_path, "postgresql://u@h/d?ssl=require")
    assert server_url(settings).drivername == "postgresql+asyncpg"


async def test_a_database_that_is_not_there_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    url = backends.cluster().url("nowhere")
    with pytest.raises(StoreError, match="create the database"):
        await ContentStore.start(server_settings(tmp_path, url))


async def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    url = "postgresql+asyncpg://u:s3cret@127.0.0.1:1/d"
    with pytest.raises(Unavailable) as refusal:
        await ContentStore.start(server_settings(tmp_path, url, database_timeout_seconds=0.2))
    assert "s3cret" not in refusal.value.message


async def test_too_many_connections_are_waited_for(
    store: ContentStore, tmp_path: Path, url: str
) -> None:
    name = url.rpartition("/")[2]
    kept = await put(store, SMALL)
    await get(store, kept.ref)
    backends.cluster().execute(
        "create role limited login", f"grant all on database {name} to limited"
    )
    try:
        with connected(url) as admin:
            admin.execute("grant all on all tables in schema public to limited")
            admin.execute("alter role limited connection limit 0")
            limited = url.replace("postgres@", "limited@")
            settings = server_settings(tmp_path, limited, database_timeout_seconds=0.3)
            with pytest.raises(Unavailable) as refusal:
                await ContentStore.start(settings)
            assert refusal.value.code == "database_busy"
            admin.execute("alter role limited connection limit -1")
            async with opened(settings) as again:
                assert await get(again, kept.ref) == SMALL
            admin.execute("drop owned by limited")
    finally:
        backends.cluster().execute("drop role limited")


# --- A server of its own, to be ended ------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    yield started
    started.close()


@pytest.mark.requirement("AHP-R26", "B73")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restart", "crash"])
async def test_a_server_that_ends_amid_uploads_loses_nothing_that_was_confirmed(
    cluster: Cluster, tmp_path: Path, how: signal.Signals
) -> None:
    settings = server_settings(tmp_path, cluster.url("postgres"))
    migrate(settings)
    confirmed: dict[str, bytes] = {}
    refused: list[Refusal] = []
    ending = asyncio.Event()

    async def upload(store: ContentStore, sender: int) -> None:
        number = 0
        while not ending.is_set():
            number += 1
            body = b"%d-%d" % (sender, number) + (LARGE if number % 3 == 0 else b"")
            try:
                confirmed[(await put(store, body)).ref] = body
            except Unavailable as refusal:
                refused.append(refusal)

    async with opened(settings) as store:
        senders = [asyncio.ensure_future(upload(store, sender)) for sender in range(8)]
        for _ in range(2):
            seen = len(confirmed)
            while len(confirmed) < seen + 50:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(cluster.stop, how)
            await asyncio.to_thread(cluster.start)
        seen = len(confirmed)
        while len(confirmed) < seen + 50:
            await asyncio.sleep(0.01)
        ending.set()
        await asyncio.gather(*senders)
        assert refused == []  # it was back within database_timeout_seconds
        assert {ref: await get(store, ref) for ref in confirmed} == confirmed
        listed = await store._catalogue.read(lambda c: c.scalars(select(content_refs.c.ref)).all())
        assert set(listed) == set(confirmed)  # and nothing was done twice
        assert await findings(store) == []


async def test_a_server_that_stays_away_is_unavailable_and_nothing_else(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings = server_settings(tmp_path, cluster.url("postgres"), database_timeout_seconds=0.3)
    migrate(settings)
    async with opened(settings) as store:
        kept = await put(store, LARGE)
        await asyncio.to_thread(cluster.stop)
        for call in (put(store, SMALL), put(store, LARGE[::-1]), store.resolve("a", kept.ref)):
            with pytest.raises(Unavailable) as refusal:
                await call
            assert refusal.value.code == "storage_unavailable"
        with pytest.raises(Unavailable) as refusal:
            await store.probe()
        assert refusal.value.code == "not_ready"
        await asyncio.to_thread(cluster.start)
        assert await get(store, kept.ref) == LARGE
        await store.probe()
        assert await findings(store) == []
