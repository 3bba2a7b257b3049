"""What is told of a request when it ends: its outcome, its action, and its audit record."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from app import audit
from app.http.metrics import Metrics
from app.http.middleware import RequestRecord, record_of, surround
from app.http.streams import ZERO_COPY
from app.settings import load_settings
from tests.http.messages import LIMITS, Sent, http_scope, receiving

pytestmark = pytest.mark.anyio


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the audit records."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)
    return tmp_path / "audit.jsonl"


@pytest.mark.parametrize(
    ("status", "code", "outcome"),
    [
        (200, None, "done"),
        (302, None, "done"),
        (200, "duplicate", "done"),
        (200, "disconnected", "disconnected"),
        (200, "internal_error", "internal_error"),
        (404, "file_not_found", "file_not_found"),
        (404, None, "unanswered"),
        (None, "disconnected", "disconnected"),
        (None, None, "unanswered"),
    ],
)
def test_an_outcome_is_done_or_the_reason_why_not(
    status: int | None, code: str | None, outcome: str
) -> None:
    record = RequestRecord("id", status=status, code=code)
    assert record.outcome == outcome


def answering(*pieces: bytes, action: str | None = "file.read", scope: str | None = "a") -> ASGIApp:
    """An application that does something for a principal, and answers in pieces."""

    async def app(asgi: Scope, receive: Receive, send: Send) -> None:
        record = record_of(asgi)
        record.action = action
        if scope is not None:
            record.serve("alice", scope)
        record.note(file_id="file_1", bytes=5)
        asgi["path_params"] = {"file_id": "as it was asked for", "session_id": "s"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def run(app: ASGIApp, metrics: Metrics, send: Any = None) -> Sent:
    sent = Sent()
    surrounded = surround(app, metrics, LIMITS, is_protected=True)
    await surrounded(http_scope("GET", "/x"), receiving(), send or sent)
    return sent


def told(records: Path) -> list[dict[str, Any]]:
    if not records.exists():
        return []
    return [json.loads(line) for line in records.read_text().splitlines()]


async def test_what_the_kernel_sends_is_counted_as_well() -> None:
    async def app(asgi: Scope, receive: Receive, send: Send) -> None:
        seen.append(record_of(asgi))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": ZERO_COPY, "offset": 3, "count": 40, "more_body": True})
        await send({"type": "http.response.body", "body": b"12"})

    seen: list[RequestRecord] = []
    await run(app, Metrics())
    assert [record.sent for record in seen] == [42]


async def test_the_record_is_there_before_the_answer_begins(records: Path) -> None:
    there: list[int] = []

    async def send(message: Any) -> None:
        there.append(len(told(records)))

    with audit.kept(load_settings(audit="file", audit_file=records)):
        await run(answering(b"12345"), Metrics(), send)
    assert there == [1, 1, 1]


async def test_the_record_says_who_did_what_to_what(records: Path) -> None:
    with audit.kept(load_settings(audit="file", audit_file=records)):
        sent = await run(answering(b"12345"), Metrics())
    (record,) = told(records)
    for name in ("time", "level", "logger", "message"):
        del record[name]
    assert record == {
        "action": "file.read",
        "outcome": "done",
        "principal": "alice",
        "scope": "a",
        "request_id": sent.headers[b"x-request-id"].decode(),
        "address": "127.0.0.1",
        "method": "GET",
        "status": 200,
        "file_id": "file_1",
        "session_id": "s",
        "bytes": 5,
    }


async def test_a_request_that_is_never_answered_leaves_a_record_all_the_same(
    records: Path,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        record.action, record.code = "reference.store", "disconnected"
        record.serve("alice", "a")

    with audit.kept(load_settings(audit="file", audit_file=records)):
        await run(app, Metrics())
    (record,) = told(records)
    assert (record["outcome"], record.get("status")) == ("disconnected", None)


@pytest.mark.parametrize("lacking", [{"action": None}, {"scope": None}])
async def test_without_an_action_or_a_principal_there_is_nothing_to_record(
    records: Path, lacking: dict[str, None]
) -> None:
    with audit.kept(load_settings(audit="file", audit_file=records)):
        await run(answering(**lacking), Metrics())
    assert told(records) == []


async def test_what_was_sent_is_added_up_by_action() -> None:
    metrics = Metrics()
    await run(answering(b"123", b"45"), metrics)
    lines = metrics.render().decode().splitlines()
    assert 'consignee_sent_bytes_total{action="file.read"} 5.0' in lines
    assert 'consignee_actions_total{action="file.read",outcome="done"} 1.0' in lines
    assert not [line for line in lines if line.startswith("consignee_refusals_total{")]


async def test_an_answer_that_is_cut_off_was_not_done() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).action = "file.read"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError("in the middle")

    metrics = Metrics()
    with pytest.raises(LookupError):
        await run(app, metrics)
    lines = metrics.render().decode().splitlines()
    assert 'consignee_actions_total{action="file.read",outcome="internal_error"} 1.0' in lines
    assert 'consignee_refusals_total{code="internal_error"} 1.0' in lines
