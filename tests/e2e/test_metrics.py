"""What a running server tells Prometheus of what it did."""

from __future__ import annotations

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.crews import running_crew
from tests.e2e.processes import running_server
from tests.otlp import otlp_receiver

TOKEN = "token-of-the-metrics-test"
WAIT_SECONDS = 60
"""Far above what it takes: it only keeps a test that waits in vain from hanging."""


class Scrapes:
    """The newest exposition of a server."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def value(self, series: str) -> float | None:
        """The value of one series, None while there is none."""
        text = self._client.get("/metrics").text
        found = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
        return None if found is None else float(found[1])

    def wait_for(self, series: str, value: float) -> None:
        """Ask until a series has that value."""
        deadline = time.monotonic() + WAIT_SECONDS
        while (last := self.value(series)) != value:
            assert time.monotonic() < deadline, f"{series} is {last}"
            time.sleep(0.05)


def upload(client: httpx.Client, data: bytes) -> str:
    headers = {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(data).hexdigest(),
    }
    response = client.post("/ahp/uploads", content=data, headers=headers)
    assert response.status_code == 201
    ref: str = response.json()["ref"]
    return ref


def test_a_server_counts_what_it_did(tmp_path: Path) -> None:
    environment = {
        "CONSIGNEE_RETENTION": "1s",
        "CONSIGNEE_SWEEP_INTERVAL_SECONDS": "0.2",
        "CONSIGNEE_MAX_SCOPE_FILES": "1",
        "CONSIGNEE_INLINE_BYTES": "10",
    }
    arguments = ("--token", f"counter={TOKEN}", "--data-dir", str(tmp_path / "data"))
    with running_server(*arguments, environment=environment) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
            scrapes = Scrapes(client)
            upload(client, b"more than ten bytes")
            first, second = (client.post("/v1/files", files={"file": b"x"}) for _ in range(2))
            assert (first.status_code, second.status_code) == (200, 429)
            file_id = first.json()["id"]
            assert client.get(f"/v1/files/{file_id}/content").content == b"x"
            assert client.delete(f"/v1/files/{file_id}").status_code == 200
            asked = client.post("/v1/responses", json={"input": "hello"}, timeout=60)
            assert asked.json()["status"] == "completed"

            scrapes.wait_for('consignee_tasks_total{outcome="completed"}', 1)
            scrapes.wait_for("consignee_tasks_running", 0)
            assert scrapes.value("consignee_task_seconds_count") == 1
            assert scrapes.value('consignee_refusals_total{code="quota_exhausted"}') == 1
            assert scrapes.value('consignee_sent_bytes_total{action="file.read"}') == 1
            action = 'consignee_actions_total{action="file.store",outcome="done"}'
            assert scrapes.value(action) == 1
            published = '{engine="blobs",operation="publish"}'
            assert scrapes.value(f"consignee_store_operation_seconds_count{published}") == 1

            scrapes.wait_for('consignee_swept_total{what="references"}', 1)
            scrapes.wait_for('consignee_swept_total{what="bodies"}', 1)
            assert scrapes.value('consignee_swept_total{what="bytes"}') == 19
            done = 'consignee_background_rounds_total{outcome="done",work="sweep"}'
            assert (scrapes.value(done) or 0) >= 1
            success = 'consignee_background_success_timestamp_seconds{work="sweep"}'
            assert abs((scrapes.value(success) or 0) - time.time()) < WAIT_SECONDS
            assert scrapes.value("consignee_audit_lost_total") == 0


def test_a_server_counts_what_it_keeps_when_it_starts(tmp_path: Path) -> None:
    arguments = ("--token", f"counter={TOKEN}", "--data-dir", str(tmp_path / "data"))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for is_first in (True, False):
        with (
            running_server(*arguments) as server,
            httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client,
        ):
            if is_first:
                client.post("/v1/sessions", json={})
                client.post("/v1/files", files={"file": b"12345"})
                continue
            scrapes = Scrapes(client)
            scrapes.wait_for("consignee_sessions", 1)
            scrapes.wait_for("consignee_files", 1)
            scrapes.wait_for("consignee_file_bytes", 5)
            assert (scrapes.value("consignee_data_free_bytes") or 0) > 0


def test_workers_show_one_sum_write_one_audit_file_and_trace_apart(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with otlp_receiver() as collector:
        told: dict[str, Any] = {"audit": "file", "otel": True, "otel_endpoint": collector.url}
        with running_crew(data_dir, **told) as crew:
            for worker in crew.workers():
                assert upload(crew.peer(worker).http, b"of one worker").startswith("ref_")
            scrapes = Scrapes(crew.peer().http)
            action = 'consignee_actions_total{action="reference.store",outcome="done"}'
            scrapes.wait_for(action, 2)
            records = (data_dir / "audit.jsonl").read_text().splitlines()
            assert [json.loads(line)["action"] for line in records] == ["reference.store"] * 2
    spans = collector.named("POST /ahp/uploads")
    assert len(spans) == 2
    assert len({span.trace_id for span in spans}) == 2
    assert len({resource["service.instance.id"] for resource in collector.resources}) == 2
