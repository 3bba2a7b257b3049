"""Files in and artifacts out, over HTTP: what the public suite does not look at."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote, urlsplit

import psutil
import pytest

from tests import backends
from tests.conformance.peer import (
    Peer,
    Site,
    citations_of,
    content_path,
    running_site,
    session_of,
    text_of,
)
from tests.e2e.wire import MIB, Wire, digest, head
from tests.uhp.documents import docx

pytestmark = pytest.mark.xdist_group("uhp files")

LIMIT = 64 * 1024
UNICODE_NAMES = ("报告.txt", "plan-🚀.txt", "café.txt", 'a "quoted" name.txt', "я" * 100 + ".txt")


FORM = "multipart/form-data; boundary=B"


def part(disposition: str, rest: bytes) -> bytes:
    """The beginning of a form, and what comes behind the head of its first part."""
    return f"--B\r\nContent-Disposition: form-data; {disposition}\r\n\r\n".encode() + rest


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture(scope="module")
def small() -> Iterator[Site]:
    """A server with little room: `LIMIT` for a file, and a bit more for a request."""
    limits = {
        "CONSIGNEE_MAX_UPLOAD_BYTES": str(LIMIT),
        "CONSIGNEE_MAX_REQUEST_BYTES": str(4 * LIMIT),
        "CONSIGNEE_MAX_SCOPE_BYTES": str(3 * LIMIT),
        "CONSIGNEE_PREVIEW_COMMAND": "",
    }
    with running_site(environment=limits) as running:
        yield running


def data_url(content: bytes, media_type: str = "application/octet-stream") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def message(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def inline(content: bytes, name: str = "data.bin") -> list[dict[str, Any]]:
    return message({"type": "input_file", "filename": name, "file_data": data_url(content)})


def seen_by_the_task(peer: Peer, response: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Digest, size and path of each input, as the echo harness found it in its workspace."""
    (digests,) = peer.artifacts(response)
    found = []
    for line in peer.content(digests).text.splitlines():
        sha256, size, path = line.split("  ", 2)
        found.append((sha256, size, path))
    return found


def put(peer: Peer, container_id: str, path: str, content: bytes) -> dict[str, Any]:
    headers = {"Content-Type": "application/octet-stream", "AHP-Content-SHA256": digest(content)}
    answer = peer.ask(
        "PUT", f"/v1/containers/{container_id}/files/{path}", content=content, headers=headers
    )
    assert answer.status_code == 201, answer.text
    file: dict[str, Any] = answer.json()
    return file


# --- in -----------------------------------------------------------------------------------------


@pytest.mark.requirement("UHP-06", "B01")
@pytest.mark.parametrize("kind", ["empty", "text", "octets"])
def test_inline_or_uploaded_the_task_sees_the_same(site: Site, kind: str) -> None:
    content = {"empty": b"", "text": b"line\r\n", "octets": Random(1).randbytes(200_000)}[kind]
    file = site.alice.upload("data.bin", content)
    responses = [
        site.alice.run(inline(content)),
        site.alice.run(message({"type": "input_file", "file_id": file["id"]})),
    ]
    expected = [(digest(content), str(len(content)), "inputs/data.bin")]
    assert [seen_by_the_task(site.alice, each) for each in responses] == [expected] * 2
    assert file["bytes"] == len(content)


@pytest.mark.requirement("UHP-33")
def test_images_come_in_every_way(site: Site) -> None:
    pixel = Random(2).randbytes(100)
    file = site.alice.upload("p.png", pixel, "image/png")
    url = data_url(pixel, "image/png")
    response = site.alice.run(
        message(
            {"type": "input_image", "image_url": url},
            {"type": "input_image", "file_data": url, "filename": "own.png"},
            {"type": "input_image", "file_id": file["id"]},
        )
    )
    found = seen_by_the_task(site.alice, response)
    assert [(sha256, size) for sha256, size, _ in found] == [(digest(pixel), "100")] * 3
    assert len({path for _, _, path in found}) == 3
    assert "inputs/own.png" in [path for _, _, path in found]


