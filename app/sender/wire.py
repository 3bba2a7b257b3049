"""How an upload goes over the wire: httpx, with an ear for the answer while bytes still go out.

httpx sends a whole body before it looks for an answer. A receiver that refuses early (AHP-R09,
R51) would be sent gigabytes for nothing, and its refusal could be lost in the reset that follows.
Here an answer that begins early ends the sending, and is read like any other.

Each upload has a connection of its own: what one is told, no other can hear.

A range of a file goes from the kernel's own cache into a connection that is not encrypted. httpx
knows bytes only, so it is given as many zeros, and a Shortcut tells the connection what they
stand for.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import struct
import threading
from asyncio.trsock import TransportSocket
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import httpcore
import httpx

from app.sender.files import FileRange
from app.sender.threads import ended, in_thread

READ_BYTES: Final = 64 * 1024

LEAVE_SECONDS: Final = 1.0
"""How long a request that asks first waits for 100 Continue: not every receiver says it."""

AHEAD_BYTES: Final = 256 * 1024
"""What may lie between the kernel and a receiver without TLS, which is on this machine (AHP-S06):
it takes what is still in the processor's cache in much less time."""

_ASKS_FIRST = re.compile(rb"\r\nexpect: 100-continue\r\n", re.IGNORECASE)
_INTERIM = re.compile(rb"(?:HTTP/1\.[01] 1\d\d[^\r\n]*\r?\n(?:[^\r\n]+\r?\n)*\r?\n)*")
_BEGUN = re.compile(rb"HTTP/1\.[01] 1|.{0,9}", re.DOTALL)
_NO_LINGERING: Final = struct.pack("ii", 1, 0)


class Shortcut:
    """What goes into one connection without passing through httpx, while it `is_open`."""

    def __init__(self) -> None:
        self.is_open = False
        self._part: FileRange | None = None
        self._zeros = b""

    def stand_in(self, part: FileRange) -> bytes:
        """What httpx is given next for `part`. Nobody looks into it, so it takes no memory."""
        self._part = part
        if len(self._zeros) != part.size:  # kept: only fresh memory is zero without being written
            self._zeros = bytes(part.size)
        return self._zeros

    def part_for(self, buffer: bytes) -> FileRange | None:
        """What `buffer` stands for, if it does. Raises RuntimeError rather than send zeros."""
        part, self._part = self._part, None
        if part is not None and part.size != len(buffer):
            raise RuntimeError("a body is not written piece by piece")
        return part


def uploading_client(trust: ssl.SSLContext, shortcut: Shortcut | None = None) -> httpx.AsyncClient:
    """A client for one upload: nothing of the environment, no redirects.

    `trust` holds the certificate authorities; `shortcut` opens once the body can go through it.
    """
    transport = UploadTransport(trust, shortcut or Shortcut())
    return httpx.AsyncClient(transport=transport, trust_env=False, follow_redirects=False)


class UploadTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport over connections that listen while they send."""

    def __init__(self, trust: ssl.SSLContext, shortcut: Shortcut) -> None:
        super().__init__(verify=trust, trust_env=False)
        # httpx has no other way to name the network that its connections are made of.
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=trust,
            max_connections=None,
            max_keepalive_connections=0,
            network_backend=ListeningNetwork(shortcut),
        )


class ListeningNetwork(httpcore.AsyncNetworkBackend):
    """Connections that listen while they send.

    They are asyncio's own, and try one address after another: what races several (anyio, and
    asyncio itself when told to) forgets the winner's socket when it is cancelled in that moment.
    """

    def __init__(self, shortcut: Shortcut) -> None:
        self._shortcut = shortcut

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """As httpcore has it; the time is the budget's."""
        del timeout, local_address, socket_options  # nobody gives them
        try:
            connection = await asyncio.open_connection(host, port, limit=READ_BYTES)
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return ListeningStream(*connection, self._shortcut)


