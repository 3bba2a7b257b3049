"""A stored body as an answer: validators, ranges, digests, and headers that make it harmless."""

from __future__ import annotations

import base64
import email
import email.policy
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from starlette.types import Receive

from app.http.downloads import (
    KERNEL_BYTES,
    Accelerator,
    Download,
    PreconditionFailed,
    Representation,
)
from app.http.ranges import RangeNotSatisfiable
from app.http.streams import PART_BYTES, ZERO_COPY
from app.store.blobs import FileSpan
from tests.http.messages import DISCONNECT, Header, Sent, http_scope, receiving

pytestmark = pytest.mark.anyio

BODY = bytes(range(100))
MIB = 1024 * 1024


class Stored:
    """Bytes as a source that tells what was opened and closed."""

    def __init__(self, body: bytes = BODY, chunk_bytes: int = 7) -> None:
        self.body = body
        self.opened: list[tuple[int, int]] = []
        self.closed = 0
        self._chunk_bytes = chunk_bytes

    @asynccontextmanager
    async def open(self, start: int, stop: int) -> AsyncIterator[AsyncIterator[bytes]]:
        self.opened.append((start, stop))
        try:
            yield self._chunks(start, stop)
        finally:
            self.closed += 1

    async def _chunks(self, start: int, stop: int) -> AsyncIterator[bytes]:
        for begin in range(start, stop, self._chunk_bytes):
            yield self.body[begin : min(begin + self._chunk_bytes, stop)]

    def representation(
        self, media_type: str = "text/csv", filename: str = "a.csv", path: Path | None = None
    ) -> Representation:
        digest = hashlib.sha256(self.body).hexdigest()
        return Representation(len(self.body), digest, media_type, filename, self.open, path)


async def answered(
    stored: Stored,
    method: str = "GET",
    headers: Iterable[Header] = (),
    *,
    representation: Representation | None = None,
    inline: bool = False,
    accelerator: Accelerator | None = None,
    receive: Receive | None = None,
) -> Sent:
    sent = Sent()
    download = Download(
        representation or stored.representation(), inline=inline, accelerator=accelerator
    )
    await download(http_scope(method, headers=headers), receive or receiving(), sent)
    assert stored.closed == len(stored.opened)
    return sent


def ranged(value: str) -> list[Header]:
    return [(b"range", value.encode("latin-1"))]


@pytest.mark.requirement("UHP-18", "UHP-19", "UHP-22", "B49", "B55")
async def test_the_whole_file_as_it_is() -> None:
    stored = Stored()
    sent = await answered(stored, headers=[(b"accept-encoding", b"gzip, br")])
    digest = hashlib.sha256(BODY)
    assert sent.status == 200
    assert sent.body == BODY
    assert sent.headers == {
        b"content-type": b"text/csv",
        b"content-length": b"100",
        b"content-disposition": b"attachment; filename=\"a.csv\"; filename*=UTF-8''a.csv",
        b"content-security-policy": b"default-src 'none'; sandbox",
        b"cross-origin-resource-policy": b"same-origin",
        b"cache-control": b"private, no-transform",
        b"etag": b'"sha256-' + digest.hexdigest().encode() + b'"',
        b"repr-digest": b"sha-256=:" + base64.b64encode(digest.digest()) + b":",
        b"accept-ranges": b"bytes",
    }
    assert sent.is_complete


@pytest.mark.requirement("B10")
async def test_an_empty_file() -> None:
    stored = Stored(b"")
    sent = await answered(stored)
    assert sent.status == 200
    assert sent.headers[b"content-length"] == b"0"
    assert sent.body == b""
    with pytest.raises(RangeNotSatisfiable):
        await answered(stored, headers=ranged("bytes=0-"))


@pytest.mark.requirement("B51")
@pytest.mark.parametrize("headers", [[], ranged("bytes=0-1"), ranged("bytes=500-")])
async def test_head_is_the_head_of_the_whole_file_and_opens_nothing(headers: list[Header]) -> None:
    stored = Stored()
    whole = await answered(stored)
    stored.opened.clear()
    stored.closed = 0
    sent = await answered(stored, "HEAD", headers)
    assert sent.status == 200
    assert sent.headers == whole.headers
    assert sent.body == b""
    assert stored.opened == []


