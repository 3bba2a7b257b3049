"""A file as the body of an answer, sent by the kernel to a real socket."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from app.errors import Disconnected, Unavailable
from app.http.streams import PART_BYTES, ZERO_COPY, send_stream
from app.store.blobs import FileSpan
from tests.http.listening import (
    LIMITS,
    MIB,
    PATIENCE,
    Client,
    Listening,
    answer,
    contexts,
    listening,
    post,
)
from tests.loops import ON_BOTH_LOOPS

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("UHP-18"), ON_BOTH_LOOPS]

GET = b"GET / HTTP/1.1\r\nHost: receiver\r\n\r\n"
BODY = random.Random(1).randbytes(3 * PART_BYTES + 5)  # more than the sockets of a connection hold


class Files:
    """Answers with the bytes `[start, stop)` of a file; `ended` has how that went."""

    def __init__(self, path: Path, start: int = 0, stop: int = len(BODY)) -> None:
        path.write_bytes(BODY)
        self.path = path
        self.span = start, stop
        self.ended: asyncio.Queue[BaseException | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["extensions"][ZERO_COPY] == {}
        if scope["path"] == "/small":
            await answer(send, 200, b"small")
            return
        try:
            with opened(self.path) as descriptor:
                file = FileSpan(descriptor, *self.span)
                await send_stream(receive, send, [], only(file), length=len(file))
        except BaseException as error:
            self.ended.put_nowait(error)
            raise
        self.ended.put_nowait(None)

    async def outcome(self) -> BaseException | None:
        async with asyncio.timeout(PATIENCE):
            return await self.ended.get()


async def only(file: FileSpan) -> AsyncIterator[FileSpan]:
    yield file


@contextmanager
def opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


async def begun(server: Listening[Files]) -> Client:
    """A client that has read the head of its answer, and nothing else yet."""
    client = await server.connect()
    client.send(GET)
    async with asyncio.timeout(PATIENCE):
        await client.reader.readuntil(b"\r\n\r\n")
    return client


@pytest.mark.parametrize(
    ("start", "stop"), [(0, len(BODY)), (0, 1), (5, 5 + PART_BYTES), (MIB - 1, len(BODY) - 1)]
)
async def test_every_octet_of_the_span_arrives(tmp_path: Path, start: int, stop: int) -> None:
    async with listening(Files(tmp_path / "file", start, stop)) as server:
        client = await server.connect()
        client.send(GET)
        response = await client.response()
        assert response.status == 200
        assert response.body == BODY[start:stop]
        assert await server.app.outcome() is None
        client.close()


async def test_the_connection_goes_on_and_answers_keep_their_order(tmp_path: Path) -> None:
    small = GET.replace(b" / ", b" /small ")
    async with listening(Files(tmp_path / "file")) as server:
        client = await server.connect()
        client.send(small + GET + small + GET)
        bodies = [(await client.response()).body for _ in range(4)]
        assert bodies == [b"small", BODY, b"small", BODY]
        client.close()


async def test_a_client_that_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    async with listening(Files(tmp_path / "file")) as server:
        idle = await begun(server)
        for _ in range(5):
            client = await server.connect()
            client.send(GET)
            assert (await client.response()).body == BODY
            client.close()
        assert await idle.reader.readexactly(len(BODY)) == BODY
        idle.close()


@pytest.mark.requirement("B92")
@pytest.mark.parametrize("pipelined", [b"", GET])
async def test_a_client_that_goes_ends_the_work(tmp_path: Path, pipelined: bytes) -> None:
    async with listening(Files(tmp_path / "file")) as server:
        before = len(os.listdir("/proc/self/fd"))
        client = await begun(server)
        client.send(pipelined)
        client.writer.transport.abort()
        assert isinstance(await server.app.outcome(), Disconnected)
        await server.is_quiet()
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("pipelined", [b"", GET])
async def test_a_reset_ends_the_work(tmp_path: Path, pipelined: bytes) -> None:
    """Also where nothing more is read from the client, because a request waits for its turn."""
    async with listening(Files(tmp_path / "file")) as server:
        before = len(os.listdir("/proc/self/fd"))
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(GET + pipelined)
            async with asyncio.timeout(PATIENCE):
                await asyncio.to_thread(client.recv, 1)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert isinstance(await server.app.outcome(), Disconnected)
        await server.is_quiet()
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.requirement("B26")
async def test_a_file_that_ends_too_early_never_looks_whole(tmp_path: Path) -> None:
    async with listening(Files(tmp_path / "file")) as server:
        client = await begun(server)
        os.truncate(server.app.path, PART_BYTES)
        received = await client.ended()
        assert isinstance(await server.app.outcome(), Unavailable)
        assert received == BODY[: len(received)]
        assert len(received) < len(BODY)
        client.close()


async def test_a_server_that_gives_up_leaves_no_descriptor_open(tmp_path: Path) -> None:
    async with listening(Files(tmp_path / "file")) as server:
        before = len(os.listdir("/proc/self/fd"))
        client = await begun(server)
        for task in server.state.tasks:
            task.cancel()
        assert isinstance(await server.app.outcome(), asyncio.CancelledError)
        client.close()
        await server.is_quiet()
        assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    "headers", [[(b"transfer-encoding", b"chunked")], [(b"content-length", b"7")]]
)
async def test_no_more_is_sent_than_was_promised(
    tmp_path: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        with opened(path) as descriptor:
            file = FileSpan(descriptor, 0, 8)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            part = {"file": file, "offset": 0, "count": 8, "more_body": False}
            with pytest.raises(RuntimeError, match="declared"):
                await send({"type": ZERO_COPY, **part})
            refused.set()

    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    refused = asyncio.Event()
    async with listening(application) as server:
        client = await server.connect()
        client.send(GET)
        assert b"12345678" not in await client.ended()
        assert refused.is_set()
        client.close()


@pytest.mark.parametrize("request_head", [post("/", 0), GET.replace(b"GET", b"HEAD")])
async def test_only_the_answer_to_a_get_takes_files(request_head: bytes) -> None:
    assert await _offered(request_head) == [False]


async def test_nothing_is_sent_past_tls(tmp_path: Path) -> None:
    served, trusting = contexts(tmp_path)
    assert await _offered(GET, served, trusting) == [False]


async def _offered(
    head: bytes, served: ssl.SSLContext | None = None, trusting: ssl.SSLContext | None = None
) -> list[bool]:
    offered = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        offered.append(ZERO_COPY in scope["extensions"])
        await answer(send, 200, b"")

    async with listening(application, LIMITS, served) as server:
        client = await server.connect(trusting)
        client.send(head)
        async with asyncio.timeout(PATIENCE):
            await client.reader.readuntil(b"\r\n\r\n")
        client.close()
    return offered
