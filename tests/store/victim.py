"""A process that dies by SIGKILL at a given step of the store."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from app.settings import Settings
from app.store import ContentStore, Reference
from tests.backends import COMMIT, CONFIRM, PUBLISH, UNLINK
from tests.store.stores import put, store_settings

Deed = Literal["receive", "remove", "sweep"]
Moment = Literal["before", "after"]

STEPS = {
    "write": "app.store.staging:StagedFile.write",
    "seal": "app.store.staging:StagedFile.seal",
    "publish": PUBLISH,
    "commit": COMMIT,
    "confirm": CONFIRM,
    "discard": "app.store.staging:StagedFile.discard",
    "close": "app.store.staging:Staging.close",
    "unlink": UNLINK,
}

# From a server that has the store loaded already, and that has no threads: a child is there at
# once, and inherits none of this process's locks.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def run(
    data_dir: Path,
    deed: Deed,
    step: str,
    moment: Moment,
    data: bytes = b"",
    ref: str = "",
    offset: float = 0.0,
) -> tuple[list[Reference], int]:
    """Do `deed` in a process that dies `moment` `step`; what it confirmed, and its exit status.

    Its clock is `offset` seconds ahead.
    """
    receiver, sender = _context.Pipe(duplex=False)
    arguments = (sender, store_settings(data_dir), deed, step, moment, data, ref, offset)
    process = _context.Process(target=_live, args=arguments)
    process.start()
    sender.close()
    confirmed = []
    try:
        while True:
            confirmed.append(receiver.recv())
    except EOFError:
        process.join(60)
    receiver.close()
    status = process.exitcode
    process.close()
    assert status is not None
    return confirmed, status


def _live(
    sender: Connection,
    settings: Settings,
    deed: Deed,
    step: str,
    moment: Moment,
    data: bytes,
    ref: str,
    offset: float,
) -> None:
    with patch("time.time", lambda clock=time.time: clock() + offset):
        asyncio.run(_do(sender, settings, deed, (step, moment), data, ref))


async def _do(
    sender: Connection,
    settings: Settings,
    deed: Deed,
    death: tuple[str, Moment],
    data: bytes,
    ref: str,
) -> None:
    store = await ContentStore.start(settings)
    _arm(*death)
    if deed == "receive":
        sender.send(await put(store, data))
    elif deed == "remove":
        await store.remove("a", ref)
    else:
        await store.sweep()
    await store.close()


def _arm(step: str, moment: Moment) -> None:
    module, _, path = STEPS[step].partition(":")
    name, _, method = path.partition(".")
    owner = getattr(importlib.import_module(module), name)
    original: Callable[..., Any] = getattr(owner, method)

    def deadly(*args: Any) -> Any:
        if moment == "after":
            original(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    async def deadly_on_the_loop(*args: Any) -> Any:
        if moment == "after":
            await original(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    is_async = inspect.iscoroutinefunction(original)
    setattr(owner, method, deadly_on_the_loop if is_async else deadly)
