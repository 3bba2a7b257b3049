"""Work that nobody leaves behind: steps off the event loop, and tasks that are ended (AHP-S40)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

from anyio import CancelScope

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(step: Callable[[*Ts], T], *args: *Ts, stop: Callable[[], object] = int) -> T:
    """Run `step` in the loop's own threads. A cancelled caller waits for its end, then goes.

    `stop` asks a step that takes its time to end.
    """
    running = asyncio.get_running_loop().run_in_executor(None, step, *args)
    try:
        await asyncio.wait((running,))
    except asyncio.CancelledError:
        stop()
        await _outlast(running)
        raise
    return running.result()


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel `task` and wait until it has ended, also when the caller is cancelled meanwhile."""
    task.cancel()
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await _outlast(task)
        raise
    _seen(task)


async def _outlast(running: asyncio.Future[Any]) -> None:
    # A native cancellation arrives once per cancel(), one of an anyio scope at every await:
    # the shield keeps the second kind from spinning here.
    with CancelScope(shield=True):
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                continue
    _seen(running)


def _seen(done: asyncio.Future[Any]) -> None:
    """Nobody asks how it ended: without this asyncio would complain of that later."""
    if not done.cancelled():
        done.exception()
