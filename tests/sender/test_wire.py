"""A connection that listens while it sends, step by step."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpcore
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sender.files import FileRange, open_regular
from app.sender.wire import (
    READ_BYTES,
    ListeningNetwork,
    ListeningStream,
    Shortcut,
    _answers,
    uploading_client,
)
from tests.sender.watching import Leaks

pytestmark = pytest.mark.anyio


class Line:
    """Both ends of a connection on loopback; the far one is the test."""

    near: ListeningStream
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Line]:
        line, there = cls(), asyncio.Event()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            line.reader, line.writer = reader, writer
            there.set()

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1024)
        port = server.sockets[0].getsockname()[1]
        near = await ListeningNetwork(Shortcut()).connect_tcp("127.0.0.1", port)
        assert isinstance(near, ListeningStream)
        line.near = near
        await there.wait()
        try:
            yield line
        finally:
            await near.aclose()
            line.writer.transport.abort()
            server.close()
            await server.wait_closed()

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def blocked(self) -> asyncio.Task[None]:
        """A write of more than the line takes while nobody reads."""
        writing = asyncio.create_task(self.near.write(bytes(64 * 1024 * 1024)))
        await self.reader.readexactly(1)
        return writing


async def test_an_answer_ends_a_write_that_waits() -> None:
    async with Line.open() as line:
        await line.near.write(b"h")
        await line.reader.readexactly(1)
        writing = await line.blocked()
        await line.say(b"HTTP/1.1 413 ")
        with pytest.raises(httpcore.WriteError):
            await writing
        with pytest.raises(httpcore.WriteError):
            await line.near.write(b"more")
        assert await line.near.read(READ_BYTES) == b"HTTP/1.1 413 "
        await line.say(b"rest")
        assert await line.near.read(READ_BYTES) == b"rest"


async def test_a_connection_that_is_reset_fails_as_httpcore_has_it() -> None:
    async with Line.open() as line:
        await line.near.write(b"h")
        await line.reader.readexactly(1)
        writing = await line.blocked()
        connection = line.writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        line.writer.transport.abort()
        with pytest.raises(httpcore.WriteError):
            await writing
        with pytest.raises(httpcore.ReadError):
            await line.near.read(READ_BYTES)


@pytest.mark.parametrize("is_known", [False, True])
async def test_a_range_for_a_connection_that_is_gone_fails_as_httpcore_has_it(
    is_known: bool, tmp_path: Path
) -> None:
    """Whether or not the loop has closed our end of it already."""
    path = tmp_path / "body"
    path.write_bytes(bytes(8 * 1024 * 1024))
    file = open_regular(path)
    async with Line.open() as line:
        if is_known:
            line.near._writer.transport.abort()
            await asyncio.sleep(0)
            line.near._open_shortcut()
        else:
            connection = line.writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            line.writer.transport.abort()
        with pytest.raises(httpcore.WriteError):
            await line.near._send_part(FileRange(file, 0, 8 * 1024 * 1024))
        assert not line.near._shortcut.is_open
    file.close()


async def test_nothing_is_written_of_nothing() -> None:
    async with Line.open() as line:
        await line.near.write(b"")
        await line.near.write(b"h")
        assert await line.reader.read(100) == b"h"


@pytest.mark.requirement("AHP-S32", "AHP-S40")
async def test_ahp_s40_a_cancelled_write_leaves_no_task_and_sends_no_more() -> None:
    async with Line.open() as line:
        with Leaks() as leaks:
            await line.near.write(b"h")
            await line.reader.readexactly(1)
            writing = await line.blocked()
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            await line.near.aclose()
            assert not leaks.tasks()
        with pytest.raises(ConnectionResetError):
            await line.reader.read()


async def test_closing_twice_is_legal() -> None:
    async with Line.open() as line:
        await line.near.write(b"h")
        await line.near.aclose()
        await line.near.aclose()


INTERIM = [
    b"HTTP/1.1 100 Continue\r\n\r\n",
    b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n",
    b"HTTP/1.0 102 Processing\n\n",
]


@given(st.lists(st.sampled_from(INTERIM)), st.sampled_from([200, 201, 401, 500]))
def test_an_answer_is_told_from_what_comes_before_it(before: list[bytes], status: int) -> None:
    """However the octets are cut: not before its status line, and then at once."""
    interim = b"".join(before)
    final = b"HTTP/1.1 %d " % status
    for end in range(len(interim) + len(final)):
        heard = (interim + final)[:end]
        assert _answers(heard) == (end >= len(interim) + 10)


async def test_a_piece_that_is_cut_on_its_way_is_not_sent_as_zeros(tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(b"abcdef")
    file, shortcut = open_regular(path), Shortcut()
    piece = shortcut.stand_in(FileRange(file, 0, 6))
    with pytest.raises(RuntimeError, match="piece by piece"):
        shortcut.part_for(piece[:3])
    assert shortcut.part_for(b"other") is None
    file.close()


async def test_the_client_takes_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    async with uploading_client(ssl.create_default_context()) as client:
        assert client.trust_env is False
        assert not client.follow_redirects
        transport = client._transport_for_url(httpx.URL("https://receiver.example/"))
        assert transport is client._transport
