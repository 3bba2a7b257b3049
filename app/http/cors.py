"""Pages of other origins that may call the API from a browser: listed ones only (off by default).

What is allowed is the bearer token that a page's script sends itself; cookies never are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope

Headers = list[tuple[bytes, bytes]]

PREFLIGHT_SECONDS = 600
"""How long a browser may remember what a preflight said."""

_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_REQUEST_HEADERS = (
    b"authorization, content-type, uhp-version, idempotency-key, last-event-id, range, if-range, "
    b"if-none-match, ahp-content-sha256"
)
_ANSWER_HEADERS = (
    b"uhp-version, x-request-id, retry-after, content-disposition, content-length, content-range, "
    b"accept-ranges, etag, repr-digest"
)


class CrossOrigin:
    """What the pages of `origins` (exact, as browsers send them) are told."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode("ascii") for origin in origins)

    def headers(self, scope: Scope) -> Headers:
        """What an answer to the request `scope` says beside its own headers."""
        if not self._origins:
            return []
        origin = _header(scope, b"origin")
        if origin not in self._origins:
            return [(b"vary", b"origin")]
        return [
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", _ANSWER_HEADERS),
        ]

    def preflight(self, scope: Scope) -> Headers | None:
        """The headers that answer a preflight, None when the request is none of a listed origin."""
        asked = _header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or not asked or not self._allows(scope):
            return None
        return [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", _REQUEST_HEADERS),
            (b"access-control-max-age", b"%d" % PREFLIGHT_SECONDS),
        ]

    def _allows(self, scope: Scope) -> bool:
        return _header(scope, b"origin") in self._origins


def _header(scope: Scope, wanted: bytes) -> bytes:
    return next((value for name, value in scope["headers"] if name == wanted), b"")
