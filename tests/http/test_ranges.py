"""Which bytes a Range header asks for: RFC 9110 section 14, and what users of others ran into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.ranges import MAX_RANGES, RangeNotSatisfiable, Span, requested_spans


@pytest.mark.requirement("B44")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=-1000", (0, 100)),
        ("bytes=0-", (0, 100)),
        ("bytes=99-", (99, 100)),
        ("bytes=0-999", (0, 100)),
        ("bytes=0-0", (0, 1)),
        ("bytes=-1", (99, 100)),
        ("BYTES=5-9", (5, 10)),
        (" bytes=5-9\t", (5, 10)),
        ("bytes=, 5-9 ,", (5, 10)),
        ("bytes=000000000000000000000000005-9", (5, 10)),
        ("bytes=5-" + "9" * 30, (5, 100)),
        ("bytes=-" + "9" * 4000, (0, 100)),
    ],
)
def test_one_range(value: str, expected: tuple[int, int]) -> None:
    assert requested_spans(value, 100) == (Span(*expected),)


@pytest.mark.requirement("B44", "B10")
@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("bytes=100-", 100),
        ("bytes=-0", 100),
        ("bytes=" + "9" * 30 + "-", 100),
        ("bytes=200-300,100-", 100),
        ("bytes=0-", 0),
        ("bytes=-5", 0),
    ],
)
def test_a_range_that_exists_nowhere_is_not_satisfiable(value: str, size: int) -> None:
    with pytest.raises(RangeNotSatisfiable) as refused:
        requested_spans(value, size)
    assert refused.value.size == size


@pytest.mark.requirement("B43")
@pytest.mark.parametrize(
    "value",
    [
        "",
        "bytes",
        "bytes=",
        "bytes=,",
        "bytes=-",
        "bytes=5-4",
        "bytes=10-5",
        "bytes=abc",
        "bytes=--1",
        "bytes=0-5;x",
        "bytes=0-1,5-4",
        "bytes=0-1, x",
        "bytes = 0-1",
        "bytes=0 - 1",
        "bytes=0x1-2",
        "bytes=\u0661-\u0662",
        "bytes=1-2-3",
        "bytes=+1-2",
        "items=0-1",
        "bytes=0-1, bytes=4-5",
        "bytes=" + "0-0," * MAX_RANGES + "5-6",
    ],
)
def test_what_is_malformed_or_unknown_is_ignored(value: str) -> None:
    assert requested_spans(value, 100) == ()


@pytest.mark.requirement("B45")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("bytes=0-1,4-5", [(0, 2), (4, 6)]),
        ("bytes=4-5,0-1", [(4, 6), (0, 2)]),
        ("bytes=0-1,500-,4-5", [(0, 2), (4, 6)]),
        ("bytes=0-9,5-14", [(0, 15)]),
        ("bytes=0-4,5-9", [(0, 10)]),
        ("bytes=0-1,8-9,1-8", [(0, 10)]),
        ("bytes=50-59,0-1,55-69,1-2", [(50, 70), (0, 3)]),
        ("bytes=0-0,0-0,0-0", [(0, 1)]),
    ],
)
def test_several_ranges_keep_their_order_and_never_overlap(
    value: str, expected: list[tuple[int, int]]
) -> None:
    assert requested_spans(value, 100) == tuple(Span(*pair) for pair in expected)


_positions = st.one_of(st.none(), st.integers(0, 300))


@given(
    pieces=st.lists(st.tuples(_positions, _positions), min_size=1, max_size=MAX_RANGES),
    size=st.integers(0, 200),
)
def test_spans_are_exactly_the_bytes_that_were_asked_for(
    pieces: list[tuple[int | None, int | None]], size: int
) -> None:
    value = "bytes=" + ",".join(
        f"{'' if first is None else first}-{'' if last is None else last}" for first, last in pieces
    )
    valid = all(
        not (first is None and last is None)
        and not (first is not None and last is not None and last < first)
        for first, last in pieces
    )
    wanted: set[int] = set()
    for first, last in pieces if valid else []:
        if first is None:
            wanted.update(range(max(size - (last or 0), 0), size))
        else:
            wanted.update(range(first, size if last is None else min(last + 1, size)))
    try:
        spans = requested_spans(value, size)
    except RangeNotSatisfiable:
        assert valid
        assert not wanted
        return
    assert [offset for span in spans for offset in range(*span)] == sorted(
        wanted, key=lambda offset: _place(offset, spans)
    )
    assert all(0 <= span.start < span.stop <= size for span in spans)


def _place(offset: int, spans: tuple[Span, ...]) -> tuple[int, int]:
    return next(
        (index, offset) for index, span in enumerate(spans) if span.start <= offset < span.stop
    )


@given(value=st.text(alphabet="bytes=-,0123456789 x;\t", max_size=40), size=st.integers(0, 50))
def test_no_header_ever_gives_a_wrong_span(value: str, size: int) -> None:
    try:
        spans = requested_spans(value, size)
    except RangeNotSatisfiable:
        return
    assert all(0 <= span.start < span.stop <= size for span in spans)
    assert sum(span.length for span in spans) <= size
