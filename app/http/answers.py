"""Sending an answer: the one place that turns status, headers and bytes into ASGI messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope, Send

    from app.http.bodies import RequestBody

JSON = b"application/json"
PROBLEM = b"application/problem+json"

STAGED_CLOSE = "consignee.staged_close"
"""The ASGI extension of a server that sees an answer arrive before it closes a connection."""


_encoder = json.JSONEncoder(separators=(",", ":"))


def encode_json(value: Any) -> bytes:
    """Compact ASCII JSON."""
    return _encoder.encode(value).encode("ascii")


async def send_whole(
    send: Send,
    status: int,
    content_type: bytes,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete answer."""
    await _start(send, status, content_type, body, headers)
    await send({"type": "http.response.body", "body": body})


async def send_early(
    scope: Scope,
    send: Send,
    unread: RequestBody,
    status: int,
    content_type: bytes,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete answer while the client may still be sending its body, and see it arrive.

    The answer leaves at once; then the rest of the body is read and dropped within bounds, and the
    connection closes (AHP-R51, B13). Nothing of it is ever taken for a next request. The server
    does the dropping where it can (`STAGED_CLOSE`), this function does it elsewhere.
    """
    if unread.complete:
        await send_whole(send, status, content_type, body, headers)
        return
    headers = [*headers, (b"connection", b"close")]
    if STAGED_CLOSE in scope.get("extensions", ()):
        await send_whole(send, status, content_type, body, headers)
        return
    await _start(send, status, content_type, body, headers)
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await unread.drain()
    await send({"type": "http.response.body", "body": b""})


async def _start(
    send: Send,
    status: int,
    content_type: bytes,
    body: bytes,
    headers: Sequence[tuple[bytes, bytes]],
) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", content_type),
                (b"content-length", b"%d" % len(body)),
                *headers,
            ],
        }
    )
