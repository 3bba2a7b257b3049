"""The checks of class Core, one test each, with the sentence of the protocol that is behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.peer import TERMINAL, TERMINAL_EVENTS, Event, Peer, judge_response
from tests.uhp.schema import validate

pytestmark = pytest.mark.xdist_group("conformance")

UNKNOWN_HARNESS = "/v1/harnesses/chrn_nosuchharness"
EXTENDED = {"streaming", "sessions", "cancellation", "files_input", "files_output"}


def final(events: list[Event]) -> dict[str, Any]:
    """The response that the last event carries."""
    last: dict[str, Any] = events[-1].data["response"]
    return last


# --- discovery (Lifecycle, section 2) -----------------------------------------------------------


@pytest.mark.requirement("D-01")
def test_the_discovery_document_is_served(peer: Peer) -> None:
    """A server describes itself at one fixed address, as a JSON object."""
    assert peer.get("/v1/uhp")["protocol"] == "uhp"


@pytest.mark.requirement("D-02")
def test_discovery_asks_for_no_credential(stranger: Peer) -> None:
    """Whoever holds no token yet can already learn what this server is."""
    assert stranger.get("/v1/uhp")["object"] == "uhp.discovery"


@pytest.mark.requirement("D-03", "UHP-01")
def test_the_discovery_document_has_its_schema(stranger: Peer) -> None:
    """Every capability is named and is true or false, none is left to be guessed."""
    document = stranger.get("/v1/uhp")
    validate("Discovery", document)
    assert all(isinstance(value, bool) for value in document["capabilities"].values())
    assert len(document["capabilities"]) == 10


@pytest.mark.requirement("D-04")
def test_the_default_version_is_one_that_is_served(stranger: Peer) -> None:
    """What a client gets without asking is among what it can ask for."""
    document = stranger.get("/v1/uhp")
    assert document["default_version"] in document["versions"]


@pytest.mark.requirement("D-05", "UHP-01")
def test_the_class_and_the_capabilities_agree(stranger: Peer) -> None:
    """A class is a promise of capabilities: none of those it stands for is reported false."""
    document = stranger.get("/v1/uhp")
    served = {name for name, is_served in document["capabilities"].items() if is_served}
    assert document["conformance_class"] == "extended"
    assert served == EXTENDED | {"session_listing", "idempotency"}


# --- versions (Lifecycle, section 1) ------------------------------------------------------------


@pytest.mark.requirement("V-01")
@pytest.mark.parametrize("path", ["/v1/uhp", "/v1/models", "/v1/none", UNKNOWN_HARNESS])
def test_every_answer_names_its_version(peer: Peer, path: str) -> None:
    """A client reads from any answer under which contract it was made."""
    assert peer.ask("GET", path).headers["uhp-version"] == "2026-09-12"


@pytest.mark.requirement("V-02")
@pytest.mark.parametrize("version", ["2026-08-11", "2026-09-12"])
def test_a_served_version_is_honoured(peer: Peer, version: str) -> None:
    """Whoever asks for a version that is on offer gets that one."""
    answer = peer.ask("GET", "/v1/uhp", headers={"UHP-Version": version})
    assert answer.status_code == 200
    assert answer.headers["uhp-version"] == version
    assert version in answer.json()["versions"]


@pytest.mark.requirement("V-03")
def test_a_version_that_is_not_served_is_refused(stranger: Peer) -> None:
    """Another version is never put in its place silently: the refusal lists what there is."""
    version = {"UHP-Version": "1999-01-01"}
    refusal = stranger.refused(
        400, "unsupported_protocol_version", "GET", "/v1/uhp", headers=version
    )
    assert refusal["detail"]["supported"] == ["2026-08-11", "2026-09-12"]


# --- credentials (Architecture, section 5) and errors (Errors) ----------------------------------


@pytest.mark.requirement("A-01")
def test_an_absent_credential_is_refused(stranger: Peer) -> None:
    """What belongs to somebody is not shown to nobody."""
    stranger.refused(401, "missing_credential", "GET", "/v1/harnesses")


@pytest.mark.requirement("A-02")
def test_a_wrong_credential_is_refused(stranger: Peer) -> None:
    """An unknown token is an authentication error, whatever else is wrong."""
    wrong = {"Authorization": "Bearer nobody-knows-this"}
    refusal = stranger.refused(401, "invalid_credential", "GET", "/v1/harnesses", headers=wrong)
    assert refusal["type"] == "authentication_error"


@pytest.mark.requirement("E-01")
def test_an_error_is_the_envelope(peer: Peer) -> None:
    """Failures have one form, which a program can take apart."""
    answer = peer.ask("GET", UNKNOWN_HARNESS)
    validate("ErrorEnvelope", answer.json())
    assert answer.status_code == 404
    assert all(answer.json()["error"][key] for key in ("type", "code", "message"))


@pytest.mark.requirement("E-02")
def test_an_unknown_harness_is_told_as_such(peer: Peer) -> None:
    """The code names the kind of thing that was not found."""
    peer.refused(404, "harness_not_found", "GET", UNKNOWN_HARNESS)


@pytest.mark.requirement("E-03")
def test_an_unknown_response_is_told_as_such(peer: Peer) -> None:
    """The same, for a response."""
    peer.refused(404, "response_not_found", "GET", "/v1/responses/resp_nosuchresponse")


@pytest.mark.requirement("E-04")
def test_a_message_shows_nothing_of_the_inside(peer: Peer) -> None:
    """What is wrong is said to a person, not with a stack trace."""
    message = peer.refused(404, "harness_not_found", "GET", UNKNOWN_HARNESS)["message"]
    assert not any(leak in message for leak in ("Traceback", 'File "/', "  at ", "\n"))


# --- harnesses and models (Harnesses, sections 1 and 3) -----------------------------------------


@pytest.mark.requirement("H-01")
def test_harnesses_are_listed(peer: Peer) -> None:
    """A client finds out what can run its work."""
    listed = peer.get("/v1/harnesses")["harnesses"]
    assert [harness["object"] for harness in listed] == ["harness"]


@pytest.mark.requirement("H-02")
def test_a_harness_is_found_by_its_id(peer: Peer, harness_id: str) -> None:
    """The id of the listing leads to the same harness."""
    harness = peer.get(f"/v1/harnesses/{harness_id}")
    assert harness["id"] == harness_id
    assert [harness] == peer.get("/v1/harnesses")["harnesses"]


@pytest.mark.requirement("H-03")
def test_the_catalogue_says_which_models_are_available(peer: Peer) -> None:
    """Availability is a fact about now: yes or no."""
    backends = peer.get("/v1/models")["backends"].values()
    models = [model for backend in backends for model in backend["models"]]
    assert models
    assert all(model["available"] is True for model in models)


@pytest.mark.requirement("H-04")
def test_a_harness_lists_its_models(peer: Peer, harness_id: str) -> None:
    """The models of one harness, with its default among them."""
    listed = peer.get(f"/v1/harnesses/{harness_id}/models")
    assert listed["harness_id"] == harness_id
    assert listed["default"] in [model["id"] for model in listed["models"]]


# --- tasks (Tasks) ------------------------------------------------------------------------------


@pytest.mark.requirement("T-01")
def test_a_task_answers_with_a_response(response: dict[str, Any]) -> None:
    """Work in, one response object out."""
    judge_response(response)
    assert response["object"] == "response"


@pytest.mark.requirement("T-02")
def test_what_was_waited_for_has_ended(response: dict[str, Any]) -> None:
    """A client that waits is not answered before the end."""
    assert response["status"] == "completed"


@pytest.mark.requirement("T-03")
def test_the_response_names_the_model_that_ran(peer: Peer, response: dict[str, Any]) -> None:
    """Another model than the one asked for is never passed off as it."""
    replaced = peer.run("Reply with exactly: ok", model="no-such-model")
    assert response["model"]
    assert "model_fallback" not in response["metadata"]
    assert replaced["model"] == response["model"]
    assert replaced["metadata"]["requested_model"] == "no-such-model"
    assert replaced["metadata"]["model_fallback"] is True


@pytest.mark.requirement("T-04")
def test_the_response_names_its_session(peer: Peer, response: dict[str, Any]) -> None:
    """Without the session's id nobody could go on with it."""
    session_id = response["metadata"]["session_id"]
    assert peer.get(f"/v1/sessions/{session_id}")["id"] == session_id


