"""Blocking work off the event loop, never left running behind its caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from app.store.threads import uninterrupted

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_blocking(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `work` in a thread; a cancelled caller is let go only once the thread is done.

    So nothing is closed, removed or collected while a thread still works on it.
    """
    return await uninterrupted(asyncio.to_thread(work, *args))
