"""The protocol that ships behind a listening socket, and clients of it."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from starlette.types import ASGIApp, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from app.http.outflow import file_sending
from app.http.protocol import (
    AFTERWARDS_KEY,
    LIMITS_KEY,
    SENDING_KEY,
    ConnectionLimits,
    ReceiverProtocol,
)
from app.server import bind
from tests.certificates import write_certificate

App = TypeVar("App", bound=ASGIApp)

LIMITS = ConnectionLimits(
    head_seconds=20, head_bytes=4096, drain_bytes=64 * 1024 * 1024, drain_seconds=20
)
MIB = 1024 * 1024
PATIENCE = 10  # for what must come; only a failing test waits that long


@dataclass
class Listening(Generic[App]):
    """A listening socket with the protocol behind it."""

    port: int
    app: App
    state: ServerState
    tls: ssl.SSLContext | None = None

    async def connect(self, tls: ssl.SSLContext | None = None) -> Client:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        return Client(reader, writer)

    async def talk(self, data: bytes, *, fin: bool = False) -> list[Response]:
        """Send `data`, then everything that comes until the server ends the connection."""
        client = await self.connect()
        client.send(data)
        if fin:
            client.writer.write_eof()
        return await client.until_the_end()

    @property
    def connection(self) -> ReceiverProtocol:
        (only,) = self.state.connections
        assert isinstance(only, ReceiverProtocol)
        return only

    def shutdown(self) -> None:
        """Do to the only connection what a stopping server does."""
        self.connection.shutdown()

    async def takes_no_more(self) -> None:
        """Wait until the connection reads no further request."""
        async with asyncio.timeout(PATIENCE):
            while not self.state.connections or not self.connection._is_over:
                await asyncio.sleep(0.005)

    async def is_quiet(self) -> None:
        """Wait until no connection is left."""
        async with asyncio.timeout(PATIENCE):
            while self.state.connections:
                await asyncio.sleep(0.005)


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        code: str = json.loads(self.body)["code"]
        return code


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def send_for_ever(self) -> None:
        while True:
            self.send(b"q" * MIB)
            await self.writer.drain()

    async def response(self) -> Response:
        async with asyncio.timeout(PATIENCE):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii")
            status = re.match(r"HTTP/1\.1 ([0-9]{3}) ", head)
            assert status is not None, head
            lines = [line.split(": ", 1) for line in head.splitlines()[1:] if line]
            headers = {name.lower(): value for name, value in lines}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Response(int(status[1]), headers, body)

    async def ended(self) -> bytes:
        """What came before the server's FIN."""
        async with asyncio.timeout(PATIENCE):
            return await self.reader.read()

    async def until_the_end(self) -> list[Response]:
        found = []
        while not await self._is_at_end():
            found.append(await self.response())
        self.close()
        return found

    async def _is_at_end(self) -> bool:
        async with asyncio.timeout(PATIENCE):
            first = await self.reader.read(1)
        if first:
            # Put back: a stream reader has no way to look ahead.
            self.reader._buffer[:0] = first  # type: ignore[attr-defined]
        return not first

    def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def listening(
    app: App,
    limits: ConnectionLimits = LIMITS,
    tls: ssl.SSLContext | None = None,
    keep_alive: float = 60,
) -> AsyncIterator[Listening[App]]:
    config = Config(
        app,
        http=ReceiverProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # whole seconds are for people
    )
    config.load()
    state = ServerState()
    app_state: dict[str, Any] = {LIMITS_KEY: limits, AFTERWARDS_KEY: put_off}
    loop = asyncio.get_running_loop()
    listener = bind("127.0.0.1", 0)
    server = await loop.create_server(
        lambda: ReceiverProtocol(config, state, app_state), sock=listener, ssl=tls
    )
    async with AsyncExitStack() as stack:
        app_state[SENDING_KEY] = stack.enter_context(file_sending())
        stack.push_async_callback(server.wait_closed)
        stack.callback(server.close)
        stack.push_async_callback(_end, state)
        yield Listening(listener.getsockname()[1], app, state)


def put_off(work: Callable[[], None]) -> None:
    """Takes what is left to do for a request: in these tests at once."""
    work()


async def _end(state: ServerState) -> None:
    for task in set(state.tasks):
        task.cancel()
    for connection in list(state.connections):
        assert isinstance(connection, ReceiverProtocol)
        connection._wire.abort()
    while state.connections or state.tasks:
        await asyncio.sleep(0)


def post(path: str = "/", size: int | None = 3, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: receiver", *headers]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def statuses(responses: list[Response]) -> list[int]:
    return [each.status for each in responses]


async def begin_answer(send: Send, status: int, length: int) -> None:
    headers = [(b"content-length", b"%d" % length)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def answer(send: Send, status: int, body: bytes) -> None:
    close = [(b"connection", b"close")] if status == 401 else []
    headers = [(b"content-length", b"%d" % len(body)), *close]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS for a server and for a client that trusts it."""
    certificate, key = write_certificate(folder)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(certificate, key)
    return served, ssl.create_default_context(cafile=certificate)