@pytest.mark.requirement("UHP-33", "B90")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.png", "file:///etc/passwd", "x.png", ""])
@pytest.mark.parametrize("part", ["input_image", "input_file"])
def test_no_url_is_fetched(site: Site, part: str, url: str) -> None:
    key = "image_url" if part == "input_image" else "file_data"
    body = {"input": message({"type": part, key: url, "filename": "x"})}
    error = site.alice.refused(400, "invalid_input", "POST", "/v1/responses", json=body)
    assert error["param"] == f"input.0.content.0.{key}"


@pytest.mark.requirement("B02", "B30", "B32")
@pytest.mark.parametrize("name", UNICODE_NAMES)
def test_any_name_comes_in_and_out(site: Site, name: str) -> None:
    uploaded = site.alice.upload(name, b"x")
    assert site.alice.get(f"/v1/files/{uploaded['id']}")["filename"] == uploaded["filename"]
    response = site.alice.run(f"Create a file named {name} containing exactly: {name}")
    (file,) = site.alice.artifacts(response)
    assert file["filename"] == name
    for method in ("GET", "HEAD"):
        answer = site.alice.ask(method, content_path(file))
        assert filename_of(answer.headers["content-disposition"]) == name
    assert site.alice.content(file).text == name


def filename_of(disposition: str) -> str:
    """The name that a client reads from a Content-Disposition (RFC 6266, RFC 8187)."""
    assert disposition.isascii()
    kind, *parameters = disposition.split("; ")
    assert kind == "attachment"
    given = dict(parameter.split("=", 1) for parameter in parameters)
    fallback = given["filename"].strip('"')
    encoded = given.get("filename*", "UTF-8''" + fallback)
    assert encoded.startswith("UTF-8''")
    return unquote(encoded.removeprefix("UTF-8''"), errors="strict")