@pytest.mark.requirement("B44")
async def test_one_range() -> None:
    stored = Stored()
    sent = await answered(stored, headers=ranged("bytes=-30"))
    assert sent.status == 206
    assert sent.body == BODY[70:]
    assert sent.headers[b"content-range"] == b"bytes 70-99/100"
    assert sent.headers[b"content-length"] == b"30"
    assert sent.headers[b"content-type"] == b"text/csv"
    assert stored.opened == [(70, 100)]


@pytest.mark.requirement("B43")
@pytest.mark.parametrize("value", ["bytes=5-4", "items=0-1", "bytes=abc", "bytes=0-5;x"])
async def test_what_cannot_be_read_is_no_range(value: str) -> None:
    sent = await answered(Stored(), headers=ranged(value))
    assert sent.status == 200
    assert sent.body == BODY
    assert b"content-range" not in sent.headers


async def test_two_range_headers_are_none() -> None:
    sent = await answered(Stored(), headers=[*ranged("bytes=0-1"), *ranged("bytes=4-5")])
    assert sent.status == 200


@pytest.mark.requirement("B44")
async def test_a_range_beyond_the_end_begins_no_answer() -> None:
    stored = Stored()
    with pytest.raises(RangeNotSatisfiable) as refused:
        await answered(stored, headers=ranged("bytes=100-"))
    assert refused.value.size == 100
    assert stored.opened == []


@pytest.mark.requirement("B45")
async def test_several_ranges_are_one_message_of_parts() -> None:
    stored = Stored()
    sent = await answered(stored, headers=ranged("bytes=0-9, 95-, 50-50"))
    assert sent.status == 206
    assert int(sent.headers[b"content-length"]) == len(sent.body)
    assert b"content-range" not in sent.headers
    assert b"content-disposition" in sent.headers
    kind = sent.headers[b"content-type"]
    assert kind.startswith(b"multipart/byteranges; boundary=")
    assert b"\n" not in sent.body.replace(b"\r\n", b"").replace(BODY[10:11], b"")
    message = email.message_from_bytes(
        b"Content-Type: " + kind + b"\r\n\r\n" + sent.body, policy=email.policy.HTTP
    )
    parts = [
        (part["Content-Type"], part["Content-Range"], part.get_payload(decode=True))
        for part in message.iter_parts()
    ]
    assert parts == [
        ("text/csv", "bytes 0-9/100", BODY[:10]),
        ("text/csv", "bytes 95-99/100", BODY[95:]),
        ("text/csv", "bytes 50-50/100", BODY[50:51]),
    ]
    assert stored.opened == [(0, 10), (95, 100), (50, 51)]


async def test_ranges_that_are_one_are_answered_as_one() -> None:
    sent = await answered(Stored(), headers=ranged("bytes=0-49,50-99"))
    assert sent.headers[b"content-range"] == b"bytes 0-99/100"
    assert sent.body == BODY


@pytest.mark.requirement("B47")
@pytest.mark.parametrize(
    ("validator", "status"),
    [
        ("{etag}", 206),
        ("W/{etag}", 200),
        ('"sha256-0000"', 200),
        ("Tue, 01 Dec 2026 00:00:00 GMT", 200),
        ("garbage", 200),
        ("*", 200),
        ('"a", {etag}', 200),
        ("", 200),
    ],
)
async def test_a_resumed_download_needs_exactly_this_version(validator: str, status: int) -> None:
    stored = Stored()
    value = validator.format(etag=stored.representation().etag).encode()
    sent = await answered(stored, headers=[*ranged("bytes=10-"), (b"if-range", value)])
    assert sent.status == status
    assert sent.body == (BODY[10:] if status == 206 else BODY)


