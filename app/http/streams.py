"""Sending what is too large to hold: piece by piece, for as long as somebody reads it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from app.errors import Disconnected
from app.store.blobs import FileSpan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
    from typing import Any

    from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

ZERO_COPY = "http.response.zerocopysend"
"""The ASGI extension, and the type of its message, by which the server sends a part of a file."""


def takes_files(scope: Scope) -> bool:
    """Whether the server of a request takes ZERO_COPY."""
    return ZERO_COPY in scope.get("extensions", {})


Piece = bytes | FileSpan
"""Of the body of an answer: in memory, or in a file that the server sends from."""

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
    pieces: AsyncIterator[Piece],
    *,
    status: int = 200,
    length: int | None = None,
) -> None:
    """Send an answer whose body is `pieces`, and promise `length` bytes where that is known.

    Files are among them only where the server takes ZERO_COPY. The next piece is read while one
    that is in memory is sent, so no more than two are; a file may be closed by whoever gave it
    once the next piece is asked for. The first is there before the answer begins: what fails up to
    then can still be refused. Whatever fails later is raised, and the server cuts the connection.

    Raises Disconnected, LengthMismatch, and what `pieces` raises.
    """
    declared = [] if length is None else [(b"content-length", b"%d" % length)]
    start = {"type": "http.response.start", "status": status, "headers": [*headers, *declared]}
    await while_connected(receive, _relay(send, start, pieces, length))
    await send({"type": "http.response.body", "body": b""})


async def _relay(
    send: Send, start: dict[str, Any], pieces: AsyncIterator[Piece], length: int | None
) -> None:
    sent = 0
    async for piece in _read_ahead(pieces):
        if not sent:
            await send(start)
        sent += len(piece)
        if length is not None and sent > length:
            raise LengthMismatch
        for message in _messages(piece):
            await send(message)
    if length is not None and sent < length:
        raise LengthMismatch
    if not sent:
        await send(start)


def _messages(piece: Piece) -> Iterator[Message]:
    if isinstance(piece, FileSpan):
        for offset in range(piece.start, piece.stop, PART_BYTES):
            count = min(PART_BYTES, piece.stop - offset)
            part = {"file": piece, "offset": offset, "count": count}
            yield {"type": ZERO_COPY, **part, "more_body": True}
    else:
        yield {"type": "http.response.body", "body": piece, "more_body": True}


async def _read_ahead(pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    """The pieces that hold anything, each next one fetched while one from memory is in use."""
    upcoming = asyncio.ensure_future(_next(pieces))
    try:
        while (piece := await upcoming) is not None:
            if isinstance(piece, FileSpan):
                yield piece
                upcoming = asyncio.ensure_future(_next(pieces))
            else:
                upcoming = asyncio.ensure_future(_next(pieces))
                if piece:
                    yield piece
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)


async def _next(pieces: AsyncIterator[Piece]) -> Piece | None:
    return await anext(pieces, None)