@pytest.mark.requirement("B30", "B29")
@pytest.mark.parametrize(
    "name", ["\ud800.txt", "a\x00b", "a\r\nSet-Cookie: x=1", ".", "..", "", " "]
)
def test_a_bad_name_is_refused_at_once(site: Site, name: str) -> None:
    """It never gets as far as a listing, which would fail for good."""
    body = {"input": message({"type": "input_file", "filename": name, "file_data": "data:,x"})}
    octets = json_ascii(body)
    headers = {"Content-Type": "application/json"}
    answer = site.alice.ask("POST", "/v1/responses", content=octets, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input.0.content.0.filename"


def json_ascii(value: Any) -> bytes:

    return json.dumps(value).encode("ascii")


@pytest.mark.requirement("UHP-08", "UHP-09", "UHP-10")
def test_the_limit_is_the_same_both_ways_and_is_told(small: Site) -> None:
    """At the limit a file is taken whole; a byte more and nothing of it is."""
    fits, too_large = b"x" * LIMIT, b"x" * (LIMIT + 1)
    assert small.alice.upload("fits", fits)["bytes"] == LIMIT
    response = small.bob.run(inline(fits))
    assert seen_by_the_task(small.bob, response)[0][:2] == (digest(fits), str(LIMIT))
    before = [small.alice.get(path) for path in ("/v1/files", "/v1/sessions")]
    form = {"file": ("f", too_large, "text/plain")}
    refusals = [
        small.alice.refused(413, "file_too_large", "POST", "/v1/files", files=form),
        small.alice.refused(
            413, "file_too_large", "POST", "/v1/responses", json={"input": inline(too_large)}
        ),
    ]
    assert [each["detail"]["max_bytes"] for each in refusals] == [LIMIT, LIMIT]
    assert small.alice.get("/v1/uhp")["limits"]["max_file_bytes"] == LIMIT
    assert [small.alice.get(path) for path in ("/v1/files", "/v1/sessions")] == before


@pytest.mark.requirement("UHP-09")
def test_a_request_has_a_limit_of_its_own(small: Site) -> None:
    """Told in the same way; and so does an artifact from elsewhere."""
    body = {"input": "x" * (4 * LIMIT)}
    error = small.alice.refused(413, "file_too_large", "POST", "/v1/responses", json=body)
    assert error["detail"]["max_bytes"] == 4 * LIMIT
    container_id = small.alice.post("/v1/sessions")["container_id"]
    content = b"x" * (LIMIT + 1)
    headers = {"Content-Type": "application/octet-stream", "AHP-Content-SHA256": digest(content)}
    path = f"/v1/containers/{container_id}/files/x"
    error = small.alice.refused(
        413, "file_too_large", "PUT", path, content=content, headers=headers
    )
    assert error["detail"]["max_bytes"] == LIMIT


@pytest.mark.requirement("UHP-10", "B18")
def test_a_chunked_upload_over_the_limit_is_refused(small: Site) -> None:
    """Its length is known only by counting; the answer comes while the client still sends."""

    def body() -> Iterator[bytes]:
        yield part('name="file"; filename="x"', b"")
        for _ in range(64):
            yield b"x" * LIMIT
        yield b"\r\n--B--\r\n"

    headers = {"Content-Type": FORM}
    error = small.alice.refused(
        413, "file_too_large", "POST", "/v1/files", content=body(), headers=headers
    )
    assert error["detail"]["max_bytes"] == LIMIT


@pytest.mark.requirement("UHP-10", "B20", "B21", "B22", "B28")
@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (FORM, b""),
        (FORM, b"--B--\r\n"),
        (FORM, b"--B\r\nContent-Dis"),
        (FORM, part('name="file"; filename="1"', b"abc")),
        (FORM, part('name="file"; filename="1"', b"abc\r\n--B")),
        (FORM, part('name="upload"; filename="1"', b"abc\r\n--B--\r\n")),
        (FORM, part('name="file"', b"abc\r\n--B--\r\n")),
        ("multipart/form-data", b"--B--\r\n"),
        ("multipart/form-data; boundary=", b"--B--\r\n"),
        ("application/json", b"{}"),
    ],
)
def test_a_form_that_is_no_file_stores_nothing(site: Site, content_type: str, body: bytes) -> None:
    before = site.bob.get("/v1/files")
    headers = {"Content-Type": content_type}
    site.bob.refused(400, "invalid_input", "POST", "/v1/files", content=body, headers=headers)
    assert site.bob.get("/v1/files") == before


@pytest.mark.requirement("UHP-07")
def test_a_large_upload_is_not_held_in_memory(site: Site) -> None:
    process = psutil.Process(site.server.process.pid)
    site.alice.upload("warm-up", b"x" * MIB)
    before = process.memory_info().rss
    file = site.alice.upload("large", bytes(96 * MIB))
    assert file["bytes"] == 96 * MIB
    # Buffers alone; and where there is an object store, parts that are on their way to it.
    on_their_way = 15 * MIB if backends.IN_OBJECTS else 0
    assert process.memory_info().rss - before < 24 * MIB + on_their_way
    site.alice.delete(f"/v1/files/{file['id']}")


def test_uploads_are_paged_and_deleted(site: Site) -> None:
    made = [site.bob.upload(f"{n}.txt", b"x")["id"] for n in range(5)]
    seen: list[str] = []
    more: str | None = ""
    while more is not None:
        page = site.bob.get(f"/v1/files?limit=2{more}")
        seen += [file["id"] for file in page["files"]]
        cursor = page["next_cursor"]
        more = f"&cursor={cursor}" if cursor else None
    assert seen[:5] == made[::-1]
    for file_id in made:
        site.bob.delete(f"/v1/files/{file_id}")
        site.bob.refused(404, "file_not_found", "GET", f"/v1/files/{file_id}")
        site.bob.refused(404, "file_not_found", "DELETE", f"/v1/files/{file_id}")
    body = {"input": message({"type": "input_file", "file_id": made[0]})}
    site.bob.refused(404, "file_not_found", "POST", "/v1/responses", json=body)


# --- out ----------------------------------------------------------------------------------------


