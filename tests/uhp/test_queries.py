"""Query parameters: each once, of its type, within its bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.uhp.errors import UhpError
from app.uhp.queries import MAX_FIELDS, Query


def limit_of(raw: bytes) -> int:
    return Query(raw).integer("limit", default=20, least=1, most=100)


def test_what_is_given_and_what_is_not() -> None:
    query = Query(b"limit=5&cursor=a%2Bb+c&empty=&stream=true&other=1")
    assert query.integer("limit", default=20, least=1, most=100) == 5
    assert query.text("cursor") == "a+b c"
    assert query.text("empty") == ""
    assert query.flag("stream") is True
    assert query.text("missing") is None
    assert query.flag("missing") is False
    assert limit_of(b"") == 20


@pytest.mark.parametrize("value", [b"1", b"true"])
def test_true(value: bytes) -> None:
    assert Query(b"stream=" + value).flag("stream") is True


@pytest.mark.parametrize("value", [b"0", b"false"])
def test_false(value: bytes) -> None:
    assert Query(b"stream=" + value).flag("stream") is False


@pytest.mark.parametrize(
    "value", [b"0", b"101", b"-1", b"1.0", b"1e1", b"", b"abc", b"9" * 400, b"%D9%A1", b"1&limit=2"]
)
def test_a_number_that_is_none_names_itself(value: bytes) -> None:
    with pytest.raises(UhpError) as caught:
        limit_of(b"limit=" + value)
    assert (caught.value.code, caught.value.param) == ("invalid_input", "limit")


@pytest.mark.parametrize(
    ("raw", "ask"),
    [
        (b"stream=yes", lambda query: query.flag("stream")),
        (b"cursor=a&cursor=a", lambda query: query.text("cursor")),
        (b"cursor=%ff", lambda query: query.text("cursor")),
        (b"cursor=\xff", lambda query: query.text("cursor")),
        (b"a&" * (MAX_FIELDS + 1), lambda query: query.text("cursor")),
    ],
)
def test_a_broken_query_is_refused_when_it_is_asked(
    raw: bytes, ask: Callable[[Query], Any]
) -> None:
    query = Query(raw)
    with pytest.raises(UhpError):
        ask(query)
