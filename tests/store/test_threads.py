"""Waiting that a cancellation cannot cut short."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest

from app.store.threads import STEPPED_BACK, Workers, settle, uninterrupted

pytestmark = pytest.mark.anyio

ENDINGS: list[Callable[[asyncio.Future[None]], object]] = [
    lambda future: future.set_result(None),
    lambda future: future.set_exception(OSError()),
    lambda future: future.cancel(),
]


@pytest.mark.parametrize("end", ENDINGS, ids=["result", "error", "cancelled"])
async def test_a_cancelled_caller_waits_for_the_end_whatever_it_is(
    end: Callable[[asyncio.Future[None]], object],
) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settle(future))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    end(future)
    await asyncio.wait([task])
    assert task.cancelled()


async def test_uninterrupted_steps_come_to_their_end() -> None:
    done: list[str] = []

    async def steps() -> None:
        await asyncio.sleep(0)
        done.append("steps")

    task = asyncio.create_task(uninterrupted(steps()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), done) == (True, ["steps"])


async def test_uninterrupted_steps_give_their_result_and_their_error() -> None:
    async def gives() -> int:
        return 1

    async def fails() -> int:
        raise OSError

    assert await uninterrupted(gives()) == 1
    with pytest.raises(OSError):  # noqa: PT011 - it has no message
        await uninterrupted(fails())


@pytest.mark.parametrize(("processors", "threads"), [(1, 1), (2, 1), (8, 7)])
@pytest.mark.parametrize("knows_its_own", [True, False])
def test_hashing_leaves_a_processor_to_the_others(
    monkeypatch: pytest.MonkeyPatch, processors: int, threads: int, knows_its_own: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    if not knows_its_own:
        monkeypatch.delattr(os, "sched_getaffinity")
    pool = Workers(1)
    assert pool._hashing._max_workers == threads
    pool.close()


async def test_hashing_steps_back_for_everybody_else() -> None:
    """With a digest that takes its time, the others still get the processor."""

    def nice(_: object = None) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    found: list[int] = []
    workers = Workers(1)
    nice()
    await workers.hash(nice, memoryview(b""))
    await workers.submit(nice)
    workers.close()
    assert found == [found[0], found[0] + STEPPED_BACK, found[0]]
