"""A settled file goes into a plain connection from the kernel's own cache, and under every rule."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from app.sender.budget import Budget
from app.sender.errors import BudgetExceeded, SendError, SourceError, TransferError
from app.sender.sources import Snapshot, Source
from app.sender.spool import MEMORY_BYTES, RANGE_BYTES
from app.sender.transfer import Receipt, Sender
from tests.certificates import write_certificate
from tests.sender.receivers import (
    JSON,
    Exchange,
    Receiver,
    Script,
    answer,
    confirm,
    hang,
    reset_before,
    scripted,
)
from tests.sender.watching import Leaks

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
LARGE = os.urandom(32 * MIB + 17)
DIGEST = hashlib.sha256(LARGE).hexdigest()


class Anonymous:
    async def credential(self, *_: object) -> str:
        return "Bearer upload"


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    return path


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the kernel sent, call by call. Every file counts as settled."""
    counts: list[int] = []
    real = os.sendfile

    def counted(*arguments: int) -> int:
        count = real(*arguments)
        counts.append(count)
        return count

    monkeypatch.setattr("app.sender.files.TICK_NS", -1)
    monkeypatch.setattr(os, "sendfile", counted)
    return counts


@asynccontextmanager
async def hashed(path: Path) -> AsyncIterator[Snapshot]:
    async with Source.file(path, in_place=True) as source:
        yield await source.snapshot(max_bytes=1 << 30, budget=Budget(60))


async def send(
    receiver: Receiver, path: Path, *, retries: int = 0, milliseconds: int = 30_000
) -> Receipt:
    async with hashed(path) as snapshot, Sender(Anonymous(), retries=retries) as sender:
        return await sender.upload(snapshot, receiver.configuration(timeoutMs=milliseconds))


async def failure(script: Script, path: Path) -> tuple[SendError, Exchange]:
    """How an upload to a receiver with this script fails, and what came there."""
    async with scripted(script) as receiver:
        with pytest.raises(SendError) as caught:
            await send(receiver, path)
        await receiver.exchanges[0].gone.wait()
    return caught.value, receiver.exchanges[0]


def after(least: int, act: Callable[[], object]) -> Script:
    """Read `least` bytes, then `act`, then confirm what was declared, whatever came."""

    async def script(exchange: Exchange) -> None:
        while exchange.received < least:
            await exchange.read_some(least - exchange.received)
        act()
        await exchange.read_body(keep=False)
        assert exchange.received == exchange.size
        receipt = {"ref": "r", "size": len(LARGE), "sha256": DIGEST}
        await exchange.say(201, json.dumps(receipt).encode(), JSON)

    return script


@pytest.mark.requirement("AHP-S14", "AHP-S36", "AHP-S41")
@pytest.mark.parametrize("size", [0, 1, MIB, MIB + 1, RANGE_BYTES + MIB + 1, len(LARGE)])
async def test_what_was_copied_goes_from_its_copy(size: int, body: Path, sent: list[int]) -> None:
    """All of it, to every receiver: nobody else can write to a copy."""
    os.truncate(body, size)
    async with scripted(confirm) as receiver, Sender(Anonymous()) as sender:
        async with Source.file(body) as source:
            await source.snapshot(max_bytes=1 << 30, budget=Budget(60))
            body.write_bytes(b"something else")
            configuration = receiver.configuration(timeoutMs=30_000)
            await asyncio.gather(*[sender.upload(source, configuration) for _ in range(3)])
        assert [bytes(each.body) for each in receiver.exchanges] == [LARGE[:size]] * 3
    assert sum(sent) == (3 * size if size > MEMORY_BYTES else 0)


@pytest.mark.requirement("AHP-S14", "AHP-S15")
@pytest.mark.parametrize(
    "size", [0, 1, MIB, MIB + 1, RANGE_BYTES, RANGE_BYTES + MIB, RANGE_BYTES + MIB + 1, len(LARGE)]
)
async def test_the_octets_are_those_of_the_file(size: int, body: Path, sent: list[int]) -> None:
    """All but the last piece, which is kept back until the file is known to be the same."""
    os.truncate(body, size)
    async with scripted(confirm) as receiver:
        receipt = await send(receiver, body)
        exchange = receiver.exchanges[0]
        assert bytes(exchange.body) == LARGE[:size]
        assert exchange.header("content-length") == str(size)
    assert receipt.sha256 == hashlib.sha256(LARGE[:size]).hexdigest()
    assert sum(sent) == max(0, size - 1) // MIB * MIB


