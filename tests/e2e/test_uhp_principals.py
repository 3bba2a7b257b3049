"""Two principals against every route and method: what is another's is as if it were not there.

The matrix is made from the server's own table of routes, so a new route is in it by itself. Each
request is made twice, once with ids of the other principal and once with ids that never were, and
both answers must be the same in every byte that does not name the request (UHP-29, B85).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.uhp.http import UhpRoute
from app.uhp.routes import all_routes
from tests.conformance.peer import Peer, Site, content_path, running_site, session_of
from tests.uhp.calling import services_on, settings_for

pytestmark = pytest.mark.xdist_group("uhp principals")

ROUTES = all_routes(services_on(settings_for(Path("/nonexistent")), cast("Any", None)))

SHARED = {"harness_id"}
"""Harnesses come from the configuration and belong to everybody."""

RANDOM: Mapping[str, str] = {
    "session_id": "hsess_" + "5" * 32,
    "response_id": "resp_" + "5" * 32,
    "container_id": "cntr_" + "5" * 32,
    "file_id": "file_" + "5" * 32,
    "upload_id": "file_" + "5" * 32,
    "path": "notes/report.md",
    "rest": "cntr_" + "5" * 32,
}

OF_THIS_REQUEST = {"date", "x-request-id"}

CONDITIONS: Mapping[str, dict[str, str]] = {
    "plain": {},
    "a range": {"Range": "bytes=0-1"},
    "a bad range": {"Range": "bytes=99999-"},
    "a condition": {"If-None-Match": "*"},
    "a resumption": {"Last-Event-ID": "0"},
}

QUERIES = ("?stream=true", "?stream=maybe", "?media_type=a/b", "?disposition=inline", "?limit=0")


@dataclass(frozen=True, slots=True)
class Owned:
    """What the first principal has, by the name of the parameter that it fills."""

    ids: Mapping[str, str]
    cursors: Mapping[str, str]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture(scope="module")
def owned(site: Site) -> Owned:
    alice = site.alice
    alice.upload("first.txt", b"secret upload")
    alice.run("Hello.")
    response = alice.run("Create a file named notes/report.md containing exactly: secret")
    (file,) = alice.artifacts(response)
    ids = {
        "session_id": session_of(response),
        "response_id": response["id"],
        "container_id": file["container_id"],
        "file_id": file["id"],
        "upload_id": alice.upload("mine.txt", b"secret upload")["id"],
        "path": file["path"],
        "rest": file["container_id"],
    }
    cursors = {
        path: alice.get(f"{path}?limit=1")["next_cursor"] for path in ("/v1/files", "/v1/sessions")
    }
    return Owned(ids, cursors)


def parameters_of(route: UhpRoute) -> list[str]:
    return re.findall(r"\{(\w+)(?::\w+)?\}", route.path)


def filled(route: UhpRoute, ids: Mapping[str, str]) -> str:
    """The route's path with ids; the files under /v1/files are uploads."""
    path = route.path
    if path.startswith("/v1/files"):
        path = path.replace("file_id", "upload_id")
    return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: ids[match[1]], path)


