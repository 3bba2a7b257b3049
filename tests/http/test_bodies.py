"""A request body as it arrives: whole, in parts, never, or too slowly."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from starlette.types import Message, Receive

from app.errors import Disconnected, TooLarge, TooSlow
from app.http.bodies import ALL_THERE, BodyLimits, RequestBody
from app.settings import Settings
from tests.http.messages import (
    DISCONNECT,
    LIMITS,
    announcing,
    chunk,
    http_scope,
    receive_nothing,
    receiving,
)

pytestmark = pytest.mark.anyio

SOON = replace(LIMITS, idle_seconds=0.01, drain_seconds=0.01)


def body_of(
    receive: Receive,
    size: int = 6,
    limits: BodyLimits = LIMITS,
    clock: Callable[[], float] = time.monotonic,
) -> RequestBody:
    return RequestBody(http_scope(headers=announcing(size)), receive, limits, clock=clock)


async def read(body: RequestBody) -> list[bytes]:
    return [part async for part in body]


def test_the_limits_come_from_the_settings() -> None:
    settings = Settings(
        idle_timeout_seconds=1,
        min_rate_bytes_per_second=2,
        drain_bytes=3,  # type: ignore[arg-type]  # pydantic makes a ByteSize of it
        drain_seconds=4,
    )
    assert BodyLimits.of(settings) == BodyLimits(1, 2, 3, 4)


async def test_a_body_in_one_part() -> None:
    body = body_of(receiving(chunk(b"abcdef", more=False)))
    assert await read(body) == [b"abcdef"]
    assert body.received == 6
    assert body.complete


async def test_a_body_in_several_parts_is_handed_on_as_it_arrives() -> None:
    body = body_of(receiving(chunk(b"abc"), chunk(b""), chunk(b"def"), chunk(b"", more=False)))
    parts = aiter(body)
    assert await anext(parts) == b"abc"
    assert body.received == 3
    assert not body.complete
    assert [part async for part in parts] == [b"def"]
    assert body.complete


async def test_nobody_s_time_is_measured_for_a_body_that_is_all_there() -> None:
    def unasked() -> float:
        raise AssertionError("somebody looked at the clock")

    scope = http_scope(headers=announcing(6), extensions={ALL_THERE: {}})
    receive = receiving(chunk(b"abc"), chunk(b"def", more=False))
    body = RequestBody(scope, receive, LIMITS, clock=unasked)
    assert await read(body) == [b"abc", b"def"]
    assert body.received == 6
    assert body.complete


async def test_a_client_may_go_although_its_body_is_all_there() -> None:
    scope = http_scope(headers=announcing(6), extensions={ALL_THERE: {}})
    with pytest.raises(Disconnected):
        await read(RequestBody(scope, receiving(DISCONNECT), LIMITS))


@pytest.mark.parametrize("extensions", [{}, {ALL_THERE: {}}])
@pytest.mark.parametrize("parts", [[b"abcdef"], [b"abc", b"", b"def"]])
async def test_a_whole_body_is_what_its_parts_are(
    parts: list[bytes], extensions: dict[str, object]
) -> None:
    *first, last = parts
    receive = receiving(*map(chunk, first), chunk(last, more=False))
    body = RequestBody(http_scope(headers=announcing(6), extensions=extensions), receive, LIMITS)
    assert await body.whole(6) == b"abcdef"
    assert body.received == 6
    assert await body.whole(6) == b""


@pytest.mark.parametrize("extensions", [{}, {ALL_THERE: {}}])
@pytest.mark.parametrize("parts", [[b"abcdef"], [b"abc", b"def"]])
async def test_a_whole_body_over_its_limit_is_refused_and_not_read_to_its_end(
    parts: list[bytes], extensions: dict[str, object]
) -> None:
    receive = receiving(*map(chunk, parts))
    scope = http_scope(headers=announcing(9), extensions=extensions)
    body = RequestBody(scope, receive, LIMITS)
    with pytest.raises(TooLarge):
        await body.whole(5)
    assert not body.complete


@pytest.mark.parametrize("extensions", [{}, {ALL_THERE: {}}])
async def test_a_client_that_goes_leaves_no_whole_body(extensions: dict[str, object]) -> None:
    scope = http_scope(headers=announcing(6), extensions=extensions)
    body = RequestBody(scope, receiving(chunk(b"abc"), DISCONNECT), LIMITS)
    with pytest.raises(Disconnected):
        await body.whole(6)


async def test_no_body_is_a_whole_one_without_octets() -> None:
    assert await RequestBody(http_scope(), receive_nothing, LIMITS).whole(0) == b""


@pytest.mark.parametrize("headers", [[], [(b"content-length", b"0")]])
async def test_a_request_without_a_body_is_complete_from_the_start(
    headers: list[tuple[bytes, bytes]],
) -> None:
    body = RequestBody(http_scope(headers=headers), receive_nothing, LIMITS)
    assert body.complete
    assert await read(body) == []


@pytest.mark.parametrize("length", [[], [(b"content-length", b"0")]])
async def test_a_transfer_encoding_announces_a_body(length: list[tuple[bytes, bytes]]) -> None:
    headers = [*length, (b"transfer-encoding", b"chunked")]
    body = RequestBody(http_scope(headers=headers), receive_nothing, LIMITS)
    assert not body.complete


@pytest.mark.requirement("AHP-R46", "B97")
async def test_a_client_that_goes_is_no_end_of_its_body() -> None:
    body = body_of(receiving(chunk(b"abc"), DISCONNECT))
    with pytest.raises(Disconnected):
        await read(body)
    assert not body.complete


@pytest.mark.requirement("B16")
async def test_a_client_that_sends_nothing_is_ended() -> None:
    body = body_of(receiving(chunk(b"abc")), limits=SOON)
    with pytest.raises(TooSlow, match="Nothing arrived"):
        await read(body)
    assert body.received == 3


def every(seconds: float, part: bytes, times: int) -> tuple[Receive, Callable[[], float]]:
    """`receive` that brings `part` after `seconds` each time, and the clock that shows them."""
    now = 0.0
    numbers = count(1)

    async def receive() -> Message:
        nonlocal now
        now += seconds
        return chunk(part, more=next(numbers) < times)

    return receive, lambda: now


@pytest.mark.requirement("B16")
async def test_a_trickle_below_the_minimum_rate_is_ended() -> None:
    receive, clock = every(4, b"x", times=1000)
    body = body_of(receive, 1000, clock=clock)
    with pytest.raises(TooSlow, match="minimum rate"):
        await read(body)
    assert body.received == 8  # judged as soon as 30 seconds were spent waiting


@pytest.mark.requirement("B16")
async def test_a_slow_honest_body_may_take_for_ever() -> None:
    receive, clock = every(10, b"x" * 6000, times=1000)
    body = body_of(receive, 6_000_000, clock=clock)
    assert len(b"".join(await read(body))) == 6_000_000
    assert clock() == 10_000


async def test_a_body_that_is_there_is_never_too_slow() -> None:
    receive, clock = every(20, b"x", times=2)
    body = body_of(receive, 2, clock=clock)
    assert await read(body) == [b"x", b"x"]


async def test_no_minimum_rate() -> None:
    receive, clock = every(29, b"x", times=10)
    body = body_of(receive, 10, replace(LIMITS, min_bytes_per_second=0), clock)
    assert len(await read(body)) == 10


async def test_time_that_the_reader_takes_does_not_count() -> None:
    now = 0.0
    body = body_of(receiving(*[chunk(b"x")] * 9, chunk(b"x", more=False)), 10, clock=lambda: now)
    async for _ in body:
        now += 100
    assert body.complete


async def test_draining_reads_to_the_end() -> None:
    body = body_of(receiving(chunk(b"abc"), chunk(b"def", more=False)))
    await body.drain()
    assert body.complete
    assert body.received == 6


async def test_draining_after_a_part_goes_on_from_there() -> None:
    body = body_of(receiving(chunk(b"abc"), chunk(b"def", more=False)))
    async for _ in body:
        break
    await body.drain()
    assert body.complete


@pytest.mark.requirement("B13")
async def test_draining_is_bounded_in_bytes() -> None:
    receive, _ = every(0, b"x" * 1000, times=10**6)
    body = body_of(receive, 10**9, replace(LIMITS, drain_bytes=10_000))
    await body.drain()
    assert not body.complete
    assert body.received == 11_000  # the part that went over the bound is the last


@pytest.mark.requirement("B13")
async def test_draining_is_bounded_in_time() -> None:
    body = body_of(receiving(chunk(b"abc")), limits=SOON)
    await body.drain()
    assert not body.complete


async def test_draining_ends_when_the_client_goes() -> None:
    body = body_of(receiving(chunk(b"abc"), DISCONNECT))
    await body.drain()
    assert not body.complete


async def test_draining_what_is_complete_reads_nothing() -> None:
    body = RequestBody(http_scope(), receive_nothing, LIMITS)
    await body.drain()
    assert body.received == 0
