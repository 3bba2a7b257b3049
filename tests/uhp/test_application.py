"""The shell of /v1: every answer has its version, every non-2xx is the envelope."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.auth.principals import Principal
from app.errors import Disconnected, NotFound, TooLarge
from app.http.middleware import record_of
from app.uhp.application import UhpApplication, is_uhp
from app.uhp.errors import RateLimited, UhpError
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from tests.http.messages import DISCONNECT, Sent, announcing, chunk, http_scope, receiving
from tests.uhp.calling import (
    FIRST,
    POWERLESS,
    application_of,
    call,
    error_of,
    settings_for,
)
from tests.uhp.schema import validate

pytestmark = pytest.mark.anyio

SECRET = "/srv/secret/place"


async def echo(request: UhpRequest) -> UhpAnswer:
    return json_answer(
        {
            "scope": request.scope,
            "method": request.method,
            "path": dict(request.path),
            "version": request.version,
            "word": request.query.text("word"),
        }
    )


async def take_json(request: UhpRequest) -> UhpAnswer:
    return json_answer({"taken": await request.json(20)}, status=201)


async def fail(request: UhpRequest) -> UhpAnswer:
    raise RuntimeError(SECRET)


async def refuse(request: UhpRequest) -> UhpAnswer:
    raise {
        "gone": NotFound("session_not_found", "There is no such session."),
        "large": TooLarge(7),
        "range": UhpError(
            "consignee_range_not_satisfiable",
            "The file has no such range.",
            headers=[(b"content-range", b"bytes */3")],
        ),
    }[request.path["how"]]


async def stream(request: UhpRequest) -> UhpAnswer:
    how = request.query.text("how")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if how == "refuse":
            raise NotFound("file_not_found", "There is no such file.")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        if how == "late refusal":
            raise NotFound("file_not_found", "There is no such file.")
        if how == "fail":
            raise RuntimeError(SECRET)
        if how == "gone":
            assert await receive() == DISCONNECT
            raise Disconnected
        await send({"type": "http.response.body", "body": b"b"})

    return respond


ROUTES = [
    UhpRoute("/v1/echo/{name}", {"GET": echo, "HEAD": echo}),
    UhpRoute("/v1/json", {"POST": take_json}),
    UhpRoute("/v1/fail", {"GET": fail, "POST": fail}),
    UhpRoute("/v1/refuse/{how}", {"GET": refuse}),
    UhpRoute("/v1/stream", {"GET": stream}),
    UhpRoute("/v1/open", {"GET": echo}, public=True),
    UhpRoute("/v1/admin", {"GET": echo, "PUT": echo}, permissions={"PUT": "artifacts.write"}),
    UhpRoute("/v1/box/{path:path}", {"PUT": echo}, conceals=True),
]


@pytest.fixture
def app(tmp_path: Path) -> UhpApplication:
    return application_of(ROUTES, settings_for(tmp_path))


def test_what_belongs_to_the_application() -> None:
    assert [is_uhp(path) for path in ("/v1", "/v1/", "/v1/x")] == [True] * 3
    assert [is_uhp(path) for path in ("/", "/v1x", "/v2/x", "/ahp/v1/")] == [False] * 4


async def test_a_request_reaches_its_handler(app: UhpApplication) -> None:
    older = (b"uhp-version", b"2026-08-11")
    sent = await call(app, "GET", "/v1/echo/a%2fb?word=x", headers=[older])
    assert sent.status == 200
    assert sent.headers[b"uhp-version"] == b"2026-08-11"
    assert sent.json == {
        "scope": "a",
        "method": "GET",
        "path": {"name": "a%2fb"},
        "version": "2026-08-11",
        "word": "x",
    }


@pytest.mark.requirement("UHP-31", "B19")
@pytest.mark.parametrize(
    "path", ["/v1", "/v1/", "/v1/none", "/v1/json/", "/v1/echo/", "/v1//json", "/v1/echo/a/b"]
)
@pytest.mark.parametrize("token", [None, FIRST])
async def test_no_route(app: UhpApplication, path: str, token: str | None) -> None:
    sent = await call(app, "GET", path, token=token)
    assert sent.status == 404
    assert error_of(sent)["code"] == "consignee_route_not_found"


@pytest.mark.requirement("UHP-31", "B19")
async def test_no_method(app: UhpApplication) -> None:
    sent = await call(app, "DELETE", "/v1/echo/a", token=None)
    assert sent.status == 405
    assert sent.headers[b"allow"] == b"GET, HEAD"
    assert error_of(sent)["code"] == "consignee_method_not_allowed"


@pytest.mark.requirement("UHP-30")
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS", "TRACE"])
async def test_a_concealing_route_has_one_method(app: UhpApplication, method: str) -> None:
    sent = await call(app, method, "/v1/box/../../etc/passwd")
    assert sent.status == 404
    assert error_of(sent)["code"] == "file_not_found"
    assert b"allow" not in sent.headers


@pytest.mark.requirement("UHP-31", "B19")
@pytest.mark.parametrize("path", ["/v1/echo/a", "/v1/none", "/v1/open"])
async def test_an_unknown_version(app: UhpApplication, path: str) -> None:
    sent = await call(app, "GET", path, headers=[(b"uhp-version", b"1999-01-01")], token=None)
    assert sent.status == 400
    assert sent.headers[b"uhp-version"] == b"2026-09-12"
    assert error_of(sent)["detail"] == {"supported": ["2026-08-11", "2026-09-12"]}


@pytest.mark.requirement("UHP-31", "B19")
async def test_who_may_not(app: UhpApplication) -> None:
    missing = await call(app, "GET", "/v1/echo/a", token=None)
    assert (missing.status, error_of(missing)["code"]) == (401, "missing_credential")
    assert missing.headers[b"www-authenticate"].startswith(b"Bearer ")
    unknown = await call(app, "GET", "/v1/echo/a", token="unknown")
    assert (unknown.status, error_of(unknown)["code"]) == (401, "invalid_credential")
    assert error_of(unknown)["type"] == "authentication_error"
    powerless = await call(app, "GET", "/v1/echo/a", token=POWERLESS)
    assert (powerless.status, error_of(powerless)["code"]) == (403, "insufficient_scope")
    assert b'scope="uhp"' in powerless.headers[b"www-authenticate"]
    assert (await call(app, "GET", "/v1/admin")).status == 200
    assert (await call(app, "PUT", "/v1/admin")).status == 403


async def test_a_public_route_asks_nobody(app: UhpApplication) -> None:
    for token in (None, "unknown"):
        sent = await call(app, "GET", "/v1/open", token=token)
        assert (sent.status, sent.json["scope"]) == (200, "")


async def test_a_principal_with_too_many_requests(tmp_path: Path) -> None:
    class Nobody:
        async def admit(self, principal: Principal) -> None:
            assert principal.name == "first"
            raise RateLimited(3)

    app = application_of(ROUTES, settings_for(tmp_path), Nobody())
    sent = await call(app, "GET", "/v1/echo/a")
    assert (sent.status, error_of(sent)["code"]) == (429, "rate_limited")
    assert sent.headers[b"retry-after"] == b"3"
    assert (await call(app, "GET", "/v1/open")).status == 200


@pytest.mark.requirement("UHP-31", "B19")
async def test_refusals_of_a_handler(app: UhpApplication) -> None:
    gone = await call(app, "GET", "/v1/refuse/gone")
    assert (gone.status, error_of(gone)["code"]) == (404, "session_not_found")
    large = await call(app, "GET", "/v1/refuse/large")
    assert (large.status, error_of(large)["detail"]) == (413, {"max_bytes": 7})
    unsatisfiable = await call(app, "GET", "/v1/refuse/range")
    assert unsatisfiable.status == 416
    assert unsatisfiable.headers[b"content-range"] == b"bytes */3"
    validate("ErrorEnvelope", unsatisfiable.json)


@pytest.mark.requirement("UHP-31", "B19")
async def test_an_unexpected_error_tells_its_id_alone(
    app: UhpApplication, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "consignee.error"):
        sent = await call(app, "POST", "/v1/fail", b"unread")
    assert sent.status == 500
    error = error_of(sent)
    assert error["detail"] == {"request_id": "0123456789abcdef"}
    assert SECRET.encode() not in sent.body
    assert [record.__dict__["request_id"] for record in caplog.records] == ["0123456789abcdef"]


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ([], b'{"a":1}', 201),
        ([(b"content-type", b"application/json; charset=utf-8")], b"1", 201),
        ([(b"content-encoding", b"identity")], b"1", 201),
        ([(b"content-encoding", b"gzip")], b"1", 400),
        ([(b"content-type", b"text/plain")], b"1", 400),
        ([(b"content-type", b"a/b"), (b"content-type", b"a/b")], b"1", 400),
        ([], b"{", 400),
        ([], b"", 400),
        ([], b'"' + b"x" * 20 + b'"', 413),
    ],
)
async def test_json_bodies(app: UhpApplication, headers: Any, body: bytes, status: int) -> None:
    sent = await call(app, "POST", "/v1/json", body, headers=headers)
    assert sent.status == status
    assert sent.headers[b"uhp-version"] == b"2026-09-12"
    if status != 201:
        assert error_of(sent)["code"] == ("invalid_input" if status == 400 else "file_too_large")


async def test_a_stream_is_sent_as_it_comes(app: UhpApplication) -> None:
    sent = await call(app, "GET", "/v1/stream")
    assert (sent.status, sent.body) == (200, b"ab")
    assert sent.headers[b"uhp-version"] == b"2026-09-12"


async def test_a_stream_may_be_refused_until_it_has_begun(app: UhpApplication) -> None:
    sent = await call(app, "GET", "/v1/stream?how=refuse")
    assert (sent.status, error_of(sent)["code"]) == (404, "file_not_found")


@pytest.mark.parametrize(("how", "error"), [("late%20refusal", NotFound), ("fail", RuntimeError)])
async def test_what_fails_later_is_no_answer(
    app: UhpApplication, how: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await call(app, "GET", f"/v1/stream?how={how}")


async def test_a_client_that_goes_ends_the_stream(app: UhpApplication) -> None:
    sent = Sent()
    headers = [(b"authorization", f"Bearer {FIRST}".encode())]
    scope = http_scope("GET", "/v1/stream", headers, query_string=b"how=gone")
    await app(scope, receiving(chunk(b"", more=False), DISCONNECT), sent)
    assert sent.body == b"a"
    assert not sent.is_complete
    assert record_of(scope).code == "disconnected"


async def test_a_stream_takes_no_endless_body(tmp_path: Path) -> None:
    app = application_of(ROUTES, settings_for(tmp_path, drain_bytes=10))
    sent = Sent()
    headers = [(b"authorization", f"Bearer {FIRST}".encode()), *announcing(1000)]
    body = [chunk(b"x" * 100)] * 3
    await app(http_scope("GET", "/v1/stream", headers), receiving(*body, DISCONNECT), sent)
    assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")


async def test_a_client_that_goes_is_answered_by_nobody(app: UhpApplication) -> None:
    sent = Sent()
    headers = [(b"authorization", f"Bearer {FIRST}".encode()), *announcing(10)]
    await app(http_scope("POST", "/v1/json", headers), receiving(chunk(b"{"), DISCONNECT), sent)
    assert sent.messages == []


async def test_listed_origins_may_call(tmp_path: Path) -> None:
    app = application_of(ROUTES, settings_for(tmp_path), cors_origins=["https://console.example"])
    listed = (b"origin", b"https://console.example")
    asks = (b"access-control-request-method", b"PUT")
    preflight = await call(app, "OPTIONS", "/v1/box/a", token=None, headers=[listed, asks])
    assert preflight.status == 200
    assert preflight.headers[b"access-control-allow-origin"] == b"https://console.example"
    assert b"PUT" in preflight.headers[b"access-control-allow-methods"]
    assert b"authorization" in preflight.headers[b"access-control-allow-headers"]
    refused = await call(app, "GET", "/v1/echo/a", token=None, headers=[listed])
    assert refused.status == 401
    assert refused.headers[b"access-control-allow-origin"] == b"https://console.example"
    assert b"uhp-version" in refused.headers[b"access-control-expose-headers"]
    assert (await call(app, "OPTIONS", "/v1/json", headers=[listed])).status == 405


async def test_other_origins_may_not(tmp_path: Path) -> None:
    app = application_of(ROUTES, settings_for(tmp_path), cors_origins=["https://console.example"])
    foreign = (b"origin", b"https://console.example.evil")
    asks = (b"access-control-request-method", b"PUT")
    preflight = await call(app, "OPTIONS", "/v1/json", headers=[foreign, asks])
    assert preflight.status == 405
    assert b"access-control-allow-origin" not in preflight.headers
    assert preflight.headers[b"vary"] == b"origin"


async def test_without_a_list_nobody_is_told_anything(app: UhpApplication) -> None:
    sent = await call(app, "GET", "/v1/open", headers=[(b"origin", b"https://a.example")])
    assert not any(name.startswith(b"access-control") for name in sent.headers)
    assert b"vary" not in sent.headers