def request(peer: Peer, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
    """A request that is valid but for its ids."""
    if method == "PUT":
        digest = hashlib.sha256(b"new").hexdigest()
        octets = {"Content-Type": "application/octet-stream", "AHP-Content-SHA256": digest}
        return peer.ask(method, path, content=b"new", headers=octets | dict(headers))
    return peer.ask(method, path, headers=headers)


def seen(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """An answer without what names the one request."""
    headers = [(k, v) for k, v in answer.headers.multi_items() if k not in OF_THIS_REQUEST]
    return answer.status_code, answer.content, headers


OWNING = [route for route in ROUTES if set(parameters_of(route)) - SHARED]
MATRIX = [
    pytest.param(route, method, id=f"{method} {route.path}")
    for route in OWNING
    for method in (*route.methods, "PROPFIND")
]


def test_the_matrix_holds_every_route_that_has_an_owner() -> None:
    """The others are public, shared, or collections, which have tests of their own below."""
    others = {route.path for route in ROUTES} - {route.path for route in OWNING}
    assert others == {
        "/v1/uhp",
        "/v1/harnesses",
        "/v1/harnesses/{harness_id}",
        "/v1/harnesses/{harness_id}/models",
        "/v1/harnesses/{harness_id}/events",
        "/v1/models",
        "/v1/responses",
        "/v1/sessions",
        "/v1/files",
    }
    assert len(MATRIX) > 40


@pytest.mark.requirement("UHP-29", "UHP-30", "B85", "B51")
@pytest.mark.parametrize(("route", "method"), MATRIX)
def test_another_s_ids_are_ids_that_never_were(
    site: Site, owned: Owned, route: UhpRoute, method: str
) -> None:
    has_405 = method not in route.methods and not route.conceals
    for headers in CONDITIONS.values():
        foreign = request(site.bob, method, filled(route, owned.ids), headers)
        unknown = request(site.bob, method, filled(route, RANDOM), headers)
        assert seen(foreign) == seen(unknown)
        assert foreign.status_code == (405 if has_405 else 404)


@pytest.mark.requirement("UHP-29", "B85")
@pytest.mark.parametrize(("route", "method"), MATRIX)
def test_a_query_tells_no_more(site: Site, owned: Owned, route: UhpRoute, method: str) -> None:
    for query in QUERIES:
        foreign = request(site.bob, method, filled(route, owned.ids) + query, {})
        unknown = request(site.bob, method, filled(route, RANDOM) + query, {})
        assert seen(foreign) == seen(unknown)


@pytest.mark.requirement("UHP-30", "B85")
@pytest.mark.parametrize("last", ["content", "pdf"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_file_is_found_in_its_own_container_only(
    site: Site, owned: Owned, last: str, method: str
) -> None:
    """Also by its owner; and another's file is not in one's own container either."""
    own = site.bob.post("/v1/sessions")["container_id"]
    mine = site.alice.post("/v1/sessions")["container_id"]
    a, never = owned.ids, RANDOM["file_id"]
    for peer, container, file_id in (
        (site.bob, own, a["file_id"]),
        (site.bob, a["container_id"], never),
        (site.alice, mine, a["file_id"]),
        (site.alice, a["container_id"], a["upload_id"]),
    ):
        found = peer.ask(method, f"/v1/containers/{container}/files/{file_id}/{last}")
        unknown = peer.ask(method, f"/v1/containers/{container}/files/{never}/{last}")
        assert seen(found) == seen(unknown)
        assert found.status_code == 404


@pytest.mark.requirement("UHP-29", "UHP-30")
def test_an_artifact_is_no_upload(site: Site, owned: Owned) -> None:
    """A session's artifact is not deleted behind the session's back, not even by its owner."""
    for method in ("GET", "DELETE"):
        site.alice.refused(404, "file_not_found", method, f"/v1/files/{owned.ids['file_id']}")


def task_with(part: Mapping[str, Any]) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [dict(part)]}]}


INPUTS = {
    "an upload as file": ("upload_id", "input_file"),
    "an upload as image": ("upload_id", "input_image"),
    "an artifact as file": ("file_id", "input_file"),
    "an artifact as image": ("file_id", "input_image"),
}


@pytest.mark.requirement("UHP-29", "B85")
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("stream", [False, True])
def test_another_s_file_is_no_input(site: Site, owned: Owned, kind: str, stream: bool) -> None:
    name, part = INPUTS[kind]
    before = site.bob.get("/v1/sessions?limit=100")
    answers = []
    for ids in (owned.ids, RANDOM):
        body = task_with({"type": part, "file_id": ids[name]}) | {"stream": stream}
        answers.append(site.bob.ask("POST", "/v1/responses", json=body))
    assert seen(answers[0]) == seen(answers[1])
    assert answers[0].status_code == 404
    error = answers[0].json()["error"]
    assert error["code"] == "file_not_found"
    assert error["param"] == "input.0.content.0.file_id"
    assert site.bob.get("/v1/sessions?limit=100") == before


@pytest.mark.requirement("UHP-29")
def test_one_s_own_files_are_inputs(site: Site, owned: Owned) -> None:
    """The other half of the test above: these ids do name files."""
    parts = [{"type": part, "file_id": owned.ids[name]} for name, part in INPUTS.values()]
    response = site.alice.run([{"role": "user", "content": parts}])
    assert response["status"] == "completed"
    (digests,) = site.alice.artifacts(response)
    lines = site.alice.content(digests).text.splitlines()
    want = [hashlib.sha256(text).hexdigest() for text in (b"secret upload", b"secret")]
    assert [line.split()[0] for line in lines] == [want[0], want[0], want[1], want[1]]


@pytest.mark.requirement("UHP-29", "B85")
@pytest.mark.parametrize("more", [{}, {"metadata": {"harness_id": "chrn_other"}}], ids=["", "x"])
def test_another_s_response_is_not_continued(
    site: Site, owned: Owned, more: dict[str, Any]
) -> None:
    answers = [
        site.bob.ask(
            "POST",
            "/v1/responses",
            json={"input": "And?", "previous_response_id": ids["response_id"], **more},
        )
        for ids in (owned.ids, RANDOM)
    ]
    assert seen(answers[0]) == seen(answers[1])
    assert answers[0].status_code == 404


@pytest.mark.requirement("UHP-29", "B85")
@pytest.mark.parametrize("path", ["/v1/files", "/v1/sessions"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_another_s_cursor_is_no_cursor(site: Site, owned: Owned, path: str, method: str) -> None:
    cursor = owned.cursors[path]
    assert site.alice.ask(method, f"{path}?cursor={cursor}").status_code == 200
    other = owned.cursors["/v1/sessions" if path == "/v1/files" else "/v1/files"]
    foreign, unknown, of_another_listing = (
        site.bob.ask(method, f"{path}?cursor={value}") for value in (cursor, "x" * 40, other)
    )
    assert seen(foreign) == seen(unknown) == seen(of_another_listing)
    assert foreign.status_code == 400
    assert site.alice.ask(method, f"{path}?cursor={other}").status_code == 400


@pytest.mark.requirement("UHP-29", "B85")
def test_listings_hold_nothing_of_another(site: Site, owned: Owned) -> None:
    said = [site.bob.ask("GET", f"{path}?limit=100").text for path in ("/v1/files", "/v1/sessions")]
    assert not any(value in text for text in said for value in owned.ids.values())


@pytest.mark.requirement("UHP-29", "B94")
def test_another_s_key_is_a_key_like_any(site: Site) -> None:
    """An Idempotency-Key leads nobody to another's response."""
    responses = [
        peer.post("/v1/responses", {"input": "Hello."}, headers={"Idempotency-Key": "k"})
        for peer in (site.alice, site.bob)
    ]
    assert responses[0]["id"] != responses[1]["id"]


@pytest.mark.requirement("UHP-29")
def test_another_s_task_runs_on(site: Site) -> None:
    """Whatever a stranger asks of it; and its events come to its owner only."""
    begun = site.alice.run("Count slowly from 1 to 200.", background=True)
    paths = [f"/v1/responses/{begun['id']}", f"/v1/sessions/{session_of(begun)}"]
    for path in paths:
        assert site.bob.ask("POST", f"{path}/cancel").status_code == 404
        assert site.bob.ask("DELETE", path).status_code == 404
    assert site.alice.get(paths[0])["status"] == "in_progress"
    site.alice.post(f"{paths[1]}/cancel")
    assert site.alice.follow(begun)["status"] == "cancelled"


@pytest.mark.requirement("UHP-29")
def test_a_feed_holds_one_s_own_events_only(site: Site) -> None:
    harness_id = site.bob.get("/v1/harnesses")["harnesses"][0]["id"]
    with site.bob.stream("GET", f"/v1/harnesses/{harness_id}/events") as feed:
        site.alice.run("Alice was here.")
        mine = site.bob.run("Bob was here.")
        ids = []
        for event in feed:
            ids += [event.data["response"]["id"]] if "response" in event.data else []
            if event.kind == "response.completed":
                break
    assert set(ids) == {mine["id"]}


@pytest.mark.requirement("UHP-29")
def test_after_all_that_nothing_has_changed(site: Site, owned: Owned) -> None:
    """The strangers above have tried to write, cancel and delete."""
    ids = owned.ids
    (file, *_) = site.alice.get(f"/v1/sessions/{ids['session_id']}/files")["files"]
    assert file["id"] == ids["file_id"]
    assert site.alice.ask("GET", content_path(file)).content == b"secret"
    assert site.alice.get(f"/v1/responses/{ids['response_id']}")["status"] == "completed"
    assert site.alice.get(f"/v1/files/{ids['upload_id']}")["filename"] == "mine.txt"
