"""What a thousand cancelled and failed deliveries leave behind: nothing (AHP-S39, S40)."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from app.sender import spool
from app.sender.attachments import Attachments
from app.sender.authorization import Credentials
from app.sender.budget import Budget
from app.sender.delivery import Delivery
from app.sender.publication import PublicationState
from app.sender.receivers import Receiver
from app.sender.sources import Source
from app.sender.transfer import Sender
from tests.sender.deliveries import LONG, attached, messages_of, receiver
from tests.sender.receivers import Exchange, answer, hang, reset_before, scripted
from tests.sender.receivers import Receiver as Scripted

pytestmark = pytest.mark.anyio

ROUNDS = 1000
AT_ONCE = 20
BODY = bytes(20_000)
SHOT = messages_of(attached("shot"))
TOKEN = {"type": "bearer", "tokenEnv": "TOKEN"}


async def by_path(exchange: Exchange) -> None:
    scripts = {b"/hang": hang, b"/reset": reset_before, b"/refuse": answer(400)}
    await scripts[exchange.target.partition(b"?")[0]](exchange)


@dataclass(frozen=True)
class Held:
    """What the process holds: open descriptors, tasks, and files with a name of spools."""

    descriptors: int
    tasks: int
    files: int

    @classmethod
    def now(cls, folder: Path) -> Held:
        return cls(
            psutil.Process().num_fds(), len(asyncio.all_tasks()), len(list(folder.iterdir()))
        )


async def stream() -> AsyncIterator[bytes]:
    for start in range(0, len(BODY), 4096):
        yield BODY[start : start + 4096]


async def failing() -> AsyncIterator[bytes]:
    yield BODY
    raise OSError("gone")


class Round:
    """One delivery that comes to nothing, in one of four ways."""

    def __init__(self, server: Scripted, sender: Sender) -> None:
        self._server = server
        self._sender = sender

    async def run(self, number: int) -> None:
        if number % 4 == 0:
            await self._cancel(number // 4)
        elif number % 4 == 1:
            assert await self._state("/reset") is PublicationState.FAILED
        elif number % 4 == 2:
            assert await self._state("/refuse") is PublicationState.FAILED
        else:
            assert await self._state("/refuse", failing) is PublicationState.FAILED

    async def _state(self, path: str, read: object = stream) -> PublicationState:
        one = self._receiver(path)
        async with (
            Attachments({"shot": Source.stream(read)}) as attachments,  # type: ignore[arg-type]
            Delivery(SHOT, [one], attachments, self._sender, budget=Budget(LONG)) as delivery,
        ):
            return (await delivery.publication(one)).state

    async def _cancel(self, number: int) -> None:
        """Cancel a delivery while its bytes are on the way, or after so many turns of the loop."""
        path = f"/hang?{number}"
        delivering = asyncio.create_task(self._state(path))
        if number % 2:
            await self._server_has(path.encode())
        for _ in range(number % 100):
            await asyncio.sleep(0)
        delivering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await delivering

    async def _server_has(self, target: bytes) -> None:
        while not any(each.head and each.target == target for each in self._server.exchanges):
            await asyncio.sleep(0.001)

    def _receiver(self, path: str) -> Receiver:
        return receiver(upload=self._server.configuration(path, auth=TOKEN))


async def test_ahp_s39_a_thousand_cancelled_and_failed_deliveries_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(spool, "MEMORY_BYTES", 1000)
    credentials = Credentials(environment={"TOKEN": "secret"})
    async with scripted(by_path) as server, Sender(credentials, retries=0) as sender:
        rounds = Round(server, sender)
        await run(rounds, server, 2 * AT_ONCE)
        before, threads = Held.now(tmp_path), threading.active_count()
        await run(rounds, server, ROUNDS)
        after, more = Held.now(tmp_path), threading.active_count() - threads
    assert after == before
    assert after.files == 0
    # The loop's own pool grows up to its size and no further, however much passes through it.
    assert more <= 32


async def run(rounds: Round, server: Scripted, count: int) -> None:
    for start in range(0, count, AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for number in range(start, min(start + AT_ONCE, count)):
                group.create_task(rounds.run(number))
    for exchange in server.exchanges:
        await exchange.gone.wait()
    server.exchanges.clear()
