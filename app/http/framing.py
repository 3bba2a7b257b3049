"""The head of a body of raw octets: headers in, a declaration out, or a refusal. Pure, no I/O.

AHP uploads and the artifact intake of UHP are framed alike.

Parsers and senders differ; what is legal here does not (AHP-R16 to R22, R50). Every framing header
appears exactly once and has exactly one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from app.errors import Malformed, TooLarge

_LENGTH = re.compile(rb"0|[1-9][0-9]{0,18}")
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")

_CONTENT_TYPE = b"content-type"
_CONTENT_LENGTH = b"content-length"
_DIGEST_HEADER = b"ahp-content-sha256"
_SINGLE = frozenset({_CONTENT_TYPE, _CONTENT_LENGTH, _DIGEST_HEADER})

_FORBIDDEN = {
    b"content-encoding": (
        "content_encoding",
        "Content-Encoding is not part of this binding: send the raw octets without the header.",
    ),
    b"transfer-encoding": (
        "transfer_encoding",
        "Transfer-Encoding is not part of this binding: declare the exact Content-Length.",
    ),
    b"ahp-subscription": (
        "caller_identity",
        "AHP-Subscription belongs to an older draft: a sender names no subscription.",
    ),
    b"ahp-content-ref": (
        "caller_identity",
        "AHP-Content-Ref belongs to an older draft: only the receiver allocates references.",
    ),
}


@dataclass(frozen=True, slots=True)
class Declared:
    """What the sender says of its body: `size` in octets, `sha256` as 64 lowercase hex."""

    size: int
    sha256: str


def parse_framing(headers: Iterable[tuple[bytes, bytes]], *, limit: int) -> Declared:
    """Judge the head of an upload.

    `headers` are ASGI pairs with lower-case names. Raises Malformed (400) for the first fault, and
    TooLarge (413) for a well-formed declaration over `limit` octets.
    """
    found = _collect(headers)
    _check_content_type(found.get(_CONTENT_TYPE))
    size = _parse_length(found.get(_CONTENT_LENGTH))
    digest = _parse_digest(found.get(_DIGEST_HEADER))
    if size > limit:
        raise TooLarge(limit)
    return Declared(size, digest)


def _collect(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if _CONTROL.search(value):
            raise Malformed("malformed_header", "A header value holds control characters.")
        if name in _FORBIDDEN:
            code, message = _FORBIDDEN[name]
            raise Malformed(code, message)
        if name == b"expect" and value.lower() != b"100-continue":
            raise Malformed("expectation", "Expect may only be 100-continue; leave it out.")
        if name in _SINGLE:
            if name in found:
                raise Malformed("duplicate_header", f"{name.decode()} must appear exactly once.")
            found[name] = value
    return found


def _check_content_type(value: bytes | None) -> None:
    if value is None or value.lower() != b"application/octet-stream":
        raise Malformed(
            "content_type", "Content-Type must be application/octet-stream, without parameters."
        )


def _parse_length(value: bytes | None) -> int:
    if value is None:
        raise Malformed("length_required", "Content-Length is missing; declare the exact length.")
    if not _LENGTH.fullmatch(value):
        raise Malformed(
            "malformed_length", "Content-Length must be a decimal number without sign or zeros."
        )
    return int(value)


def _parse_digest(value: bytes | None) -> str:
    if value is None or not _DIGEST.fullmatch(value):
        raise Malformed(
            "malformed_digest",
            "AHP-Content-SHA256 must be the body's SHA-256 as exactly 64 lowercase hex digits.",
        )
    return value.decode("ascii")
