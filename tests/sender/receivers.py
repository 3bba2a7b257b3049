"""A receiver that does as it is told, well or badly, and remembers every octet that it got.

Each connection is served by the next script; the last one serves all that follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from app.sender.config import UploadConfiguration

JSON = {"Content-Type": "application/json"}


@dataclass
class Exchange:
    """One connection: the request as it came, and what a script may do with it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    head: bytes = b""
    body: bytearray = field(default_factory=bytearray)
    received: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def request_line(self) -> bytes:
        return self.head.split(b"\r\n", 1)[0]

    @property
    def target(self) -> bytes:
        return self.request_line.split(b" ")[1]

    @property
    def headers(self) -> list[tuple[str, str]]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return [
            (name.lower(), value.strip()) for name, _, value in (x.partition(":") for x in lines)
        ]

    def header(self, name: str) -> str | None:
        """Its value, None without one; AssertionError where there are two."""
        found = [value for key, value in self.headers if key == name]
        assert len(found) <= 1, found
        return found[0] if found else None

    @property
    def size(self) -> int:
        return int(self.header("content-length") or 0)

    async def read_head(self) -> None:
        self.head = (await self.reader.readuntil(b"\r\n\r\n"))[:-4]

    async def read_some(self, most: int) -> bytes:
        """Up to `most` bytes of the body; b"" at its end or at the connection's."""
        data = await self.reader.read(min(most, self.size - self.received))
        self.received += len(data)
        return data

    async def read_body(self, *, keep: bool = True) -> None:
        while self.received < self.size and (data := await self.read_some(1 << 20)):
            if keep:
                self.body += data

    async def count_what_comes(self) -> int:
        """Bytes that still come until the sender closes, the answer notwithstanding."""
        with suppress(ConnectionError):
            while data := await self.reader.read(1 << 20):
                self.received += len(data)
        return self.received

    async def say(
        self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> None:
        """An answer with its length."""
        lines = {"Content-Length": str(len(body)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        await self.write(f"HTTP/1.1 {status} Answer\r\n{head}\r\n".encode() + body)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def closed(self) -> None:
        """Until our end is closed, too."""
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        """End the connection with RST."""
        connection = self.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    def receipt(self, **changed: Any) -> dict[str, Any]:
        """What confirms the body that was read."""
        sha256 = hashlib.sha256(self.body).hexdigest()
        return {"ref": "ref-of-the-receiver", "size": len(self.body), "sha256": sha256} | changed


Script = Callable[[Exchange], Awaitable[None]]


@dataclass
class Receiver:
    """Where it listens, and every exchange so far."""

    url: str
    exchanges: list[Exchange]

    def configuration(self, path: str = "/upload", **changed: Any) -> UploadConfiguration:
        mapping = {"endpoint": self.url + path, "timeoutMs": 30_000, "maxBytes": 1 << 30}
        return UploadConfiguration.parse(mapping | changed, allow_loopback_http=True)


async def confirm(exchange: Exchange) -> None:
    """What every receiver should do."""
    await exchange.read_body()
    await exchange.say(201, json.dumps(exchange.receipt()).encode(), JSON)


def confirm_with(**changed: Any) -> Script:
    """A receipt with changed members; None leaves one out."""

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        receipt = {k: v for k, v in exchange.receipt(**changed).items() if v is not None}
        await exchange.say(201, json.dumps(receipt).encode(), JSON)

    return script


def answer(
    status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, *, early: bool = False
) -> Script:
    """A fixed answer, after the body or as soon as the head is there."""

    async def script(exchange: Exchange) -> None:
        if not early:
            await exchange.read_body()
        await exchange.say(status, body, headers)
        await exchange.count_what_comes()

    return script


def answer_receipt(render: Callable[[dict[str, Any]], bytes], headers: Mapping[str, str]) -> Script:
    """A 201 whose body `render` makes of the right receipt."""

    async def script(exchange: Exchange) -> None:
        await exchange.read_body()
        await exchange.say(201, render(exchange.receipt()), headers)

    return script


async def reset_before(exchange: Exchange) -> None:
    """Gone in the middle of the body, or before its answer where there is none."""
    if exchange.size:
        await exchange.read_some(1)
    exchange.reset()


async def reset_after(exchange: Exchange) -> None:
    """The bytes are taken, and nobody learns of it."""
    await exchange.read_body()
    exchange.reset()


async def hang(exchange: Exchange) -> None:
    """Takes everything and says nothing, until the sender goes."""
    await exchange.count_what_comes()


@asynccontextmanager
async def scripted(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver on loopback; with `tls` its URL is https://localhost."""
    exchanges: list[Exchange] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        exchange = Exchange(reader, writer)
        script = scripts[min(len(exchanges), len(scripts) - 1)]
        exchanges.append(exchange)
        try:
            await exchange.read_head()
            await script(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the sender went, as it may
        finally:
            exchange.gone.set()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    try:
        yield Receiver(url, exchanges)
    finally:
        server.close()
        for exchange in exchanges:
            exchange.writer.transport.abort()
            await exchange.gone.wait()
        await server.wait_closed()