class ListeningStream(httpcore.AsyncNetworkStream):
    """One connection of one request. A write fails once an answer has begun.

    httpcore takes that failure for what it means: it stops sending and reads the answer. How long
    anything may take is for the budget to say.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shortcut: Shortcut
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._shortcut = shortcut
        self._listening: asyncio.Task[bytes] | None = None
        self._heard_anything = asyncio.Event()

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Send `buffer`. Raises httpcore.WriteError when the receiver answers meanwhile."""
        del timeout
        if not buffer:
            return
        part = self._shortcut.part_for(buffer)
        if self._listening is None:
            await self._write_head(buffer)
            self._open_shortcut()
        else:
            if self._listening.done():
                raise httpcore.WriteError("answered before the end of the body")
            sending = self._send(buffer) if part is None else self._send_part(part)
            await self._write_unless_answered(sending, self._listening)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """What was heard first, then what follows; READ_BYTES at most."""
        del max_bytes, timeout
        if self._listening is None:
            return await self._receive()
        listening, self._listening = self._listening, None
        try:
            return await listening
        finally:
            await ended(listening)

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """The same connection, encrypted."""
        del timeout
        try:
            await self._writer.start_tls(ssl_context, server_hostname=server_hostname)
        except OSError as error:  # what TLS refuses is one, too
            raise httpcore.ConnectError(str(error)) from error
        finally:
            if not self._is_encrypted:
                await self.aclose()
        return self

    async def aclose(self) -> None:
        """Close it; bytes that have not left yet never will when no answer was read."""
        listening, self._listening = self._listening, None
        if listening is not None:
            _reset_on_close(self._writer.get_extra_info("socket"))
        self._writer.transport.abort()
        if listening is not None:
            await ended(listening)

    def get_extra_info(self, info: str) -> Any:
        """As httpcore has it."""
        return self._writer.get_extra_info(info)

    @property
    def _is_encrypted(self) -> bool:
        return self._writer.get_extra_info("ssl_object") is not None

    async def _receive(self) -> bytes:
        try:
            return await self._reader.read(READ_BYTES)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from error

    async def _send(self, buffer: bytes) -> None:
        # Without this a write counts as done while asyncio still holds much of it, and what is
        # sent past it would overtake the rest. Over TLS a limit of 0 would never be met again.
        most = 1 if self._is_encrypted else 0
        self._writer.transport.set_write_buffer_limits(high=most, low=0)
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    def _open_shortcut(self) -> None:
        if self._is_encrypted:
            return
        connection = self._writer.get_extra_info("socket")
        with suppress(OSError):  # the connection is gone already, as the next write will tell
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AHEAD_BYTES)
            self._shortcut.is_open = True

    async def _send_part(self, part: FileRange) -> None:
        try:
            # asyncio lets nobody else wait for a socket of its own, but for a duplicate.
            connection = os.dup(self._writer.get_extra_info("socket").fileno())
            try:
                await _send_through(connection, part)
            finally:
                os.close(connection)
        except OSError as error:
            raise httpcore.WriteError(str(error)) from error

    async def _write_head(self, head: bytes) -> None:
        await self._send(head)
        self._listening = asyncio.create_task(self._listen())
        if _ASKS_FIRST.search(head):
            hearing = asyncio.create_task(self._heard_anything.wait())
            try:
                await asyncio.wait(
                    (hearing, self._listening),
                    timeout=LEAVE_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                await ended(hearing)

    async def _write_unless_answered(
        self, sending: Coroutine[Any, Any, None], listening: asyncio.Task[bytes]
    ) -> None:
        writing = asyncio.create_task(sending)
        try:
            await asyncio.wait((writing, listening), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not writing.done():
                await ended(writing)
        if writing.cancelled():
            raise httpcore.WriteError("answered before the end of the body")
        writing.result()

    async def _listen(self) -> bytes:
        """What comes first, up to and with the beginning of the final answer or the end."""
        heard = b""
        while True:
            data = await self._receive()
            heard += data
            self._heard_anything.set()
            if not data or len(heard) > READ_BYTES or _answers(heard):
                return heard


async def _send_through(connection: int, part: FileRange) -> None:
    stopped, done = threading.Event(), 0
    while done < part.size:
        await _writable(connection)
        step = partial(part.send_to, connection, done, stopped)
        done = await in_thread(step, stop=stopped.set)


async def _writable(connection: int) -> None:
    """Until the socket takes more, or fails with what is wrong with it."""
    loop, writable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(connection, writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connection)


def _answers(heard: bytes) -> bool:
    """Whether a final answer has begun: interim ones (1xx) ask for nothing but patience."""
    interim = _INTERIM.match(heard)
    rest = heard[interim.end() :] if interim else heard
    begun = _BEGUN.fullmatch(rest, 0, 10)
    return begun is None


def _reset_on_close(connection: TransportSocket) -> None:
    """Make the kernel drop what it has not sent yet, rather than send it after us."""
    with suppress(OSError):  # the connection is gone already, and its bytes with it
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGERING)
