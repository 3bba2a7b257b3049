"""Every look-up and listing of the store reads an index, on both databases, however much there is.

The planners choose between an index and the whole table by what is in it, so the tables are filled:
with ROWS references, fewer of what costs more.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from app.errors import Refusal
from app.store import ContentStore, migrate
from app.store.prepared import Prepared, Values
from tests.backends import Rows
from tests.postgres import connected
from tests.store.servers import fresh_database, opened, server_settings
from tests.store.sessions import _engines, add_artifact, begin, finish, key_of
from tests.store.stores import put, sqlite_rows, sqlite_settings

pytestmark = pytest.mark.anyio

ROWS = 1_000_000
SCOPES = 100

Statement = tuple[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the two databases call by other names."""

    numbers: str
    padded: Callable[[str], str]
    digest: str


SQLITE = Dialect(
    numbers="with recursive s(n) as (select 1 union all select n + 1 from s where n < {rows})",
    padded=lambda n: f"printf('%032d', {n})",
    digest="cast(printf('%032d', n) as blob)",
)
POSTGRES = Dialect(
    numbers="with s(n) as (select generate_series(1, {rows}))",
    padded=lambda n: f"lpad(({n})::text, 32, '0')",
    digest="convert_to(lpad(n::text, 32, '0'), 'UTF8')",
)


