"""The parser that ships, on real sockets and on both event loops."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.http.afterwards import AFTERWARDS
from app.http.protocol import LONG_BYTES, ConnectionLimits
from tests.http.listening import (
    LIMITS,
    MIB,
    PATIENCE,
    Listening,
    answer,
    begin_answer,
    contexts,
    listening,
    post,
    put_off,
    statuses,
)
from tests.loops import ON_BOTH_LOOPS

pytestmark = [pytest.mark.anyio, ON_BOTH_LOOPS]

SHORT = 0.05
LARGE = [b"a" * 100_000, b"b", b"c" * 100_000, b"d" * 5000, b"e"]


@dataclass
class Application:
    """Reads a body and tells what it saw; waits for `go` where the path is /wait."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    scopes: list[Scope] = field(default_factory=list)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    then: Callable[[], object] = bool

    async def is_asked(self) -> None:
        """Wait until a request has reached the application."""
        async with asyncio.timeout(PATIENCE):
            while not self.scopes:
                await asyncio.sleep(0.005)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["path"] == "/early":
            await answer(send, 401, b"early")
            return
        if scope["path"] == "/stream":
            await begin_answer(send, 200, 100)
        size = await self._read(receive)
        if size is None:
            self.disconnected.set()
            return
        if scope["path"] == "/wait":
            await self.go.wait()
        if scope["path"] == "/empty":
            await answer(send, 204, b"")
            self.then()
            return
        if scope["path"] == "/large":
            await _answer_in_pieces(send, LARGE)
            return
        await answer(send, 201, b"%s %d" % (scope["path"].encode(), size))

    async def _read(self, receive: Receive) -> int | None:
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message["body"])
            if not message["more_body"]:
                return size


async def _answer_in_pieces(send: Send, pieces: list[bytes]) -> None:
    await begin_answer(send, 200, sum(map(len, pieces)))
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def serving(
    limits: ConnectionLimits = LIMITS, tls: ssl.SSLContext | None = None, keep_alive: float = 60
) -> AbstractAsyncContextManager[Listening[Application]]:
    return listening(Application(), limits, tls, keep_alive)


async def test_requests_follow_each_other_on_a_connection() -> None:
    async with serving() as server:
        client = await server.connect()
        for _ in range(3):
            client.send(post() + b"abc")
            assert (await client.response()).body == b"/ 3"
        client.close()


@pytest.mark.parametrize("size", [0, 3, LONG_BYTES])
async def test_what_is_left_to_do_for_any_request_can_be_put_off(size: int) -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/", size) + bytes(size))
        assert (await client.response()).body == b"/ %d" % size
        client.close()
    (scope,) = server.app.scopes
    assert scope["extensions"][AFTERWARDS] == {"do": put_off}


async def test_an_answer_is_never_held_back_for_the_next_one() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post() + b"abc")
        await client.response()
        accepted = server.connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        client.close()


async def test_an_answer_in_pieces_is_whole_and_in_order() -> None:
    async with serving() as server:
        client = await server.connect()
        for _ in range(2):
            client.send(post("/large") + b"abc")
            assert (await client.response()).body == b"".join(LARGE)
        client.close()


async def test_a_head_without_a_body_is_not_held_back() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 201 ")
        client.close()


# --- the head -----------------------------------------------------------------------------------


@pytest.mark.requirement("B16")
async def test_half_a_head_and_silence_is_ended() -> None:
    async with serving(replace(LIMITS, head_seconds=SHORT)) as server:
        (response,) = await server.talk(b"POST / HTTP/1.1\r\nHost: rec")
        assert (response.status, response.code) == (408, "too_slow")
        await server.is_quiet()


@pytest.mark.requirement("B16")
async def test_silence_is_ended_without_a_word() -> None:
    async with serving(replace(LIMITS, head_seconds=SHORT)) as server:
        assert await server.talk(b"") == []
        await server.is_quiet()


@pytest.mark.requirement("B16")
async def test_blank_lines_do_not_keep_a_connection() -> None:
    async with serving(replace(LIMITS, head_seconds=SHORT)) as server:
        client = await server.connect()
        client.send(post() + b"abc")
        await client.response()
        client.send(b"\r\n")
        assert await client.ended() == b""
        client.close()


