"""Small answers to GET and HEAD, and what is said of every other request."""

from __future__ import annotations

import pytest
from starlette.types import Scope

from app.errors import NotFound, Unavailable
from app.http.middleware import record_of
from app.http.resources import Answer, Resource, UnknownRoute, refused
from tests.http.messages import LIMITS, Sent, announcing, chunk, http_scope, receiving

pytestmark = pytest.mark.anyio


async def hello(_: Scope) -> Answer:
    return Answer(200, b"text/plain", b"hello", ((b"x-a", b"b"),))


async def broken(_: Scope) -> Answer:
    raise Unavailable("not_ready", "The database does not answer.", retry_after=3)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_get_and_head_are_answered(method: str) -> None:
    sent = Sent()
    await Resource(hello, LIMITS)(http_scope(method), receiving(), sent)
    assert (sent.status, sent.body, sent.headers[b"x-a"]) == (200, b"hello", b"b")


@pytest.mark.requirement("B19")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get"])
async def test_another_method_is_told_which_there_are(method: str) -> None:
    sent = Sent()
    scope = http_scope(method)
    await Resource(hello, LIMITS)(scope, receiving(), sent)
    assert sent.status == 405
    assert sent.headers[b"allow"] == b"GET, HEAD"
    assert sent.json["code"] == record_of(scope).code == "method_not_allowed"


async def test_a_refusal_is_a_problem_document() -> None:
    sent = Sent()
    scope = http_scope("GET")
    await Resource(broken, LIMITS)(scope, receiving(), sent)
    assert sent.status == 503
    assert sent.headers[b"content-type"] == b"application/problem+json"
    assert sent.headers[b"retry-after"] == b"3"
    assert record_of(scope).code == "not_ready"


async def test_a_body_that_nobody_asked_for_is_read_away() -> None:
    sent = Sent()
    receive = receiving(chunk(b"abc", more=False))
    await Resource(hello, LIMITS)(http_scope("GET", headers=announcing(3)), receive, sent)
    assert sent.headers[b"connection"] == b"close"
    assert sent.is_complete


@pytest.mark.requirement("AHP-R31")
@pytest.mark.parametrize("method", ["GET", "POST", "BREW"])
async def test_an_unknown_route_is_404_for_every_method(method: str) -> None:
    sent = Sent()
    scope = http_scope(method, "/nope")
    await UnknownRoute(LIMITS)(scope, receiving(), sent)
    assert (sent.status, sent.json["code"]) == (404, "route_not_found")
    assert record_of(scope).code == "route_not_found"


def test_headers_stand_beside_those_of_the_refusal() -> None:
    answer = refused(NotFound("x", "y"), (b"x-a", b"b"))
    assert answer.headers == ((b"x-a", b"b"),)