@pytest.mark.requirement("T-05")
def test_usage_is_not_made_up(response: dict[str, Any]) -> None:
    """A server that has counted nothing says null, and never zero."""
    assert response["usage"] is None


@pytest.mark.requirement("T-06")
def test_a_response_is_read_back(peer: Peer, response: dict[str, Any]) -> None:
    """What was kept can be fetched again, and is the same."""
    assert peer.get(f"/v1/responses/{response['id']}") == response


@pytest.mark.requirement("T-07")
def test_a_response_is_known_by_its_prefix(response: dict[str, Any]) -> None:
    """An id tells of what kind it is."""
    assert response["id"].startswith("resp_")


@pytest.mark.requirement("T-08")
def test_reserved_fields_are_accepted(reserved: dict[str, Any]) -> None:
    """A field that a server does not act on is no reason to refuse the work."""
    assert reserved["status"] == "completed"


@pytest.mark.requirement("T-09")
def test_reserved_fields_are_reported_as_ignored(reserved: dict[str, Any]) -> None:
    """What had no effect is named, so that nobody relies on it."""
    assert reserved["metadata"]["ignored_fields"] == ["include", "tools"]


@pytest.mark.requirement("T-10")
def test_what_was_not_sent_is_not_reported(response: dict[str, Any]) -> None:
    """The report is about this request."""
    assert not {"include", "tools"} & set(response["metadata"].get("ignored_fields", []))