@pytest.mark.requirement("B16")
async def test_the_head_of_a_next_request_is_timed_like_the_first() -> None:
    async with serving(replace(LIMITS, head_seconds=SHORT)) as server:
        responses = await server.talk(post() + b"abcPOST / HTTP")
        assert statuses(responses) == [201, 408]


@pytest.mark.requirement("B16")
async def test_a_slow_head_does_not_cost_the_request_before_it_its_answer() -> None:
    async with serving(replace(LIMITS, head_seconds=SHORT)) as server:
        client = await server.connect()
        client.send(post("/wait") + b"abcPOST / HTTP")
        await server.takes_no_more()
        server.app.go.set()
        assert statuses(await client.until_the_end()) == [201]


@pytest.mark.requirement("AHP-R47")
async def test_a_head_that_never_ends_is_refused() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(b"POST / HTTP/1.1\r\nX-Long: ")
        client.send(b"x" * MIB)
        (response,) = await client.until_the_end()
        assert (response.status, response.code) == (431, "head_too_large")


async def test_a_head_in_small_pieces_is_a_head() -> None:
    async with serving() as server:
        client = await server.connect()
        for octet in post() + b"abc":
            client.send(bytes([octet]))
            await client.writer.drain()
            await asyncio.sleep(0)
        assert (await client.response()).status == 201
        client.close()


@pytest.mark.requirement("AHP-R50", "B07", "B19")
@pytest.mark.parametrize(
    "head",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\r\n\r\n",
        b"POST / HTTP/2.0\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\r2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\n2: 3\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-A: 1\x002\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nX-A : 1\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_answered_with_a_problem_document(head: bytes) -> None:
    async with serving() as server:
        (response,) = await server.talk(head)
        assert (response.status, response.code) == (400, "malformed_request")
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["connection"] == "close"
        assert server.app.scopes == []


@pytest.mark.requirement("AHP-R14", "B19")
async def test_what_is_no_request_is_logged_under_the_id_that_its_answer_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "consignee.access")
    async with serving() as server:
        (response,) = await server.talk(b"s3cret\r\n\r\n")
    (record,) = [each for each in caplog.records if each.name == "consignee.access"]
    shown = vars(record)
    assert shown["request_id"] == response.headers["x-request-id"]
    assert (shown["status"], shown["code"]) == (400, "malformed_request")
    assert "s3cret" not in str(shown)


