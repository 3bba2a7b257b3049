"""Counted, bounded and disconnect-aware reading of a request body.

Nothing here buffers: a chunk is handed on as it arrives. Only time spent waiting for the client
counts against the client; a slow disk of ours does not.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.errors import Disconnected, TooSlow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from starlette.types import Message, Receive, Scope

    from app.settings import Settings


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bounds on how a body arrives; see the settings of the same names."""

    idle_seconds: float
    min_bytes_per_second: int
    drain_bytes: int
    drain_seconds: float

    @classmethod
    def of(cls, settings: Settings) -> BodyLimits:
        """The limits that the configuration gives."""
        return cls(
            idle_seconds=settings.idle_timeout_seconds,
            min_bytes_per_second=settings.min_rate_bytes_per_second,
            drain_bytes=settings.drain_bytes,
            drain_seconds=settings.drain_seconds,
        )


class RequestBody:
    """The octets of one request, once, in the order in which they arrive.

    Iterating raises Disconnected when the client goes before the end, and TooSlow when it sends
    nothing for `idle_seconds`, or less than the minimum rate over a span of that length. A total
    time is never a reason: a slow honest body of any size arrives (B16).
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        limits: BodyLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receive = receive
        self._limits = limits
        self._clock = clock
        self.received = 0
        self.complete = not announces_body(scope["headers"])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pace = _Pace(self._limits)
        while not self.complete:
            chunk = await self._next(pace)
            if chunk:
                yield chunk

    async def _next(self, pace: _Pace) -> bytes:
        asked = self._clock()
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow("Nothing arrived for too long; send the body without pauses.") from None
        chunk = self._take(message)
        if not self.complete:
            pace.count(len(chunk), self._clock() - asked)
        return chunk

    def _take(self, message: Message) -> bytes:
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunk: bytes = message.get("body", b"")
        self.received += len(chunk)
        self.complete = not message.get("more_body", False)
        return chunk

    async def drain(self) -> None:
        """Read and drop what is still coming, up to `drain_bytes` and `drain_seconds`.

        For after a refusal: a connection that closes on unread bytes is reset, and the client
        would lose the answer that it was just sent (AHP-R51, B13).
        """
        start = self.received
        try:
            async with asyncio.timeout(self._limits.drain_seconds):
                while not self.complete and self.received - start <= self._limits.drain_bytes:
                    self._take(await self._receive())
        except (TimeoutError, Disconnected):
            return


def announces_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body follows the head with these ASGI headers (RFC 9112 section 6.3)."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and value != b"0"):
            return True
    return False


class _Pace:
    """The sender's rate over spans of `idle_seconds` spent waiting for it."""

    def __init__(self, limits: BodyLimits) -> None:
        self._span = limits.idle_seconds
        self._least = limits.min_bytes_per_second * limits.idle_seconds
        self._waited = 0.0
        self._arrived = 0

    def count(self, size: int, waited: float) -> None:
        self._arrived += size
        self._waited += waited
        if self._waited < self._span:
            return
        if self._arrived < self._least:
            raise TooSlow("The body arrives below the minimum rate of this receiver.")
        self._waited = 0.0
        self._arrived = 0
