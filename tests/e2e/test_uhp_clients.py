"""The public clients of the protocol, unchanged, against a real server."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uhp
from agoradm_uhp.uhp import UHPClient, UHPError
from harnessrouter import HarnessRouter, UhpError, artifacts, output_text

from tests.conformance.peer import SECONDS, Site, running_site

pytestmark = pytest.mark.xdist_group("uhp clients")

REPORT = "Create a file named notes/report.md containing exactly: # Report"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture(autouse=True)
def _directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """These clients heed the proxies of their environment; the server is on this machine."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


FRONT_DOORS: dict[str, Callable[..., HarnessRouter]] = {
    "harnessrouter": HarnessRouter,
    "uhp": uhp.connect,
}


@pytest.fixture(params=FRONT_DOORS)
def client(request: pytest.FixtureRequest, site: Site) -> HarnessRouter:
    """The two packages that share one client, each through its own front door."""
    make: Callable[..., HarnessRouter] = FRONT_DOORS[request.param]
    return make(site.server.uhp_base_url, "alice-token", timeout=SECONDS, max_retries=0)


@pytest.fixture
def harness_id(client: HarnessRouter) -> str:
    harness: str = client.harnesses()[0]["id"]
    return harness


def with_file(text: str, content: bytes) -> list[dict[str, Any]]:
    data = "data:application/octet-stream;base64," + base64.b64encode(content).decode()
    file = {"type": "input_file", "filename": "data.bin", "file_data": data}
    return [{"role": "user", "content": [{"type": "input_text", "text": text}, file]}]


# --- harnessrouter and uhp ----------------------------------------------------------------------


@pytest.mark.requirement("D-05", "UHP-01")
def test_the_client_agrees_with_the_discovery_document(client: HarnessRouter) -> None:
    assert uhp.check_discovery(client.discover()) == (True, [])


def test_the_client_finds_harnesses_and_models(client: HarnessRouter, harness_id: str) -> None:
    assert client.harness(harness_id)["base"] == "echo"
    assert client.models()["backends"]["echo"]["models"][0]["available"] is True
    assert client.harness_models(harness_id)["harness_id"] == harness_id


@pytest.mark.requirement("T-01", "C-01")
def test_the_client_runs_and_continues(client: HarnessRouter, harness_id: str) -> None:
    first = client.run("Hello.", harness_id=harness_id)
    second = client.continue_(first["id"], "And again.", harness_id=harness_id)
    assert output_text(first) == "Hello."
    assert output_text(second) == "And again.\n\nTurns before this one: 1."
    session_id = first["metadata"]["session_id"]
    assert [turn["user"] for turn in client.turns(session_id)["turns"]] == ["Hello.", "And again."]
    assert client.session(session_id)["status"] == "completed"
    assert client.input_items(second["id"])["data"][0]["content"][0]["text"] == "And again."
    assert client.get_response(first["id"]) == first


@pytest.mark.requirement("T-01")
def test_a_repeated_key_runs_no_second_task(client: HarnessRouter) -> None:
    key = uhp.idempotency_key()
    assert client.run("Once.", key=key) == client.run("Once.", key=key)


@pytest.mark.requirement("S-01", "S-04", "UHP-12")
def test_the_client_collects_a_stream(client: HarnessRouter) -> None:
    """Its decoder wants frames that end in two line feeds, and its sequence has no gap."""
    seen: list[str] = []
    task = client.collect(REPORT + " [tool]", on_event=lambda event: seen.append(event["type"]))
    assert task.status == "completed"
    assert task.sequence == (True, [])
    assert seen[0] == "response.created"
    assert seen[-1] == "response.completed"
    assert [call["name"] for call in task.tool_calls] == ["count_characters"]
    assert task.reasoning
    assert task.error is None
    assert task.annotations == artifacts(task.response)
    assert task.annotations[0]["filename"] == "report.md"


@pytest.mark.requirement("UHP-14", "UHP-18")
def test_the_client_downloads_what_was_made(client: HarnessRouter) -> None:
    content = bytes(range(256))
    response = client.run(with_file("Look at it.", content))
    (cited,) = artifacts(response)
    (listed,) = client.session_files(response["metadata"]["session_id"])
    assert (cited["container_id"], cited["file_id"]) == (listed["container_id"], listed["id"])
    digests = client.download_file(listed["container_id"], listed["id"])
    assert digests.split()[:2] == [hashlib.sha256(content).hexdigest().encode(), b"256"]


@pytest.mark.requirement("C-02", "C-03")
def test_the_client_cancels_and_waits(client: HarnessRouter) -> None:
    """Cancelling twice is no error, and the session goes on afterwards."""
    events = client.stream("Count slowly from 1 to 200.")
    response_id = next(events)["response"]["id"]
    assert any(event["type"] == "response.output_text.delta" for event in events)
    client.cancel(response_id)
    assert client.wait(response_id, interval=0.05, timeout=SECONDS)["status"] == "cancelled"
    assert client.cancel(response_id)["status"] == "cancelled"
    assert [event["type"] for event in events][-1] == "response.failed"
    assert client.continue_(response_id, "Go on.")["status"] == "completed"


