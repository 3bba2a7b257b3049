"""Sending piece by piece: what is in memory, what a client that goes ends, what a fault does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from starlette.types import Message

from app.errors import Disconnected
from app.http.streams import ZERO_COPY, LengthMismatch, Piece, send_stream, while_connected
from app.store.blobs import FileSpan
from tests.http.messages import DISCONNECT, Sent, receiving

pytestmark = pytest.mark.anyio


async def _chunks(*chunks: bytes, failing: bool = False) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk
    if failing:
        raise OSError("gone")


async def test_the_chunks_are_the_body_and_the_length_is_declared() -> None:
    sent = Sent()
    await send_stream(
        receiving(), sent, [(b"a", b"b")], _chunks(b"one", b"", b"two"), status=206, length=6
    )
    assert sent.status == 206
    assert sent.headers == {b"a": b"b", b"content-length": b"6"}
    assert [message["body"] for message in sent.messages[1:]] == [b"one", b"two", b""]
    assert sent.is_complete


@pytest.mark.requirement("B10")
async def test_a_body_of_nothing_is_an_answer_too() -> None:
    sent = Sent()
    await send_stream(receiving(), sent, [], _chunks(), length=0)
    assert sent.headers == {b"content-length": b"0"}
    assert sent.body == b""
    assert sent.is_complete


async def test_without_a_length_none_is_declared() -> None:
    sent = Sent()
    await send_stream(receiving(), sent, [], _chunks(b"x"))
    assert sent.headers == {}
    assert sent.body == b"x"


async def test_what_fails_before_the_first_chunk_begins_no_answer() -> None:
    sent = Sent()
    with pytest.raises(OSError, match="gone"):
        await send_stream(receiving(), sent, [], _chunks(failing=True), length=3)
    assert sent.messages == []


@pytest.mark.requirement("B62")
async def test_what_fails_later_is_raised_and_ends_no_answer() -> None:
    sent = Sent()
    with pytest.raises(OSError, match="gone"):
        await send_stream(receiving(), sent, [], _chunks(b"abc", failing=True))
    assert sent.body == b"abc"
    assert not sent.is_complete


@pytest.mark.requirement("B53", "B62")
@pytest.mark.parametrize("chunks", [[b"abc"], [b"abc", b"def", b"g"], []])
async def test_another_length_than_the_promised_one_never_ends_well(chunks: list[bytes]) -> None:
    sent = Sent()
    with pytest.raises(LengthMismatch):
        await send_stream(receiving(), sent, [], _chunks(*chunks), length=6)
    assert not sent.is_complete
    assert len(b"".join(message.get("body", b"") for message in sent.messages)) <= 6


async def test_no_more_than_one_chunk_is_read_ahead() -> None:
    given = 0
    held: list[int] = []
    sent = Sent()

    async def counting() -> AsyncIterator[bytes]:
        nonlocal given
        for _ in range(20):
            given += 1
            yield b"x"

    async def send(message: Message) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        if message.get("body"):
            held.append(given - len(held))
        await sent(message)

    await send_stream(receiving(), send, [], counting(), length=20)
    assert sent.body == b"x" * 20
    assert max(held) == 2


async def test_a_client_that_goes_ends_the_source_at_once() -> None:
    closed = asyncio.Event()
    gone = asyncio.Event()

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"x"
            await asyncio.get_running_loop().create_future()
        finally:
            closed.set()

    async def receive() -> Message:
        await gone.wait()
        return DISCONNECT

    async def send(message: Message) -> None:
        if message.get("body"):
            gone.set()

    with pytest.raises(Disconnected):
        async with aclosing(endless()) as chunks:
            await send_stream(receive, send, [], chunks)
    assert closed.is_set()


async def test_other_messages_than_the_end_of_the_client_mean_nothing() -> None:
    sent = Sent()
    request: Message = {"type": "http.request", "body": b"", "more_body": False}
    await send_stream(receiving(request), sent, [], _chunks(b"x"), length=1)
    assert sent.is_complete


async def test_work_gives_its_result_and_raises_its_error() -> None:
    async def work(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 5

    assert await while_connected(receiving(), work(None)) == 5
    with pytest.raises(ValueError, match="x"):
        await while_connected(receiving(), work(ValueError("x")))


async def test_work_ends_with_whoever_waits_for_it() -> None:
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    waiting = asyncio.create_task(while_connected(receiving(), work()))
    await begun.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended.is_set()


async def test_nothing_is_read_ahead_of_a_file_that_is_sent() -> None:
    """Who gave it may close it as soon as more is asked for."""
    asked = []

    async def pieces() -> AsyncIterator[Piece]:
        for number in range(3):
            asked.append(number)
            yield FileSpan(7, number, number + 1)

    async def send(message: Message) -> None:
        await asyncio.sleep(0)
        if message["type"] == ZERO_COPY:
            assert asked[-1] == message["offset"]
            sent.append(message["offset"])

    sent: list[int] = []
    await send_stream(receiving(), send, [], pieces(), length=3)
    assert sent == [0, 1, 2]
