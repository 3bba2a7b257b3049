"""The error envelope of UHP and the closed table of its codes (Errors sections 1 to 3).

Modules of this package raise `UhpError` with a code of the table. What the layers below raise is
translated by `translate`, in one place, so that every non-2xx under /v1 has the same five keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
from app.http.problems import MethodNotAllowed, headers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"
RATE_LIMIT = "rate_limit_error"
HARNESS = "harness_error"
SERVER = "server_error"


class CodeRow(NamedTuple):
    """What the chapter says of one code: its HTTP status and its `type`."""

    status: int
    type: str


CODES: Mapping[str, CodeRow] = {
    # Errors section 3.1: request and routing
    "unsupported_protocol_version": CodeRow(400, INVALID),
    "invalid_input": CodeRow(400, INVALID),
    "harness_not_found": CodeRow(404, INVALID),
    "response_not_found": CodeRow(404, INVALID),
    "session_not_found": CodeRow(404, INVALID),
    "file_not_found": CodeRow(404, INVALID),
    "session_expired": CodeRow(404, INVALID),
    "harness_mismatch": CodeRow(409, INVALID),
    "session_busy": CodeRow(409, INVALID),
    "file_too_large": CodeRow(413, INVALID),
    "model_unavailable": CodeRow(422, INVALID),
    "unsupported_base": CodeRow(422, INVALID),
    # section 3.2: authentication and limits
    "missing_credential": CodeRow(401, AUTHENTICATION),
    "invalid_credential": CodeRow(401, AUTHENTICATION),
    "insufficient_scope": CodeRow(403, PERMISSION),
    "rate_limited": CodeRow(429, RATE_LIMIT),
    "quota_exhausted": CodeRow(429, RATE_LIMIT),
    # section 3.3: execution, where a request and not a task fails
    "harness_unavailable": CodeRow(503, SERVER),
    "preview_unavailable": CodeRow(501, SERVER),
    "preview_failed": CodeRow(502, SERVER),
    # our own, for what the chapter does not cover
    "consignee_route_not_found": CodeRow(404, INVALID),
    "consignee_method_not_allowed": CodeRow(405, INVALID),
    "consignee_https_required": CodeRow(403, PERMISSION),
    "consignee_too_slow": CodeRow(408, INVALID),
    "consignee_conflict": CodeRow(409, INVALID),
    "consignee_idempotency_mismatch": CodeRow(409, INVALID),
    "consignee_precondition_failed": CodeRow(412, INVALID),
    "consignee_range_not_satisfiable": CodeRow(416, INVALID),
    "consignee_internal_error": CodeRow(500, SERVER),
    "consignee_unavailable": CodeRow(503, SERVER),
}


class UhpError(Refusal):
    """A refusal with a code of `CODES`.

    `param` is the dotted path of the field at fault, `detail` structured context, `headers` what
    the status asks for (Content-Range, Retry-After, ...). A code that is not in the table is a
    KeyError where it is raised, not at the client.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        detail: Mapping[str, Any] | None = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(code, message)
        self.status, self.type = CODES[code]
        self.param = param
        self.detail = detail
        self.headers = tuple(headers)


class RateLimited(UhpError):
    """Too many requests of one principal; `retry_after` in whole seconds, at least one."""

    def __init__(self, retry_after: int) -> None:
        seconds = max(1, retry_after)
        super().__init__(
            "rate_limited",
            f"Too many requests; try again in {seconds} s.",
            detail={"retry_after_ms": seconds * 1000},
            headers=[(b"retry-after", b"%d" % seconds)],
        )


def invalid_input(
    message: str, *, param: str | None = None, detail: Mapping[str, Any] | None = None
) -> UhpError:
    """The refusal for a body or a field that is not what it must be: 400 `invalid_input`."""
    return UhpError("invalid_input", message, param=param, detail=detail)


def translate(refusal: Refusal) -> UhpError:
    """What a refusal of the layers below is in UHP's words.

    Raises LookupError for a kind of refusal that nobody has given a place here; a test finds those.
    """
    if isinstance(refusal, UhpError):
        return refusal
    for kind in type(refusal).__mro__:
        if kind in _TRANSLATIONS:
            return _TRANSLATIONS[kind](refusal)
    raise LookupError(f"{type(refusal).__name__} has no place in the table")


def envelope(error: UhpError) -> bytes:
    """The body of a non-2xx (Errors section 1): all five keys, always."""
    return encode_json(
        {
            "error": {
                "type": error.type,
                "code": error.code,
                "message": error.message,
                "param": error.param,
                "detail": error.detail,
            }
        }
    )


def internal_error(request_id: str) -> UhpError:
    """An unexpected error, of which the client learns the id and nothing else (Security 8)."""
    return UhpError(
        "consignee_internal_error",
        "Something failed here; the request id names it in the log.",
        detail={"request_id": request_id},
    )


def route_not_found() -> UhpError:
    """A path that is no route."""
    return UhpError("consignee_route_not_found", "There is no such route on this server.")


def _or_else(code: str, *, unless: int) -> Callable[[Refusal], UhpError]:
    """Keep the refusal's own code where the table gives it the status `unless`, else use `code`."""

    def translated(refusal: Refusal) -> UhpError:
        row = CODES.get(refusal.code)
        own = refusal.code if row is not None and row.status == unless else code
        return UhpError(
            own,
            refusal.message,
            param=getattr(refusal, "param", None),
            detail=getattr(refusal, "detail", None),
            headers=headers_of(refusal),
        )

    return translated


def _too_large(refusal: Refusal) -> UhpError:
    limit = refusal.limit if isinstance(refusal, TooLarge) else None
    return UhpError("file_too_large", refusal.message, detail={"max_bytes": limit})


_TRANSLATIONS: Mapping[type[Refusal], Callable[[Refusal], UhpError]] = {
    Malformed: _or_else("invalid_input", unless=400),
    Unauthenticated: _or_else("invalid_credential", unless=401),
    Forbidden: _or_else("insufficient_scope", unless=403),
    NotFound: _or_else("file_not_found", unless=404),
    MethodNotAllowed: _or_else("consignee_method_not_allowed", unless=405),
    TooSlow: _or_else("consignee_too_slow", unless=408),
    Conflict: _or_else("consignee_conflict", unless=409),
    TooLarge: _too_large,
    Exhausted: _or_else("quota_exhausted", unless=429),
    QuotaExhausted: _or_else("quota_exhausted", unless=429),
    Unavailable: _or_else("consignee_unavailable", unless=503),
}
