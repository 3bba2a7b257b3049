"""Uploads on a real store: what arrives is kept whole, shown to its scope, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from app.settings import MIB
from app.uhp import files
from app.uhp.application import UhpApplication
from app.uhp.services import Services
from tests import backends
from tests.http.messages import (
    DISCONNECT,
    Sent,
    announcing,
    chunk,
    http_scope,
    receiving,
)
from tests.uhp.calling import (
    FIRST,
    POWERLESS,
    SECOND,
    SHARING,
    application_of,
    call,
    error_of,
    services_in,
)
from tests.uhp.schema import validate

pytestmark = pytest.mark.anyio

LIMIT = 256 * 1024
CONTENT_TYPE = (b"content-type", b"multipart/form-data; boundary=B")
UNKNOWN = "file_0123456789abcdef0123456789abcdef"


def part(disposition: str, content: bytes, *headers: str) -> bytes:
    lines = ["--B", f"Content-Disposition: form-data; {disposition}", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8") + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--B--\r\n"


def file_form(name: str, content: bytes, *headers: str, purpose: str | None = None) -> bytes:
    fields = [] if purpose is None else [part('name="purpose"', purpose.encode())]
    return form(*fields, part(f'name="file"; filename="{name}"', content, *headers))


@pytest.fixture
async def services(tmp_path: Path) -> AsyncIterator[Services]:
    async with services_in(
        tmp_path, max_upload_bytes=LIMIT, inline_bytes=1024, upload_ttl=timedelta(hours=1)
    ) as opened:
        yield opened


@pytest.fixture
def app(services: Services) -> UhpApplication:
    return application_of(files.routes(services), services.settings)


async def upload(app: UhpApplication, *body: bytes, token: str = FIRST) -> Sent:
    return await call(app, "POST", "/v1/files", *body, token=token, headers=[CONTENT_TYPE])


async def uploaded(app: UhpApplication, body: bytes, token: str = FIRST) -> dict[str, Any]:
    sent = await upload(app, body, token=token)
    assert sent.status == 200, sent.body
    document: dict[str, Any] = sent.json
    validate("File", document)
    return document


async def content_of(services: Services, file_id: str, scope: str = "a") -> bytes:
    record = await services.store.files.get(scope, file_id)
    async with services.store.files.open(record) as pieces:
        return b"".join([piece async for piece in pieces])


def stored(services: Services) -> list[Path]:
    """Every file of a body that lies on the disk."""
    places = [services.settings.data_dir / "blobs", services.settings.staging_dir]
    found = [path for place in places for path in place.rglob("*") if path.is_file()]
    return [path for path in found if not path.name.startswith(".")]


@contextmanager
def nothing_is_kept(services: Services) -> Iterator[None]:
    before = stored(services)
    yield
    assert stored(services) == before


@pytest.mark.requirement("UHP-03", "UHP-04", "B01")
@pytest.mark.parametrize("size", [0, 12, 1024, 1025, LIMIT])
async def test_an_upload(app: UhpApplication, services: Services, size: int) -> None:
    content = os.urandom(size)
    body = file_form("notes.txt", content, "Content-Type: text/plain", purpose="user_data")
    document = await uploaded(app, body)
    assert document["object"] == "file"
    assert document["filename"] == "notes.txt"
    assert document["bytes"] == size
    assert document["purpose"] == "user_data"
    assert document["media_type"] == "text/plain"
    assert document["id"].startswith("file_")
    assert await content_of(services, document["id"]) == content
    record = await services.store.files.get("a", document["id"])
    assert record.expires_at is not None
    assert 0 <= record.expires_at - record.created_at - 3600 <= 2
    shown = await call(app, "GET", f"/v1/files/{document['id']}")
    assert shown.json == document


async def test_what_is_not_said_is_the_default(app: UhpApplication) -> None:
    document = await uploaded(app, file_form("report.md", b"#"))
    assert document["purpose"] == "user_data"
    assert document["media_type"] == "text/markdown"
    assert (await uploaded(app, file_form("x", b"#", "Content-Type:")))["media_type"] == (
        "application/octet-stream"
    )


@pytest.mark.requirement("B02", "B24", "B35")
@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("报告 🚀.txt", "报告 🚀.txt"),
        ("a%41.txt", "a%41.txt"),
        ("100% done.txt", "100% done.txt"),
        (r"C:\dir\f.txt", "f.txt"),
        ("../../etc/x", "x"),
        (r"a\"b.txt", 'a"b.txt'),
        ("я" * 128 + ".txt", "я" * 128 + ".txt"),
    ],
)
async def test_names(app: UhpApplication, written: str, shown: str) -> None:
    document = await uploaded(app, file_form(written, b"x"))
    assert document["filename"] == shown
    listed = (await call(app, "GET", "/v1/files")).json["files"]
    assert [file["filename"] for file in listed] == [shown]


@pytest.mark.requirement("UHP-31", "B20", "B22", "B29", "B32", "B56")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        form(),
        form(part('name="purpose"', b"x")),
        form(part('name="upload"; filename="a"', b"x")),
        form(part('name="file"', b"x")),
        form(part('name="file"; filename="a"', b"x"), part('name="file"; filename="b"', b"y")),
        form(part('name="file"; filename="a"', b"x" * 4096), part('name="b"; filename="b"', b"")),
        file_form("", b"x"),
        file_form("   ", b"x"),
        file_form(".", b"x"),
        file_form("..", b"x"),
        file_form("/", b"x"),
        file_form("a\x85b", b"x"),
        file_form("a" * 5_000, b"x"),
        file_form("x.png", b"x", "Content-Type: text/html, image/png"),
        file_form("x.png", b"x", f"Content-Type: text/{'x' * 300}"),
    ],
)
async def test_what_is_no_file_names_its_part(
    app: UhpApplication, services: Services, body: bytes
) -> None:
    with nothing_is_kept(services):
        sent = await upload(app, body)
    assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")
    assert error_of(sent)["param"] == "file"
    assert (await call(app, "GET", "/v1/files")).json["files"] == []


@pytest.mark.requirement("B20", "B28")
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([], "file"),
        ([(b"content-type", b"application/json")], "file"),
        ([(b"content-type", b"multipart/form-data")], None),
        ([(b"content-type", b"multipart/form-data; boundary=" + b"b" * 300)], None),
        ([CONTENT_TYPE, CONTENT_TYPE], None),
        ([CONTENT_TYPE, (b"content-encoding", b"gzip")], None),
    ],
)
async def test_heads_that_are_refused_before_the_body(
    app: UhpApplication, headers: list[tuple[bytes, bytes]], param: str | None
) -> None:
    sent = await call(app, "POST", "/v1/files", file_form("a", b"x"), headers=headers)
    assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")
    assert error_of(sent)["param"] == param


async def test_a_purpose_is_a_word(app: UhpApplication, services: Services) -> None:
    assert (await uploaded(app, file_form("a", b"x", purpose="batch")))["purpose"] == "batch"
    late = form(part('name="file"; filename="a"', b"x" * 4096), part('name="purpose"', b"<script>"))
    with nothing_is_kept(services):
        sent = await upload(app, late)
    assert (sent.status, error_of(sent)["param"]) == (400, "purpose")


@pytest.mark.requirement("UHP-10", "B21")
@pytest.mark.parametrize("missing", [4, 5, 8, 4000, 4110, 4140])
async def test_a_form_that_is_cut_stores_nothing(
    app: UhpApplication, services: Services, missing: int
) -> None:
    body = file_form("a.bin", b"x" * 4096)
    with nothing_is_kept(services):
        sent = await upload(app, body[:-missing])
    assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")
    assert (await call(app, "GET", "/v1/files")).json["files"] == []


@pytest.mark.requirement("UHP-09", "UHP-10", "B18")
async def test_over_the_limit(app: UhpApplication, services: Services) -> None:
    body = file_form("a.bin", b"x" * (LIMIT + 1))
    with nothing_is_kept(services):
        sent = await upload(app, body[:1000], body[1000:])
    assert (sent.status, error_of(sent)["code"]) == (413, "file_too_large")
    assert error_of(sent)["detail"] == {"max_bytes": LIMIT}
    assert (await call(app, "GET", "/v1/files")).json["files"] == []


@pytest.mark.requirement("UHP-09", "B18")
async def test_a_declared_excess_is_refused_from_the_head(app: UhpApplication) -> None:
    token = (b"authorization", f"Bearer {FIRST}".encode())
    head = [CONTENT_TYPE, token, *announcing(LIMIT + 2 * MIB)]
    sent = Sent()

    async def receive() -> Any:
        assert sent.messages, "the body was asked for before the answer"
        return DISCONNECT

    await app(http_scope("POST", "/v1/files", head), receive, sent)
    assert (sent.status, error_of(sent)["code"]) == (413, "file_too_large")


@pytest.mark.requirement("UHP-10")
async def test_a_client_that_goes_leaves_nothing(app: UhpApplication, services: Services) -> None:
    body = file_form("a.bin", b"x" * 100_000)
    token = (b"authorization", f"Bearer {FIRST}".encode())
    scope = http_scope("POST", "/v1/files", [CONTENT_TYPE, token, *announcing(len(body))])
    with nothing_is_kept(services):
        await app(scope, receiving(chunk(body[:50_000]), DISCONNECT), sent := Sent())
    assert sent.messages == []


@pytest.mark.requirement("B25")
async def test_descriptors_do_not_grow(app: UhpApplication, services: Services) -> None:
    whole = file_form("a.bin", os.urandom(5_000))
    cut = whole[:-10]
    twice = form(*[part('name="file"; filename="a"', b"x" * 5_000)] * 2)
    counts = []
    for _ in range(3):
        for body in (whole, cut, twice) * 10:
            await upload(app, body)
        counts.append(backends.open_descriptors())
    assert counts[1:] == counts[:1] * 2


@pytest.mark.requirement("UHP-29")
async def test_uploads_belong_to_their_scope(app: UhpApplication) -> None:
    file_id = (await uploaded(app, file_form("a", b"x")))["id"]
    assert (await call(app, "GET", f"/v1/files/{file_id}", token=SHARING)).status == 200
    for method in ("GET", "HEAD", "DELETE"):
        foreign = await call(app, method, f"/v1/files/{file_id}", token=SECOND)
        unknown = await call(app, method, f"/v1/files/{UNKNOWN}", token=SECOND)
        assert foreign.status == unknown.status == 404
        assert foreign.body == unknown.body
        assert error_of(foreign)["code"] == "file_not_found"
    assert (await call(app, "GET", "/v1/files", token=SECOND)).json["files"] == []
    assert (await call(app, "GET", "/v1/files", token=POWERLESS)).status == 403
    assert (await call(app, "GET", f"/v1/files/{file_id}")).status == 200


@pytest.mark.requirement("UHP-30")
@pytest.mark.parametrize(
    "file_id",
    ["x", "file_", "file_a.b", "file_" + "a" * 65, "resp_" + "a" * 32, "file_%00", "..", "é"],
)
async def test_what_is_no_id_is_unknown(app: UhpApplication, file_id: str) -> None:
    for method in ("GET", "DELETE"):
        sent = await call(app, method, f"/v1/files/{file_id}")
        assert (sent.status, error_of(sent)["code"]) == (404, "file_not_found")


@pytest.mark.requirement("UHP-18", "UHP-21", "UHP-22", "UHP-29")
@pytest.mark.parametrize("size", [0, 5_000])
async def test_an_upload_can_be_read_back(app: UhpApplication, size: int) -> None:
    content = os.urandom(size)
    file_id = (await uploaded(app, file_form("a.svg", content)))["id"]
    target = f"/v1/files/{file_id}/content"
    sent = await call(app, "GET", target)
    assert (sent.status, sent.body) == (200, content)
    assert sent.headers[b"content-type"] == b"image/svg+xml"
    assert sent.headers[b"content-disposition"].startswith(b"attachment")
    head = await call(app, "HEAD", target)
    assert (head.status, head.body) == (200, b"")
    assert head.headers[b"content-length"] == b"%d" % size
    beyond = await call(app, "GET", target, headers=[(b"range", b"bytes=9999-")])
    assert (beyond.status, error_of(beyond)["code"]) == (416, "consignee_range_not_satisfiable")
    foreign = await call(app, "GET", target, token=SECOND)
    unknown = await call(app, "GET", f"/v1/files/{UNKNOWN}/content", token=SECOND)
    assert (foreign.status, foreign.body) == (404, unknown.body)


async def test_deleting(app: UhpApplication) -> None:
    file_id = (await uploaded(app, file_form("a", b"x")))["id"]
    sent = await call(app, "DELETE", f"/v1/files/{file_id}")
    assert (sent.status, sent.json) == (200, {"id": file_id, "object": "file", "deleted": True})
    for method in ("DELETE", "GET"):
        assert (await call(app, method, f"/v1/files/{file_id}")).status == 404
    assert (await call(app, "GET", "/v1/files")).json == {"files": [], "next_cursor": None}


async def test_pages(app: UhpApplication) -> None:
    ids = [(await uploaded(app, file_form(str(n), b"x")))["id"] for n in range(5)]
    await uploaded(app, file_form("foreign", b"x"), token=SECOND)
    pages = [(await call(app, "GET", "/v1/files?limit=2")).json]
    await call(app, "DELETE", f"/v1/files/{ids[3]}")
    while (cursor := pages[-1]["next_cursor"]) is not None:
        pages.append((await call(app, "GET", f"/v1/files?limit=2&cursor={cursor}")).json)
    assert [file["id"] for page in pages for file in page["files"]] == ids[::-1]
    assert len(pages) == 3
    assert (await call(app, "GET", "/v1/files?limit=4")).json["next_cursor"] is None


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_cursor_of_another_scope_is_none(app: UhpApplication) -> None:
    for n in range(2):
        await uploaded(app, file_form(str(n), b"x"))
    cursor = (await call(app, "GET", "/v1/files?limit=1")).json["next_cursor"]
    foreign = await call(app, "GET", f"/v1/files?cursor={cursor}", token=SECOND)
    made_up = await call(app, "GET", "/v1/files?cursor=made-up", token=SECOND)
    assert foreign.status == made_up.status == 400
    assert foreign.body == made_up.body
    assert error_of(foreign)["param"] == "cursor"
    assert (await call(app, "GET", "/v1/files?limit=0")).status == 400


async def test_a_spent_quota_keeps_nothing(tmp_path: Path) -> None:
    async with services_in(tmp_path, max_scope_files=1, inline_bytes=10) as services:
        app = application_of(files.routes(services), services.settings)
        await uploaded(app, file_form("a", b"x" * 100))
        with nothing_is_kept(services):
            sent = await upload(app, file_form("b", b"y" * 100))
        assert (sent.status, error_of(sent)["code"]) == (429, "quota_exhausted")
        await uploaded(app, file_form("b", b"y" * 100), token=SECOND)
