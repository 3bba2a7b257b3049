"""Which bytes of a representation a request asks for (RFC 9110 section 14). Pure, no I/O.

A Range that is malformed, of another unit, or asks for more than MAX_RANGES pieces is ignored, as
the RFC allows: the answer is then the whole representation. What never happens is a 206 with a
backwards or wrong range (B43, B44, B45).
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_RANGES = 16
"""Pieces of one request; a download manager asks for few, an attack for thousands."""

_MAX_DIGITS = 18
"""Longer numbers are beyond every file: they are cut to one that is, before they cost anything."""

_BEYOND = 10**_MAX_DIGITS
_SPECIFIER = re.compile(r"bytes=(?P<set>[0-9, \t-]*)", re.IGNORECASE)
_PIECE = re.compile(r"(?P<first>[0-9]*)-(?P<last>[0-9]*)")


class RangeNotSatisfiable(Exception):
    """No byte of the range exists; `size` is the length of the representation in bytes."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Span(NamedTuple):
    """The bytes `[start, stop)`; never empty."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Bytes in it."""
        return self.stop - self.start


def requested_spans(value: str, size: int) -> tuple[Span, ...]:
    """The spans of a representation of `size` bytes that the Range header `value` asks for.

    Empty when the header is to be ignored. Spans that overlap or touch are one, at the place of
    the first of them; those that exist nowhere are left out. Raises RangeNotSatisfiable when that
    leaves none.
    """
    pieces = _pieces(value)
    if not pieces:
        return ()
    spans = [span for piece in pieces if (span := _resolve(*piece, size))]
    if not spans:
        raise RangeNotSatisfiable(size)
    return tuple(_coalesce(spans))


def _pieces(value: str) -> list[tuple[int | None, int | None]]:
    """Each piece as (first, last); (None, n) is a suffix. Empty for what is to be ignored."""
    specifier = _SPECIFIER.fullmatch(value.strip(" \t"))
    if specifier is None:
        return []
    listed = [text for item in specifier["set"].split(",") if (text := item.strip(" \t"))]
    if len(listed) > MAX_RANGES:
        return []
    pieces = [_piece(text) for text in listed]
    return [piece for piece in pieces if piece is not None] if None not in pieces else []


def _piece(text: str) -> tuple[int | None, int | None] | None:
    match = _PIECE.fullmatch(text)
    if match is None:
        return None
    first, last = _number(match["first"]), _number(match["last"])
    if first is None and last is None:
        return None
    if first is not None and last is not None and last < first:
        return None
    return first, last


def _number(digits: str) -> int | None:
    if not digits:
        return None
    significant = digits.lstrip("0") or "0"
    return int(significant) if len(significant) <= _MAX_DIGITS else _BEYOND


def _resolve(first: int | None, last: int | None, size: int) -> Span | None:
    if first is None:
        start, stop = max(size - (last or 0), 0), size
    else:
        start, stop = first, size if last is None else min(last + 1, size)
    return Span(start, stop) if start < stop else None


def _coalesce(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for span in spans:
        touching = [m for m in merged if span.start <= m.stop and m.start <= span.stop]
        if not touching:
            merged.append(span)
            continue
        place = merged.index(touching[0])
        whole = Span(
            min(span.start, *(m.start for m in touching)),
            max(span.stop, *(m.stop for m in touching)),
        )
        merged = [m for m in merged if m not in touching]
        merged.insert(place, whole)
    return merged