@pytest.mark.requirement("UHP-11", "UHP-12", "UHP-13", "UHP-14", "UHP-32")
def test_the_message_and_the_listing_tell_of_the_same_files(site: Site) -> None:
    response = site.alice.run("Create a file named out/report.md containing exactly: # Hi")
    (cited,) = citations_of(response)
    (listed,) = site.alice.artifacts(response)
    assert (cited["file_id"], cited["container_id"]) == (listed["id"], listed["container_id"])
    assert cited["filename"] == listed["filename"] == "report.md"
    assert listed["path"] == "out/report.md"
    assert re.fullmatch(r"cntr_\w+", cited["container_id"])
    assert cited["download_url"] == site.server.uhp_base_url + content_path(listed)
    answer = site.alice.ask("GET", urlsplit(cited["download_url"]).path)
    assert answer.content == b"# Hi"
    text = text_of(response)
    assert text[cited["start_index"] : cited["end_index"]] == "report.md"
    (turn,) = site.alice.get(f"/v1/sessions/{session_of(response)}/turns")["turns"]
    assert [file["id"] for file in turn["files"]] == [listed["id"]]


@pytest.mark.requirement("UHP-12", "S-03", "S-08")
def test_a_stream_tells_of_files_as_it_closes(site: Site) -> None:
    events = site.alice.events("Create a file named a.md containing exactly: a")
    kinds = [event.kind for event in events]
    places = [
        kinds.index(f"response.{kind}")
        for kind in (
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "output_text.annotation.added",
            "content_part.done",
            "output_item.done",
            "completed",
        )
    ]
    assert places == sorted(places)
    (added,) = [event.data["annotation"] for event in events if "annotation" in event.data]
    assert [added] == citations_of(events[-1].data["response"])


@pytest.mark.requirement("UHP-13", "UHP-17", "B64")
def test_a_session_without_artifacts_is_empty(site: Site) -> None:
    response = site.alice.run("Hello.")
    assert site.alice.artifacts(response) == []
    assert citations_of(response) == []
    archive = site.alice.ask("GET", f"/v1/sessions/{session_of(response)}/files/archive")
    assert zipfile.ZipFile(io.BytesIO(archive.content)).namelist() == []


@pytest.mark.requirement("UHP-16", "UHP-27", "B58", "B61")
def test_every_task_s_files_stay(site: Site) -> None:
    """Two tasks write the same path: two files, whose bytes never change, and one is current."""
    first = site.alice.run("Create a file named a.txt containing exactly: old")
    old_tag = site.alice.content(site.alice.artifacts(first)[0]).headers["etag"]
    more = {"previous_response_id": first["id"]}
    second = site.alice.run("Create a file named a.txt containing exactly: newer", **more)
    site.alice.run(
        "Create a file named b/a.txt containing exactly: other", previous_response_id=second["id"]
    )
    files = site.alice.artifacts(first)
    assert [(file["path"], file["current"]) for file in files] == [
        ("a.txt", False),
        ("a.txt", True),
        ("b/a.txt", True),
    ]
    answers = [site.alice.content(file) for file in files]
    assert [answer.text for answer in answers] == ["old", "newer", "other"]
    assert answers[0].headers["etag"] == old_tag != answers[1].headers["etag"]
    path = f"/v1/sessions/{session_of(first)}/files/archive"
    with zipfile.ZipFile(io.BytesIO(site.alice.ask("GET", path).content)) as archive:
        assert archive.testzip() is None
        packed = {name: archive.read(name) for name in archive.namelist()}
    assert packed == {
        "a.txt": b"newer",
        "b/a.txt": b"other",
        f"previous/{files[0]['id']}/a.txt": b"old",
    }


