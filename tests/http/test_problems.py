"""Every refusal has a status and a document."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from app.errors import (
    Conflict,
    Disconnected,
    Exhausted,
    Forbidden,
    Malformed,
    NotFound,
    Refusal,
    TooLarge,
    TooSlow,
    Unauthenticated,
    Unavailable,
)
from app.http.problems import STATUSES, MethodNotAllowed, headers_of, problem_of, status_of

EXAMPLES: dict[int, Refusal] = {
    400: Malformed("content_type", "text", param="file"),
    401: Unauthenticated("missing_credential", "text", token_given=False),
    403: Forbidden("ahp.upload"),
    404: NotFound("route_not_found", "text"),
    405: MethodNotAllowed("GET", "HEAD"),
    408: TooSlow("text"),
    409: Conflict("conflict", "text"),
    413: TooLarge(7),
    503: Unavailable("not_ready", "text", retry_after=9),
    507: Exhausted(),
}


def kinds(of: type[Refusal] = Refusal) -> Iterator[type[Refusal]]:
    for kind in of.__subclasses__():
        yield kind
        yield from kinds(kind)


@pytest.mark.requirement("AHP-R28", "AHP-R33", "B19")
def test_every_refusal_has_a_status() -> None:
    """Disconnected has none: nobody is left to answer."""
    ours = ("app.errors", "app.http.problems")
    assert {kind for kind in kinds() if kind.__module__ in ours} == {
        *STATUSES,
        Disconnected,
    }


@pytest.mark.requirement("B19")
@pytest.mark.parametrize("status", EXAMPLES)
def test_a_document_tells_what_was_wrong(status: int) -> None:
    refusal = EXAMPLES[status]
    document = json.loads(problem_of(refusal))
    assert status_of(refusal) == document["status"] == status
    assert document["type"] == "about:blank"
    assert document["title"]
    assert document["code"] == refusal.code
    assert document["detail"] == refusal.message


def test_a_document_holds_the_figures_of_its_refusal() -> None:
    assert json.loads(problem_of(EXAMPLES[413]))["max_bytes"] == 7
    assert json.loads(problem_of(EXAMPLES[403]))["permission"] == "ahp.upload"


@pytest.mark.requirement("AHP-R15", "B19")
def test_headers_of_a_status() -> None:
    assert headers_of(EXAMPLES[405]) == [(b"allow", b"GET, HEAD")]
    assert headers_of(EXAMPLES[503]) == [(b"retry-after", b"9")]
    assert headers_of(EXAMPLES[400]) == []
