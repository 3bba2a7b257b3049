"""A proxy in front of a server of HTTP/1.1 that breaks what a test tells it to break."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NoReturn

from anyio.from_thread import start_blocking_portal

HEAD_BYTES = 64 * 1024
PIECE = 64 * 1024
SLOW_SECONDS = 0.2


class Fault(Enum):
    """What happens to a request."""

    ERROR = "500 and the request is not passed on"
    BUSY = "503 and the request is not passed on"
    FULL = "507 and the request is not passed on"
    MISSING = "404 and the request is not passed on"
    RESET = "the connection is reset when the request is there"
    CUT = "half of the answer's body arrives, then the connection is reset"
    LOST = "the request is passed on, its answer is not"
    SLOW = "the request is passed on after SLOW_SECONDS"
    HANG = "nothing happens until the proxy ends"


_STATUSES = {
    Fault.ERROR: b"500 Internal Server Error",
    Fault.BUSY: b"503 Slow Down",
    Fault.MISSING: b"404 Not Found",
    Fault.FULL: b"507 Insufficient Storage",
}


@dataclass
class FaultProxy:
    """`rules` are asked in order for each request line, such as `PUT /bucket/key?partNumber=1`."""

    upstream: str
    address: str = ""
    rules: list[Callable[[str], Fault | None]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by every request to which a fault happens."""

    def always(self, fault: Fault, *, where: str = "") -> None:
        """Break every request whose line holds `where`."""
        self.rules.append(lambda line: fault if where in line else None)

    def times(self, count: int, fault: Fault, *, where: str = "") -> None:
        """Break the next `count` requests whose line holds `where`."""
        left = iter(range(count))

        def rule(line: str) -> Fault | None:
            return fault if where in line and next(left, None) is not None else None

        self.rules.append(rule)

    def heal(self) -> None:
        """Break nothing from here on."""
        self.rules.clear()

    def fault_of(self, line: str) -> Fault | None:
        """What happens to a request with this line."""
        self.seen.append(line)
        faults = (rule(line) for rule in self.rules)
        fault = next((fault for fault in faults if fault is not None), None)
        if fault is not None:
            self.arrived.set()
        return fault


@asynccontextmanager
async def fault_proxy(upstream: str) -> AsyncIterator[FaultProxy]:
    """A proxy in front of `upstream` (HOST:PORT), ended with every connection at the end."""
    proxy = FaultProxy(upstream)
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(_serve(proxy, reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=HEAD_BYTES)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()


@contextmanager
def proxied(upstream: str) -> Iterator[FaultProxy]:
    """The same for a test that is not async, in a thread and on a loop of its own."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fault_proxy(upstream)) as proxy,
    ):
        yield proxy


async def _serve(
    proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await _one_request(proxy, reader, writer):
                continue
    finally:
        writer.close()


async def _one_request(
    proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Whether another request may follow on this connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(_length(head))
    fault = proxy.fault_of(head.partition(b" HTTP/1.1\r\n")[0].decode("latin-1"))
    if fault in _STATUSES:
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % _STATUSES[fault])
        await writer.drain()
        return True
    if fault is Fault.RESET:
        _reset(writer)
    if fault is Fault.HANG:
        await asyncio.Event().wait()
    if fault is Fault.SLOW:
        await asyncio.sleep(SLOW_SECONDS)
    await _pass_on(proxy.upstream, _last(head) + body, writer, fault)
    return False


def _last(head: bytes) -> bytes:
    """The head, asking for the end of the connection: the answer's end is then its own mark."""
    return head.removesuffix(b"\r\n") + b"Connection: close\r\n\r\n"


async def _pass_on(
    upstream: str, request: bytes, writer: asyncio.StreamWriter, fault: Fault | None
) -> None:
    host, _, port = upstream.partition(":")
    reader, onward = await asyncio.open_connection(host, int(port), limit=HEAD_BYTES)
    try:
        onward.write(request)
        await onward.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        if fault is Fault.LOST:
            await reader.read()
            _reset(writer)
        writer.write(answer)
        if fault is Fault.CUT:
            writer.write(await reader.readexactly(_length(answer) // 2))
            await writer.drain()
            _reset(writer)
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    finally:
        onward.close()


def _reset(writer: asyncio.StreamWriter) -> NoReturn:
    """End a connection as a crash does: what was not sent is gone."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise ConnectionResetError


def _length(head: bytes) -> int:
    fields = dict(line.lower().partition(b":")[::2] for line in head.split(b"\r\n")[1:] if line)
    return int(fields.get(b"content-length", 0))