@pytest.mark.requirement("UHP-16", "UHP-27")
def test_three_hundred_files_are_all_there(site: Site) -> None:
    response = site.alice.run("[files 300]")
    listed = site.alice.artifacts(response)
    assert len(listed) == 300
    assert {file["file_id"] for file in citations_of(response)} == {file["id"] for file in listed}
    answer = site.alice.ask("GET", f"/v1/sessions/{session_of(response)}/files/archive")
    assert answer.headers["content-type"] == "application/zip"
    assert int(answer.headers["content-length"]) == len(answer.content)
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        packed = {name: digest(archive.read(name)) for name in archive.namelist()}
    assert packed == {file["path"]: file["sha256"] for file in listed}


@pytest.mark.requirement("UHP-18", "UHP-19", "UHP-20", "UHP-21", "UHP-22", "B49", "B55")
@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("x.json", "application/json"),
        ("x.html", "text/html"),
        ("x.svg", "image/svg+xml"),
        ("empty", "application/octet-stream"),
        ("x.tar.gz", "application/gzip"),
    ],
)
def test_a_download_is_the_file_and_nothing_runs(site: Site, path: str, media_type: str) -> None:
    content = b"" if path == "empty" else b"<svg onload=alert(1)>{}"
    session = site.alice.post("/v1/sessions", {"title": "From elsewhere"})
    file = put(site.alice, session["container_id"], path, content)
    accepting = {"Accept-Encoding": "gzip, br", "Accept": "application/json"}
    answer = site.alice.content(file, headers=accepting)
    assert answer.content == content
    assert answer.headers["content-type"] == media_type
    assert "content-encoding" not in answer.headers
    assert answer.headers["content-length"] == str(len(content))
    assert answer.headers["etag"] == f'"sha256-{file["sha256"]}"'
    raw = base64.b64encode(hashlib.sha256(content).digest()).decode()
    assert answer.headers["repr-digest"] == f"sha-256=:{raw}:"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"
    assert filename_of(answer.headers["content-disposition"]) == path
    head_of_it = site.alice.ask("HEAD", content_path(file))
    for name in ("content-type", "content-length", "etag", "content-disposition", "accept-ranges"):
        assert head_of_it.headers[name] == answer.headers[name]


@pytest.mark.requirement("B43", "B44", "B45", "B47")
def test_ranges(site: Site) -> None:
    session = site.alice.post("/v1/sessions")
    file = put(site.alice, session["container_id"], "x.bin", bytes(range(100)))

    def ranged(value: str, **more: str) -> tuple[int, bytes, str | None]:
        answer = site.alice.content(file, headers={"Range": value} | more)
        assert answer.headers["x-content-type-options"] == "nosniff"
        return answer.status_code, answer.content, answer.headers.get("content-range")

    whole = bytes(range(100))
    assert ranged("bytes=0-1") == (206, whole[:2], "bytes 0-1/100")
    assert ranged("bytes=-1000") == (206, whole, "bytes 0-99/100")
    assert ranged("bytes=99-") == (206, whole[99:], "bytes 99-99/100")
    assert ranged("bytes=5-4") == (200, whole, None)
    assert ranged("items=0-1") == (200, whole, None)
    tag = site.alice.ask("HEAD", content_path(file)).headers["etag"]
    assert ranged("bytes=10-", **{"If-Range": tag}) == (206, whole[10:], "bytes 10-99/100")
    assert ranged("bytes=10-", **{"If-Range": f"W/{tag}"}) == (200, whole, None)
    status, body, content_range = ranged("bytes=100-")
    assert (status, content_range) == (416, "bytes */100")
    assert b"consignee_range_not_satisfiable" in body
    answer = site.alice.content(file, headers={"Range": "bytes=0-1,4-5"})
    assert answer.headers["content-type"].startswith("multipart/byteranges; boundary=")
    assert int(answer.headers["content-length"]) == len(answer.content)
    answer = site.alice.content(file, headers={"If-None-Match": tag})
    assert answer.status_code == 304


