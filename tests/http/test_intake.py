"""Bodies that are received past the parser, on real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import hashlib
import random
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http.bodies import ALL_THERE, RECEIVE_INTO, BodyLimits, RequestBody
from app.http.protocol import LONG_BYTES, ConnectionLimits
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
    statuses,
)
from tests.loops import ON_BOTH_LOOPS

pytestmark = [pytest.mark.anyio, ON_BOTH_LOOPS]

SPACE = 100_000
HUGE = 250_000  # digests are more than the network's buffers hold


@dataclass
class Reader:
    """Reads each body into memory of its own, and answers with what came.

    By the path: /turns takes turns with `receive`, /part answers in the middle, and /hold
    stops there until `go`.
    """

    go: asyncio.Event = field(default_factory=asyncio.Event)
    holds: asyncio.Event = field(default_factory=asyncio.Event)
    seen: list[bytearray] = field(default_factory=list)
    last: list[str] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        self.seen.append(body)
        message = await self._read(scope, receive, body)
        self.last.append(message["type"])
        if message["type"] == "http.request":
            await answer(send, 201, digest(body) * (HUGE if scope["path"] == "/huge" else 1))

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> Message:
        while True:
            message = await receive_into(scope, receive, body, turns=scope["path"] == "/turns")
            if not message.get("more_body") or (scope["path"] == "/part" and len(body) >= MIB):
                return message
            if scope["path"] == "/hold" and len(body) >= MIB // 2 and not self.go.is_set():
                self.holds.set()
                await self.go.wait()


async def receive_into(
    scope: Scope, receive: Receive, body: bytearray, *, turns: bool = False
) -> Message:
    """Append what comes next to `body`."""
    into = scope["extensions"].get(RECEIVE_INTO, {}).get("into")
    if into is None or (turns and len(body) % 3 == 1):
        chunk = await receive()
        body += chunk.get("body", b"")
        return chunk
    space = bytearray(random.choice([1, 1000, SPACE]) if turns else SPACE)
    message: Message = await into(memoryview(space))
    body += space[: message.get("filled", 0)]
    return message


def digest(body: bytes | bytearray) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def serving(
    limits: ConnectionLimits = LIMITS, tls: ssl.SSLContext | None = None
) -> AbstractAsyncContextManager[Listening[Reader]]:
    return listening(Reader(), limits, tls)


async def _send(client: Client, *data: bytes) -> None:
    for each in data:
        client.send(each)
        await client.writer.drain()


@pytest.mark.requirement("AHP-R17")
@pytest.mark.parametrize("size", [LONG_BYTES, SPACE, SPACE + 1, 3 * MIB])
@pytest.mark.parametrize("path", ["/", "/turns"])
async def test_every_octet_arrives_once_and_in_order(path: str, size: int) -> None:
    body = random.randbytes(size)
    async with serving() as server:
        client = await server.connect()
        for _ in range(3):
            await _send(client, post(path, size), body)
            assert (await client.response()).body == digest(body)
        client.close()


@pytest.mark.requirement("AHP-R05", "AHP-R17")
async def test_every_octet_arrives_over_tls(tmp_path: Path) -> None:
    served, trusting = contexts(tmp_path)
    body = random.randbytes(3 * MIB)
    async with serving(tls=served) as server:
        client = await server.connect(trusting)
        for _ in range(3):
            await _send(client, post("/", len(body)), body)
            assert (await client.response()).body == digest(body)
        client.close()


@pytest.mark.requirement("AHP-R17", "B07")
async def test_what_follows_a_body_is_the_next_request() -> None:
    """All of it in one stream: nothing behind a body may get into it, or get lost."""
    bodies = [random.randbytes(size) for size in (2 * MIB, 3, MIB + 1, 0, LONG_BYTES)]
    stream = b"".join(post("/", len(body)) + body for body in bodies)
    async with serving() as server:
        responses = await server.talk(stream, fin=True)
        assert [response.body for response in responses] == [digest(body) for body in bodies]


async def test_a_client_that_reads_late_gets_every_answer() -> None:
    """The first answer is still leaving while the second body arrives."""
    async with serving() as server:
        client = await server.connect()
        await _send(client, post("/huge", MIB), bytes(MIB), post("/huge", MIB), bytes(MIB // 2))
        await _until(lambda: len(server.app.seen) == 2 and len(server.app.seen[1]) == MIB // 2)
        assert (await client.response()).body == digest(bytes(MIB)) * HUGE
        await _send(client, bytes(MIB // 2))
        assert (await client.response()).body == digest(bytes(MIB)) * HUGE
        client.close()


@pytest.mark.requirement("AHP-R17", "B07")
async def test_what_is_no_request_behind_a_body_does_not_cost_it_its_answer() -> None:
    body = random.randbytes(MIB)
    async with serving() as server:
        first, *others = await server.talk(post("/", MIB) + body + b"GARBAGE\r\n\r\n")
        assert first.body == digest(body)
        assert statuses(others) in ([], [400])
        await server.is_quiet()


@pytest.mark.requirement("AHP-R17", "AHP-R46", "B09")
async def test_a_body_that_ends_early_is_refused() -> None:
    async with serving() as server:
        (response,) = await server.talk(post("/", 2 * MIB) + bytes(2 * MIB - 1), fin=True)
        assert (response.status, response.code) == (400, "malformed_body")
        await server.is_quiet()
        assert server.app.last == ["http.disconnect"]


@pytest.mark.requirement("AHP-R17")
async def test_a_client_that_half_closes_gets_its_answer() -> None:
    async with serving() as server:
        (response,) = await server.talk(post("/", 2 * MIB) + bytes(2 * MIB), fin=True)
        assert response.body == digest(bytes(2 * MIB))


@pytest.mark.requirement("AHP-R46", "B09")
async def test_a_client_that_resets_is_gone() -> None:
    async with serving() as server:
        client = await server.connect()
        await _send(client, post("/hold", 2 * MIB), bytes(MIB))
        await server.app.holds.wait()
        server.app.go.set()
        client.writer.transport.abort()
        await server.is_quiet()
        await _until(lambda: bool(server.app.last))
        assert server.app.last == ["http.disconnect"]


async def test_a_client_that_is_gone_behind_its_last_octet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the server learns first: the body is whole or its client is gone, and no more."""
    async with serving() as server:
        for _ in range(20):
            client = await server.connect()
            await _send(client, post("/", MIB), bytes(MIB))
            client.writer.transport.abort()
            await server.is_quiet()
        await _until(lambda: len(server.app.last) == len(server.app.seen))
    assert set(server.app.last) <= {"http.request", "http.disconnect"}
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_behind_a_body_there_is_only_the_end_of_the_connection() -> None:
    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        del send
        while (await receive_into(scope, receive, body))["type"] != "http.disconnect":
            pass
        again.append((await receive_into(scope, receive, body))["type"])

    body, again = bytearray(), list[str]()
    async with listening(silent) as server:
        client = await server.connect()
        await _send(client, post("/", MIB), bytes(MIB))
        await _until(lambda: len(body) == MIB)
        server.connection.abort()
        await _until(lambda: again == ["http.disconnect"])
        assert body == bytes(MIB)
        client.close()