@pytest.mark.requirement("B47")
async def test_a_stale_resumption_of_nothing_is_the_whole_file() -> None:
    sent = await answered(Stored(), headers=[*ranged("bytes=500-"), (b"if-range", b'"old"')])
    assert sent.status == 200


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("validator", ["{etag}", "W/{etag}", "*", '"a" , {etag}'])
async def test_what_the_client_has_is_not_sent_again(method: str, validator: str) -> None:
    stored = Stored()
    value = validator.format(etag=stored.representation().etag).encode()
    headers = [(b"if-none-match", value), *ranged("bytes=0-1")]
    sent = await answered(stored, method, headers)
    assert sent.status == 304
    assert sent.headers[b"etag"] == stored.representation().etag.encode()
    assert sent.headers[b"cache-control"] == b"private, no-transform"
    assert b"content-length" not in sent.headers
    assert b"content-type" not in sent.headers
    assert sent.body == b""
    assert stored.opened == []


async def test_another_version_is_sent() -> None:
    sent = await answered(Stored(), headers=[(b"if-none-match", b'"sha256-0", W/"x"')])
    assert sent.status == 200


@pytest.mark.parametrize("validator", ['"other"', "W/{etag}", "garbage", ""])
async def test_if_match_of_another_version_fails(validator: str) -> None:
    stored = Stored()
    value = validator.format(etag=stored.representation().etag).encode()
    with pytest.raises(PreconditionFailed):
        await answered(stored, headers=[(b"if-match", value)])


@pytest.mark.parametrize("validator", ["{etag}", "*", '"a", {etag}'])
async def test_if_match_of_this_version_changes_nothing(validator: str) -> None:
    stored = Stored()
    value = validator.format(etag=stored.representation().etag).encode()
    assert (await answered(stored, headers=[(b"if-match", value)])).status == 200


@pytest.mark.requirement("B55")
@pytest.mark.parametrize(
    ("media_type", "shown"),
    [
        ("image/png", True),
        ("image/jpeg", True),
        ("image/gif", True),
        ("image/webp", True),
        ("text/plain; charset=utf-8", True),
        ("image/svg+xml", False),
        ("text/html", False),
        ("application/xhtml+xml", False),
        ("application/xml", False),
        ("application/pdf", False),
        ("multipart/related", False),
        ("text/markdown", False),
    ],
)
async def test_only_what_cannot_hold_a_script_is_shown_in_place(
    media_type: str, shown: bool
) -> None:
    stored = Stored()
    representation = stored.representation(media_type)
    asked = await answered(stored, representation=representation, inline=True)
    unasked = await answered(stored, representation=representation)
    kind = b"inline" if shown else b"attachment"
    assert asked.headers[b"content-disposition"].startswith(kind)
    assert unasked.headers[b"content-disposition"].startswith(b"attachment")
    for sent in (asked, unasked):
        assert sent.headers[b"content-type"] == media_type.encode()
        assert sent.headers[b"content-security-policy"] == b"default-src 'none'; sandbox"


@pytest.mark.requirement("B56")
@pytest.mark.parametrize(
    "media_type", ["", "nonsense", "text/html, image/png", "a/b\r\nx: y", "a/" + "b" * 10_000]
)
async def test_what_is_no_media_type_never_gets_into_a_header(media_type: str) -> None:
    stored = Stored()
    sent = await answered(stored, representation=stored.representation(media_type))
    assert sent.headers[b"content-type"] == b"application/octet-stream"


@pytest.mark.requirement("UHP-20", "B02", "B29")
@pytest.mark.parametrize(
    "name",
    ["报告.txt", "plan-🚀.txt", "café.txt", 'a"; filename="evil.exe', "a\r\nX: y.txt", "a/b.txt"],
)
async def test_any_name_is_shown_and_breaks_nothing(name: str) -> None:
    stored = Stored()
    sent = await answered(stored, representation=stored.representation(filename=name))
    disposition = sent.headers[b"content-disposition"].decode("ascii")
    assert disposition.isprintable()
    assert unquote(disposition.partition("filename*=UTF-8''")[2]) == name


async def test_a_client_that_is_gone_leaves_nothing_open() -> None:
    stored = Stored()
    sent = Sent()
    download = Download(stored.representation())
    with pytest.raises(Exception, match="closed the connection"):
        await download(http_scope("GET"), receiving(DISCONNECT), sent)
    assert stored.closed == len(stored.opened)
    assert not sent.is_complete