@pytest.mark.requirement("UHP-24", "UHP-26")
def test_a_server_without_a_converter_says_never(small: Site) -> None:
    """But first whether there is such a file at all, and before that who asks."""
    session = small.alice.post("/v1/sessions")
    file = put(small.alice, session["container_id"], "x.docx", b"broken")
    preview = content_path(file).replace("/content", "/pdf")
    assert small.alice.refused(501, "preview_unavailable", "GET", preview)["type"] == "server_error"
    unknown = preview.replace(file["id"], "file_unknown")
    small.alice.refused(404, "file_not_found", "GET", unknown)
    small.bob.refused(404, "file_not_found", "GET", preview)
    wrong = {"Authorization": "Bearer wrong"}
    small.alice.refused(401, "invalid_credential", "GET", preview, headers=wrong)
    assert small.alice.ask("HEAD", preview).status_code == 501


def converting_site(folder: Path, script: str) -> dict[str, str]:
    """The environment of a server whose converter is a program of three lines."""
    converter = folder / "converter"
    converter.write_text(f"#!/bin/sh\n{script}\n")
    converter.chmod(0o755)
    return {"CONSIGNEE_PREVIEW_COMMAND": str(converter)}


@pytest.mark.requirement("UHP-23", "UHP-25", "UHP-26", "UHP-28")
def test_a_file_that_would_not_convert_says_so(tmp_path: Path) -> None:
    """Previews of PDFs need no converter; they go with their session."""
    environment = converting_site(tmp_path, "exit 1")
    pdf = b"%PDF-1.4\n1 0 obj<</Type/Catalog>>endobj\ntrailer<</Root 1 0 R>>\n%%EOF\n"
    with running_site(environment=environment) as site:
        session = site.alice.post("/v1/sessions")
        files = [
            put(site.alice, session["container_id"], path, content)
            for path, content in (("x.docx", docx()), ("x.exe", b"MZ"), ("x.pdf", pdf))
        ]
        paths = [content_path(file).replace("/content", "/pdf") for file in files]
        for path in paths[:2]:
            error = site.alice.refused(502, "preview_failed", "GET", path)
            assert error["detail"]["reason"]
        preview = site.alice.ask("GET", paths[2])
        assert (preview.status_code, preview.content) == (200, pdf)
        assert preview.headers["content-type"] == "application/pdf"
        site.alice.delete(f"/v1/sessions/{session['id']}")
        for path in paths:
            site.alice.refused(404, "file_not_found", "GET", path)


@pytest.mark.requirement("UHP-28", "UHP-34", "B89")
@pytest.mark.parametrize("route", ["sessions", "traces"])
def test_a_deleted_session_is_gone_at_once(site: Site, route: str) -> None:
    response = site.alice.run("Create a file named a.txt containing exactly: a")
    (file,) = site.alice.artifacts(response)
    session_id = session_of(response)
    running = site.alice.run(
        "Count slowly from 1 to 200.", previous_response_id=response["id"], background=True
    )
    site.alice.delete(f"/v1/{route}/{session_id}")
    of_files = [content_path(file), content_path(file).replace("/content", "/pdf")]
    for path in of_files:
        site.alice.refused(404, "file_not_found", "GET", path)
        site.alice.refused(404, "file_not_found", "GET", path, headers={"Range": "bytes=0-0"})
    of_session = ("", "/files", "/files/archive", "/turns")
    for suffix in of_session:
        path = f"/v1/sessions/{session_id}{suffix}"
        site.alice.refused(404, "session_not_found", "GET", path)
    for gone in (response, running):
        site.alice.refused(404, "response_not_found", "GET", f"/v1/responses/{gone['id']}")
        body = {"input": "And?", "previous_response_id": gone["id"]}
        site.alice.refused(404, "response_not_found", "POST", "/v1/responses", json=body)
    site.alice.refused(404, "session_not_found", "DELETE", f"/v1/{route}/{session_id}")
    headers = {"Content-Type": "application/octet-stream", "AHP-Content-SHA256": digest(b"")}
    path = f"/v1/containers/{file['container_id']}/files/b.txt"
    site.alice.refused(404, "file_not_found", "PUT", path, content=b"", headers=headers)


