"""Work off the event loop, and waiting that a cancellation cannot cut short."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, TypeVarTuple

from anyio import CancelScope

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEPPED_BACK = 10
"""How much nicer a thread gets that steps back: a tenth of what others get is left to it, where
there is not enough."""


class Workers:
    """The bounded pools of threads for what would hold up the event loop.

    Those that read files and ask the database are one. Hashing and writing bodies keep processors
    busy all the time: they have threads of their own, which step back for all others, so that
    neither the event loop nor a download queues up behind an upload. One processor fewer hashes
    than there are.
    """

    def __init__(self, threads: int, *, name: str = "consignee-io") -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._hashing = _bulk(max(1, processors() - 1), "consignee-hash")
        self._writing = _bulk(max(2, processors()), "consignee-write")

    def submit(self, step: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Start `step` in the pool."""
        return asyncio.get_running_loop().run_in_executor(self._pool, step, *args)

    def hash(
        self, update: Callable[[memoryview], None], octets: memoryview
    ) -> asyncio.Future[None]:
        """Start to `update` a digest."""
        return asyncio.get_running_loop().run_in_executor(self._hashing, update, octets)

    def write(
        self, append: Callable[[memoryview], None], octets: memoryview
    ) -> asyncio.Future[None]:
        """Start to `append` to a file of a body."""
        return asyncio.get_running_loop().run_in_executor(self._writing, append, octets)

    async def run(self, step: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `step` in the pool. A cancelled caller still waits for a step that has begun."""
        future = self.submit(step, *args)
        await settle(future)
        return future.result()

    def close(self) -> None:
        """Wait for running steps and end the threads. Legal twice."""
        self._pool.shutdown(wait=True)
        self._hashing.shutdown(wait=True)
        self._writing.shutdown(wait=True)


def processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _bulk(threads: int, name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, name, initializer=_step_back)


def _step_back() -> None:
    """Leave processors to the other threads of this process, and never take one from them."""
    if sys.platform == "linux":  # elsewhere it is a matter of whole processes
        with suppress(PermissionError):  # a sandbox may forbid it: then all threads are alike
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.nice(STEPPED_BACK)


async def settle(*futures: asyncio.Future[Any]) -> None:
    """Wait until every one of `futures` is done, cancelled or not; then raise the cancellation."""
    try:
        await asyncio.wait(futures)
    except asyncio.CancelledError:
        await _outlast(futures)
        raise


async def _outlast(futures: tuple[asyncio.Future[Any], ...]) -> None:
    # A native cancellation arrives once per cancel(), one of an anyio scope at every await:
    # the shield keeps the second kind from spinning here.
    with CancelScope(shield=True):
        while not all(future.done() for future in futures):
            try:
                await asyncio.wait(futures)
            except asyncio.CancelledError:
                continue
    for future in futures:
        if not future.cancelled():
            future.exception()  # seen: the cancellation is what the caller gets to know


async def uninterrupted(steps: Coroutine[Any, Any, T]) -> T:
    """Run `steps` to their end even if the caller is cancelled, which then still raises."""
    task = asyncio.get_running_loop().create_task(steps)
    await settle(task)
    return task.result()