async def test_progress_counts_what_the_kernel_took(body: Path) -> None:
    told: list[int] = []

    def tell(done: int, size: int) -> None:
        assert size == len(LARGE)
        told.append(done)

    async with (
        scripted(answer(503), confirm) as receiver,
        hashed(body) as snapshot,
        Sender(Anonymous(), first_pause_seconds=0.001) as sender,
    ):
        await sender.upload(snapshot, receiver.configuration(), progress=tell)
    once = [*range(0, 32 * MIB + 1, RANGE_BYTES), len(LARGE)]
    assert told == once * 2


async def test_over_tls_every_octet_is_encrypted(
    body: Path, tmp_path: Path, sent: list[int]
) -> None:
    certificate, key = write_certificate(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=certificate)
    async with scripted(confirm, tls=serving) as receiver, hashed(body) as snapshot:
        async with Sender(Anonymous(), trust=trusting) as sender:
            await sender.upload(snapshot, receiver.configuration())
        assert bytes(receiver.exchanges[0].body) == LARGE
    assert sent == []


async def test_a_lent_client_is_given_the_octets(body: Path, sent: list[int]) -> None:
    async with scripted(confirm) as receiver, hashed(body) as snapshot, httpx.AsyncClient() as lent:
        async with Sender(Anonymous(), client=lent) as sender:
            await sender.upload(snapshot, receiver.configuration())
        assert bytes(receiver.exchanges[0].body) == LARGE
    assert sent == []


