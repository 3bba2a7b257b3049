"""Sessions: found by their scope alone, paged in order, expired and deleted with all they hold."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from app.errors import Conflict, NotFound, Refusal
from app.store import ContentStore
from app.store.files import Totals
from app.store.sessions import SessionRecord, refuse_expired
from tests.store.sessions import (
    HARNESS,
    add_artifact,
    add_input,
    begin,
    counted,
    executed,
    finish,
    noted,
    plans_of,
)
from tests.store.stores import LARGE, count, database, new_sqlite_store, published

pytestmark = pytest.mark.anyio


async def create(store: ContentStore, scope: str = "a", **changes: str) -> SessionRecord:
    return await store.sessions.create(scope=scope, principal="alice", **changes)


async def quiet(store: ContentStore) -> None:
    while store._background:
        await asyncio.wait(store._background)


async def expire(store: ContentStore, *, after: int = 1) -> list[SessionRecord]:
    """Let everything expire that was not touched since just now."""
    return await store.sessions.expire(idle_since=int(time.time()) + after)


@pytest.mark.requirement("UHP-32")
async def test_a_session_has_a_container(store: ContentStore) -> None:
    made = await create(store, title="Work")
    assert made.id.startswith("hsess_")
    assert made.container_id.startswith("cntr_")
    assert (made.status, made.title, made.harness_id) == ("active", "Work", None)
    assert await store.sessions.get("a", made.id) == made
    assert await store.sessions.of_container("a", made.container_id) == made
    assert await store.sessions.exists(made.id)


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_foreign_session_is_unknown(store: ContentStore) -> None:
    made = await create(store)
    sessions = store.sessions
    for refusing in (sessions.get, sessions.delete):
        for scope, session_id in (("b", made.id), ("a", "hsess_unknown")):
            with pytest.raises(NotFound) as refused:
                await refusing(scope, session_id)
            assert refused.value.code == "session_not_found"
    with pytest.raises(NotFound, match="no such file"):
        await sessions.of_container("b", made.container_id)
    assert await sessions.page("b") == []


async def test_pages_are_newest_first_and_gapless(store: ContentStore) -> None:
    ids = [(await create(store)).id for _ in range(5)][::-1]
    await create(store, "b")
    first = await store.sessions.page("a", limit=2)
    await create(store)
    await store.sessions.delete("a", ids[2])
    rest = await store.sessions.page("a", before=first[-1].position, limit=9)
    assert [session.id for session in first + rest] == ids[:2] + ids[3:]
    assert await store.sessions.page("a", before=0) == []


async def test_a_page_can_be_of_one_harness(store: ContentStore) -> None:
    one = await create(store, harness_id=HARNESS)
    await create(store, harness_id="chrn_other")
    await create(store)
    assert await store.sessions.page("a", harness_id=HARNESS) == [one]


@pytest.mark.requirement("UHP-28", "UHP-34", "B89")
async def test_deleting_takes_everything_along(store: ContentStore, tmp_path: Path) -> None:
    begun = await begin(store)
    await add_artifact(store, begun.session, LARGE)
    await add_artifact(store, begun.session, b"small", "b.txt")
    await add_input(store, begun)
    await store.responses.append_events(begun.response.id, [(0, "{}")])
    await finish(store, begun)
    kept = await add_artifact(store, await create(store), b"kept")
    await store.sessions.delete("a", begun.session.id)
    await quiet(store)
    assert published(tmp_path) == []
    assert [count(tmp_path, table) for table in ("responses", "response_events")] == [0, 0]
    assert count(tmp_path, "files") == count(tmp_path, "blobs") == 1
    assert await store.files.totals("a") == Totals(1, kept.size)
    for gone in (
        store.sessions.get("a", begun.session.id),
        store.files.of_session("a", begun.session.id),
        store.responses.turns("a", begun.session.id),
    ):
        with pytest.raises(NotFound, match="no such session"):
            await gone


async def test_of_two_deletions_one_finds_it_gone(store: ContentStore) -> None:
    made = await create(store)
    outcomes = await asyncio.gather(
        *(store.sessions.delete("a", made.id) for _ in range(3)), return_exceptions=True
    )
    assert outcomes.count(None) == 1
    assert sum(isinstance(one, NotFound) for one in outcomes) == 2


async def test_a_busy_session_is_deleted_only_on_request(store: ContentStore) -> None:
    begun = await begin(store)
    with pytest.raises(Conflict) as refused:
        await store.sessions.delete("a", begun.session.id)
    assert refused.value.code == "session_busy"
    await store.sessions.delete("a", begun.session.id, running=True)
    assert not await store.sessions.exists(begun.session.id)


@pytest.mark.requirement("UHP-35")
async def test_an_expired_session_is_told_from_an_unknown_one(
    store: ContentStore, tmp_path: Path
) -> None:
    begun = await begin(store, title="Secret plans")
    record = await add_artifact(store, begun.session, LARGE)
    await store.responses.append_events(begun.response.id, [(0, "{}")])
    await finish(store, begun)
    assert await expire(store, after=-100) == []
    assert [session.id for session in await expire(store)] == [begun.session.id]
    assert await expire(store) == []
    for refusing in (
        store.sessions.get("a", begun.session.id),
        store.files.of_session("a", begun.session.id),
        store.responses.turns("a", begun.session.id),
        store.responses.get("a", begun.response.id),
        begin(store, previous_response_id=begun.response.id),
    ):
        with pytest.raises(NotFound) as refused:
            await refusing
        assert refused.value.code == "session_expired"
    with pytest.raises(NotFound, match="no such file"):
        await store.files.get_in_container("a", begun.session.container_id, record.id)
    await quiet(store)
    assert published(tmp_path) == []
    assert (counted(tmp_path), noted(tmp_path)) == ({}, {})
    assert count(tmp_path, "response_events") == 0
    with database(tmp_path) as rows:
        assert rows.execute("select request, response from responses").fetchall() == [("{}", "{}")]
        assert rows.execute("select title from sessions").fetchone() == (None,)


async def test_an_expired_session_is_not_listed_and_takes_nothing(store: ContentStore) -> None:
    made = await create(store)
    await expire(store)
    assert await store.sessions.page("a") == []
    assert not await store.sessions.exists(made.id)
    with pytest.raises(NotFound, match="no such session"):
        await add_artifact(store, made)
    record = await store.sessions.of_container("a", made.container_id)
    with pytest.raises(NotFound, match="past its retention"):
        refuse_expired(record)
    refuse_expired(made)


async def test_a_tombstone_can_be_deleted_and_does_not_stay(store: ContentStore) -> None:
    first, second = await create(store), await create(store)
    await expire(store)
    await store.sessions.delete("a", first.id)
    over = await store.sessions.expired(before=int(time.time()) + 1)
    assert [session.id for session in over] == [second.id]
    assert await store.sessions.expired(before=0) == []
    await store.sessions.delete("a", second.id)
    with pytest.raises(NotFound, match="no such session"):
        await store.sessions.get("a", second.id)


async def test_what_is_in_use_does_not_expire(store: ContentStore) -> None:
    begun = await begin(store)
    assert await expire(store) == []
    await finish(store, begun)
    touched = await create(store)
    later = int(time.time()) + 1000
    with patch("time.time", lambda: later):
        await add_artifact(store, touched)
    assert [one.id for one in await store.sessions.expire(idle_since=later - 1)] == [
        begun.session.id
    ]


async def test_a_session_that_is_touched_meanwhile_stays(store: ContentStore) -> None:
    made = await create(store)
    outcomes = await asyncio.gather(
        expire(store), add_artifact(store, made), return_exceptions=True
    )
    assert not any(isinstance(one, Exception) and not isinstance(one, Refusal) for one in outcomes)
    assert not await store.sessions._expire(made.id, 0)


async def test_which_sessions_are_missing(store: ContentStore) -> None:
    here, gone = await create(store), [f"hsess_{number}" for number in range(501)]
    assert await store.sessions.missing([here.id, *gone]) == set(gone)
    assert await store.sessions.missing([]) == set()


async def test_listing_from_sqlite_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path)
    with executed(store) as statements:
        await store.sessions.page("a", before=5)
        await store.sessions.page("a", before=5, harness_id=HARNESS)
        await store.sessions.expired(before=5)
    assert plans_of(tmp_path, statements) == [
        "SEARCH sessions USING INDEX ix_sessions_scope (scope=? AND id<?)",
        "SEARCH sessions USING INDEX ix_sessions_scope_harness (scope=? AND harness_id=? AND id<?)",
        "SEARCH sessions USING INDEX ix_sessions_expired_at (expired_at<?)",
    ]
    with executed(store) as statements:
        await store.sessions.expire(idle_since=5)
    assert plans_of(tmp_path, statements)[0] == (
        "SEARCH sessions USING INDEX ix_sessions_updated_at (updated_at<?)"
    )
    await store.close()
