"""Traces and metrics by OTLP, sent to a receiver that decodes them (tests/otlp.py)."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from app import telemetry
from app.http.metrics import Metrics
from app.settings import Settings, SettingsError, load_settings
from app.telemetry.otlp import OtlpTracing
from tests.ahp.hook_examples import event, interception
from tests.e2e.processes import ROOT, running_server
from tests.otlp import OtlpReceiver, attributes_of, otlp_receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
TOKEN = "token-of-the-tracing-test"
BODY = b"contents that no span may hold" * 4000  # more than fits into a row of the database

OPERATOR = "async def handle(event):\n    return None\n"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("CONSIGNEE_", "OTEL_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


def upload(client: httpx.Client, **headers: str) -> httpx.Response:
    given = {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(BODY).hexdigest(),
        **headers,
    }
    return client.post("/ahp/uploads?secret=query", content=BODY, headers=given)


def run_server(receiver: OtlpReceiver, folder: Path) -> None:
    """A server from its start to its end, with an upload, an event and a task in between."""
    (folder / "operator_code.py").write_text(OPERATOR)
    environment = {
        "CONSIGNEE_OTEL": "true",
        "CONSIGNEE_OTEL_ENDPOINT": receiver.url,
        "CONSIGNEE_EVENT_HANDLER": "operator_code:handle",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(folder))),
    }
    with running_server("--token", f"tracer={TOKEN}", environment=environment) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
            assert upload(client, traceparent=TRACEPARENT).status_code == 201
            told = interception(event("turn.start", id="evt_traced"))
            assert client.post("/ahp/hooks", json=told).status_code == 200
            answered = client.post("/v1/responses", json={"input": "hello"}, timeout=60)
            assert answered.json()["status"] == "completed"
            assert client.get("/v1/sessions/hsess_unknown").status_code == 404
            assert client.get("/no/such/route").status_code == 404


def test_a_running_server_exports_spans_and_metrics(receiver: OtlpReceiver, tmp_path: Path) -> None:
    run_server(receiver, tmp_path)

    (received,) = receiver.named("POST /ahp/uploads")
    assert received.trace_id.hex() == TRACE
    assert received.parent_span_id.hex() == PARENT
    facts = attributes_of(received)
    assert facts == {
        "http.request.method": "POST",
        "http.response.status_code": "201",
        "http.route": "/ahp/uploads",
        "url.scheme": "http",
        "enduser.id": "tracer",
    }
    below = {span.name for span in receiver.spans if span.parent_span_id == received.span_id}
    assert below >= {"receive", "blobs publish", "database commit"}

    (delivered,) = receiver.named("POST /ahp/hooks")
    (handled,) = receiver.named("handler")
    assert handled.trace_id == delivered.trace_id
    (asked,) = receiver.named("POST /v1/responses")
    (task,) = receiver.named("task")
    assert task.trace_id == asked.trace_id
    assert receiver.named("GET /v1/sessions/{session_id}")
    assert not [span for span in receiver.spans if "no/such" in span.name]

    assert {r["service.name"] for r in receiver.resources} == {"consignee"}
    assert {r["deployment.environment"] for r in receiver.resources} == {"test"}
    assert len({r["service.instance.id"] for r in receiver.resources}) == 1

    assert ({"outcome": "confirmed"}, 1.0) in receiver.points("consignee_uploads")
    assert ({}, float(len(BODY))) in receiver.points("consignee_upload_bytes")
    assert receiver.points("consignee_upload_seconds_count") == [({}, 1.0)]
    durations = receiver.metrics["http.server.request.duration"].histogram.data_points
    routes = {attributes_of(point).get("http.route"): point.count for point in durations}
    assert routes["/ahp/uploads"] == 1

    for secret in (TOKEN.encode(), b"secret=query", b"contents that no span"):
        assert secret not in receiver.raw


def started(settings: Settings, registry: CollectorRegistry | None = None) -> Any:
    """What ends the telemetry that begins with this."""
    return telemetry.start(settings, registry or CollectorRegistry())


def request(**told: Any) -> None:
    """A request whose span has ended."""
    tracing = telemetry.active()
    assert tracing is not None
    with tracing.request("GET", "http", []) as span:
        facts = {"route": "/x", "status": 200, "principal": None, "seconds": 0.1, **told}
        span.answered(**facts)


def test_the_standard_variables_say_where_to_and_under_which_name(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-variable")
    end = started(load_settings(otel=True))
    request()
    end()
    assert [span.name for span in receiver.spans] == ["GET /x"]
    assert {r["service.name"] for r in receiver.resources} == {"named-by-variable"}


def test_the_settings_come_before_the_variables(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-variable")
    end = started(
        load_settings(otel=True, otel_endpoint=receiver.url + "/", otel_service_name="by-setting")
    )
    request()
    end()
    assert len(receiver.spans) == 1
    assert {r["service.name"] for r in receiver.resources} == {"by-setting"}


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"status": 200}, StatusCode.UNSET),
        ({"status": 404}, StatusCode.UNSET),
        ({"status": 503}, StatusCode.ERROR),
        ({"status": None, "route": None}, StatusCode.ERROR),
    ],
)
def test_a_span_is_an_error_when_the_server_is_to_blame(
    receiver: OtlpReceiver, told: dict[str, Any], code: StatusCode
) -> None:
    end = started(load_settings(otel=True, otel_endpoint=receiver.url))
    request(**told)
    end()
    (span,) = receiver.spans
    assert span.status.code == code.value


def test_what_is_not_sampled_is_not_sent_but_measured(receiver: OtlpReceiver) -> None:
    settings = load_settings(otel=True, otel_endpoint=receiver.url, otel_sample_ratio=0)
    end = started(settings, Metrics().registry)
    request()
    end()
    assert receiver.spans == []
    assert "http.server.request.duration" in receiver.metrics


@pytest.mark.parametrize("signal", ["TRACES", "METRICS"])
def test_a_signal_can_be_left_out(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, signal: str
) -> None:
    monkeypatch.setenv(f"OTEL_{signal}_EXPORTER", "none")
    end = started(load_settings(otel=True, otel_endpoint=receiver.url))
    request()
    end()
    assert bool(receiver.spans) == (signal == "METRICS")
    assert bool(receiver.metrics) == (signal == "TRACES")


def test_a_span_within_a_request_is_its_child(receiver: OtlpReceiver) -> None:
    end = started(load_settings(otel=True, otel_endpoint=receiver.url))
    tracing = telemetry.active()
    assert tracing is not None
    with pytest.raises(LookupError), tracing.request("GET", "http", []), telemetry.span("inner"):
        raise LookupError("what went wrong is in the log")
    end()
    inner, outer = receiver.spans
    assert (inner.name, inner.parent_span_id) == ("inner", outer.span_id)
    assert inner.status.code == StatusCode.ERROR.value
    assert b"what went wrong" not in receiver.raw


def test_a_collector_that_is_not_there_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    end = started(load_settings(otel=True, otel_endpoint="http://127.0.0.1:9"))
    request()
    end()
    assert telemetry.active() is None
    assert any(record.levelno >= logging.ERROR for record in caplog.records)


def test_off_nothing_is_active_and_a_span_is_nothing() -> None:
    end = started(load_settings())
    assert telemetry.active() is None
    with telemetry.span("a") as nothing:
        assert nothing is None
    end()


def test_an_earlier_end_leaves_a_later_start_alone(receiver: OtlpReceiver) -> None:
    settings = load_settings(otel=True, otel_endpoint=receiver.url)
    end_first, end_second = started(settings), started(settings)
    later = telemetry.active()
    end_first()
    assert telemetry.active() is later
    end_second()
    assert telemetry.active() is None


def test_off_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, app.main, app.settings\n"
        "app.main.create_app(app.settings.load_settings(implicit_file=False))\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_the_extra_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry.sdk")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(SettingsError, match=r"otel: .*pip install 'consignee\[otel\]'"):
        started(load_settings(otel=True))
    assert telemetry.active() is None


def test_another_module_that_is_missing_is_not_taken_for_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(ModuleNotFoundError):
        started(load_settings(otel=True))


@pytest.mark.parametrize(
    "url", ["localhost:4318", "http://a:b@host", "http://host/?key=1", "ftp://h"]
)
def test_an_endpoint_is_a_url_without_secrets(url: str) -> None:
    with pytest.raises(SettingsError, match="otel_endpoint"):
        load_settings(otel_endpoint=url)


def test_sums_and_counts_of_histograms_gauges_and_counters_are_all_told(
    receiver: OtlpReceiver,
) -> None:
    metrics = Metrics()
    metrics.count_action("file.read", "done", 0.25, 7)
    metrics.sessions.set(3)
    tracing = OtlpTracing(load_settings(otel=True, otel_endpoint=receiver.url), metrics.registry)
    tracing.close()
    assert receiver.points("consignee_sessions") == [({}, 3.0)]
    assert receiver.points("consignee_sent_bytes") == [({"action": "file.read"}, 7.0)]
    assert receiver.points("consignee_action_seconds_sum") == [({"action": "file.read"}, 0.25)]
