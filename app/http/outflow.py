"""A stored file as the body of an answer, sent by the kernel.

On its way through a program an octet of a file is copied twice, each time into fresh memory: that
is most of what a download costs. `sendfile` hands the pages of the file to the socket instead. It
waits for a disk, so threads call it; it does not wait for the client: its socket does not block,
and when that is full, the event loop says when there is room again.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.errors import Disconnected
from app.http.streams import ZERO_COPY
from app.store.blobs import ends_too_early
from app.store.disk import disk_border
from app.store.threads import processors, settle

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


MUCH_BYTES = 1024 * 1024
"""A client that takes so much at once takes more in a moment, most likely: a thread waits for that.
One that does not never keeps a thread."""

MOMENT_MILLISECONDS = 1


class Outflow:
    """The `send` of one request, which knows the extension ZERO_COPY as well.

    `release` writes what is held back for `wire`, whose socket carries no TLS.
    """

    def __init__(
        self,
        cycle: RequestResponseCycle,
        wire: asyncio.Transport,
        release: Callable[[], None],
        threads: Executor,
    ) -> None:
        self._cycle = cycle
        self._wire = wire
        self._release = release
        self._threads = threads

    async def send(self, message: Message) -> None:
        """As the cycle's own; raises Disconnected and Unavailable while it sends a file."""
        if message["type"] == ZERO_COPY:
            await self._send_file(message["file"].fileno(), message["offset"], message["count"])
            message = {"type": "http.response.body", "more_body": message["more_body"]}
        await self._cycle.send(message)  # type: ignore[arg-type]

    async def _send_file(self, file: int, offset: int, count: int) -> None:
        if self._is_gone():
            raise Disconnected
        self._take_from_promised(count)
        self._release()
        with self._own_descriptor() as socket:
            while self._wire.get_write_buffer_size():
                await _writable(socket)
            end = offset + count
            while offset < end:
                offset += await self._send_some(socket, file, offset, end - offset)
                if offset < end:
                    await _writable(socket)

    def _is_gone(self) -> bool:
        return self._cycle.disconnected or self._wire.is_closing()

    def _take_from_promised(self, count: int) -> None:
        """These octets pass the cycle, which holds every answer against its Content-Length."""
        if self._cycle.chunked_encoding or count > self._cycle.expected_content_length:
            raise RuntimeError("a file is sent as part of a body whose length was declared")
        self._cycle.expected_content_length -= count

    @contextmanager
    def _own_descriptor(self) -> Iterator[int]:
        """The socket once more, under a number that the transport does not watch."""
        descriptor = os.dup(self._wire.get_extra_info("socket").fileno())
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    async def _send_some(self, socket: int, file: int, offset: int, count: int) -> int:
        if self._is_gone():
            raise Disconnected
        loop = asyncio.get_running_loop()
        step = loop.run_in_executor(self._threads, _send_some, socket, file, offset, count)
        await settle(step)  # a descriptor that is in use must not be closed
        return step.result()


def file_sending() -> ThreadPoolExecutor:
    """Threads for all that is sent so. Mostly they keep processors busy, rarely a disk."""
    return ThreadPoolExecutor(2 * processors(), "consignee-send")


def _send_some(socket: int, file: int, offset: int, count: int) -> int:
    """Send what the socket takes; how many octets. Hardly ever blocks for the client."""
    sent = 0
    while sent < count:
        more = _send(socket, file, offset + sent, count - sent)
        sent += more
        if not more and (sent < MUCH_BYTES or not _has_room_soon(socket)):
            break
    return sent


def _send(socket: int, file: int, offset: int, count: int) -> int:
    """What the socket has room for, maybe nothing. Blocks for the disk."""
    with disk_border():
        try:
            sent = os.sendfile(socket, file, offset, count)
        except BlockingIOError:
            return 0
        except ConnectionError:
            raise Disconnected from None
    if not sent:
        raise ends_too_early()
    return sent


def _has_room_soon(socket: int) -> bool:
    poll = select.poll()
    poll.register(socket, select.POLLOUT)
    return bool(poll.poll(MOMENT_MILLISECONDS))


async def _writable(socket: int) -> None:
    """Wait until `socket` takes something, or its connection has ended."""
    loop = asyncio.get_running_loop()
    writable = loop.create_future()
    loop.add_writer(socket, _settle, writable)
    try:
        await writable
    finally:
        loop.remove_writer(socket)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
