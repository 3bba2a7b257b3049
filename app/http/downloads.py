"""A stored body as an answer: validators, ranges, digests, and headers that make it harmless.

What is stored is what somebody else wrote. It keeps its own media type (UHP-18), and is made
harmless by everything around that: an attachment in an empty sandbox, never sniffed (UHP-21,
UHP-22, B55). It is never content-coded, whatever a client accepts, and no intermediary may do so
either (B49, B50).
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from app.errors import Malformed
from app.http.media_types import OCTET_STREAM, accept
from app.http.names import content_disposition
from app.http.ranges import Span, requested_spans
from app.http.streams import Piece, send_stream, takes_files
from app.store.blobs import file_behind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

Headers = list[tuple[bytes, bytes]]
Linker = Callable[[str, str], Awaitable[str | None]]
Opener = Callable[[int, int], AbstractAsyncContextManager[AsyncIterator[bytes]]]

INLINE_TYPES = frozenset({"image/png", "image/jpeg", "image/gif", "image/webp", "text/plain"})
"""What a browser may show in place when it is asked to: formats that cannot hold a script."""

KERNEL_BYTES = 64 * 1024
"""From here on the kernel sends a file where it can; less is read sooner than that is arranged."""

_TAGS = re.compile(r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"')

_HARMLESS = (
    (b"content-security-policy", b"default-src 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_CACHING = (b"cache-control", b"private, no-transform")


class PreconditionFailed(Exception):
    """`If-Match` names no tag of this representation (RFC 9110 section 13.1.1)."""


@dataclass(frozen=True, slots=True)
class Representation:
    """Stored bytes, and what an answer says of them.

    `size` in bytes, `sha256` as 64 lowercase hex. `open(start, stop)` gives the bytes
    `[start, stop)` in chunks; nothing else touches them. `path` is where they lie as a file of
    this machine, None where they do not. `link(media_type, disposition)` gives a URL where whoever
    knows it gets them with those headers, or None.
    """

    size: int
    sha256: str
    media_type: str
    filename: str
    open: Opener
    path: Path | None = None
    link: Linker | None = None

    @property
    def etag(self) -> str:
        """The strong validator: equal tags mean equal bytes."""
        return f'"sha256-{self.sha256}"'


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The proxy in front sends files below `root` itself when told to by X-Accel-Redirect.

    `prefix` is its internal location, with slashes at both ends.
    """

    prefix: str
    root: Path

    def target(self, path: Path | None) -> bytes | None:
        """The internal URL of a file; None when it does not lie below `root`."""
        if path is None or not path.is_relative_to(self.root):
            return None
        relative = PurePosixPath(path.relative_to(self.root))
        return quote(self.prefix + str(relative)).encode("ascii")