async def test_http_1_0_needs_no_host() -> None:
    async with serving() as server:
        (response,) = await server.talk(b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
        assert response.status == 201


async def test_white_space_around_a_value_is_no_part_of_it() -> None:
    async with serving() as server:
        await server.talk(post("/", 3, "X-A: \t v \t ", "Connection: close") + b"abc")
        assert (b"x-a", b"v") in server.app.scopes[0]["headers"]


@pytest.mark.requirement("B06")
async def test_a_trailer_is_no_header() -> None:
    async with serving() as server:
        chunks = b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\n\r\n"
        head = post("/", None, "Transfer-Encoding: chunked", "Connection: close")
        (response,) = await server.talk(head + chunks)
        assert response.body == b"/ 3"
        assert b"authorization" not in dict(server.app.scopes[0]["headers"])


@pytest.mark.requirement("B07")
@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_a_body_is_never_taken_for_another_protocol_or_a_next_request(protocol: str) -> None:
    async with serving() as server:
        client = await server.connect()
        head = post("/", 40, "Connection: Upgrade", f"Upgrade: {protocol}")
        client.send(head)
        (response,) = await client.until_the_end()
        assert response.status == 400
        assert "Upgrade" in json.loads(response.body)["detail"]
        assert server.app.scopes == []


async def test_an_offer_to_switch_protocols_is_declined() -> None:
    async with serving() as server:
        head = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        (response,) = await server.talk(head)
        assert response.status == 201
        assert response.headers["connection"] == "close"


# --- behind and instead of the body -------------------------------------------------------------


@pytest.mark.requirement("AHP-R17", "B07")
@pytest.mark.parametrize("path", ["/", "/wait"])
@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("size", [3, 8 * MIB])
async def test_bytes_behind_a_request_do_not_cost_it_its_answer(
    path: str, connection: str, size: int
) -> None:
    async with serving() as server:
        server.app.go.set()
        head = post(path, 3, f"Connection: {connection}")
        (response,) = await server.talk(head + b"abc" + b"q" * size)
        assert response.status == 201
        assert response.headers["connection"] == "close"
        await server.is_quiet()


@pytest.mark.requirement("AHP-R17", "B09")
async def test_a_body_that_ends_early_is_refused() -> None:
    async with serving() as server:
        (response,) = await server.talk(post("/", 9) + b"abc", fin=True)
        assert (response.status, response.code) == (400, "malformed_body")
        async with asyncio.timeout(PATIENCE):
            await server.app.disconnected.wait()
        await server.is_quiet()


async def test_a_body_in_broken_chunks_is_refused() -> None:
    async with serving() as server:
        head = post("/", None, "Transfer-Encoding: chunked")
        (response,) = await server.talk(head + b"ZZ\r\nabc\r\n")
        assert (response.status, response.code) == (400, "malformed_request")


async def test_no_second_status_inside_an_answer_that_has_begun() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/stream", 9) + b"abc")
        await client.reader.readuntil(b"\r\n\r\n")
        client.writer.write_eof()
        assert await client.ended() == b""
        client.close()


@pytest.mark.requirement("AHP-R17")
async def test_a_client_that_half_closes_gets_its_answer() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/wait") + b"abc")
        client.writer.write_eof()
        await server.takes_no_more()
        server.app.go.set()
        assert statuses(await client.until_the_end()) == [201]
        await server.is_quiet()


@pytest.mark.requirement("AHP-R17")
async def test_an_answer_without_a_body_reaches_a_client_that_half_closes() -> None:
    """It is held for a body that does not come; the end must not overtake it."""
    async with serving() as server:
        for _ in range(20):
            assert statuses(await server.talk(post("/empty") + b"abc", fin=True)) == [204]


async def test_an_answer_without_a_body_leaves_before_the_server_stops() -> None:
    async with serving() as server:
        server.app.then = server.shutdown
        assert statuses(await server.talk(post("/empty") + b"abc")) == [204]


@pytest.mark.parametrize("data", [b"", b"POST / HT"])
async def test_a_client_that_closes_before_a_request_gets_nothing(data: bytes) -> None:
    async with serving() as server:
        assert await server.talk(data, fin=True) == []


async def test_a_client_that_closes_between_requests_gets_no_more() -> None:
    async with serving() as server:
        assert statuses(await server.talk(post("/") + b"abc", fin=True)) == [201]
        client = await server.connect()
        client.send(post("/") + b"abc")
        await client.response()
        client.writer.write_eof()
        assert await client.ended() == b""
        client.close()


@pytest.mark.requirement("AHP-R46")
async def test_a_client_that_resets_is_gone() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/", 9) + b"abc")
        await client.writer.drain()
        await server.app.is_asked()
        client.writer.transport.abort()
        async with asyncio.timeout(PATIENCE):
            await server.app.disconnected.wait()
        await server.is_quiet()


# --- pipelining ---------------------------------------------------------------------------------


@pytest.mark.requirement("B07")
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as server:
        server.app.go.set()
        data = post("/wait") + b"abc" + post("/b", 0) + post("/c", 2, "Connection: close") + b"zz"
        assert [each.body for each in await server.talk(data)] == [b"/wait 3", b"/b 0", b"/c 2"]


@pytest.mark.requirement("B07")
@pytest.mark.parametrize("between", [b"", post("/b", 0)])
async def test_an_unfinished_request_in_the_queue_is_dropped_behind_the_answers_before_it(
    between: bytes,
) -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/wait") + b"abc" + between + post("/c", 9) + b"abc")
        client.writer.write_eof()
        await server.takes_no_more()
        server.app.go.set()
        responses = await client.until_the_end()
        assert statuses(responses) == ([201, 201] if between else [201])
        assert responses[-1].headers["connection"] == "close"
        assert "/c" not in [scope["path"] for scope in server.app.scopes]


@pytest.mark.requirement("B07")
async def test_garbage_behind_pipelined_requests_does_not_cost_them_their_answers() -> None:
    async with serving() as server:
        server.app.go.set()
        data = post("/wait") + b"abc" + post("/b") + b"abcGARBAGE"
        assert statuses(await server.talk(data)) == [201, 201]


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R51", "B13")
async def test_an_early_answer_arrives_although_the_client_sends_everything_first() -> None:
    async with serving() as server:
        (response,) = await server.talk(post("/early", 16 * MIB) + b"q" * (16 * MIB))
        assert (response.status, response.body) == (401, b"early")
        await server.is_quiet()


@pytest.mark.requirement("B07", "B13")
async def test_what_is_left_over_is_never_a_next_request() -> None:
    async with serving() as server:
        responses = await server.talk(post("/early", 9) + b"123456789" + post("/b") + b"abc")
        assert statuses(responses) == [401]
        assert [scope["path"] for scope in server.app.scopes] == ["/early"]


@pytest.mark.requirement("B13")
async def test_the_drain_is_bounded_in_bytes() -> None:
    async with serving(replace(LIMITS, drain_bytes=MIB)) as server:
        client = await server.connect()
        client.send(post("/early", 1 << 40))
        assert (await client.response()).status == 401
        with pytest.raises(ConnectionError):
            await client.send_for_ever()
        client.close()
        await server.is_quiet()


@pytest.mark.requirement("B13")
async def test_the_drain_is_bounded_in_time() -> None:
    async with serving(replace(LIMITS, drain_seconds=SHORT)) as server:
        client = await server.connect()
        client.send(post("/early", 1 << 40))
        assert (await client.response()).status == 401
        assert await client.ended() == b""
        await server.is_quiet()  # although the client keeps its side open
        client.close()


async def test_an_idle_connection_is_closed() -> None:
    async with serving(keep_alive=SHORT) as server:
        client = await server.connect()
        client.send(post() + b"abc")
        assert (await client.response()).status == 201
        assert await client.ended() == b""
        await server.is_quiet()
        client.close()


async def test_shutdown_closes_what_is_idle() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post() + b"abc")
        await client.response()
        server.shutdown()
        await server.is_quiet()
        client.close()


