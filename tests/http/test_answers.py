"""Complete answers, and those that leave while the client is still sending."""

from __future__ import annotations

import pytest
from starlette.types import Message

from app.http.answers import JSON, STAGED_CLOSE, encode_json, send_early, send_whole
from app.http.bodies import RequestBody
from tests.http.messages import (
    LIMITS,
    Sent,
    announcing,
    chunk,
    http_scope,
    receive_nothing,
    receiving,
)

pytestmark = pytest.mark.anyio


def test_json_is_compact_and_ascii() -> None:
    assert encode_json({"a": "é", "b": [1, None]}) == b'{"a":"\\u00e9","b":[1,null]}'


async def test_a_whole_answer() -> None:
    sent = Sent()
    await send_whole(sent, 201, JSON, b"{}", [(b"x-a", b"b")])
    assert sent.status == 201
    assert sent.headers == {
        b"content-type": b"application/json",
        b"content-length": b"2",
        b"x-a": b"b",
    }
    assert sent.body == b"{}"
    assert sent.is_complete


async def test_an_answer_to_a_complete_request_keeps_the_connection() -> None:
    scope = http_scope("GET")
    sent = Sent()
    unread = RequestBody(scope, receive_nothing, LIMITS)
    await send_early(scope, sent, unread, 404, JSON, b"{}")
    assert b"connection" not in sent.headers
    assert sent.is_complete


@pytest.mark.requirement("AHP-R51", "B13")
async def test_an_early_answer_leaves_before_the_rest_of_the_body_is_read() -> None:
    scope = http_scope(headers=announcing(6))
    sent = Sent()
    incoming = receiving(chunk(b"abc"), chunk(b"def", more=False))
    seen_before_reading: list[int] = []

    async def receive() -> Message:
        seen_before_reading.append(len(sent.body))
        return await incoming()

    unread = RequestBody(scope, receive, LIMITS)
    await send_early(scope, sent, unread, 413, JSON, b"{}", [(b"x-a", b"b")])
    assert seen_before_reading == [2, 2]
    assert unread.complete
    assert sent.headers[b"connection"] == b"close"
    assert sent.headers[b"x-a"] == b"b"
    assert sent.body == b"{}"
    assert sent.is_complete


@pytest.mark.requirement("AHP-R51", "B13", "B15")
async def test_a_server_that_closes_in_stages_reads_the_rest_itself() -> None:
    scope = http_scope(headers=announcing(6), extensions={STAGED_CLOSE: {}})
    sent = Sent()
    unread = RequestBody(scope, receive_nothing, LIMITS)
    await send_early(scope, sent, unread, 413, JSON, b"{}")
    assert sent.headers[b"connection"] == b"close"
    assert sent.is_complete
