"""A thousand uploads that come to nothing leave nothing behind (AHP-S39, AHP-S40)."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from app.sender import spool as spools
from app.sender.errors import SendError
from app.sender.sources import Source
from app.sender.transfer import Sender
from tests.sender.receivers import (
    JSON,
    Exchange,
    Receiver,
    answer,
    answer_receipt,
    confirm,
    reset_after,
    reset_before,
    scripted,
)
from tests.sender.watching import Leaks

pytestmark = pytest.mark.anyio

UPLOADS = 1000
AT_ONCE = 20
BODY = Random(1).randbytes(300_000)

Ending = Callable[[Sender, Receiver], Awaitable[None]]


class Anonymous:
    async def credential(self, *_: object) -> None:
        return None


async def misbehave(exchange: Exchange) -> None:
    """What the path asks for."""
    scripts = {
        b"/refused": answer(413, early=True),
        b"/reset": reset_before,
        b"/lost": reset_after,
        b"/html": answer_receipt(lambda _: b"<html>", JSON),
        b"/confirmed": confirm,
    }
    if exchange.target in scripts:
        await scripts[exchange.target](exchange)
    else:
        await exchange.count_what_comes()


async def pieces() -> AsyncGenerator[bytes, None]:
    for start in range(0, len(BODY), 50_000):
        yield BODY[start : start + 50_000]


async def broken() -> AsyncGenerator[bytes, None]:
    yield BODY
    raise RuntimeError("the host's own failure")


async def stuck() -> AsyncGenerator[bytes, None]:
    yield BODY
    await asyncio.Event().wait()


def answered(path: str) -> Ending:
    """An upload that the receiver ends."""

    async def ending(sender: Sender, receiver: Receiver) -> None:
        async with Source.stream(pieces) as source:
            await sender.upload(source, receiver.configuration(path))

    return ending


def timed_out(*, reading: bool) -> Ending:
    """An upload whose time is over while it is read, or while it waits for its answer."""

    async def ending(sender: Sender, receiver: Receiver) -> None:
        async with Source.stream(stuck if reading else pieces) as source:
            await sender.upload(source, receiver.configuration("/hang", timeoutMs=30))

    return ending


def cancelled(*, after: int) -> Ending:
    """An upload that is cancelled some turns of the loop after it has begun."""

    async def ending(sender: Sender, receiver: Receiver) -> None:
        async with Source.stream(pieces) as source:
            upload = asyncio.create_task(sender.upload(source, receiver.configuration("/hang")))
            for _ in range(after):
                await asyncio.sleep(0)
            upload.cancel()
            await asyncio.wait((upload,))

    return ending


def shared() -> Ending:
    """One source for two receivers, of which one fails and one is cancelled."""

    async def ending(sender: Sender, receiver: Receiver) -> None:
        async with Source.stream(pieces) as source:
            failing = asyncio.create_task(sender.upload(source, receiver.configuration("/refused")))
            hanging = asyncio.create_task(sender.upload(source, receiver.configuration("/hang")))
            await asyncio.wait((failing,))
            hanging.cancel()
            await asyncio.wait((hanging,))
            await failing

    return ending


async def failing_source(sender: Sender, receiver: Receiver) -> None:
    async with Source.stream(broken) as source:
        await sender.upload(source, receiver.configuration("/confirmed"))


async def unused(sender: Sender, receiver: Receiver) -> None:
    del sender, receiver
    async with Source.stream(pieces):
        raise SendError("unused", "Nobody wanted it.")


ENDINGS: list[Ending] = [
    answered("/refused"),
    answered("/reset"),
    answered("/lost"),
    answered("/html"),
    timed_out(reading=True),
    timed_out(reading=False),
    cancelled(after=0),
    cancelled(after=1),
    cancelled(after=5),
    cancelled(after=40),
    cancelled(after=200),
    shared(),
    failing_source,
    unused,
]


async def many(sender: Sender, receiver: Receiver, count: int) -> int:
    """Run uploads to their bad end, some at once; gives the number of SendErrors."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(ending: Ending) -> bool:
        async with slots:
            try:
                await ending(sender, receiver)
            except SendError:
                return True
            return False

    ended = await asyncio.gather(*[one(ENDINGS[i % len(ENDINGS)]) for i in range(count)])
    return sum(ended)


def open_spools() -> int:
    """Descriptors of files that have no name (any more)."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).endswith("(deleted)") for link in links if os.path.islink(link))


@pytest.mark.requirement("AHP-S39", "AHP-S40", "AHP-S42")
async def test_ahp_s39_a_thousand_bad_ends_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spools, "MEMORY_BYTES", 1000)  # every snapshot goes to a file
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
    async with scripted(misbehave) as receiver, Sender(Anonymous(), retries=0) as sender:
        assert await many(sender, receiver, 5 * len(ENDINGS)) > 0  # threads are there now
        await quiet(receiver)
        spools_before = open_spools()
        with Leaks() as leaks:
            failed = await many(sender, receiver, UPLOADS)
            await quiet(receiver)
            assert leaks.tasks() == set()
            assert leaks.descriptors() == 0
            assert leaks.threads() == 0
        assert failed > UPLOADS // 2
        assert open_spools() == spools_before
        assert list(tmp_path.iterdir()) == []


async def quiet(receiver: Receiver) -> None:
    """Until the receiver, which is in this process too, has noticed every end."""
    for exchange in receiver.exchanges:
        await exchange.gone.wait()
        await exchange.closed()
    receiver.exchanges.clear()
    await asyncio.sleep(0)
