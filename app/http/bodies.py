"""Counted, bounded and disconnect-aware reading of a request body.

Nothing here buffers: a chunk is handed on as it arrives, or arrives in the memory of whoever wants
it (`RequestBody.pour`). Only time spent waiting for the client counts against the client; a slow
disk of ours does not.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from app.errors import Disconnected, TooLarge, TooSlow
from app.store.staging import copy_into

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from starlette.types import Message, Receive, Scope

    from app.settings import Settings
    from app.store.staging import Sink

    ReceiveInto = Callable[[memoryview], Awaitable[Message]]

PIECE_BYTES = 256 * 1024
"""Most that iterating over a body gives at once: it stays in the processor's cache."""

RECEIVE_INTO = "consignee.receive_into"
"""The ASGI extension of a server that can receive a body into memory that it is given:

    message = await scope["extensions"][RECEIVE_INTO]["into"](space)

It is `receive`, with the number of octets that were written to the front of `space` as the
message's `filled` in place of its `body`. The two may take turns."""

ALL_THERE = "consignee.all_there"
"""The ASGI extension of a server that has the whole body of a request already: `receive` gives it
without waiting for the client."""


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
        self._receive_into: ReceiveInto | None
        extensions = scope.get("extensions", {})
        self._receive_into = extensions.get(RECEIVE_INTO, {}).get("into")
        self._is_all_there = ALL_THERE in extensions
        self._limits = limits
        self._clock = clock
        self.received = 0
        self.complete = not announces_body(scope["headers"])

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._receive_into is not None:
            return self._pieces(self._receive_into)
        return self._present() if self._is_all_there else self._chunks()

    async def pour(self, sink: Sink) -> None:
        """Have all octets arrive in the memory of `sink`; raises as iterating does.

        An octet is not copied any more then, where the server can receive so, and once elsewhere.
        """
        if self._receive_into is None:
            async for chunk in self:
                await copy_into(sink, chunk)
            return
        async for count in self._arrivals(self._receive_into, sink.space):
            await sink.filled(count)

    async def whole(self, limit: int) -> bytes:
        """All octets at once. Raises TooLarge as soon as there are more than `limit`, and as
        iterating does."""
        octets = await self._part() if self._is_all_there and not self.complete else b""
        if len(octets) > limit:
            raise TooLarge(limit)
        return octets if self.complete else await self._rest_behind(octets, limit)

    async def _rest_behind(self, octets: bytes, limit: int) -> bytes:
        grown = bytearray(octets)
        async for chunk in self:
            grown += chunk
            if len(grown) > limit:
                raise TooLarge(limit)
        return bytes(grown)

    async def _present(self) -> AsyncIterator[bytes]:
        while not self.complete:
            if part := await self._part():
                yield part

    async def _part(self) -> bytes:
        # Nobody is waited for, so nobody's time is measured: that would cost more than reading.
        message = await self._receive()
        self._take(message)
        part: bytes = message.get("body", b"")
        return part

    async def _chunks(self) -> AsyncIterator[bytes]:
        pace = _Pace(self._limits)
        with _Patience(self._limits.idle_seconds) as patience:
            while not self.complete:
                message = await self._next(pace, patience, self._receive)
                if chunk := message.get("body"):
                    yield chunk

    async def _pieces(self, receive_into: ReceiveInto) -> AsyncIterator[bytes]:
        buffer = memoryview(bytearray(PIECE_BYTES))
        async for count in self._arrivals(receive_into, lambda: buffer):
            yield bytes(buffer[:count])

    async def _arrivals(
        self, receive_into: ReceiveInto, space: Callable[[], memoryview]
    ) -> AsyncIterator[int]:
        """How many octets have come into the front of each `space()`."""
        pace = _Pace(self._limits)
        with _Patience(self._limits.idle_seconds) as patience:
            while not self.complete:
                message = await self._next(pace, patience, partial(receive_into, space()))
                if filled := message.get("filled"):
                    yield filled

    async def _next(self, pace: _Pace, patience: _Patience, receive: Receive) -> Message:
        asked = self._clock()
        message = await patience.wait(receive)
        count = self._take(message)
        if not self.complete:
            pace.count(count, self._clock() - asked)
        return message

    def _take(self, message: Message) -> int:
        """Count what has arrived. Raises Disconnected."""
        if message["type"] == "http.disconnect":
            raise Disconnected
        filled: int | None = message.get("filled")
        count = len(message.get("body", b"")) if filled is None else filled
        self.received += count
        self.complete = not message.get("more_body", False)
        return count

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


class _Patience:
    """Ends a wait for the client that lasts `seconds`, and costs nothing while its bytes come.

    One timer for the whole body, which looks how long the present wait has lasted: a timer for
    each chunk would be a third of what receiving costs.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Task[Any] | None = None
        self._since = 0.0
        self._spent = False

    def __enter__(self) -> Self:
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def wait(self, receive: Receive) -> Message:
        """What `receive` gives, or TooSlow."""
        self._waiter = asyncio.current_task()
        self._since = self._loop.time()
        try:
            return await receive()
        except asyncio.CancelledError:
            if not self._spent or self._waiter is None or self._waiter.uncancel() > 0:
                raise
            raise TooSlow("Nothing arrived for too long; send the body without pauses.") from None
        finally:
            self._waiter = None

    def _look(self) -> None:
        left = self._seconds
        if self._waiter is not None:
            left -= self._loop.time() - self._since
        if self._waiter is not None and left <= 0:
            self._spent = True
            self._waiter.cancel()
            return
        self._timer = self._loop.call_later(max(left, 0.001), self._look)


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
