"""The files of a container: who gets which bytes, under which headers, and who gets nothing."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.types import Message

from app.http.streams import LengthMismatch
from app.settings import Settings
from app.uhp.previews import Interrupted, Previews
from tests.http.messages import DISCONNECT, Header, Sent, http_scope
from tests.uhp.calling import FIRST, error_of
from tests.uhp.containers import READER, STRANGER, WRITER, Depot, depot_in, framed
from tests.uhp.documents import PDF
from tests.uhp.schema import validate

pytestmark = pytest.mark.anyio

BODY = bytes(range(256)) * 4
UNKNOWN = "file_" + "0" * 32
STUB = """
import pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--outdir") + 1])
if pathlib.Path(sys.argv[-1]).read_text() != "bad":
    (out / "input.pdf").write_bytes({pdf!r})
"""


@pytest.fixture
async def depot(tmp_path: Path) -> AsyncIterator[Depot]:
    async with depot_in(tmp_path / "data") as made:
        yield made


@pytest.fixture
async def converting(tmp_path: Path) -> AsyncIterator[Depot]:
    script = tmp_path / "stub.py"
    script.write_text(STUB.format(pdf=PDF), encoding="utf-8")
    async with depot_in(
        tmp_path / "data", preview_command=(sys.executable, "-I", "-S", str(script))
    ) as made:
        yield made


# Downloads


@pytest.mark.requirement("UHP-18", "UHP-20", "UHP-22", "B50")
@pytest.mark.parametrize(
    ("path", "media_type"),
    [("out/报告.html", "text/html"), ("x.tar.gz", "application/gzip"), ("e", "text/x-python")],
)
async def test_an_artifact_as_it_is(depot: Depot, path: str, media_type: str) -> None:
    record = await depot.add(BODY, path, media_type)
    sent = await depot.call("GET", depot.url(record), headers=[(b"accept-encoding", b"gzip")])
    assert sent.status == 200
    assert sent.body == BODY
    assert sent.headers[b"content-type"] == media_type.encode()
    assert sent.headers[b"content-disposition"].startswith(b"attachment; ")
    assert b"content-encoding" not in sent.headers
    assert sent.headers[b"uhp-version"]
    head = await depot.call("HEAD", depot.url(record))
    assert head.headers == sent.headers
    assert head.body == b""


@pytest.mark.requirement("UHP-19")
@pytest.mark.parametrize("content", [b"", b'{"a": 1}', bytes(300_000)])
async def test_no_size_makes_a_difference(depot: Depot, content: bytes) -> None:
    record = await depot.add(content, "x.json", "application/json")
    sent = await depot.call("GET", depot.url(record))
    assert sent.body == content
    assert sent.headers[b"content-length"] == b"%d" % len(content)


@pytest.mark.requirement("B44", "UHP-31")
async def test_ranges_and_what_is_beyond_them(depot: Depot) -> None:
    url = depot.url(await depot.add(BODY))
    part = await depot.call("GET", url, headers=[(b"range", b"bytes=-24")])
    assert (part.status, part.body) == (206, BODY[-24:])
    beyond = await depot.call("GET", url, headers=[(b"range", b"bytes=1024-")])
    assert beyond.status == 416
    assert beyond.headers[b"content-range"] == b"bytes */1024"
    error = error_of(beyond)
    assert error["code"] == "consignee_range_not_satisfiable"
    assert error["detail"] == {"size": 1024}


async def test_a_version_that_is_not_there(depot: Depot) -> None:
    url = depot.url(await depot.add(BODY))
    sent = await depot.call("GET", url, headers=[(b"if-match", b'"other"')])
    assert sent.status == 412
    assert error_of(sent)["code"] == "consignee_precondition_failed"


@pytest.mark.requirement("B55")
async def test_shown_in_place_only_when_asked_and_harmless(depot: Depot) -> None:
    image = depot.url(await depot.add(b"\x89PNG", "a.png", "image/png"))
    page = depot.url(await depot.add(b"<svg onload=x>", "a.svg", "image/svg+xml"))
    for url, query, kind in [
        (image, "", b"attachment"),
        (image, "?disposition=inline", b"inline"),
        (image, "?disposition=other", b"attachment"),
        (page, "?disposition=inline", b"attachment"),
    ]:
        sent = await depot.call("GET", url + query)
        assert sent.headers[b"content-disposition"].startswith(kind)


async def test_a_large_artifact_is_left_to_the_proxy(tmp_path: Path) -> None:
    async with depot_in(tmp_path / "data", accel="nginx", blob_url=None) as depot:
        large = await depot.add(bytes(200_000))
        sent = await depot.call("GET", depot.url(large))
        target = sent.headers[b"x-accel-redirect"].decode()
        assert target.startswith("/_consignee/blobs/")
        lies_at = tmp_path / "data" / "blobs" / target.removeprefix("/_consignee/blobs/")
        assert lies_at.read_bytes() == bytes(200_000)
        small = await depot.call("GET", depot.url(await depot.add(BODY)))
        assert b"x-accel-redirect" not in small.headers
        assert small.body == BODY


def test_a_store_elsewhere_has_no_files_for_a_proxy(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="accel is for bodies in files"):
        Settings(data_dir=tmp_path, accel="nginx", blob_url="s3://bucket/prefix")


# Who gets nothing

OTHERS = [
    ("GET", STRANGER),
    ("HEAD", STRANGER),
    ("DELETE", STRANGER),
    ("DELETE", FIRST),
    ("POST", FIRST),
    ("PATCH", FIRST),
    ("OPTIONS", FIRST),
]


@pytest.mark.requirement("UHP-29")
@pytest.mark.parametrize("last", ["content", "pdf"])
@pytest.mark.parametrize(("method", "token"), OTHERS)
async def test_foreign_files_look_like_unknown_ones(
    converting: Depot, last: str, method: str, token: str
) -> None:
    record = await converting.add(BODY)
    url = converting.url(record, last)
    foreign = await converting.call(method, url, token=token)
    unknown = await converting.call(method, url.replace(record.id, UNKNOWN), token=token)
    assert foreign.status == unknown.status == 404
    assert foreign.body == unknown.body
    assert foreign.headers == unknown.headers
    if method != "HEAD":
        assert error_of(foreign)["code"] == "file_not_found"


@pytest.mark.requirement("UHP-30")
async def test_a_file_is_only_in_its_own_container(depot: Depot) -> None:
    record = await depot.add(BODY)
    other = await depot.store.sessions.create(scope="a", principal="first")
    sent = await depot.call("GET", f"/v1/containers/{other.container_id}/files/{record.id}/content")
    assert sent.status == 404


TRAVERSALS = [
    "/v1/containers/../files/f/content",
    "/v1/containers/../../etc/passwd",
    "/v1/containers/{c}/files/../../etc/passwd/content",
    "/v1/containers/{c}/files/../../etc/passwd/pdf",
    "/v1/containers/{c}/files/..\\f/content",
    "/v1/containers/{c}/files/%2e%2e/content",
    "/v1/containers/{c}/files/\ufffd\ufffd/content",
    "/v1/containers/{c}/files/a\0b/content",
    "/v1/containers/{c}/files/a\nb/content",
    "/v1/containers/{c}/files/{f}\0.png/content",
    "/v1/containers/{c}/files/{f}\n/content",
    "/v1/containers/{c}/files/{f}/content\n",
    "/v1/containers/{c}/files/{f}/content/",
    "/v1/containers/{c}/files//{f}/content",
    "/v1/containers//{c}/files/{f}/content",
    "/v1/containers/{c}\0/files/{f}/content",
    "/v1/containers/{c}/files/{f}",
    "/v1/containers/{c}/files//etc/passwd",
    "/v1/containers/{c}/files/",
    "/v1/containers/{c}/files",
    "/v1/containers/{c}",
    "/v1/containers/",
    "/v1/containers/{c}/files/file_é/content",
    "/v1/containers/{c}/files/file_" + "1" * 65 + "/content",
]


@pytest.mark.requirement("UHP-30", "B37", "B38")
@pytest.mark.parametrize("path", TRAVERSALS)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_nothing_leads_anywhere_else(depot: Depot, path: str, method: str) -> None:
    record = await depot.add(BODY)
    target = path.format(c=record.container_id, f=record.id)
    unknown = await depot.call(
        method, f"/v1/containers/{record.container_id}/files/{UNKNOWN}/content"
    )
    sent = await depot.call(method, target)
    assert sent.status == 404
    assert sent.body == unknown.body
    assert error_of(sent)["code"] == "file_not_found"


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "POST"])
@pytest.mark.parametrize("path", ["/v1/containers/x/files/y/content", "/v1/containers/x"])
async def test_who_is_nobody_is_told_so_first(depot: Depot, method: str, path: str) -> None:
    sent = await depot.call(method, path, token=None)
    assert sent.status == 401
    assert error_of(sent)["code"] == "missing_credential"


# Previews


@pytest.mark.requirement("UHP-24", "UHP-26")
async def test_without_a_converter_there_are_never_previews(depot: Depot) -> None:
    for name, media_type in [("a.txt", "text/plain"), ("a.pdf", "application/pdf"), ("a", "x/y")]:
        record = await depot.add(BODY, name, media_type)
        sent = await depot.call("GET", depot.url(record, "pdf"))
        assert sent.status == 501
        assert error_of(sent)["code"] == "preview_unavailable"
        assert (await depot.call("HEAD", depot.url(record, "pdf"))).status == 501
    unknown = depot.url(await depot.add(BODY)).replace("/content", "0/pdf")
    assert (await depot.call("GET", unknown)).status == 404


@pytest.mark.requirement("UHP-23", "UHP-21", "B69")
async def test_a_preview_is_a_download_of_its_own(converting: Depot) -> None:
    record = await converting.add(b"good", "Special_ß.txt")
    url = converting.url(record, "pdf")
    before = await converting.call("HEAD", url)
    assert before.status == 200
    assert before.headers[b"content-type"] == b"application/pdf"
    sent = await converting.call("GET", url)
    assert (sent.status, sent.body) == (200, PDF)
    assert sent.headers[b"content-type"] == b"application/pdf"
    assert sent.headers[b"content-security-policy"] == b"default-src 'none'; sandbox"
    assert b"Special_%C3%9F.txt.pdf" in sent.headers[b"content-disposition"]
    digest = hashlib.sha256(PDF).hexdigest()
    assert sent.headers[b"etag"] == f'"sha256-{digest}"'.encode()
    assert (await converting.call("HEAD", url)).headers == sent.headers
    part = await converting.call("GET", url, headers=[(b"range", b"bytes=0-3")])
    assert (part.status, part.body) == (206, b"%PDF")


@pytest.mark.requirement("UHP-25")
@pytest.mark.parametrize(
    ("content", "name", "media_type", "reason"),
    [
        (b"bad", "a.txt", "text/plain", "no_output"),
        (b"<html>", "a.html", "text/html", "unsupported_format"),
        (b"noise", "a", "application/octet-stream", "unsupported_format"),
        (b"noise", "a.docx", "application/msword", "content_mismatch"),
        (b"noise", "a.pdf", "application/pdf", "content_mismatch"),
        (b"", "a.pdf", "application/pdf", "content_mismatch"),
    ],
)
async def test_a_file_that_does_not_convert(
    converting: Depot, content: bytes, name: str, media_type: str, reason: str
) -> None:
    record = await converting.add(content, name, media_type)
    sent = await converting.call("GET", converting.url(record, "pdf"))
    assert sent.status == 502
    error = error_of(sent)
    assert error["code"] == "preview_failed"
    assert error["detail"] == {"reason": reason}
    validate("ErrorEnvelope", sent.json)


@pytest.mark.requirement("B51")
async def test_the_head_of_a_preview_opens_and_makes_nothing(converting: Depot) -> None:
    for content, name, media_type, status in [
        (b"good", "a.txt", "text/plain", 200),
        (PDF, "a.pdf", "application/pdf", 200),
        (b"<html>", "a.html", "text/html", 502),
    ]:
        record = await converting.add(content, name, media_type)
        sent = await converting.call("HEAD", converting.url(record, "pdf"))
        assert sent.status == status
    assert not converting.settings.previews_dir.exists()


@pytest.mark.requirement("UHP-23")
async def test_a_pdf_is_its_own_preview(converting: Depot) -> None:
    record = await converting.add(PDF, "paper.PDF", "application/octet-stream")
    sent = await converting.call("GET", converting.url(record, "pdf"))
    assert (sent.status, sent.body) == (200, PDF)
    assert sent.headers[b"content-type"] == b"application/pdf"
    assert b'filename="paper.PDF"' in sent.headers[b"content-disposition"]


@pytest.mark.requirement("UHP-28")
async def test_a_preview_that_is_swept_away_meanwhile_is_not_found(
    converting: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await converting.add(b"good")
    made = converting.previews.make

    async def lost(*arguments: Any) -> Any:
        kept = await made(*arguments)
        kept.path.unlink()
        return kept

    monkeypatch.setattr(Previews, "make", staticmethod(lost))
    sent = await converting.call("GET", converting.url(record, "pdf"))
    assert sent.status == 404


@pytest.mark.requirement("UHP-24")
async def test_a_preview_that_was_cut_is_never_a_whole_answer(
    converting: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await converting.add(b"good")
    made = converting.previews.make

    async def cut(*arguments: Any) -> Any:
        kept = await made(*arguments)
        kept.path.write_bytes(PDF[:9])
        return kept

    monkeypatch.setattr(Previews, "make", staticmethod(cut))
    with pytest.raises(LengthMismatch):
        await converting.call("GET", converting.url(record, "pdf"))


@pytest.mark.requirement("UHP-28")
async def test_a_session_that_goes_while_its_preview_is_made(
    converting: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await converting.add(b"good")
    assert record.session_id is not None
    session_id = record.session_id
    made = converting.previews.make

    async def overtaken(*arguments: Any) -> Any:
        kept = await made(*arguments)
        await converting.store.sessions.delete("a", session_id)
        return kept

    monkeypatch.setattr(Previews, "make", staticmethod(overtaken))
    sent = await converting.call("GET", converting.url(record, "pdf"))
    assert sent.status == 404


@pytest.mark.parametrize("gone", [True, False])
async def test_a_conversion_that_is_ended_from_outside(
    converting: Depot, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    record = await converting.add(b"good")
    assert record.session_id is not None
    session_id = record.session_id

    async def ended(*_: Any) -> Any:
        if gone:
            await converting.store.sessions.delete("a", session_id)
        raise Interrupted

    monkeypatch.setattr(Previews, "make", staticmethod(ended))
    sent = await converting.call("GET", converting.url(record, "pdf"))
    assert sent.status == (404 if gone else 503)


async def test_a_client_that_goes_ends_the_conversion(
    converting: Depot, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await converting.add(b"good")
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def hanging(*_: Any) -> Any:
        begun.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ended.set()

    async def receive() -> Message:
        await begun.wait()
        return DISCONNECT

    monkeypatch.setattr(Previews, "make", staticmethod(hanging))
    scope = http_scope(
        "GET",
        converting.url(record, "pdf"),
        [(b"authorization", b"Bearer " + FIRST.encode())],
    )
    sent = Sent()
    await converting.app(scope, receive, sent)
    assert sent.messages == []
    assert ended.is_set()


# Artifact intake


async def test_an_artifact_that_is_handed_in(depot: Depot) -> None:
    sent = await depot.put("out/report.md", BODY)
    assert sent.status == 201
    shown = sent.json
    validate("File", shown)
    assert shown["filename"] == "report.md"
    assert shown["path"] == "out/report.md"
    assert shown["bytes"] == len(BODY)
    assert shown["sha256"] == hashlib.sha256(BODY).hexdigest()
    assert shown["media_type"] == "text/markdown"
    assert shown["current"] is True
    assert shown["container_id"] == depot.session.container_id
    assert shown["download_url"].startswith(depot.settings.base_url + "/v1/containers/")
    fetched = await depot.call("GET", shown["download_url"].removeprefix(depot.settings.base_url))
    assert fetched.body == BODY
    (listed,) = await depot.store.files.of_session("a", depot.session.id)
    assert listed.id == shown["id"]


async def test_the_same_path_again_is_another_file(depot: Depot) -> None:
    first = (await depot.put("a.txt", b"one")).json
    second = (await depot.put("a.txt", b"two")).json
    assert first["id"] != second["id"]
    records = await depot.store.files.of_session("a", depot.session.id)
    assert [(record.id, record.current) for record in records] == [
        (first["id"], False),
        (second["id"], True),
    ]


@pytest.mark.requirement("B10")
async def test_an_artifact_of_nothing(depot: Depot) -> None:
    sent = await depot.put("empty", b"")
    assert sent.status == 201
    assert sent.json["bytes"] == 0


@pytest.mark.parametrize("path", ["report/content", "report/pdf", "content", "a/b/c"])
async def test_any_path_can_be_handed_in(depot: Depot, path: str) -> None:
    sent = await depot.put(path, BODY)
    assert (sent.status, sent.json["path"]) == (201, path)


@pytest.mark.requirement("B56")
async def test_the_media_type_can_be_named(depot: Depot) -> None:
    named = await depot.put("a.bin?media_type=Text/HTML;%20charset=utf-8", BODY)
    assert named.json["media_type"] == "text/html; charset=utf-8"
    wrong = await depot.put("a.bin?media_type=nonsense", BODY)
    assert wrong.status == 400
    assert error_of(wrong)["param"] == "media_type"


@pytest.mark.parametrize(
    "raw",
    [b"..", b"a/../../b", b"%2e%2e/x", b"a//b", b"a/", b"a%00b", b"a%0Ab", b"%ff", b"%2Fx",
     b"x" * 1025, b"%C2%85"],
)  # fmt: skip
async def test_a_path_that_is_none(depot: Depot, raw: bytes) -> None:
    base = f"/v1/containers/{depot.session.container_id}/files/"
    scope = http_scope(
        "PUT",
        base + "whatever",
        [*framed(BODY), (b"authorization", b"Bearer " + FIRST.encode())],
        raw_path=base.encode() + raw,
    )
    sent = Sent()
    await depot.app(scope, _whole(BODY), sent)
    assert sent.status == 400
    assert error_of(sent)["param"] == "path"
    assert await depot.store.files.of_session("a", depot.session.id) == []


def _whole(body: bytes) -> Any:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (BODY, framed(BODY)[1:], 400, "invalid_input"),
        (BODY, framed(BODY)[:2], 400, "invalid_input"),
        (BODY, framed(BODY[1:]), 400, "invalid_input"),
        (BODY, [*framed(BODY), (b"content-encoding", b"gzip")], 400, "invalid_input"),
        (b"other" + BODY[5:], framed(BODY), 400, "invalid_input"),
        (bytes(5000), framed(bytes(5000)), 413, "file_too_large"),
    ],
)
async def test_what_is_not_framed_as_it_must_be(
    tmp_path: Path, content: bytes, headers: list[Header], status: int, code: str
) -> None:
    async with depot_in(tmp_path / "data", max_upload_bytes=4999) as depot:
        sent = await depot.put("a", content, headers=headers)
        assert sent.status == status
        error = error_of(sent)
        assert error["code"] == code
        if status == 413:
            assert error["detail"] == {"max_bytes": 4999}
        assert await depot.store.files.of_session("a", depot.session.id) == []


@pytest.mark.requirement("UHP-29")
async def test_who_may_hand_in(depot: Depot) -> None:
    assert (await depot.put("a", BODY, token=WRITER)).status == 201
    refused = await depot.put("a", BODY, token=READER)
    assert refused.status == 403
    assert error_of(refused)["code"] == "insufficient_scope"
    foreign = await depot.put("a", BODY, token=STRANGER)
    assert foreign.status == 404
    unknown = await depot.call("PUT", "/v1/containers/cntr_0/files/a", BODY, headers=framed(BODY))
    assert unknown.body == foreign.body
    malformed = await depot.call("PUT", "/v1/containers/..", BODY, headers=framed(BODY))
    assert malformed.status == 404


async def test_a_budget_that_is_spent(tmp_path: Path) -> None:
    async with depot_in(tmp_path / "data", max_session_files=1) as depot:
        assert (await depot.put("a", BODY)).status == 201
        sent = await depot.put("b", BODY)
        assert sent.status == 429
        assert error_of(sent)["code"] == "quota_exhausted"