async def test_a_file_that_is_not_settled_is_read_and_hashed_again(
    body: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sender.files.TICK_NS", 10**18)
    async with scripted(confirm) as receiver:
        await send(receiver, body)
        assert bytes(receiver.exchanges[0].body) == LARGE
    assert sent == []


@pytest.mark.requirement("AHP-S32")
@pytest.mark.parametrize("status", [403, 413])
async def test_an_early_refusal_stops_the_kernel(status: int, body: Path, sent: list[int]) -> None:
    async def refuse(exchange: Exchange) -> None:
        """The answer, and not a byte of the body is read before it has been heard."""
        await exchange.say(status)
        await asyncio.wait_for(exchange.gone.wait(), 60)

    async with scripted(refuse) as receiver:
        with pytest.raises(SendError) as caught:
            await send(receiver, body)
        receiver.exchanges[0].gone.set()
    assert caught.value.code == {403: "forbidden", 413: "too_large"}[status]
    assert sum(sent) < len(LARGE) - MIB


@pytest.mark.requirement("AHP-S32")
async def test_ahp_s32_a_cancelled_upload_sends_no_further_byte(
    body: Path, sent: list[int]
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.read_some(MIB)
        begun.set()
        await goes_on.wait()
        await exchange.count_what_comes()

    async with hashed(body) as snapshot, Sender(Anonymous()) as sender:
        with Leaks() as leaks:
            async with scripted(slow) as receiver:
                sending = asyncio.create_task(sender.upload(snapshot, receiver.configuration()))
                await begun.wait()
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                calls = len(sent)
                goes_on.set()
                await receiver.exchanges[0].gone.wait()
                assert receiver.exchanges[0].received <= sum(sent) < len(LARGE) - MIB
            assert not leaks.tasks()
            assert leaks.descriptors() == 0
        assert len(sent) == calls


@pytest.mark.requirement("AHP-S12")
async def test_ahp_s12_the_time_of_a_receiver_that_stops_reading_is_over(
    body: Path, sent: list[int]
) -> None:
    over = asyncio.Event()

    async def stop(exchange: Exchange) -> None:
        await exchange.read_some(1)
        await over.wait()
        await exchange.count_what_comes()

    async with scripted(stop) as receiver:
        with pytest.raises(BudgetExceeded):
            await send(receiver, body, milliseconds=300)
        over.set()
    assert 0 < sum(sent) < len(LARGE) - MIB


async def test_a_receiver_that_stops_reading_holds_no_thread(body: Path) -> None:
    """The loop has a few of them for everything: as many uploads would keep them from the rest."""
    stalled, over = [], asyncio.Event()

    async def stall(exchange: Exchange) -> None:
        if exchange.target == b"/stall":
            stalled.append(exchange)
            await over.wait()
        else:
            await confirm(exchange)

    async with (
        scripted(stall) as receiver,
        hashed(body) as snapshot,
        Sender(Anonymous()) as sender,
    ):
        hanging = [
            asyncio.create_task(sender.upload(snapshot, receiver.configuration("/stall")))
            for _ in range(40)
        ]
        assert (await sender.upload(snapshot, receiver.configuration())).sha256 == DIGEST
        for each in hanging:
            each.cancel()
        await asyncio.wait(hanging)
        over.set()
    assert stalled


async def test_a_connection_that_is_reset_is_lost(body: Path) -> None:
    error, exchange = await failure(reset_before, body)
    assert isinstance(error, TransferError)
    assert error.code == "connection_lost"
    assert error.transient
    assert exchange.received <= MIB


@pytest.mark.requirement("AHP-S20")
async def test_ahp_s20_a_retry_sends_everything_again(body: Path) -> None:
    async with scripted(reset_before, confirm) as receiver:
        assert (await send(receiver, body, retries=1)).sha256 == DIGEST
        assert bytes(receiver.exchanges[1].body) == LARGE


@pytest.mark.requirement("AHP-S41")
@pytest.mark.parametrize("rest", [0, MIB, 24 * MIB])
async def test_a_file_that_shrinks_meanwhile_has_changed(rest: int, body: Path) -> None:
    error, exchange = await failure(after(1, lambda: os.truncate(body, rest)), body)
    assert error.code == "changed"
    assert exchange.received < len(LARGE)


@pytest.mark.requirement("AHP-S41")
async def test_a_file_that_is_written_to_meanwhile_keeps_its_last_piece(body: Path) -> None:
    def overwrite() -> None:
        with body.open("r+b") as file:
            file.write(b"other")

    error, exchange = await failure(after(1, overwrite), body)
    assert error.code == "changed"
    assert exchange.received <= len(LARGE) - 17


@pytest.mark.requirement("AHP-S41")
async def test_a_file_that_changes_before_it_is_confirmed_is_not(body: Path) -> None:
    """The network takes the pages when it comes to them: all had left, and not all was taken."""

    def overwrite() -> None:
        with body.open("r+b") as file:
            file.write(b"other")

    error, exchange = await failure(after(len(LARGE), overwrite), body)
    assert isinstance(error, SourceError)
    assert error.code == "changed"
    assert exchange.received == len(LARGE)


async def test_a_file_that_was_removed_meanwhile_is_confirmed(body: Path) -> None:
    async with scripted(after(1, body.unlink)) as receiver:
        assert (await send(receiver, body)).size == len(LARGE)


async def test_of_several_files_at_once_one_fails(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(4)]
    for number, path in enumerate(paths):
        path.write_bytes(LARGE[number:])
    broken = len(LARGE) - 2

    async def by_size(exchange: Exchange) -> None:
        await (answer(413, early=True) if exchange.size == broken else confirm)(exchange)

    async with scripted(by_size) as receiver:
        ended = await asyncio.gather(
            *[send(receiver, path) for path in paths], return_exceptions=True
        )
        assert {len(each.body) for each in receiver.exchanges if each.size != broken} == {
            len(LARGE) - number for number in (0, 1, 3)
        }
    assert [getattr(each, "code", None) for each in ended] == [None, None, "too_large", None]


async def test_an_answer_that_never_comes_ends_with_the_time(body: Path) -> None:
    async with scripted(hang) as receiver:
        with pytest.raises(BudgetExceeded):
            await send(receiver, body, milliseconds=1000)