ACCELERATOR = Accelerator("/_consignee/blobs/", Path("/srv/blobs"))


@pytest.mark.parametrize("headers", [[], ranged("bytes=5-9")])
async def test_the_proxy_is_told_where_the_file_lies(headers: list[Header]) -> None:
    stored = Stored()
    representation = stored.representation(path=Path("/srv/blobs/ab/ab c%-0"))
    sent = await answered(
        stored, headers=headers, representation=representation, accelerator=ACCELERATOR
    )
    assert sent.status == 200
    assert sent.body == b""
    assert sent.headers[b"x-accel-redirect"] == b"/_consignee/blobs/ab/ab%20c%25-0"
    assert sent.headers[b"content-length"] == b"0"
    assert sent.headers[b"content-type"] == b"text/csv"
    assert sent.headers[b"etag"] == representation.etag.encode()
    assert stored.opened == []


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (None, []),
        (Path("/elsewhere/ab"), []),
        (Path("/srv/blobs/ab"), ranged("bytes=5-4")),
        (Path("/srv/blobs/ab"), ranged("bytes=0-1,5-6")),
        (Path("/srv/blobs/ab"), [*ranged("bytes=0-1"), (b"if-range", b'"old"')]),
        (Path("/srv/blobs/ab"), [(b"if-match", b"*")]),
    ],
)
async def test_what_the_proxy_would_answer_otherwise_is_sent_by_ourselves(
    path: Path | None, headers: list[Header]
) -> None:
    stored = Stored()
    sent = await answered(
        stored,
        headers=headers,
        representation=replace(stored.representation(), path=path),
        accelerator=ACCELERATOR,
    )
    assert b"x-accel-redirect" not in sent.headers
    assert sent.body


async def test_refusals_and_heads_are_never_left_to_the_proxy() -> None:
    stored = Stored()
    representation = stored.representation(path=Path("/srv/blobs/ab"))
    with pytest.raises(RangeNotSatisfiable):
        await answered(
            stored,
            headers=ranged("bytes=500-"),
            representation=representation,
            accelerator=ACCELERATOR,
        )
    head = await answered(stored, "HEAD", representation=representation, accelerator=ACCELERATOR)
    assert head.headers[b"content-length"] == b"100"
    assert b"x-accel-redirect" not in head.headers


LINK = "https://bucket.example.com/object?signature=x"


class Elsewhere:
    """Another place where the bytes lie, or not."""

    def __init__(self, url: str | None = LINK) -> None:
        self.url = url
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, media_type: str, disposition: str) -> str | None:
        self.asked.append((media_type, disposition))
        return self.url


@pytest.mark.parametrize("headers", [[], ranged("bytes=5-9")])
async def test_a_client_is_sent_where_the_bytes_lie(headers: list[Header]) -> None:
    stored, elsewhere = Stored(), Elsewhere()
    representation = replace(stored.representation(), link=elsewhere)
    sent = await answered(stored, headers=headers, representation=representation)
    assert (sent.status, sent.body, stored.opened) == (302, b"", [])
    assert sent.headers[b"location"] == LINK.encode()
    assert sent.headers[b"cache-control"] == b"no-store"
    [(media_type, disposition)] = elsewhere.asked
    assert media_type == "text/csv"
    assert disposition.startswith("attachment;")


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("HEAD", []),
        ("GET", ranged("bytes=0-1,5-6")),
        ("GET", [*ranged("bytes=0-1"), (b"if-range", b'"old"')]),
        ("GET", [(b"if-match", b"*")]),
        ("GET", [(b"if-none-match", b"*")]),
    ],
)
async def test_a_client_is_sent_nowhere_for_what_is_answered_here(
    method: str, headers: list[Header]
) -> None:
    stored, elsewhere = Stored(), Elsewhere()
    representation = replace(stored.representation(), link=elsewhere)
    sent = await answered(stored, method, headers, representation=representation)
    assert sent.status != 302
    assert elsewhere.asked == []


