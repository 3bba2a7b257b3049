"""Sending what is too large to hold: piece by piece, for as long as somebody reads it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from app.errors import Disconnected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Sequence
    from typing import Any

    from starlette.types import Receive, Send

    from app.store.blobs import FileSpan

T = TypeVar("T")

ZERO_COPY = "http.response.zerocopysend"
"""The ASGI extension, and the type of its message, by which the server sends a part of a file."""

PART_BYTES = 16 * 1024 * 1024
"""Of a file, said to the server at once: what is counted as sent may be so much ahead."""


class LengthMismatch(Exception):
    """A source gave another number of bytes than was promised.

    Raised after the answer has begun: it cuts the connection, so that nobody takes a short answer
    for a whole one.
    """


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`; when the client goes first, end it at once and raise Disconnected.

    `receive` gives `http.disconnect` when the client goes, and nothing that anybody needs.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_stream(
    receive: Receive,
    send: Send,
    headers: Sequence[tuple[bytes, bytes]],
    chunks: AsyncIterator[bytes],
    *,
    status: int = 200,
    length: int | None = None,
) -> None:
    """Send an answer whose body is `chunks`, and promise `length` bytes where that is known.

    The next chunk is read while one is sent, so no more than two are in memory. The first is
    there before the answer begins: what fails up to then can still be refused. Whatever fails
    later is raised, and the server cuts the connection.

    Raises Disconnected, LengthMismatch, and what `chunks` raises.
    """
    declared = [] if length is None else [(b"content-length", b"%d" % length)]
    start = {"type": "http.response.start", "status": status, "headers": [*headers, *declared]}
    await while_connected(receive, _relay(send, start, chunks, length))
    await send({"type": "http.response.body", "body": b""})


async def send_file(
    receive: Receive,
    send: Send,
    headers: Sequence[tuple[bytes, bytes]],
    file: FileSpan,
    *,
    status: int = 200,
) -> None:
    """Send an answer whose body is a part of a file, where the server takes ZERO_COPY.

    Raises as `send_stream` does, once the answer has begun.
    """
    length = (b"content-length", b"%d" % (file.stop - file.start))
    start = {"type": "http.response.start", "status": status, "headers": [*headers, length]}
    await while_connected(receive, _hand_over(send, start, file))
    await send({"type": "http.response.body", "body": b""})


async def _hand_over(send: Send, start: dict[str, Any], file: FileSpan) -> None:
    await send(start)
    for offset in range(file.start, file.stop, PART_BYTES):
        count = min(PART_BYTES, file.stop - offset)
        part = {"file": file, "offset": offset, "count": count, "more_body": True}
        await send({"type": ZERO_COPY, **part})


async def _relay(
    send: Send, start: dict[str, Any], chunks: AsyncIterator[bytes], length: int | None
) -> None:
    sent = 0
    async for chunk in _read_ahead(chunks):
        if not sent:
            await send(start)
        sent += len(chunk)
        if length is not None and sent > length:
            raise LengthMismatch
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    if length is not None and sent < length:
        raise LengthMismatch
    if not sent:
        await send(start)


async def _read_ahead(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks that hold anything, each next one fetched while the one before is in use."""
    upcoming = asyncio.ensure_future(_next(chunks))
    try:
        while (chunk := await upcoming) is not None:
            upcoming = asyncio.ensure_future(_next(chunks))
            if chunk:
                yield chunk
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    return await anext(chunks, None)
