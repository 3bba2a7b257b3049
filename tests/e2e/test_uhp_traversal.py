"""Paths that try to get out, written to the socket as they stand: clients would tidy them up.

Whatever is put in the place of an id, the answer is that of an id that never was: the same status,
the same body (UHP-30, B37, B38, B35).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.peer import Site, running_site, session_of
from tests.e2e.wire import Response, Wire, digest, head

pytestmark = pytest.mark.xdist_group("uhp traversal")

SECRET = b"root:secret of the server"

PROBES = (
    "..",
    ".",
    "../../etc/passwd",
    "../../../../../../../../etc/passwd",
    "%2e%2e",
    "%2e%2e/%2e%2e/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "..%2F..%2Fsecret.txt",
    "%252e%252e%252fetc%252fpasswd",
    "..%5c..%5cetc%5cpasswd",
    "..\\..\\etc\\passwd",
    "%c0%ae%c0%ae%c0%afetc",
    "%c0%ae%c0%ae/%c0%ae",
    "%ff%fe",
    "%00",
    "x%00.png",
    "%0a",
    "x%0d%0aX-Evil:%201",
    "/etc/passwd",
    "//etc/passwd",
    "%2fetc%2fpasswd",
    "C:%5cWindows%5cwin.ini",
    "file:%2f%2f%2fetc%2fpasswd",
    "~root",
    "%7eroot",
    "*",
    "%25",
    "%u002e%u002e",
    "%EF%BC%8E%EF%BC%8E",
    "' OR 1=1 --".replace(" ", "%20"),
    "file_" + "a" * 65,
    "file_" + "a" * 4000,
    "FILE_" + "5" * 32,
    "file_%35",
    "files",
    "archive",
)

TARGETS = (
    "/v1/containers/{container}/files/{probe}/content",
    "/v1/containers/{container}/files/{probe}/pdf",
    "/v1/containers/{probe}/files/{file}/content",
    "/v1/containers/{probe}/files/{file}/pdf",
    "/v1/containers/{container}/files/{file}/{probe}",
    "/v1/containers/{container}/files/{file}/content/{probe}",
    "/v1/containers/{container}/{probe}",
)

UNKNOWN = "file_" + "5" * 32


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server whose folder holds files with the names that are probed for."""
    data_dir = tmp_path_factory.mktemp("site")
    for name in ("secret.txt", "etc/passwd"):
        path = data_dir.joinpath(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(SECRET)
    with running_site("--data-dir", str(data_dir)) as running:
        yield running


@pytest.fixture(scope="module")
def names(site: Site) -> dict[str, str]:
    response = site.alice.run("Create a file named a.txt containing exactly: mine")
    (file,) = site.alice.artifacts(response)
    return {
        "container": file["container_id"],
        "file": file["id"],
        "session": session_of(response),
    }


def asked(wire: Wire, method: str, target: str, **fields: str) -> Response:
    """One request on a connection that stays open. Refusals have a length, so HEAD has one too."""
    credential = {"Authorization": "Bearer alice-token"}
    wire.send(head(credential | fields, line=f"{method} {target} HTTP/1.1"))
    return wire.response()


def judged(answer: Response) -> dict[str, Any]:
    """The error of an answer that gives nothing away."""
    assert SECRET not in answer.body
    assert b"root:" not in answer.body
    assert answer.headers["uhp-version"]
    assert "x-evil" not in answer.headers
    error: dict[str, Any] = json.loads(answer.body)["error"]
    assert set(error) == {"type", "code", "message", "param", "detail"}
    return error


@pytest.mark.requirement("UHP-30", "X-08", "B37", "B38")
@pytest.mark.parametrize("method", ["GET", "DELETE", "POST", "PATCH"])
@pytest.mark.parametrize("target", TARGETS)
def test_no_path_leads_out(site: Site, names: dict[str, str], target: str, method: str) -> None:
    unknown = f"/v1/containers/{names['container']}/files/{UNKNOWN}/content"
    with Wire(site.server.url) as wire:
        expected = asked(wire, method, unknown)
        assert judged(expected)["code"] == "file_not_found"
        for probe in PROBES:
            answer = asked(wire, method, target.format(probe=probe, **names))
            assert (answer.status, answer.body) == (404, expected.body), probe


@pytest.mark.requirement("UHP-30", "B37", "B38")
@pytest.mark.parametrize(
    "target",
    [
        "/v1/sessions/{probe}",
        "/v1/sessions/{probe}/files",
        "/v1/sessions/{probe}/files/archive",
        "/v1/sessions/{probe}/turns",
        "/v1/responses/{probe}",
        "/v1/responses/{probe}/input_items",
        "/v1/files/{probe}",
        "/v1/harnesses/{probe}",
    ],
)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_no_other_id_leads_out(site: Site, names: dict[str, str], target: str, method: str) -> None:
    """Where the probe makes another path of it, that path is unknown: it is never a redirect."""
    with Wire(site.server.url) as wire:
        for probe in PROBES:
            answer = asked(wire, method, target.format(probe=probe, **names))
            assert answer.status in (404, 405), probe
            judged(answer)
            assert "location" not in answer.headers


@pytest.mark.requirement("UHP-30", "B37", "B38")
@pytest.mark.parametrize(
    "probe",
    [
        "..",
        "../x",
        "a/../../x",
        "%2e%2e/x",
        "..%2fx",
        "%2fetc%2fx",
        "/etc/x",
        "a//b",
        "a/./b",
        "./a",
        "a/",
        "x%00.txt",
        "x%0a.txt",
        "%ff.txt",
        "a%2f..%2f..%2fx",
        "%EF%BF%BE" * 2000,
        "a/" * 3000 + "b",
    ],
)
def test_an_intake_writes_nowhere_else(site: Site, names: dict[str, str], probe: str) -> None:
    before = site.alice.get(f"/v1/sessions/{names['session']}/files")
    target = f"/v1/containers/{names['container']}/files/{probe}"
    octets = {
        "Content-Type": "application/octet-stream",
        "Content-Length": "3",
        "AHP-Content-SHA256": digest(b"abc"),
    }
    with Wire(site.server.url) as wire:
        credential = {"Authorization": "Bearer alice-token"}
        wire.send(head(credential | octets, line=f"PUT {target} HTTP/1.1"), b"abc")
        answer = wire.response()
    assert answer.status in (400, 404)
    judged(answer)
    assert site.alice.get(f"/v1/sessions/{names['session']}/files") == before


@pytest.mark.requirement("UHP-30", "B35")
def test_an_intake_decodes_a_path_once(site: Site) -> None:
    """What looks encoded after that is part of a name; each file is found with its own bytes."""
    session = site.alice.post("/v1/sessions")
    wanted = {"100% done.txt", "a%41.txt", "aA.txt", "a%2fb.txt", "50%25.txt", "..txt", "…/..x"}
    for path in sorted(wanted):
        put(site, session["container_id"], path)
    listed = site.alice.get(f"/v1/sessions/{session['id']}/files")["files"]
    assert {file["path"] for file in listed} == wanted
    for file in listed:
        answer = site.alice.content(file)
        assert answer.content == file["path"].encode()


def put(site: Site, container_id: str, path: str) -> None:
    body = path.encode()
    encoded = "".join(f"%{octet:02x}" for octet in body).replace("%2f", "/")
    fields = {
        "Authorization": "Bearer alice-token",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(body)),
        "AHP-Content-SHA256": digest(body),
    }
    # An encoded slash stands for a name that holds one, which no file can have: sent as it is.
    target = f"/v1/containers/{container_id}/files/{encoded}"
    with Wire(site.server.url) as wire:
        wire.send(head(fields, line=f"PUT {target} HTTP/1.1"), body)
        answer = wire.response()
    assert answer.status == 201, answer.body


@pytest.mark.requirement("UHP-30")
def test_the_folder_is_as_it_was(site: Site) -> None:
    """After all of the above the server has written where it writes, and nowhere else."""
    response = site.alice.run(
        "Create a file named ../../secret.txt containing exactly: overwritten"
    )
    assert response["status"] == "failed"
    assert site.alice.artifacts(response) == []


def test_the_secret_is_where_it_was(site: Site, tmp_path: Path) -> None:
    """A task cannot write outside of its workspace by the words of its prompt."""
    for path in ("/etc/consignee-was-here", "../x", "a/../../x", "a\x00b"):
        task = f"Create a file named {path} containing exactly: x"
        assert site.alice.run(task)["status"] == "failed"
    assert not Path("/etc/consignee-was-here").exists()