async def test_bytes_that_lie_nowhere_else_are_sent_from_here() -> None:
    stored, elsewhere = Stored(), Elsewhere(None)
    representation = replace(stored.representation(), link=elsewhere)
    sent = await answered(stored, representation=representation)
    assert sent.status == 200
    assert len(sent.body) == 100
    assert len(elsewhere.asked) == 1


# --- from a file --------------------------------------------------------------------------------


class Filed(Stored):
    """A source whose chunks come from a file."""

    @asynccontextmanager
    async def open(self, start: int, stop: int) -> AsyncIterator[AsyncIterator[bytes]]:
        async with super().open(start, stop) as chunks:
            yield FromFile(chunks, FileSpan(7, start, stop))


class FromFile(AsyncIterator[bytes]):
    def __init__(self, chunks: AsyncIterator[bytes], file: FileSpan) -> None:
        self.file = file
        self._chunks = chunks

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)


async def sent_by(source: Stored, value: str | None = None, *, takes_files: bool = True) -> Sent:
    """The answer of a server that does, or does not, send files."""
    sent, headers = Sent(), [] if value is None else ranged(value)
    extensions: dict[str, object] = {ZERO_COPY: {}} if takes_files else {}
    scope = http_scope("GET", headers=headers, extensions=extensions)
    await Download(source.representation())(scope, receiving(), sent)
    assert source.closed == len(source.opened)
    return sent


LONG = bytes(PART_BYTES + KERNEL_BYTES)


@pytest.mark.parametrize(
    ("value", "status", "parts"),
    [
        (None, 200, [(0, PART_BYTES), (PART_BYTES, KERNEL_BYTES)]),
        (f"bytes=7-{KERNEL_BYTES + 6}", 206, [(7, KERNEL_BYTES)]),
        (f"bytes=-{PART_BYTES}", 206, [(KERNEL_BYTES, PART_BYTES)]),
    ],
)
async def test_the_server_is_told_which_part_of_the_file_to_send(
    value: str | None, status: int, parts: list[tuple[int, int]]
) -> None:
    sent = await sent_by(Filed(LONG), value)
    assert sent.status == status
    assert int(sent.headers[b"content-length"]) == sum(count for _, count in parts)
    told = [m for m in sent.messages if m["type"] == ZERO_COPY]
    assert [(m["file"].fileno(), m["offset"], m["count"]) for m in told] == [
        (7, *part) for part in parts
    ]
    assert sent.messages[-1] == {"type": "http.response.body", "body": b""}


@pytest.mark.parametrize(
    ("source", "value", "takes_files"),
    [
        (Filed(LONG, MIB), None, False),
        (Stored(LONG, MIB), None, True),
        (Filed(LONG), f"bytes=0-{KERNEL_BYTES - 2}", True),
        (Filed(LONG), f"bytes=0-{KERNEL_BYTES - 2},{2 * KERNEL_BYTES}-{2 * KERNEL_BYTES}", True),
    ],
    ids=["a server that cannot", "no file", "a short range", "several short ranges"],
)
async def test_what_is_not_sent_from_a_file_is_streamed(
    source: Stored, value: str | None, takes_files: bool
) -> None:
    sent = await sent_by(source, value, takes_files=takes_files)
    assert {m["type"] for m in sent.messages[1:]} == {"http.response.body"}
    assert len(sent.body) == int(sent.headers[b"content-length"])


async def test_long_ones_among_several_ranges_come_from_the_file() -> None:
    sent = await sent_by(Filed(LONG), f"bytes=0-{KERNEL_BYTES},{2 * KERNEL_BYTES}-")
    told = [m for m in sent.messages if m["type"] == ZERO_COPY]
    assert [(m["offset"], m["count"]) for m in told] == [
        (0, KERNEL_BYTES + 1),
        (2 * KERNEL_BYTES, PART_BYTES - KERNEL_BYTES),
    ]
    between = sum(len(m.get("body", b"")) + m.get("count", 0) for m in sent.messages[1:])
    assert between == int(sent.headers[b"content-length"])