class Download:
    """The ASGI application that answers one GET or HEAD with a representation.

    HEAD opens nothing, and ignores Range, which has a meaning for GET only (RFC 9110 section
    14.2). Raises PreconditionFailed and RangeNotSatisfiable before the answer begins, in whose
    place the protocol sends its own error, and whatever the source raises.
    """

    def __init__(
        self,
        representation: Representation,
        *,
        inline: bool = False,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._body = representation
        self._inline = inline and _essence(representation) in INLINE_TYPES
        self._accelerator = accelerator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = _Request(scope)
        self._check_preconditions(request)
        if request.lists("if-none-match", self._body.etag, weak=True):
            await _send_head(send, 304, [*self._validators(), *_HARMLESS])
        elif scope["method"] == "HEAD":
            length = (b"content-length", b"%d" % self._body.size)
            await _send_head(send, 200, [*self._headers(), self._type(), length])
        else:
            await self._send_body(request, receive, send)

    def _check_preconditions(self, request: _Request) -> None:
        # A date condition is ignored: these bytes have a digest, and no date of modification.
        if request.has("if-match") and not request.lists("if-match", self._body.etag, weak=False):
            raise PreconditionFailed

    async def _send_body(self, request: _Request, receive: Receive, send: Send) -> None:
        spans = self._spans(request)
        elsewhere = await self._elsewhere(request, spans)
        if elsewhere is not None:
            await _send_head(send, *elsewhere)
        elif len(spans) > 1:
            await self._send_parts(spans, request.takes_files, receive, send)
        else:
            await self._send_span(spans, request.takes_files, receive, send)

    def _spans(self, request: _Request) -> tuple[Span, ...]:
        """What a GET asks for; nothing for the whole."""
        wanted = request.single("range")
        if wanted is None:
            return ()
        if request.has("if-range") and request.single("if-range") != self._body.etag:
            return ()
        return requested_spans(wanted, self._body.size)

    async def _elsewhere(
        self, request: _Request, spans: Sequence[Span]
    ) -> tuple[int, Headers] | None:
        """The answer that lets another server send the bytes; None where we send them.

        That server judges Range and If-Match for itself: what we ignore, or decide by our own
        rules, never gets to it.
        """
        if request.has("if-match") or (request.has("range") and len(spans) != 1):
            return None
        return self._accelerated() or await self._linked()

    def _accelerated(self) -> tuple[int, Headers] | None:
        """For the proxy in front, which adds the bytes to this head."""
        if self._accelerator is None:
            return None
        target = self._accelerator.target(self._body.path)
        if target is None:
            return None
        redirect = [(b"x-accel-redirect", target), (b"content-length", b"0")]
        return 200, [*self._description(), self._type(), *redirect]

    async def _linked(self) -> tuple[int, Headers] | None:
        """For the client, which asks there: the URL is a credential, so nobody keeps it."""
        if self._body.link is None:
            return None
        disposition = self._disposition().decode("ascii")
        url = await self._body.link(_served_type(self._body), disposition)
        if url is None:
            return None
        location = (b"location", url.encode("ascii"))
        return 302, [location, (b"cache-control", b"no-store"), (b"content-length", b"0")]

    async def _send_span(
        self, spans: Sequence[Span], takes_files: bool, receive: Receive, send: Send
    ) -> None:
        headers = [*self._headers(), self._type()]
        span = spans[0] if spans else Span(0, self._body.size)
        if spans:
            headers.append((b"content-range", _content_range(span, self._body.size)))
        status = 206 if spans else 200
        async with aclosing(self._read([(b"", span)], b"", takes_files)) as pieces:
            await send_stream(receive, send, headers, pieces, status=status, length=span.length)

    async def _send_parts(
        self, spans: Sequence[Span], takes_files: bool, receive: Receive, send: Send
    ) -> None:
        boundary = secrets.token_hex(16).encode("ascii")
        parts = [(self._part_head(boundary, span), span) for span in spans]
        closing = b"\r\n--%b--\r\n" % boundary
        length = sum(len(head) + span.length for head, span in parts) + len(closing)
        kind = (b"content-type", b"multipart/byteranges; boundary=" + boundary)
        async with aclosing(self._read(parts, closing, takes_files)) as pieces:
            headers = [*self._headers(), kind]
            await send_stream(receive, send, headers, pieces, status=206, length=length)

    def _part_head(self, boundary: bytes, span: Span) -> bytes:
        return b"\r\n--%b\r\nContent-Type: %b\r\nContent-Range: %b\r\n\r\n" % (
            boundary,
            self._type()[1],
            _content_range(span, self._body.size),
        )

    async def _read(
        self, parts: Sequence[tuple[bytes, Span]], closing: bytes, takes_files: bool
    ) -> AsyncGenerator[Piece, None]:
        """The parts one after the other; no more than one source is open at a time."""
        for head, span in parts:
            async with self._body.open(*span) as chunks:
                yield head
                if takes_files and span.length >= KERNEL_BYTES and (file := file_behind(chunks)):
                    yield file
                    continue
                async for chunk in chunks:
                    yield chunk
        yield closing

    def _headers(self) -> Headers:
        return [*self._description(), (b"accept-ranges", b"bytes")]

    def _description(self) -> Headers:
        """What is said of the file, whoever sends its bytes, and in whatever pieces."""
        return [
            *self._validators(),
            *_HARMLESS,
            (b"repr-digest", _digest_field(self._body.sha256)),
            (b"content-disposition", self._disposition()),
        ]

    def _disposition(self) -> bytes:
        return content_disposition(self._body.filename, inline=self._inline)

    def _validators(self) -> Headers:
        return [(b"etag", self._body.etag.encode("ascii")), _CACHING]

    def _type(self) -> tuple[bytes, bytes]:
        return (b"content-type", _served_type(self._body).encode("ascii"))


class _Request:
    """What of a request chooses what is sent: its header fields, and what its server takes."""

    def __init__(self, scope: Scope) -> None:
        self.takes_files = takes_files(scope)
        self._headers: Sequence[tuple[bytes, bytes]] = scope["headers"]

    def has(self, name: str) -> bool:
        return bool(self._values(name))

    def single(self, name: str) -> str | None:
        """The value of a field that is given once; one given twice has none to rely on."""
        values = self._values(name)
        return values[0] if len(values) == 1 else None

    def lists(self, name: str, etag: str, *, weak: bool) -> bool:
        """Whether a list of tags has `etag`; a weak tag counts as its strong one with `weak`."""
        value = ", ".join(self._values(name))
        if value == "*":
            return True
        tags = _TAGS.findall(value)
        return etag in ((tag.removeprefix("W/") for tag in tags) if weak else tags)

    def _values(self, name: str) -> list[str]:
        wanted = name.encode("ascii")
        return [v.decode("latin-1").strip(" \t") for known, v in self._headers if known == wanted]


async def _send_head(send: Send, status: int, headers: Headers) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _served_type(representation: Representation) -> str:
    """The file's own type; what does not fit the grammar never gets into a header (B56)."""
    try:
        return accept(representation.media_type, param="media_type")
    except Malformed:
        return OCTET_STREAM


def _essence(representation: Representation) -> str:
    return _served_type(representation).partition(";")[0].strip()


def _content_range(span: Span, size: int) -> bytes:
    return b"bytes %d-%d/%d" % (span.start, span.stop - 1, size)


def _digest_field(sha256: str) -> bytes:
    """RFC 9530: a dictionary of byte sequences."""
    return b"sha-256=:%b:" % base64.b64encode(bytes.fromhex(sha256))
