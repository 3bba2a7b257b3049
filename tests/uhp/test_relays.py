"""What is heard of tasks that other processes run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest

from app.errors import Unavailable
from app.store import ContentStore
from app.store.responses import Other
from app.uhp import relays as relays_module
from app.uhp.feeds import Feeds
from app.uhp.relays import Relay, Relays
from tests.store.sessions import HARNESS, begin, finish
from tests.store.stores import new_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ContentStore]:
    opened = await new_store(tmp_path)
    yield opened
    await opened.close()


def relay_on(store: ContentStore, heard: list[str]) -> Relay:
    return Relay(store.responses, Other("a", HARNESS, "me"), heard.append)


async def test_only_what_comes_from_now_on_is_told_and_only_once(store: ContentStore) -> None:
    heard: list[str] = []
    relay = relay_on(store, heard)
    before = await begin(store, owner="they")
    await store.responses.append_events(before.response.id, [(0, "old")])
    await relay.begin()
    await store.responses.append_events(before.response.id, [(1, "new")])
    quick = await begin(store, owner="they")
    response = {**quick.response.response, "status": "completed"}
    await store.responses.finish(quick.response.id, response, [(0, "quick"), (1, "end")])
    await begin(store, owner="me")
    for _ in range(2):
        await relay.round()
    assert sorted(heard) == ["end", "new", "quick"]
    await finish(store, before)
    await relay.round()
    assert relay._told == {}


async def test_a_task_that_begins_while_the_feed_does_is_told_whole(store: ContentStore) -> None:
    heard: list[str] = []
    relay = relay_on(store, heard)
    with patch.object(type(store.responses), "position", lambda _: asyncio.sleep(0, 0)):
        task = await begin(store, owner="they")
        await store.responses.append_events(task.response.id, [(0, "first")])
        await relay.begin()
    await relay.round()
    assert heard == ["first"]


async def test_a_session_that_goes_leaves_nothing_to_be_read(store: ContentStore) -> None:
    relay = relay_on(store, [])
    task = await begin(store, owner="they")
    await relay.begin()
    await store.sessions.delete("a", task.session.id, running=True)
    await relay.round()
    assert relay._told == {}


async def test_many_listeners_have_one_reader(store: ContentStore) -> None:
    relays = Relays(store.responses, "me", Feeds())
    async with relays.reading(("a", HARNESS)):
        async with relays.reading(("a", HARNESS)), relays.reading(("b", HARNESS)):
            assert len(relays._readings) == 2
        (reading,) = relays._readings.values()
        assert not reading.task.done()
    assert relays._readings == {}
    assert reading.task.cancelled()


async def test_reading_goes_on_after_a_failure(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relays_module, "RELAY_SECONDS", 0.001)
    troubles: list[Exception] = [RuntimeError("broken"), Unavailable("database_busy", "Busy.")]
    real, feeds = store.responses.position, Feeds()

    async def position() -> int:
        if troubles:
            raise troubles.pop()
        return await real()

    with patch.object(store.responses, "position", position):
        relays = Relays(store.responses, "me", feeds)
        async with relays.reading(("a", HARNESS)), asyncio.timeout(20):
            await relays._readings["a", HARNESS].relay.begun.wait()
    assert "the tasks of other processes are not heard: database_busy" in caplog.text
    assert "broken" in caplog.text
