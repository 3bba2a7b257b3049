"""Feeds: live, numbered anew, bounded, and over when the server is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from app.uhp import feeds as feeds_module
from app.uhp.feeds import Feeds
from app.uhp.streaming import Event, event_of

pytestmark = pytest.mark.anyio

KEY = ("a", "chrn_1")


def payload(number: int) -> str:
    return event_of(number, "response.created")[1]


async def taken(feed: AsyncGenerator[Event, None], count: int) -> list[Event]:
    return [await anext(feed) for _ in range(count)]


async def listening(feeds: Feeds) -> tuple[AsyncGenerator[Event, None], asyncio.Task[Event]]:
    """A feed whose first event is waited for."""
    feed = feeds.listen(KEY)

    async def first() -> Event:
        return await anext(feed)

    task = asyncio.create_task(first())
    await asyncio.sleep(0)
    return feed, task


async def test_a_feed_begins_where_its_listener_comes_in() -> None:
    feeds = Feeds()
    feeds.publish(KEY, payload(5))
    feed, first = await listening(feeds)
    feeds.publish(("b", "chrn_1"), payload(6))
    feeds.publish(KEY, payload(7))
    feeds.publish(KEY, payload(8))
    shown = [await first, await anext(feed)]
    assert [number for number, _ in shown] == [0, 1]
    assert [json.loads(text)["sequence_number"] for _, text in shown] == [0, 1]
    await feed.aclose()
    assert feeds._listening == {}


async def test_what_a_slow_listener_misses_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds_module, "MAX_WAITING_CHARACTERS", 3 * len(payload(0)))
    feeds = Feeds()
    feed, first = await listening(feeds)
    for number in range(9):
        feeds.publish(KEY, payload(number))
    shown = [await first, *await taken(feed, 2)]
    assert [number for number, _ in shown] == [6, 7, 8]
    feeds.publish(KEY, event_of(9, "error", message="x" * 1000)[1])
    assert (await anext(feed))[0] == 9
    await feed.aclose()


async def test_the_end_of_the_server_ends_every_feed() -> None:
    feeds = Feeds()
    feed, first = await listening(feeds)
    other, second = await listening(feeds)
    feeds.publish(KEY, payload(0))
    await other.aclose() if second.done() else second.cancel()
    feeds.close()
    assert (await first)[0] == 0
    assert [event async for event in feed] == []
    assert [event async for event in feeds.listen(KEY)] == []
