"""What each scope keeps, counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.store import ContentStore
from app.store.accounts import Population, ScopeUsage
from tests.store.events import deliver
from tests.store.sessions import add_artifact, add_upload, begin, executed, plans_of
from tests.store.stores import database, new_sqlite_store, new_store, put

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ContentStore]:
    opened = await new_store(tmp_path / "data")
    yield opened
    await opened.close()


async def one(store: ContentStore, scope: str = "a") -> ScopeUsage:
    (usage,) = await store.accounts.of_scopes(scope)
    return usage


async def test_an_empty_store_keeps_nothing(store: ContentStore) -> None:
    assert await store.accounts.of_scopes() == []
    assert await store.accounts.of_scopes("a") == []
    assert await store.accounts.population() == Population(0, 0, 0)


async def test_everything_a_scope_keeps_is_counted(store: ContentStore) -> None:
    first = await put(store, b"12345")
    await put(store, b"12345")
    await add_upload(store, b"12345")
    begun = await begin(store)
    await add_artifact(store, begun.session, b"1234567")
    event = await deliver(store, first.ref)
    usage = await one(store)
    assert usage == ScopeUsage(
        scope="a",
        references=2,
        files=2,
        sessions=1,
        events=1,
        logical_bytes=5 + 5 + 5 + 7,
        stored_bytes=5 + 7,
        oldest=usage.oldest,
        newest=usage.newest,
    )
    assert usage.oldest is not None
    assert usage.newest is not None
    assert first.created_at <= usage.oldest <= usage.newest
    assert event.received_at <= usage.newest
    assert await store.accounts.population() == Population(1, 2, 12)


async def test_what_two_scopes_share_counts_for_both(store: ContentStore) -> None:
    await put(store, b"12345", scope="b")
    await put(store, b"12345", scope="a")
    await put(store, b"1", scope="a")
    found = await store.accounts.of_scopes()
    assert [(u.scope, u.references, u.stored_bytes) for u in found] == [("a", 2, 6), ("b", 1, 5)]
    assert [u.scope for u in await store.accounts.of_scopes("b")] == ["b"]


async def test_bytes_that_only_an_event_keeps_are_stored_and_not_logical(
    store: ContentStore,
) -> None:
    reference = await put(store, b"12345")
    await deliver(store, reference.ref)
    await store.remove("a", reference.ref)
    usage = await one(store)
    assert (usage.references, usage.events) == (0, 1)
    assert (usage.logical_bytes, usage.stored_bytes) == (0, 5)


async def test_the_oldest_and_the_newest_are_found(tmp_path: Path, store: ContentStore) -> None:
    for data in (b"a", b"b", b"c"):
        await put(store, data)
    with database(tmp_path / "data") as rows:
        rows.execute("update content_refs set created_at = 1000 + id")
    usage = await one(store)
    assert usage.oldest is not None
    assert usage.newest is not None
    assert usage.newest - usage.oldest == 2


async def test_the_session_of_a_scope_without_bytes_is_there(store: ContentStore) -> None:
    session = await store.sessions.create(scope="a", principal="alice")
    usage = await one(store)
    assert (usage.sessions, usage.logical_bytes, usage.stored_bytes) == (1, 0, 0)
    assert usage.oldest == usage.newest == session.created_at
    await store.sessions.expire(idle_since=session.updated_at + 1)
    assert await store.accounts.of_scopes() == []


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(min_size=1, max_size=2)), max_size=8))
async def test_counts_are_those_of_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, stored: list[tuple[str, bytes]]
) -> None:
    store = await new_store(tmp_path_factory.mktemp("accounts"))
    try:
        for scope, data in stored:
            await put(store, data, scope=scope)
        found = {u.scope: u for u in await store.accounts.of_scopes()}
    finally:
        await store.close()
    assert set(found) == {scope for scope, _ in stored}
    for scope, usage in found.items():
        own = [data for other, data in stored if other == scope]
        assert usage.references == len(own)
        assert usage.logical_bytes == sum(map(len, own))
        assert usage.stored_bytes == sum(map(len, set(own)))


async def test_a_scope_is_counted_by_the_indexes_of_its_listings(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path / "data")
    await put(store, b"a")
    with executed(store) as statements:
        await store.accounts.of_scopes("a")
    await store.close()
    plans: Any = plans_of(tmp_path / "data", statements)
    for index in ("ix_content_refs_scope", "ix_events_scope", "ix_sessions_scope"):
        assert any(index in plan for plan in plans), plans
