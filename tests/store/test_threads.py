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


async def test_hashing_and_writing_step_back_for_everybody_else() -> None:
    def note(_: object = None) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((nice, os.sched_getscheduler(0)))

    found: list[tuple[int, int]] = []
    workers = Workers(1)
    note()
    await workers.hash(note, memoryview(b""))
    await workers.write(note, memoryview(b""))
    await workers.submit(note)
    workers.close()
    ours = found[0]
    assert found == [ours, *[(min(ours[0] + STEPPED_BACK, 19), os.SCHED_BATCH)] * 2, ours]


async def test_a_sandbox_in_which_no_thread_can_step_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under systemd without @resources: bodies are taken in all the same."""

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    monkeypatch.setattr(os, "nice", forbidden)
    done: list[bytes] = []
    workers = Workers(1)
    await workers.hash(lambda octets: done.append(bytes(octets)), memoryview(b"body"))
    workers.close()
    assert done == [b"body"]
