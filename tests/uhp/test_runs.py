"""The events of a run: a window of them in memory, all of them for whoever follows."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from app.errors import Unavailable
from app.uhp import runs
from app.uhp.runs import EventLog
from app.uhp.streaming import Event

pytestmark = pytest.mark.anyio


def events(start: int, stop: int, size: int = 1) -> list[Event]:
    return [(number, "x" * size) for number in range(start, stop)]


async def nothing(_: int) -> list[Event]:
    return []


async def followed(log: EventLog, after: int = -1) -> list[int]:
    async with aclosing(log.follow(after, nothing)) as following:
        return [number async for number, _ in following]


async def test_followers_get_everything_from_where_they_are() -> None:
    log = EventLog()
    log.add(events(0, 3))
    early = asyncio.create_task(followed(log))
    late = asyncio.create_task(followed(log, 3))
    beyond = asyncio.create_task(followed(log, 99))
    await asyncio.sleep(0)
    log.add(events(3, 6))
    log.complete()
    assert await early == [0, 1, 2, 3, 4, 5]
    assert await late == [4, 5]
    assert await beyond == []
    assert await followed(log, 2) == [3, 4, 5]


@pytest.mark.requirement("S-04")
async def test_nobody_is_told_what_is_not_kept() -> None:
    log = EventLog()
    log.add(events(0, 3))
    told: list[int] = []

    async def follow() -> None:
        async with aclosing(log.follow(-1, nothing)) as following:
            async for number, _ in following:
                told.append(number)

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    assert told == []
    log.keep(log.unkept()[:2])
    await asyncio.sleep(0)
    assert told == [0, 1]
    log.complete()
    await following
    assert told == [0, 1, 2]


async def test_memory_holds_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HELD_EVENTS", 10)
    log = EventLog()
    log.add(events(0, 100))
    assert len(log.unkept()) == log.held == 100
    log.keep(log.unkept()[:50])
    assert (log.held, log.end, len(log.unkept())) == (50, 100, 50)
    log.keep(log.unkept())
    assert (log.held, log.end, log.unkept()) == (10, 100, [])


async def test_large_events_leave_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "HELD_CHARACTERS", 1000)
    log = EventLog()
    log.add(events(0, 10, size=300))
    log.keep(log.unkept())
    assert log.held == 3


async def test_what_left_memory_is_read_or_the_stream_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "HELD_EVENTS", 1)
    log = EventLog()
    log.add(events(0, 10))
    log.keep(log.unkept())
    log.complete()

    async def read(after: int) -> list[Event]:
        return events(after + 1, after + 4)

    async with aclosing(log.follow(-1, read)) as following:
        assert [number async for number, _ in following] == list(range(10))
    with pytest.raises(Unavailable):
        await followed(log)


@pytest.mark.parametrize(
    ("limit", "size"), [("MAX_UNKEPT_EVENTS", 1), ("MAX_UNKEPT_CHARACTERS", 4)]
)
async def test_whoever_is_faster_than_the_store_waits(
    monkeypatch: pytest.MonkeyPatch, limit: str, size: int
) -> None:
    monkeypatch.setattr(runs, limit, 5 * size)
    log = EventLog()
    log.add(events(0, 4, size))
    await log.room()
    log.add(events(4, 8, size))
    waiting = asyncio.create_task(log.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    log.keep(log.unkept()[:4])
    await waiting
    log.add(events(8, 20, size))
    waiting = asyncio.create_task(log.room())
    await asyncio.sleep(0)
    log.complete()
    await waiting
