"""The envelope, and the closed table of codes behind it."""

from __future__ import annotations

import importlib
import json

import pytest

from app.errors import (
    Conflict,
    Disconnected,
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
from app.http.problems import MethodNotAllowed
from app.uhp import errors
from app.uhp.errors import CODES, RateLimited, UhpError, envelope, translate
from tests.uhp.schema import validate

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
}

REFUSALS: list[tuple[Refusal, int, str]] = [
    (Malformed("length_mismatch", "x"), 400, "invalid_input"),
    (Malformed("invalid_input", "x", param="a.b"), 400, "invalid_input"),
    (Unauthenticated("missing_credential", "x", token_given=False), 401, "missing_credential"),
    (Unauthenticated("invalid_credential", "x", token_given=True), 401, "invalid_credential"),
    (Unauthenticated("other", "x", token_given=True), 401, "invalid_credential"),
    (Forbidden("uhp"), 403, "insufficient_scope"),
    (NotFound("session_not_found", "x"), 404, "session_not_found"),
    (NotFound("not_found", "x"), 404, "file_not_found"),
    (MethodNotAllowed("GET"), 405, "consignee_method_not_allowed"),
    (TooSlow("x"), 408, "consignee_too_slow"),
    (Conflict("session_busy", "x"), 409, "session_busy"),
    (Conflict("file_too_large", "x"), 409, "consignee_conflict"),
    (TooLarge(5), 413, "file_too_large"),
    (Exhausted(), 429, "quota_exhausted"),
    (QuotaExhausted("files", 3), 429, "quota_exhausted"),
    (Unavailable("harness_unavailable", "x"), 503, "harness_unavailable"),
    (Unavailable("not_ready", "x"), 503, "consignee_unavailable"),
    (UhpError("preview_failed", "x"), 502, "preview_failed"),
    (RateLimited(2), 429, "rate_limited"),
]


@pytest.mark.requirement("UHP-31")
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS)
def test_a_refusal_has_its_status_and_code(refusal: Refusal, status: int, code: str) -> None:
    error = translate(refusal)
    assert (error.status, error.code) == (status, code)
    assert error.message == refusal.message


@pytest.mark.requirement("UHP-31", "B19")
def test_every_kind_of_refusal_of_the_application_has_a_place() -> None:
    importlib.import_module("app.main")
    kinds = [kind for kind in below(Refusal) if kind.__module__.startswith("app.")]
    assert {Malformed, QuotaExhausted} <= set(kinds)
    for kind in kinds:
        is_placed = issubclass(kind, tuple(errors._TRANSLATIONS)) or issubclass(kind, UhpError)
        assert is_placed or kind is Disconnected, kind


def below(kind: type[Refusal]) -> list[type[Refusal]]:
    return [each for child in kind.__subclasses__() for each in (child, *below(child))]


def test_a_kind_below_a_known_one_is_that_one() -> None:
    class Unheard(NotFound):
        pass

    assert translate(Unheard("session_not_found", "x")).code == "session_not_found"
    with pytest.raises(LookupError):
        translate(Refusal("x", "x"))


@pytest.mark.requirement("UHP-31")
def test_the_table_is_what_the_chapter_says() -> None:
    for code, (status, kind) in CODES.items():
        expected = TYPES.get(status) or TYPES[500 if status >= 500 else 400]
        assert kind == expected, code
    with pytest.raises(KeyError):
        UhpError("made_up", "x")


@pytest.mark.requirement("UHP-31")
@pytest.mark.parametrize(("refusal", "status", "code"), REFUSALS)
def test_the_envelope_has_all_five_keys(refusal: Refusal, status: int, code: str) -> None:
    body = json.loads(envelope(translate(refusal)))
    assert set(body["error"]) == {"type", "code", "message", "param", "detail"}
    validate("ErrorEnvelope", body)


@pytest.mark.requirement("UHP-09")
def test_the_details_and_headers_of_a_status() -> None:
    assert translate(TooLarge(5)).detail == {"max_bytes": 5}
    assert translate(Malformed("x", "x", param="a.b")).param == "a.b"
    assert translate(MethodNotAllowed("GET", "HEAD")).headers == ((b"allow", b"GET, HEAD"),)
    assert translate(Unavailable("x", "x", retry_after=3)).headers == ((b"retry-after", b"3"),)
    assert RateLimited(0).headers == ((b"retry-after", b"1"),)
    assert RateLimited(7).detail == {"retry_after_ms": 7000}
