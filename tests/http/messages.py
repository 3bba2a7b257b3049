"""ASGI by hand: the scope, `receive` and `send` that a server would bring."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope

from app.http.bodies import BodyLimits
from app.http.middleware import RECORD_KEY, RequestRecord

Header = tuple[bytes, bytes]

LIMITS = BodyLimits(
    idle_seconds=30, min_bytes_per_second=512, drain_bytes=1 << 20, drain_seconds=30
)


def http_scope(
    method: str = "POST",
    path: str = "/",
    headers: Iterable[Header] = (),
    **more: Any,
) -> Scope:
    """A request as the server describes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": list(headers),
        "server": ("127.0.0.1", 8080),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        RECORD_KEY: RequestRecord("0123456789abcdef"),
        **more,
    }


def announcing(size: int) -> list[Header]:
    """The header of a body of `size` bytes."""
    return [(b"content-length", b"%d" % size)]


def chunk(body: bytes, *, more: bool = True) -> Message:
    """A part of a request body."""
    return {"type": "http.request", "body": body, "more_body": more}


DISCONNECT: Message = {"type": "http.disconnect"}


def receiving(*messages: Message) -> Receive:
    """`receive` that gives `messages` and then waits for ever, as an idle connection does."""
    waiting = list(messages)

    async def receive() -> Message:
        if not waiting:
            await asyncio.get_running_loop().create_future()
        return waiting.pop(0)

    return receive


async def receive_nothing() -> Message:
    """`receive` for what must not touch the body."""
    raise AssertionError("the body was asked for")


class Sent:
    """`send` that keeps what it is given, and the answer that this amounts to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def status(self) -> int:
        status: int = self.messages[0]["status"]
        return status

    @property
    def headers(self) -> dict[bytes, bytes]:
        pairs: list[Header] = self.messages[0]["headers"]
        assert len(dict(pairs)) == len(pairs), "a header appears twice"
        return dict(pairs)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.messages[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_complete(self) -> bool:
        """Whether the last message ends the answer, and none before it does."""
        ends = [not message.get("more_body", False) for message in self.messages[1:]]
        return bool(ends) and ends == [False] * (len(ends) - 1) + [True]


@asynccontextmanager
async def living(app: ASGIApp) -> AsyncIterator[dict[str, Any]]:
    """Run the lifespan of `app` around the block, as a server does; gives its state.

    An error of the application at start is raised here, one at its end is raised on leaving.
    """
    state: dict[str, Any] = {}
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": state}
    lifespan = asyncio.ensure_future(app(scope, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    first = asyncio.ensure_future(sent.get())
    await asyncio.wait({lifespan, first}, return_when=asyncio.FIRST_COMPLETED)
    if not first.done() or first.result()["type"] != "lifespan.startup.complete":
        first.cancel()
        await lifespan
        raise AssertionError("the application did not start")
    try:
        yield state
    finally:
        received.put_nowait({"type": "lifespan.shutdown"})
        await lifespan
