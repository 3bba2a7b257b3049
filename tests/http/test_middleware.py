"""What surrounds every request: its id, its log line, safe headers, no leak."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from app.http.answers import JSON, send_whole
from app.http.metrics import Metrics
from app.http.middleware import RECORD_KEY, record_of, surround
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

SECRET = "s3cret-of-the-failure"


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    record = record_of(scope)
    record.principal, record.ref, record.received = "name", "ref_x", 3
    await send_whole(send, 201, JSON, b"{}")


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError(SECRET)


async def failing_late(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    raise RuntimeError(SECRET)


async def silent(scope: Scope, receive: Receive, send: Send) -> None:
    return


def surrounded(app: ASGIApp, metrics: Metrics | None = None, *, protected: bool = True) -> ASGIApp:
    return surround(app, metrics or Metrics(), LIMITS, is_protected=protected)


async def test_every_request_has_an_id_of_its_own() -> None:
    app = surrounded(fine)
    ids = set()
    for _ in range(10):
        sent, scope = Sent(), http_scope()
        await app(scope, receive_nothing, sent)
        ids.add(sent.headers[b"x-request-id"])
        assert sent.headers[b"x-request-id"].decode() == record_of(scope).request_id
    assert len(ids) == 10
    assert all(re.fullmatch(rb"[0-9a-f]{16}", each) for each in ids)


def test_a_process_that_was_forked_gives_ids_of_its_own() -> None:
    # In a program without threads, as a server is that loads the application before it forks.
    program = """
import os
from app.http.middleware import new_request_id
os.fork()
os.write(1, new_request_id().encode() + b"\\n")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second = ran.stdout.split()
    assert first != second


@pytest.mark.requirement("AHP-R14")
async def test_the_log_line_holds_what_was_learnt_and_no_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    scope = http_scope(
        path="/ahp/uploads",
        headers=[(b"authorization", b"Bearer tok3n"), (b"x-a", b"he4der")],
        query_string=b"key=qu3ry",
    )
    await surrounded(fine)(scope, receive_nothing, Sent())
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("consignee.access", "INFO")
    shown = vars(record)
    expected = {
        "request_id": record_of(scope).request_id,
        "method": "POST",
        "path": "/ahp/uploads",
        "status": 201,
        "principal": "name",
        "code": None,
        "ref": "ref_x",
        "bytes": 3,
    }
    assert {key: shown[key] for key in expected} == expected
    assert shown["seconds"] >= 0
    for secret in ("tok3n", "he4der", "qu3ry"):
        assert secret not in str(shown)


@pytest.mark.parametrize(("method", "label"), [("POST", "POST"), ("BREW", "other")])
async def test_requests_are_counted_under_a_bounded_set_of_labels(method: str, label: str) -> None:
    metrics = Metrics()
    await surrounded(fine, metrics)(http_scope(method), receive_nothing, Sent())
    line = f'consignee_requests_total{{method="{label}",status="201"}} 1.0'
    assert line in metrics.render().decode()


async def test_a_request_without_an_answer_is_counted_as_such() -> None:
    metrics = Metrics()
    await surrounded(silent, metrics)(http_scope(), receive_nothing, Sent())
    assert 'status="none"} 1.0' in metrics.render().decode()


@pytest.mark.requirement("B19")
async def test_an_unexpected_error_is_answered_with_the_id_and_nothing_of_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent = Sent()
    await surrounded(failing)(http_scope(), receive_nothing, sent)
    request_id = sent.headers[b"x-request-id"].decode()
    assert sent.status == 500
    assert sent.headers[b"content-type"] == b"application/problem+json"
    assert sent.headers[b"connection"] == b"close"
    assert sent.json["code"] == "internal_error"
    assert request_id in sent.json["detail"]
    assert SECRET.encode() not in sent.body
    (logged,) = [each for each in caplog.records if each.name == "consignee.error"]
    assert vars(logged)["request_id"] == request_id
    assert logged.exc_info is not None
    assert SECRET in str(logged.exc_info[1])


async def test_an_error_inside_an_answer_goes_on_to_the_server() -> None:
    sent = Sent()
    app = surrounded(failing_late)
    with pytest.raises(RuntimeError):
        await app(http_scope(), receive_nothing, sent)
    assert len(sent.messages) == 1


@pytest.mark.parametrize("app", [fine, failing])
async def test_every_answer_says_nosniff_and_no_store(app: ASGIApp) -> None:
    sent = Sent()
    await surrounded(app)(http_scope(), receive_nothing, sent)
    assert sent.headers[b"x-content-type-options"] == b"nosniff"
    assert sent.headers[b"cache-control"] == b"no-store"


async def test_an_answer_may_say_how_it_is_cached() -> None:
    async def cached(scope: Scope, receive: Receive, send: Send) -> None:
        await send_whole(send, 200, JSON, b"{}", [(b"cache-control", b"max-age=1")])

    sent = Sent()
    await surrounded(cached)(http_scope(), receive_nothing, sent)
    assert sent.headers[b"cache-control"] == b"max-age=1"


@pytest.mark.parametrize("protected", [True, False])
async def test_the_lifespan_passes_untouched(protected: bool) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    await surrounded(app, protected=protected)({"type": "lifespan"}, receive_nothing, Sent())
    assert seen == [{"type": "lifespan"}]
    assert RECORD_KEY not in seen[0]


async def test_a_failing_lifespan_is_the_servers_to_report() -> None:
    app = surrounded(failing)
    with pytest.raises(RuntimeError):
        await app({"type": "lifespan"}, receive_nothing, Sent())


def from_server(host: str, port: int | None) -> Callable[[], Scope]:
    return lambda: http_scope(headers=announcing(3), server=(host, port))


@pytest.mark.requirement("AHP-R05")
@pytest.mark.parametrize("host", ["10.0.0.1", "192.0.2.7", "2001:db8::1", "0.0.0.0"])
async def test_plain_http_that_crosses_a_network_is_refused(host: str) -> None:
    app = surrounded(fine, protected=False)
    for _ in range(2):  # what is known of a host is the same the second time
        sent = Sent()
        await app(from_server(host, 80)(), receiving(chunk(b"abc", more=False)), sent)
        assert (sent.status, sent.json["code"]) == (403, "https_required")
        assert sent.is_complete


@pytest.mark.requirement("AHP-R05")
@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 80), ("127.9.9.9", 80), ("::1", 80), ("/run/x.sock", None)]
)
async def test_plain_http_over_loopback_or_a_unix_socket_is_served(
    host: str, port: int | None
) -> None:
    sent = Sent()
    await surrounded(fine, protected=False)(from_server(host, port)(), receive_nothing, sent)
    assert sent.status == 201


async def test_a_protected_way_is_served_on_any_address() -> None:
    sent = Sent()
    await surrounded(fine)(from_server("10.0.0.1", 80)(), receive_nothing, sent)
    assert sent.status == 201
