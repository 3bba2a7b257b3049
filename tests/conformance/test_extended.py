"""The checks of class Extended, one test each, with the sentence that is behind it."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import pytest

from tests.conformance.peer import Peer, Site, content_path, session_of
from tests.e2e.wire import Wire, head

pytestmark = pytest.mark.xdist_group("conformance")

SECRET = b"The secret token is uhp-4711."


# --- sessions (Sessions, sections 2 and 3) ------------------------------------------------------


@pytest.mark.requirement("X-01")
def test_sessions_are_listed(peer: Peer, response: dict[str, Any]) -> None:
    """A client finds its earlier work again."""
    listed = peer.get("/v1/sessions?limit=100")["sessions"]
    assert session_of(response) in [session["id"] for session in listed]


@pytest.mark.requirement("X-02")
def test_the_last_page_says_that_it_is_the_last(peer: Peer, response: dict[str, Any]) -> None:
    """The end is told, not guessed from a page that is not full."""
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = peer.get(f"/v1/sessions?limit=1&cursor={cursor}")
        seen += [session["id"] for session in page["sessions"]]
        cursor = page["next_cursor"]
    assert session_of(response) in seen
    assert len(set(seen)) == len(seen)


@pytest.mark.requirement("X-03")
def test_a_session_is_inspected(peer: Peer, response: dict[str, Any]) -> None:
    """A session can be looked at by its id."""
    session = peer.get(f"/v1/sessions/{session_of(response)}")
    assert session["id"] == session_of(response)
    assert session["harness_id"] == response["metadata"]["harness_id"]


@pytest.mark.requirement("X-04")
def test_a_session_tells_its_turns(peer: Peer, response: dict[str, Any]) -> None:
    """From the turns a client can build again what was said, oldest first."""
    first = peer.get(f"/v1/sessions/{session_of(response)}/turns")["turns"][0]
    assert (first["id"], first["status"]) == (response["id"], "completed")
    assert (first["user"], first["assistant"]) == ("Reply with exactly: ok", "ok")


# --- files (Files) ------------------------------------------------------------------------------


def digests_of(peer: Peer, response: dict[str, Any]) -> str:
    """What the echo harness has seen of its input files."""
    (digests,) = peer.artifacts(response)
    return peer.content(digests).text


@pytest.mark.requirement("X-05", "UHP-02")
def test_a_file_comes_with_the_task(peer: Peer) -> None:
    """A small file needs no request of its own, and arrives as it was."""
    data = "data:text/plain;base64," + base64.b64encode(SECRET).decode()
    response = peer.run(
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Which token?"},
                    {"type": "input_file", "filename": "token.txt", "file_data": data},
                ],
            }
        ]
    )
    assert response["status"] == "completed"
    assert hashlib.sha256(SECRET).hexdigest() in digests_of(peer, response)


@pytest.mark.requirement("X-06", "UHP-15")
def test_artifacts_are_listed(artifact: dict[str, Any]) -> None:
    """What a task has written is found in its session."""
    assert artifact["filename"] == "conformance.txt"
    assert artifact["bytes"] == len("artifact-ok")


@pytest.mark.requirement("X-07", "UHP-18", "UHP-21")
def test_an_artifact_is_downloaded_as_it_is(peer: Peer, artifact: dict[str, Any]) -> None:
    """Raw bytes, and no browser may guess what they are."""
    answer = peer.content(artifact)
    assert answer.content == b"artifact-ok"
    assert answer.headers["content-type"] == "text/plain"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.requirement("X-08", "UHP-30")
@pytest.mark.parametrize("probe", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd"])
def test_no_id_leads_out_of_its_container(site: Site, artifact: dict[str, Any], probe: str) -> None:
    """An id is a name in a table, never a path. Clients would tidy these up: a socket does not."""
    path = content_path(artifact).replace(artifact["id"], probe)
    fields = {"Authorization": f"Bearer {site.alice.token}"}
    with Wire(site.server.url) as wire:
        wire.send(head(fields, line=f"GET {path} HTTP/1.1"))
        answer = wire.response()
    assert answer.status == 404
    assert b"root:" not in answer.body


@pytest.mark.requirement("X-09", "UHP-03", "UHP-04", "UHP-05")
def test_an_uploaded_file_is_named_by_a_task(peer: Peer) -> None:
    """A large file is sent once, and then referred to."""
    file = peer.upload("token.txt", SECRET)
    assert file["object"] == "file"
    assert file["bytes"] == len(SECRET)
    response = peer.run(
        [{"role": "user", "content": [{"type": "input_file", "file_id": file["id"]}]}]
    )
    assert response["status"] == "completed"
    assert hashlib.sha256(SECRET).hexdigest() in digests_of(peer, response)