def _fill(rows: Rows, dialect: Dialect) -> None:
    """Rows as years of use leave them: most is over, little is due."""
    pad, digest = dialect.padded, dialect.digest
    scope = f"'scope' || (n % {SCOPES})"
    session = f"n % {ROWS // 5} + 1"
    location = f"{pad('n')} || {pad('n')} || '-0000000000000000'"

    def insert(table: str, count: int, **values: str) -> None:
        rows.execute(
            f"insert into {table} ({', '.join(values)}) {dialect.numbers.format(rows=count)}"
            f" select {', '.join(values.values())} from s"
        )

    insert("blobs", ROWS, id="n", digest=digest, size="1", created_at="n",
           location=f"case when n % 10 = 0 then {location} end",
           data="case when n % 10 != 0 then " + digest + " end")  # fmt: skip
    insert("content_refs", ROWS, id="n", ref=f"'ref_' || {pad('n')}", scope=scope, blob_id="n",
           principal="'p'", created_at="n",
           expires_at="case when n % 2 = 0 then 9999999999 end")  # fmt: skip
    insert("condemned", ROWS // 5, location=location.replace("'-0", "'-1"), condemned_at="n",
           removed_at="case when n % 1000 != 0 then 9999999999 end")  # fmt: skip
    insert("sessions", ROWS // 5, id="n", session_id=f"'hsess_' || {pad('n')}",
           container_id=f"'cntr_' || {pad('n')}", scope=scope, principal="'p'",
           harness_id="'chrn_' || (n % 3)", status="'completed'", created_at="n",
           updated_at="9999999999", files="2", bytes="2",
           expired_at="case when n % 10 = 0 then 9999999999 end")  # fmt: skip
    insert("responses", ROWS // 5, id="n", response_id=f"'resp_' || {pad('n')}",
           session_id=f"'hsess_' || {pad('n')}", scope=scope,
           status="case when n % 2000 = 0 then 'in_progress' else 'completed' end",
           request="'{}'", response="'{}'", owner="'w' || (n % 5)", created_at="n", seen_at="n",
           finished_at="case when n % 2000 != 0 then 9999999999 end", cancel_requested="0",
           hidden="case when n % 50 = 0 then 1 else 0 end")  # fmt: skip
    insert("response_events", ROWS // 5, response_id=f"'resp_' || {pad('n')}",
           sequence_number="0", payload="'{}'")  # fmt: skip
    insert("idempotency_keys", ROWS // 5, scope=scope, principal="'p'", key=pad("n"),
           request_digest=digest, response_id=f"'resp_' || {pad('n')}",
           created_at="9999999999")  # fmt: skip
    insert("files", ROWS // 2, id="n", file_id=f"'file_' || {pad('n')}", scope=scope,
           principal="'p'",
           session_id=f"case when n % 2 = 0 then 'hsess_' || {pad(session)} end",
           container_id=f"case when n % 2 = 0 then 'cntr_' || {pad(session)} end",
           filename="'a.txt'", path=pad("n"), media_type="'text/plain'",
           kind="case when n % 2 = 0 then 'artifact' else 'upload' end", digest=digest, size="1",
           current="case when n % 4 = 0 then 1 else 0 end", created_at="n",
           expires_at="case when n % 2 = 1 then 9999999999 end")  # fmt: skip
    insert("scope_usage", ROWS // 5, scope="'scope' || n", files="1", bytes="1")
    insert("events", ROWS // 5, id="n", scope=scope, event_id=pad("n"), type="'t'",
           mode="'observe'", principal="'p'", received_at="n", expires_at="9999999999",
           message=digest)  # fmt: skip
    insert("event_refs", ROWS // 5, event="n", place="0", ref=f"'ref_' || {pad('n')}",
           blob_id="n")  # fmt: skip


_NUMBERED = ("blobs", "content_refs", "sessions", "responses", "files", "events")


@asynccontextmanager
async def _on_sqlite(data_dir: Path) -> AsyncIterator[tuple[ContentStore, Any]]:
    settings = sqlite_settings(data_dir)
    migrate(settings)
    with sqlite_rows(data_dir) as rows:
        _fill(rows, SQLITE)
        rows.commit()
        rows.execute("analyze")

    def plan_of(statement: Statement) -> list[str]:
        with sqlite_rows(data_dir) as rows:
            return [
                row[3] for row in rows.execute(f"explain query plan {statement[0]}", statement[1])
            ]

    async with opened(settings) as store:
        yield store, plan_of


@asynccontextmanager
async def _on_postgres(data_dir: Path) -> AsyncIterator[tuple[ContentStore, Any]]:
    with fresh_database(f"plans_{secrets.token_hex(8)}") as url:
        with connected(url, transaction=True) as rows:
            rows.execute("set local session_replication_role = replica")
            _fill(rows, POSTGRES)
            for table in _NUMBERED:
                rows.execute(f"select setval('{table}_id_seq', {ROWS})")
        with connected(url) as rows:
            rows.execute("analyze")

        def plan_of(statement: Statement) -> list[str]:
            with connected(url) as rows:
                return [row[0] for row in rows.run(f"explain {statement[0]}", statement[1])]

        async with opened(server_settings(data_dir, url)) as store:
            yield store, plan_of


@contextmanager
def _noted(store: ContentStore) -> Iterator[list[Statement]]:
    """Every statement inside the block that looks for rows, with its values."""
    statements: list[Statement] = []

    def note(_: Any, __: Any, statement: str, values: Any, ___: Any, many: bool) -> None:
        if not many and statement.startswith(("SELECT", "UPDATE", "DELETE")):
            statements.append((statement, values))

    def find(hot: Prepared, connection: Connection, values: Values) -> Sequence[Sequence[Any]]:
        if connection.dialect.name == "sqlite":  # it goes past SQLAlchemy there
            statements.append(hot._ready(connection, values))
        return find_hot(hot, connection, values)

    find_hot = Prepared.find
    for engine in _engines(store._database):
        event.listen(engine, "before_cursor_execute", note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prepared, "find", find)
        yield statements


def _pad(number: int) -> str:
    return f"{number:032d}"


def _location(number: int) -> str:
    return f"{_pad(number) * 2}-0000000000000000"


async def _use(store: ContentStore) -> None:
    """Every look-up and listing that answering a request, watching over tasks or sweeping needs.

    Not what looks at everything there is: counts, and a sweep's search for what nobody refers to.
    """
    scope, ref, file = "scope5", f"ref_{_pad(105)}", f"file_{_pad(105)}"
    session, response = f"hsess_{_pad(105)}", f"resp_{_pad(105)}"
    with suppress(Refusal):
        await store.resolve(scope, ref)
    async with store.open(scope, ref) as content:
        await anext(content)
    await store.references(scope, after=50_000)
    await put(store, b"x" * 5000, scope=scope)
    await store.remove(scope, ref)
    await store.files.uploads(scope, before=25_000)
    await store.files.get(scope, file)
    await store.files.delete_upload(scope, file)
    await store.files.of_session("scope6", f"hsess_{_pad(106)}")
    await store.files.totals(scope)
    await store.files.expire()
    await store.sessions.get(scope, session)
    await store.sessions.of_container(scope, f"cntr_{_pad(105)}")
    await store.sessions.page(scope, before=10_000)
    await store.sessions.page(scope, before=10_000, harness_id="chrn_1")
    await store.sessions.expire(idle_since=5)
    await store.sessions.expired(before=5)
    await store.sessions.missing([session])
    await store.responses.get(scope, response)
    await store.responses.turns(scope, session)
    await store.responses.running(scope, session)
    await store.responses.known(scope, key_of("none"))
    await store.responses.events(response)
    await store.responses.unfinished()
    await store.responses.cancelled("w1")
    await store.responses.purge(before=5)
    await store.responses.forget_keys(before=5)
    begun = await begin(store, scope, idempotency=key_of("new"))
    await store.responses.append_events(begun.response.id, [(0, "{}")])
    await add_artifact(store, begun.session)
    await store.responses.request_cancel(scope, begun.response.id)
    await finish(store, begun)
    await store.responses.delete(scope, begun.response.id)
    await store.sessions.delete(scope, begun.session.id)
    await store.events.page(scope, after=10_000)
    await store.events.latest(scope, 10)
    await store.events.using(scope, ref)
    await store.events.find(scope, _pad(105))
    await store.events.expire(100)
    await store._catalogue.expire(100)
    await store._catalogue.expired()
    await store._catalogue.unnamed([_location(10)])
    await store._catalogue.names(_location(10))
    await store._catalogue.condemn([_location(10)])
    await store._catalogue.collect([b"%032d" % 20])
    await store._catalogue.referrers(b"%032d" % 20)
    await store._catalogue.places(50_000, 16)


async def _scans(data_dir: Path, database: Any, is_scan: Callable[[str], bool]) -> list[str]:
    """The statements that read a whole table, each with its plan."""
    async with database(data_dir) as (store, plan_of):
        with _noted(store) as statements:
            await _use(store)
        assert len({statement for statement, _ in statements}) > 40
        plans = {statement: plan_of((statement, values)) for statement, values in statements}
    return [
        f"{statement}\n" + "\n".join(plan)
        for statement, plan in plans.items()
        if any(is_scan(step) for step in plan)
    ]


async def test_every_look_up_of_sqlite_uses_an_index(tmp_path: Path) -> None:
    def is_scan(step: str) -> bool:
        return step.startswith("SCAN") and " USING " not in step and "CONSTANT ROW" not in step

    assert await _scans(tmp_path, _on_sqlite, is_scan) == []


async def test_every_look_up_of_postgres_uses_an_index(tmp_path: Path) -> None:
    assert await _scans(tmp_path, _on_postgres, lambda step: "Seq Scan" in step) == []