async def test_the_server_may_end_a_connection_while_a_reader_waits() -> None:
    async with serving() as server:
        client = await server.connect()
        await _send(client, post("/", 2 * MIB), bytes(MIB))
        await _until(lambda: bool(server.app.seen) and len(server.app.seen[0]) == MIB)
        server.connection.abort()
        await server.is_quiet()
        await _until(lambda: bool(server.app.last))
        assert server.app.last == ["http.disconnect"]
        client.close()


async def test_nothing_is_read_while_nobody_waits() -> None:
    """The network's buffers fill up, this process's memory does not."""
    async with serving() as server:
        client = await server.connect()
        sending = asyncio.create_task(_send(client, post("/hold", 64 * MIB), bytes(64 * MIB)))
        await server.app.holds.wait()
        assert len(server.connection.cycle.body) == 0
        assert not server.connection._wire.is_reading()
        server.app.go.set()
        assert (await client.response()).body == digest(bytes(64 * MIB))
        await sending
        client.close()


async def test_a_reader_that_stops_leaves_the_connection_in_order() -> None:
    """What it did not read is no request, and the next request is one."""
    async with serving() as server:
        client = await server.connect()
        body = post("/never") * (2 * MIB // len(post("/never")))
        await _send(client, post("/part", len(body)), body)
        assert (await client.response()).status == 201
        await _send(client, post("/", MIB), bytes(MIB))
        assert (await client.response()).body == digest(bytes(MIB))
        assert len(server.app.seen) == 2
        client.close()


@pytest.mark.requirement("AHP-R15")
async def test_a_client_that_waits_is_told_to_go_on_once() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/", MIB, "Expect: 100-continue"))
        async with asyncio.timeout(PATIENCE):
            interim = await client.reader.readuntil(b"\r\n\r\n")
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        await _send(client, bytes(MIB))
        assert (await client.response()).body == digest(bytes(MIB))
        client.close()


async def test_a_wait_that_is_given_up_loses_nothing() -> None:
    async def impatient(scope: Scope, receive: Receive, send: Send) -> None:
        into = scope["extensions"][RECEIVE_INTO]["into"]
        body, space, more = bytearray(), bytearray(SPACE), True
        while more:
            waiting = asyncio.ensure_future(into(memoryview(space)))
            await asyncio.wait((waiting,), timeout=0)
            if not waiting.done():
                waiting.cancel()
                gave_up.append(await asyncio.gather(waiting, return_exceptions=True))
                message = await receive()
                body += message["body"]
            else:
                message = waiting.result()
                body += space[: message["filled"]]
            more = message["more_body"]
        await answer(send, 201, digest(body))

    gave_up: list[Any] = []
    body = random.randbytes(2 * MIB)
    async with listening(impatient) as server:
        client = await server.connect()
        await _send(client, post("/", len(body)))
        for start in range(0, len(body), MIB // 4):
            await _send(client, body[start : start + MIB // 4])
            await asyncio.sleep(0)
        assert (await client.response()).body == digest(body)
        assert gave_up
        client.close()


@pytest.mark.parametrize(
    "head",
    [
        post("/", LONG_BYTES - 1) + bytes(LONG_BYTES - 1),
        post("/", None, "Transfer-Encoding: chunked") + b"3\r\nabc\r\n0\r\n\r\n",
        post("/", 0),
    ],
    ids=["short", "chunked", "empty"],
)
async def test_other_bodies_go_through_the_parser(head: bytes) -> None:
    offered = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        offered.append(RECEIVE_INTO in scope["extensions"])
        while (await receive())["more_body"]:
            pass
        await answer(send, 201, b"")

    async with listening(application) as server:
        assert statuses(await server.talk(head, fin=True)) == [201]
    assert offered == [False]


@pytest.mark.parametrize(
    ("segments", "all_there"),
    [
        ([post("/", 3) + b"abc"], True),
        ([post("/", 3), b"abc"], False),
        ([post("/", 3) + b"ab", b"c"], False),
        ([post("/", LONG_BYTES) + b"abc", bytes(LONG_BYTES - 3)], False),
    ],
    ids=["at once", "after its head", "in parts", "long"],
)
async def test_a_body_that_came_with_its_head_is_all_there(
    segments: list[bytes], all_there: bool
) -> None:
    said = []
    asked = asyncio.Event()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        said.append(ALL_THERE in scope["extensions"])
        asked.set()
        body = RequestBody(scope, receive, BODY_LIMITS)
        await answer(send, 201, digest(b"".join([piece async for piece in body])))

    async with listening(application) as server:
        client = await server.connect()
        for segment in segments:
            await _send(client, segment)
            async with asyncio.timeout(PATIENCE):
                await asked.wait()
        whole = b"".join(segments).partition(b"\r\n\r\n")[2]
        assert (await client.response()).body == digest(whole)
        client.close()
    assert said == [all_there]


# --- what stands on it --------------------------------------------------------------------------


class Memory:
    """A sink of so many bytes at a time."""

    def __init__(self, size: int) -> None:
        self.body = bytearray()
        self._space = bytearray(size)

    def space(self) -> memoryview:
        return memoryview(self._space)

    async def filled(self, count: int) -> None:
        self.body += self._space[:count]


BODY_LIMITS = BodyLimits(
    idle_seconds=PATIENCE, min_bytes_per_second=0, drain_bytes=64 * MIB, drain_seconds=PATIENCE
)


@pytest.mark.parametrize("size", [3, MIB, 3 * MIB])
@pytest.mark.parametrize("how", ["pour", "iterate"])
async def test_a_request_body_is_the_same_either_way(how: str, size: int) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        body, memory = RequestBody(scope, receive, BODY_LIMITS), Memory(70_000)
        if how == "pour":
            await body.pour(memory)
        else:
            async for chunk in body:
                memory.body += chunk
        assert (body.received, body.complete) == (size, True)
        await answer(send, 201, digest(memory.body))

    sent = random.randbytes(size)
    async with listening(application) as server:
        (response,) = await server.talk(post("/", size) + sent, fin=True)
        assert response.body == digest(sent)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)