@pytest.mark.requirement("UHP-34", "UHP-36")
def test_a_spent_quota_comes_back_with_the_session(small: Site) -> None:
    session = small.bob.post("/v1/sessions")
    for listed in small.bob.get("/v1/sessions?limit=100")["sessions"]:
        if listed["id"] != session["id"]:
            small.bob.delete(f"/v1/sessions/{listed['id']}")
    for n in range(3):
        put(small.bob, session["container_id"], str(n), b"x" * LIMIT)
    headers = {"Content-Type": "application/octet-stream", "AHP-Content-SHA256": digest(b"x")}
    path = f"/v1/containers/{session['container_id']}/files/more"
    small.bob.refused(429, "quota_exhausted", "PUT", path, content=b"x", headers=headers)
    form = {"file": ("f", b"x", "text/plain")}
    small.bob.refused(429, "quota_exhausted", "POST", "/v1/files", files=form)
    small.bob.delete(f"/v1/sessions/{session['id']}")
    assert small.bob.upload("f", b"x" * LIMIT)["bytes"] == LIMIT


# --- every answer -------------------------------------------------------------------------------


@pytest.mark.requirement("UHP-31", "V-01", "B19")
@pytest.mark.parametrize("version", [None, "2026-08-11", "2026-09-12", "1999-01-01"])
@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1", {}, 404),
        ("GET", "/v1/", {}, 404),
        ("GET", "/v1/nope", {}, 404),
        ("GET", "/v1/files/", {}, 404),
        ("PUT", "/v1/files", {}, 405),
        ("DELETE", "/v1/responses", {}, 405),
        ("GET", "/v1/responses", {}, 405),
        ("POST", "/v1/uhp", {}, 405),
        ("GET", "/v1/sessions?limit=x", {}, 400),
        ("GET", "/v1/sessions?limit=1&limit=2", {}, 400),
        ("GET", "/v1/sessions?cursor=x", {}, 400),
        ("GET", "/v1/sessions?limit=%ff", {}, 400),
        ("GET", "/v1/sessions", {"Authorization": "Basic eDp5"}, 401),
        ("GET", "/v1/sessions", {"Authorization": ""}, 401),
        ("POST", "/v1/responses", {"Content-Type": "text/plain"}, 400),
        ("POST", "/v1/files", {"Content-Type": "multipart/form-data"}, 400),
    ],
)
def test_every_refusal_is_the_envelope(
    site: Site,
    method: str,
    path: str,
    headers: dict[str, str],
    status: int,
    version: str | None,
) -> None:
    """Judged in the client: five keys, a code of the table, the version, and no inside shown."""
    asked = headers | ({"UHP-Version": version} if version else {})
    answer = site.alice.ask(method, path, headers=asked)
    assert answer.status_code == (400 if version == "1999-01-01" else status)
    served = version if version in ("2026-08-11", "2026-09-12") else "2026-09-12"
    assert answer.headers["uhp-version"] == served


@pytest.mark.requirement("B19")
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"input":', b"[" * 100_000, b'{"input":1e999}'],
)
def test_a_body_that_is_no_task_is_refused(site: Site, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = site.alice.ask("POST", "/v1/responses", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_input"


@pytest.mark.requirement("UHP-37", "UHP-31")
def test_without_accept_the_answer_is_json(site: Site) -> None:
    """A client that says nothing of what it takes, on a plain socket, with a 413 among others."""
    credential = {"Authorization": "Bearer alice-token"}
    form = part('name="file"; filename="f"', b"x\r\n--B--\r\n")
    upload = {"Content-Type": FORM, "Content-Length": str(len(form))}
    huge = {"Content-Type": FORM, "Content-Length": str(10**13)}
    with Wire(site.server.url) as wire:
        wire.send(head(credential, line="GET /v1/harnesses HTTP/1.1"))
        wire.send(head(credential | upload, line="POST /v1/files HTTP/1.1"), form)
        wire.send(head(credential | huge, line="POST /v1/files HTTP/1.1"))
        answers = [wire.response() for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 413]
    for answer in answers:
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["uhp-version"] == "2026-09-12"
    assert answers[2].json["error"]["detail"]["max_bytes"] == 1024 * MIB