# --- streams (Streaming) ------------------------------------------------------------------------


@pytest.mark.requirement("S-01")
def test_a_stream_has_events(events: list[Event]) -> None:
    """A streamed task tells what happens."""
    assert "response.output_text.delta" in {event.kind for event in events}


@pytest.mark.requirement("S-02")
def test_a_stream_has_its_media_type(peer: Peer) -> None:
    """Events are sent in the format that browsers and clients know."""
    body = {"input": "Reply with exactly: ok", "stream": True}
    with peer.http.stream("POST", "/v1/responses", json=body) as answer:
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert answer.headers["cache-control"].startswith("no-cache")
        assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.requirement("S-03")
def test_every_event_has_its_schema(events: list[Event]) -> None:
    """Each event can be read without the others."""
    for event in events:
        validate("Event", event.data)
    assert len(events) > 5


@pytest.mark.requirement("S-04")
def test_events_are_numbered_without_a_gap(events: list[Event]) -> None:
    """A client can tell a lost event from one that never was."""
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.requirement("S-05")
def test_the_first_event_says_that_the_task_is_there(events: list[Event]) -> None:
    """The response's id is known before anything else happens."""
    assert events[0].kind == "response.created"
    assert events[0].data["response"]["status"] == "in_progress"


@pytest.mark.requirement("S-06")
def test_a_stream_ends_with_its_one_terminal_event(events: list[Event]) -> None:
    """The end is an event, and nothing comes behind it."""
    assert [event.kind in TERMINAL_EVENTS for event in events].index(True) == len(events) - 1


@pytest.mark.requirement("S-07")
def test_the_terminal_event_carries_the_whole_response(peer: Peer, events: list[Event]) -> None:
    """Who reads only the last event misses nothing."""
    validate("Response", final(events))
    assert final(events)["status"] in TERMINAL
    assert peer.get(f"/v1/responses/{final(events)['id']}") == final(events)


@pytest.mark.requirement("S-08")
def test_streamed_or_not_the_result_is_the_same(
    response: dict[str, Any], events: list[Event]
) -> None:
    """The way of watching a task does not change what it gives."""

    def without_ids(result: dict[str, Any]) -> dict[str, Any]:
        output = [{k: v for k, v in item.items() if k != "id"} for item in result["output"]]
        kept = {k: v for k, v in result.items() if k not in ("id", "created_at", "metadata")}
        return kept | {"output": output}

    assert without_ids(final(events)) == without_ids(response)


@pytest.mark.requirement("S-09")
def test_a_stream_comes_as_it_happens(events: list[Event]) -> None:
    """Nothing is held back until the end. The harness takes its time, so these are least times."""
    assert len(events) >= 3
    assert events[-1].after >= 0.5
    assert events[-1].after - events[0].after > 0.05


# --- sessions and cancelling (Sessions, sections 1 and 4) ---------------------------------------


@pytest.mark.requirement("C-01")
def test_a_task_goes_on_with_a_session(
    peer: Peer, harness_id: str, response: dict[str, Any]
) -> None:
    """The next task runs where the one it names has run, and says so."""
    following = peer.run(
        "Reply with exactly: two",
        previous_response_id=response["id"],
        metadata={"harness_id": harness_id},
    )
    assert following["metadata"]["session_id"] == response["metadata"]["session_id"]
    assert following["previous_response_id"] == response["id"]


@pytest.mark.requirement("C-02")
def test_cancelling_what_has_ended_changes_nothing(peer: Peer, response: dict[str, Any]) -> None:
    """A cancel that comes too late, or twice, is not an error."""
    path = f"/v1/responses/{response['id']}"
    for _ in range(2):
        assert peer.post(f"{path}/cancel") == response
    assert peer.get(path) == response


@pytest.mark.requirement("C-03")
def test_a_running_task_is_cancelled(peer: Peer, harness_id: str) -> None:
    """It ends, as cancelled and not as failed, and what it has said is kept."""
    begun = peer.run(
        "Count slowly from 1 to 200, one number a line.",
        metadata={"harness_id": harness_id},
        background=True,
    )
    path = f"/v1/responses/{begun['id']}"
    with peer.stream("GET", f"{path}?stream=true") as events:
        assert "response.output_text.delta" in (event.kind for event in events)
        peer.post(f"{path}/cancel")
    ended = peer.follow(begun)
    assert ended["status"] == "cancelled"
    assert ended["output"][0]["content"][0]["text"].startswith("1\n")
