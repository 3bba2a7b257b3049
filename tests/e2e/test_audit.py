"""A running server leaves an audit record of everything that is stored, read or deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Settings
from app.uhp.actions import ACTIONS, action_of
from app.uhp.routes import all_routes
from tests.ahp.hook_examples import attachment, event, interception, message
from tests.e2e.processes import RunningServer, running_server
from tests.operations import table
from tests.uhp.calling import services_on

pytestmark = pytest.mark.xdist_group("audit")

TOKEN = "token-of-the-auditor-test"
SECRET = b"contents that no record may hold"

SILENT = {
    ("GET", "/v1/uhp"),
    ("GET", "/v1/harnesses"),
    ("GET", "/v1/models"),
    ("GET", "/v1/harnesses/{harness_id}"),
    ("GET", "/v1/harnesses/{harness_id}/models"),
}
"""What says only what this server is and can do."""


@dataclass
class Site:
    """A server, a client for it, and which route did what."""

    server: RunningServer
    client: httpx.Client
    file: Path
    seen: dict[tuple[str, str], str] = field(default_factory=dict)

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]

    def call(
        self, method: str, route: str, *, status: int = 200, query: str = "", **given: Any
    ) -> tuple[Any, dict[str, Any]]:
        """One request on a route whose ids are in `given["ids"]`; the answer and its record."""
        ids = given.pop("ids", {})
        path = route.replace(":any_path", "").format(**ids) + query
        response = self.client.request(method, path, **given)
        assert response.status_code == status, response.text
        return response, self.recorded(method, route, response)

    def recorded(self, method: str, route: str, response: httpx.Response) -> dict[str, Any]:
        request_id = response.headers["x-request-id"]
        found = [r for r in self.records() if r.get("request_id") == request_id]
        assert len(found) == 1, f"{method} {route} left {len(found)} records"
        (record,) = found
        assert record["method"] == method
        assert record["status"] == response.status_code
        assert record["address"] == "127.0.0.1"
        assert (record["principal"], record["scope"]) == ("auditor", "auditor")
        self.seen[method, route] = record["action"]
        return record


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    data_dir = tmp_path_factory.mktemp("audit") / "data"
    environment = {"CONSIGNEE_AUDIT": "file", "CONSIGNEE_INTERNAL_REFS": "true"}
    arguments = ("--data-dir", str(data_dir), "--token", f"auditor={TOKEN}")
    with running_server(*arguments, environment=environment) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as client:
            yield Site(server, client, data_dir / "audit.jsonl")


def framed(data: bytes) -> dict[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(data).hexdigest(),
    }


def test_uploads_events_and_references_leave_their_records(site: Site) -> None:
    digest = hashlib.sha256(SECRET).hexdigest()
    stored, record = site.call(
        "POST", "/ahp/uploads", status=201, content=SECRET, headers=framed(SECRET)
    )
    ref = stored.json()["ref"]
    assert (record["action"], record["outcome"]) == ("reference.store", "done")
    assert (record["ref"], record["sha256"], record["bytes"]) == (ref, digest, len(SECRET))

    told = interception(event("turn.start", messages=[message(attachment(ref))], id="evt_audit"))
    _, record = site.call("POST", "/ahp/hooks", json=told)
    assert (record["action"], record["event_id"]) == ("event.store", "evt_audit")

    read, record = site.call("GET", "/internal/refs/{ref}", ids={"ref": ref})
    assert read.content == SECRET
    assert (record["action"], record["ref"], record["sha256"]) == ("reference.read", ref, digest)


def test_a_refused_request_of_a_known_principal_leaves_its_record(site: Site) -> None:
    _, record = site.call("GET", "/internal/refs/{ref}", status=404, ids={"ref": "ref_none"})
    assert (record["outcome"], record["ref"]) == ("content_not_found", "ref_none")
    _, record = site.call(
        "POST", "/ahp/uploads", status=400, content=b"x", headers=framed(b"another")
    )
    assert record["outcome"] == "digest_mismatch"
    assert "ref" not in record


def test_whoever_is_nobody_leaves_no_record(site: Site) -> None:
    before = site.records()
    refused = httpx.get(f"{site.server.url}/v1/files", trust_env=False)
    assert refused.status_code == 401
    assert site.records() == before


def run_task(site: Site) -> dict[str, Any]:
    """A task with an upload, an inline file and an artifact; the ids of everything."""
    stored, record = site.call("POST", "/v1/files", files={"file": ("in.bin", SECRET)})
    file_id = stored.json()["id"]
    assert (record["file_id"], record["bytes"]) == (file_id, len(SECRET))
    inline = {"type": "input_file", "filename": "i.txt", "file_data": "data:text/plain,inline"}
    text = "Create a file named out/made.txt containing exactly: made"
    parts = [{"type": "input_text", "text": text}, inline]
    parts.append({"type": "input_file", "file_id": file_id})
    asked = {"input": [{"role": "user", "content": parts}]}
    answered, record = site.call("POST", "/v1/responses", json=asked, timeout=60)
    response = answered.json()
    session_id = response["metadata"]["session_id"]
    assert (record["response_id"], record["session_id"]) == (response["id"], session_id)
    return {
        "uploaded": file_id,
        "response_id": response["id"],
        "session_id": session_id,
        "container_id": response["metadata"]["container_id"],
        "harness_id": response["metadata"]["harness_id"],
    }


def test_what_a_task_takes_in_and_leaves_has_records_of_its_own(site: Site) -> None:
    ids = run_task(site)
    own = [r for r in site.records() if r.get("response_id") == ids["response_id"]]
    kept = {(r["action"], r.get("path")) for r in own if "request_id" not in r}
    assert kept >= {("input.store", "i.txt"), ("artifact.store", "out/made.txt")}
    made = next(r for r in own if r.get("path") == "out/made.txt")
    assert made["sha256"] == hashlib.sha256(b"made").hexdigest()
    assert (made["principal"], made["scope"]) == ("auditor", "auditor")


def test_every_route_of_uhp_leaves_its_record(site: Site) -> None:
    ids = run_task(site)
    uploaded = {"file_id": ids["uploaded"]}
    site.call("GET", "/v1/files")
    for route, method in (
        ("/v1/files/{file_id}", "GET"),
        ("/v1/files/{file_id}", "HEAD"),
        ("/v1/files/{file_id}/content", "GET"),
        ("/v1/files/{file_id}", "DELETE"),
    ):
        _, record = site.call(method, route, ids=uploaded)
        assert record["file_id"] == ids["uploaded"]
    listed, record = site.call("GET", "/v1/sessions/{session_id}/files", ids=ids)
    made = next(file for file in listed.json()["files"] if file["path"] == "out/made.txt")
    artifact = {"container_id": ids["container_id"], "file_id": made["id"]}
    content = "/v1/containers/{container_id}/files/{file_id}/content"
    _, record = site.call("GET", content, ids=artifact)
    assert (record["file_id"], record["bytes"]) == (made["id"], 4)
    assert record["session_id"] == ids["session_id"]
    pdf = "/v1/containers/{container_id}/files/{file_id}/pdf"
    shown = site.client.get(pdf.format(**artifact), timeout=60)
    assert site.recorded("GET", pdf, shown)["file_id"] == made["id"]
    taken = "/v1/containers/{container_id}/files/{path:any_path}"
    for route, path in ((taken, "new.txt"), (content, "x"), (pdf, "y")):
        given = {"container_id": ids["container_id"], "path": path, "file_id": path}
        _, record = site.call(
            "PUT", route, status=201, ids=given, content=b"brought", headers=framed(b"brought")
        )
        assert (record["action"], record["bytes"]) == ("artifact.store", 7)
    _, record = site.call("GET", "/v1/sessions/{session_id}/files/archive", ids=ids)
    assert record["action"] == "archive.read"
    assert record["files"] == 4 + len([f for f in listed.json()["files"] if f["id"] != made["id"]])
    site.call("GET", "/v1/sessions")
    for name, method in (("", "GET"), ("/turns", "GET"), ("/cancel", "POST")):
        _, record = site.call(method, "/v1/sessions/{session_id}" + name, ids=ids)
        assert record["session_id"] == ids["session_id"]
    for name, method in (("", "GET"), ("/input_items", "GET"), ("/cancel", "POST"), ("", "DELETE")):
        _, record = site.call(method, "/v1/responses/{response_id}" + name, ids=ids)
        assert record["response_id"] == ids["response_id"]
    feed = "/v1/harnesses/{harness_id}/events"
    with site.client.stream("GET", feed.format(**ids)) as streaming:
        site.recorded("GET", feed, streaming)
    site.call("DELETE", "/v1/sessions/{session_id}", ids=ids)
    made_here, record = site.call("POST", "/v1/sessions", status=201, json={})
    assert record["session_id"] == made_here.json()["id"]
    again = {"session_id": made_here.json()["id"]}
    _, record = site.call("DELETE", "/v1/traces/{session_id}", ids=again)
    assert record["session_id"] == again["session_id"]
    expected = {
        (method, route): action
        for route, actions in ACTIONS.items()
        for method, action in actions.items()
    }
    assert expected.items() <= site.seen.items()


def test_no_record_holds_contents_or_a_credential(site: Site) -> None:
    text = site.file.read_text()
    assert site.seen
    assert TOKEN not in text
    assert SECRET.decode() not in text


def test_every_fact_of_a_record_is_explained(site: Site) -> None:
    facts = set[str]().union(*site.records()) - {"time", "level", "logger", "message"}
    assert site.seen
    assert facts <= table("audit facts")


def test_every_route_has_an_action_or_touches_nothing_of_anybody() -> None:
    routes = all_routes(services_on(Settings(), None))
    named = {
        (method, route.path)
        for route in routes
        for method, handler in route.methods.items()
        if method != "HEAD" and getattr(handler, "__name__", "") != "_nothing"
    }
    of_actions = {(method, route) for route, actions in ACTIONS.items() for method in actions}
    assert named == of_actions | SILENT
    assert not of_actions & SILENT


def test_head_does_what_get_does() -> None:
    assert action_of("/v1/files/{file_id}/content", "HEAD") == "file.read"
    assert action_of("/v1/models", "GET") is None
