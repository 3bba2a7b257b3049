"""RFC 9457 problem documents: the one table from a refusal to a status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.errors import (
    Conflict,
    Exhausted,
    Forbidden,
    Malformed,
    NotFound,
    QuotaExhausted,
    Refusal,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
)
from app.http.answers import encode_json

if TYPE_CHECKING:
    from collections.abc import Mapping


class MethodNotAllowed(Refusal):
    """The route exists, the method on it does not; `allow` lists those that do."""

    def __init__(self, *allow: str) -> None:
        super().__init__("method_not_allowed", f"Use {' or '.join(allow)} here.")
        self.allow = allow


STATUSES: Mapping[type[Refusal], tuple[int, str]] = {
    Malformed: (400, "Malformed request"),
    Unauthenticated: (401, "Credential missing or invalid"),
    Forbidden: (403, "Not permitted"),
    NotFound: (404, "Not found"),
    MethodNotAllowed: (405, "Method not allowed"),
    TooSlow: (408, "Request too slow"),
    Conflict: (409, "Conflict"),
    TooLarge: (413, "Body too large"),
    Unavailable: (503, "Temporarily unavailable"),
    Exhausted: (507, "Storage exhausted"),
    QuotaExhausted: (507, "Quota exhausted"),
}


def status_of(refusal: Refusal) -> int:
    """The HTTP status of a refusal."""
    return STATUSES[type(refusal)][0]


def problem_of(refusal: Refusal) -> bytes:
    """The document of a refusal: its stable `code`, and never a part of the request."""
    status, title = STATUSES[type(refusal)]
    extra: dict[str, Any] = {}
    if isinstance(refusal, TooLarge):
        extra["max_bytes"] = refusal.limit
    if isinstance(refusal, Forbidden):
        extra["permission"] = refusal.permission
    return problem(status, title, refusal.code, refusal.message, **extra)


def headers_of(refusal: Refusal) -> list[tuple[bytes, bytes]]:
    """The headers that belong to a refusal's status, apart from the challenge of a 401 or 403."""
    if isinstance(refusal, MethodNotAllowed):
        return [(b"allow", ", ".join(refusal.allow).encode("ascii"))]
    if isinstance(refusal, Unavailable):
        return [(b"retry-after", b"%d" % refusal.retry_after)]
    return []


def problem(status: int, title: str, code: str, detail: str, **extra: Any) -> bytes:
    """A problem document; `type` stays `about:blank`, `code` tells the kinds apart."""
    return encode_json(
        {
            "type": "about:blank",
            "title": title,
            "status": status,
            "code": code,
            "detail": detail,
            **extra,
        }
    )
