"""Tasks and sessions over HTTP: what the public suite does not look at."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from tests.conformance.peer import SECONDS, Peer, Site, running_site, session_of, text_of

pytestmark = pytest.mark.xdist_group("uhp tasks")

COUNT = "Count slowly from 1 to 200."


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture
def running(site: Site) -> Iterator[dict[str, Any]]:
    """A task that runs until the test is over."""
    begun = site.alice.run(COUNT, background=True)
    assert begun["status"] == "in_progress"
    yield begun
    site.alice.post(f"/v1/responses/{begun['id']}/cancel")
    assert site.alice.follow(begun)["status"] == "cancelled"


def test_a_busy_session_takes_no_second_task(site: Site, running: dict[str, Any]) -> None:
    body = {"input": "And?", "previous_response_id": running["id"]}
    error = site.alice.refused(409, "session_busy", "POST", "/v1/responses", json=body)
    assert "retry_after_ms" not in (error["detail"] or {})
    assert site.alice.run("Another session.")["status"] == "completed"


def test_deleting_a_response_does_not_cancel_it(site: Site, running: dict[str, Any]) -> None:
    other = site.alice.run("Reply with exactly: gone", background=True)
    site.alice.delete(f"/v1/responses/{other['id']}")
    site.alice.refused(404, "response_not_found", "GET", f"/v1/responses/{other['id']}")
    session = f"/v1/sessions/{session_of(other)}"
    wait_for(lambda: site.alice.get(session)["status"] == "completed")
    assert site.alice.get(f"/v1/responses/{running['id']}")["status"] == "in_progress"


def wait_for(is_so: Any) -> None:
    deadline = monotonic() + SECONDS
    while not is_so():
        assert monotonic() < deadline, "it does not come about"
        sleep(0.05)


@pytest.mark.requirement("S-04")
def test_a_stream_is_taken_up_again(site: Site) -> None:
    """Behind the event that was seen last, and with nothing twice; also after the end."""
    whole = site.alice.events("Take this up again, please, in some pieces.")
    response_id = whole[0].data["response"]["id"]
    path = f"/v1/responses/{response_id}?stream=true"
    for last in (-1, 0, 3, len(whole) - 2, len(whole) - 1):
        headers = {"Last-Event-ID": str(last)} if last >= 0 else {}
        with site.alice.stream("GET", path, headers=headers) as events:
            assert [event.data for event in events] == [event.data for event in whole[last + 1 :]]


@pytest.mark.requirement("B96")
def test_a_client_that_leaves_does_not_end_its_task(site: Site) -> None:
    body = {"input": "[slow 0.3] Still here.", "stream": True}
    with site.alice.stream("POST", "/v1/responses", json=body) as events:
        begun = next(events).data["response"]
    ended = site.alice.follow(begun)
    assert (ended["status"], text_of(ended)) == ("completed", "[slow 0.3] Still here.")


@pytest.mark.requirement("S-06")
@pytest.mark.parametrize(
    ("task", "status", "last"),
    [
        ("[fail] Hello there.", "failed", "response.failed"),
        ("[incomplete] Hello there.", "incomplete", "response.incomplete"),
        ("[incomplete timeout] Hello there.", "incomplete", "response.incomplete"),
        ("[tool] Hello there.", "completed", "response.completed"),
    ],
)
def test_every_end_is_told_and_keeps_what_was_said(
    site: Site, task: str, status: str, last: str
) -> None:
    """A task that fails is an answer with 200; blocking and streaming give the same."""
    blocking = site.alice.run(task)
    events = site.alice.events(task)
    streamed = events[-1].data["response"]
    assert events[-1].kind == last
    assert blocking["status"] == streamed["status"] == status
    assert text_of(blocking) == text_of(streamed) != ""
    deltas = [e.data["delta"] for e in events if e.kind == "response.output_text.delta"]
    assert "".join(deltas) == text_of(streamed)


def test_a_harness_that_cannot_start_makes_a_failed_task(site: Site) -> None:
    response = site.alice.run("[unavailable]")
    assert (response["status"], response["error"]["code"]) == ("failed", "harness_unavailable")


def test_a_budget_of_words_is_kept(site: Site) -> None:
    response = site.alice.run("one two three four", max_output_tokens=2)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output"}
    assert text_of(response) == "one two"


def test_a_budget_of_time_is_kept(site: Site) -> None:
    response = site.alice.run(COUNT, timeout_seconds=1)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "timeout"}
    assert text_of(response).startswith("1\n")


@pytest.mark.requirement("B94")
def test_twenty_repeats_at_once_are_one_task(site: Site) -> None:
    """They wait for the first, and get its result."""
    before = len(site.alice.get("/v1/sessions?limit=100")["sessions"])

    def send(_: int) -> dict[str, Any]:
        with Peer(site.server.uhp_base_url, "alice-token") as peer:
            headers = {"Idempotency-Key": "twenty"}
            response: dict[str, Any] = peer.post(
                "/v1/responses", {"input": "Once."}, headers=headers
            )
            return response

    with ThreadPoolExecutor(20) as pool:
        responses = list(pool.map(send, range(20)))
    assert responses == [responses[0]] * 20
    assert responses[0]["status"] == "completed"
    assert len(site.alice.get("/v1/sessions?limit=100")["sessions"]) == before + 1


@pytest.mark.requirement("B94")
def test_a_key_stands_for_one_request(site: Site) -> None:
    headers = {"Idempotency-Key": "one request"}
    first = site.alice.post("/v1/responses", {"input": "Hello."}, headers=headers)
    body = {"input": "Something else."}
    site.alice.refused(
        409, "consignee_idempotency_mismatch", "POST", "/v1/responses", json=body, headers=headers
    )
    assert site.alice.post("/v1/responses", {"input": "Hello."}, headers=headers) == first
    for key in ("", "k" * 256):
        site.alice.refused(
            400,
            "invalid_input",
            "POST",
            "/v1/responses",
            json=body,
            headers={"Idempotency-Key": key},
        )


@pytest.mark.requirement("B94")
def test_a_repeat_of_a_stream_is_its_stream(site: Site) -> None:
    headers = {"Idempotency-Key": "streamed"}
    body = {"input": "Hello.", "stream": True}
    seen = []
    for _ in range(2):
        with site.alice.stream("POST", "/v1/responses", json=body, headers=headers) as events:
            seen.append([event.data for event in events])
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 1},
        {"input": "x", "stream": "yes"},
        {"input": "x", "metadata": []},
        {"input": "x", "metadata": {"harness_id": 1}},
        {"input": "x", "max_step": 0},
        {"input": "x", "timeout_seconds": True},
        {"input": "x", "previous_response_id": 1},
        {"input": [{"role": "king", "content": "x"}]},
        {"input": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
    ],
)
def test_a_field_of_the_wrong_kind_is_named(site: Site, body: dict[str, Any]) -> None:
    error = site.alice.refused(400, "invalid_input", "POST", "/v1/responses", json=body)
    assert error["param"]


def configured(folder: Path, *lines: str) -> str:
    path = folder / "consignee.toml"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_session_stays_with_its_harness(tmp_path: Path) -> None:
    """Its tasks take that harness by themselves, and no other one (Lifecycle, section 4)."""
    config = configured(
        tmp_path,
        *('[[harnesses]]\nname = "one"\nbase = "echo"\nid = "chrn_one"\nmodels = ["a", "b"]',),
        *('[[harnesses]]\nname = "two"\nbase = "echo"\nid = "chrn_two"',),
    )
    with running_site("--config", config) as site:
        first = site.alice.run("Hello.", metadata={"harness_id": "chrn_two"})
        previous = {"previous_response_id": first["id"]}
        assert site.alice.run("And?", **previous)["metadata"]["harness_id"] == "chrn_two"
        body = {"input": "And?", "metadata": {"harness_id": "chrn_one"}, **previous}
        site.alice.refused(409, "harness_mismatch", "POST", "/v1/responses", json=body)
        by_default = site.alice.run("Hello.", model="b")
        assert by_default["metadata"]["harness_id"] == "chrn_one"
        assert by_default["model"] == "b"
        listed = site.alice.get("/v1/sessions?harness=chrn_one")["sessions"]
        assert [session["id"] for session in listed] == [session_of(by_default)]


@pytest.mark.requirement("UHP-35")
def test_an_expired_session_is_not_an_unknown_one(tmp_path: Path) -> None:
    config = configured(tmp_path, 'session_ttl = "1s"', "sweep_interval_seconds = 0.1")
    with running_site("--config", config) as site:
        response = site.alice.run("Create a file named a.txt containing exactly: a")
        session = f"/v1/sessions/{session_of(response)}"
        wait_for(lambda: site.alice.ask("GET", f"{session}/files").status_code == 404)
        body = {"input": "And?", "previous_response_id": response["id"]}
        site.alice.refused(404, "session_expired", "POST", "/v1/responses", json=body)
        site.bob.refused(404, "response_not_found", "POST", "/v1/responses", json=body)


def test_a_principal_that_asks_too_often_waits(tmp_path: Path) -> None:
    config = configured(tmp_path, "max_requests_per_second = 0.01")
    with running_site("--config", config) as site:
        site.alice.get("/v1/models")
        answer = site.alice.ask("GET", "/v1/models")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limited"
        assert int(answer.headers["retry-after"]) > 0
        site.bob.get("/v1/models")


def test_only_listed_origins_read_from_a_browser(tmp_path: Path) -> None:
    config = configured(tmp_path, 'cors_origins = ["https://app.example"]')
    with running_site("--config", config) as site:
        for origin, is_allowed in (("https://app.example", True), ("https://evil.example", False)):
            asked = {"Origin": origin}
            answer = site.alice.ask("GET", "/v1/models", headers=asked)
            allowed = answer.headers.get("access-control-allow-origin")
            assert allowed == (origin if is_allowed else None)


def test_a_stopping_server_ends_what_only_watches() -> None:
    """Whoever follows a feed, or a task that runs on, does not hold up the end."""
    with running_site() as other:
        harness_id = other.alice.get("/v1/harnesses")["harnesses"][0]["id"]
        other.alice.run(COUNT, background=True)
        with other.alice.stream("GET", f"/v1/harnesses/{harness_id}/events") as feed:
            next(feed)
            began = monotonic()
            other.server.process.terminate()
            assert other.server.process.wait(SECONDS) == 0
            assert monotonic() - began < 20
