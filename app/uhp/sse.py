"""Server-Sent Events as an answer: events as they come, a comment in silence, no buffering."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from app.uhp.streaming import KEEP_ALIVE, frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message, Receive, Scope, Send

    from app.uhp.streaming import Event

KEEP_ALIVE_SECONDS = 15.0
"""Half of what the Errors chapter (section 5) allows, so that a proxy's jitter does no harm."""

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """An ASGI application that sends `events`, each a sequence number and its JSON.

    A client that goes ends the sending at once, and nothing else: the task runs on (B96). What
    `events` raises cuts the connection. HEAD waits for no event.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        *,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        gone = asyncio.ensure_future(receive())
        try:
            async with aclosing(self._events):
                async for piece in self._pieces(gone):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            if not gone.done():
                await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _pieces(self, gone: asyncio.Future[Message]) -> AsyncIterator[bytes]:
        following: asyncio.Task[Event] | None = None
        try:
            while True:
                following = following or asyncio.ensure_future(_next(self._events))
                waiting: set[asyncio.Future[Any]] = {following, gone}
                await asyncio.wait(
                    waiting,
                    timeout=self._keep_alive_seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if gone.done():
                    return
                if not following.done():
                    yield KEEP_ALIVE
                    continue
                try:
                    number, payload = following.result()
                except StopAsyncIteration:
                    return
                following = None
                yield frame(number, payload)
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)