def test_the_client_cancels_a_session(client: HarnessRouter) -> None:
    begun = client.run("Count slowly from 1 to 200.", background=True)
    client.cancel_session(begun["metadata"]["session_id"])
    ended = client.wait(begun["id"], interval=0.05, timeout=SECONDS)
    assert ended["status"] == "cancelled"


@pytest.mark.requirement("X-01", "X-02")
def test_the_client_pages_through_sessions(client: HarnessRouter, harness_id: str) -> None:
    made = {client.run(f"Session {n}.")["metadata"]["session_id"] for n in range(3)}
    seen: list[str] = []
    cursor = None
    while True:
        page = client.sessions(limit=2, cursor=cursor, harness=harness_id)
        seen += [session["id"] for session in page["sessions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert made <= set(seen)
    assert len(set(seen)) == len(seen)


@pytest.mark.requirement("UHP-28")
def test_the_client_deletes(client: HarnessRouter) -> None:
    """It deletes a session by the path of traces."""
    response = client.run(REPORT)
    session_id = response["metadata"]["session_id"]
    (file,) = client.session_files(session_id)
    client.delete_response(response["id"])
    with pytest.raises(UhpError) as refused:
        client.get_response(response["id"])
    assert refused.value.code == "response_not_found"
    client.delete_session(session_id)
    for gone in (
        lambda: client.session(session_id),
        lambda: client.session_files(session_id),
        lambda: client.download_file(file["container_id"], file["id"]),
    ):
        with pytest.raises(UhpError) as refused:
            gone()
        assert refused.value.status == 404


@pytest.mark.requirement("E-01")
def test_the_client_understands_refusals(client: HarnessRouter, site: Site) -> None:
    with pytest.raises(UhpError) as refused:
        client.run("Hello.", harness_id="chrn_unknown")
    error = refused.value
    assert (error.status, error.code) == (404, "harness_not_found")
    assert (error.type, error.param) == ("invalid_request_error", "metadata.harness_id")
    assert not error.retryable
    failed = client.run("[fail] Hello.")
    assert (failed["status"], failed["error"]["code"]) == ("failed", "harness_error")
    with pytest.raises(UhpError) as refused:
        HarnessRouter(site.server.uhp_base_url, "wrong").harnesses()
    assert refused.value.code == "invalid_credential"


@pytest.mark.parametrize("command", ["harnessrouter", "uhp"])
def test_the_command_lines_work(site: Site, command: str) -> None:
    def said(*arguments: str) -> str:
        line = [str(Path(sys.executable).parent / command), "--url", site.server.uhp_base_url]
        line += ["--key", "alice-token", *arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert '"conformance_class": "extended"' in said("discover")
    assert "[echo]" in said("harnesses")
    assert said("run", "Reply with exactly: hello") == "hello\n"
    assert said("stream", "Reply with exactly: hello") == "hello"
    assert '"next_cursor"' in said("sessions", "--limit", "1")


# --- agoradm-uhp --------------------------------------------------------------------------------


@pytest.fixture
def bridge(site: Site) -> Iterator[UHPClient]:
    client = UHPClient(site.server.uhp_base_url, "alice-token", timeout_s=SECONDS)
    with client._s:
        yield client


@pytest.fixture
def its_harness(site: Site) -> str:
    harness: str = site.alice.get("/v1/harnesses")["harnesses"][0]["id"]
    return harness


@pytest.mark.requirement("UHP-12", "UHP-14", "UHP-18")
def test_the_bridge_runs_downloads_and_continues(bridge: UHPClient, its_harness: str) -> None:
    """It sends its key only to the scheme and host that it was given: those of `download_url`."""
    result = bridge.run(
        REPORT, harness_id=its_harness, instructions="Be brief.", idempotency_key="agoradm-1"
    )
    assert result.text == "Created notes/report.md."
    (cited,) = result.artifacts
    assert cited.download_url is not None
    assert bridge.download(cited) == b"# Report"
    assert result.session_id is not None
    (listed,) = bridge.session_files(result.session_id)
    assert (listed.file_id, listed.filename) == (cited.file_id, "report.md")
    assert bridge.download(listed) == b"# Report"
    following = bridge.run(
        "And?", harness_id=its_harness, previous_response_id=result.response_id, timeout_seconds=60
    )
    assert following.session_id == result.session_id
    assert following.model == "default"


def test_the_bridge_learns_that_a_session_is_gone(
    bridge: UHPClient, its_harness: str, site: Site
) -> None:
    """It starts anew when the code tells it that what it would continue is unknown."""
    result = bridge.run("Hello.", harness_id=its_harness)
    assert result.session_id is not None
    site.alice.delete(f"/v1/traces/{result.session_id}")
    with pytest.raises(UHPError) as refused:
        bridge.run("And?", harness_id=its_harness, previous_response_id=result.response_id)
    assert refused.value.code == "response_not_found"
    assert bridge.session_files(result.session_id) == []


def test_the_bridge_learns_that_a_task_failed(bridge: UHPClient, its_harness: str) -> None:
    with pytest.raises(UHPError) as failed:
        bridge.run("[fail] Hello.", harness_id=its_harness)
    assert failed.value.code == "harness_error"