async def test_shutdown_lets_a_request_have_its_answer() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/wait") + b"abc")
        await server.app.is_asked()
        server.shutdown()
        server.app.go.set()
        (response,) = await client.until_the_end()
        assert (response.status, response.headers["connection"]) == (201, "close")


async def test_shutdown_does_not_wait_for_a_client_that_only_lingers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.http.protocol.LINGER_SECONDS", SHORT)
    async with serving() as server:
        client = await server.connect()
        client.send(post("/wait") + b"abc")
        await server.app.is_asked()
        server.shutdown()
        server.app.go.set()
        assert (await client.response()).status == 201
        await server.is_quiet()  # although the client keeps its side open
        client.close()


async def test_shutdown_does_not_wait_for_a_drain() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/early", 1 << 40))
        await client.response()
        server.shutdown()
        await server.is_quiet()
        client.close()


async def test_a_peer_that_is_gone_when_fin_is_due() -> None:
    async with serving() as server:
        client = await server.connect()
        client.send(post("/wait", 3, "Connection: close") + b"abc")
        await server.app.is_asked()
        protocol = server.connection
        wire = protocol._wire
        protocol._wire = _Reset(wire)
        server.app.go.set()
        await client.ended()
        await server.is_quiet()
        client.close()


class _Reset(asyncio.Transport):
    """A transport whose peer has reset the connection, which nobody has noticed yet."""

    def __init__(self, wire: asyncio.Transport) -> None:
        super().__init__()
        self._wire = wire

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        raise OSError("Transport endpoint is not connected")

    def __getattribute__(self, name: str) -> Any:
        if name in ("is_closing", "abort", "close"):
            return getattr(super().__getattribute__("_wire"), name)
        return super().__getattribute__(name)


# --- TLS ----------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R05", "AHP-R51", "B13")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (post() + b"abc", 201),
        (post("/early", 8 * MIB) + b"q" * (8 * MIB), 401),
        (b"hello\r\n\r\n", 400),
    ],
)
async def test_tls_needs_no_half_close(tmp_path: Path, data: bytes, expected: int) -> None:
    served, trusting = contexts(tmp_path)
    async with serving(tls=served) as server:
        client = await server.connect(trusting)
        client.send(data)
        assert (await client.response()).status == expected
        client.close()
        await client.writer.wait_closed()
        await server.is_quiet()
