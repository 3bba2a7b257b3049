"""Server-Sent Events as an answer: at once, kept alive, and over when the client is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.uhp.sse import EventStream
from app.uhp.streaming import KEEP_ALIVE, Event, event_of
from tests.http.messages import DISCONNECT, Sent, http_scope, receiving

pytestmark = pytest.mark.anyio

FIRST, SECOND = event_of(0, "response.created"), event_of(1, "response.completed")


class Source:
    """Events on demand, which notes that it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            while (event := await self.queue.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.is_closed = True


@pytest.mark.requirement("B96")
async def test_events_leave_as_they_come() -> None:
    source, sent = Source(), Sent()
    app = EventStream(source.events())
    answering = asyncio.create_task(app(http_scope("GET"), receiving(), sent))
    for count, event in enumerate((FIRST, SECOND), start=1):
        source.queue.put_nowait(event)
        while len(sent.messages) <= count:
            await asyncio.sleep(0)
    source.queue.put_nowait(None)
    await answering
    assert sent.is_complete
    assert sent.headers == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache, no-transform",
        b"x-accel-buffering": b"no",
    }
    assert sent.body.startswith(b"id: 0\nevent: response.created\ndata: {")
    assert source.is_closed


@pytest.mark.requirement("B96")
async def test_silence_is_filled_with_comments() -> None:
    source, sent = Source(), Sent()
    app = EventStream(source.events(), keep_alive_seconds=0.001)
    answering = asyncio.create_task(app(http_scope("GET"), receiving(), sent))
    while sent.body.count(KEEP_ALIVE) < 3 if len(sent.messages) > 1 else True:
        await asyncio.sleep(0.001)
    source.queue.put_nowait(FIRST)
    source.queue.put_nowait(None)
    await answering
    assert sent.body.replace(KEEP_ALIVE, b"").startswith(b"id: 0\n")


@pytest.mark.requirement("B96")
async def test_a_client_that_goes_frees_everything_at_once() -> None:
    source, sent = Source(), Sent()
    await EventStream(source.events())(http_scope("GET"), receiving(DISCONNECT), sent)
    assert not sent.is_complete
    source.queue.put_nowait(FIRST)
    gone = asyncio.Event()

    async def receive() -> dict[str, str]:
        await gone.wait()
        return {"type": "http.disconnect"}

    second = Source()
    second.queue.put_nowait(FIRST)
    answering = asyncio.create_task(EventStream(second.events())(http_scope("GET"), receive, sent))
    while len(sent.messages) < 3:
        await asyncio.sleep(0)
    gone.set()
    await answering
    assert second.is_closed


async def test_a_source_that_fails_cuts_the_stream() -> None:
    source, sent = Source(), Sent()
    source.queue.put_nowait(FIRST)
    source.queue.put_nowait(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await EventStream(source.events())(http_scope("GET"), receiving(), sent)
    assert not sent.is_complete


async def test_head_waits_for_nothing() -> None:
    source, sent = Source(), Sent()
    await EventStream(source.events())(http_scope("HEAD"), receiving(), sent)
    assert (sent.status, sent.body, sent.is_complete) == (200, b"", True)
