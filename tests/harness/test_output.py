"""Standard output as events: any split of the same bytes gives the same, nothing is fatal."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.harness.base import (
    HarnessEvent,
    Notice,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolResult,
    Usage,
)
from app.harness.output import MAX_BAD_LINES, MAX_LINE_BYTES, LinesOutput, Output, TextOutput


def _events(output: Output, *pieces: bytes) -> list[HarnessEvent]:
    said = [event for piece in pieces for event in output.take(piece)]
    return said + list(output.close())


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(ends)]


def _lines(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=8))
def test_text_is_the_same_however_it_is_split(data: bytes, cuts: list[int]) -> None:
    said = _events(TextOutput(), *_split(data, cuts))
    text = "".join(event.text for event in said if isinstance(event, TextDelta))
    assert text == data.decode("utf-8", "replace").replace("\0", "\ufffd")
    assert all(isinstance(event, TextDelta) and event.text for event in said)


@given(st.lists(st.integers(0, 400), max_size=8))
def test_events_are_the_same_however_they_are_split(cuts: list[int]) -> None:
    data = (
        _lines({"type": "text", "text": "报告 🚀"}, {"type": "reasoning", "text": "hm"}) + b"bad\n"
    )
    data += _lines({"type": "text", "text": "no line end"}).rstrip()
    assert _events(LinesOutput(), *_split(data, cuts)) == [
        TextDelta("报告 🚀"),
        ReasoningDelta("hm"),
        Notice(
            "harness_output", "Line 3 of the harness's output is not an event and was left out."
        ),
        TextDelta("no line end"),
    ]


@pytest.mark.parametrize(
    ("line", "event"),
    [
        ({"type": "text", "text": "a\ud800\0b"}, TextDelta("a\ufffd\ufffdb")),
        ({"type": "tool_call", "call_id": "1", "name": "x"}, ToolCall("1", "x", "{}")),
        (
            {"type": "tool_call", "call_id": "1", "name": "x", "arguments": '{"a": 1}'},
            ToolCall("1", "x", '{"a": 1}'),
        ),
        (
            {"type": "tool_call", "call_id": "1", "name": "x", "arguments": {"a": "é"}},
            ToolCall("1", "x", '{"a": "é"}'),
        ),
        ({"type": "tool_result", "call_id": "1", "output": "done"}, ToolResult("1", "done")),
        ({"type": "tool_result", "call_id": "1", "output": [1]}, ToolResult("1", "[1]")),
        ({"type": "tool_result", "call_id": "1"}, ToolResult("1", "null")),
        ({"type": "usage", "input_tokens": 1, "output_tokens": 0}, Usage(1, 0)),
        (
            {
                "type": "usage",
                "input_tokens": 1,
                "output_tokens": 2,
                "cache_read_tokens": 3,
                "cache_write_tokens": 4,
            },
            Usage(1, 2, 3, 4),
        ),
        ({"type": "notice", "code": "c", "message": "m"}, Notice("c", "m")),
    ],
)
def test_each_kind_of_line_is_an_event(line: object, event: HarnessEvent) -> None:
    assert _events(LinesOutput(), _lines(line)) == [event]


@pytest.mark.parametrize(
    "line",
    [
        b"plain words",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"type": "unknown"}',
        b'{"type": ["text"]}',
        b'{"type": "text"}',
        b'{"type": "text", "text": 1}',
        b'{"type": "tool_call", "name": "x"}',
        b'{"type": "usage", "input_tokens": true, "output_tokens": 1}',
        b'{"type": "usage", "input_tokens": -1, "output_tokens": 1}',
        b'{"type": "usage", "input_tokens": 1.5, "output_tokens": 1}',
        b"[" * 100_000,
        b'{"type": "usage", "input_tokens": ' + b"9" * 5000 + b', "output_tokens": 1}',
    ],
)
def test_a_bad_line_is_a_notice(line: bytes) -> None:
    [event] = _events(LinesOutput(), line + b"\n")
    assert isinstance(event, Notice)
    assert event.message.startswith("Line 1 ")


def test_an_empty_line_is_nothing() -> None:
    assert _events(LinesOutput(), b"\n \r\n\n") == []


def test_a_line_without_end_is_left_out_with_a_notice_and_not_kept() -> None:
    output = LinesOutput()
    piece = b"x" * 65536
    said = [event for _ in range(100) for event in output.take(piece)]
    assert said == []
    assert len(output._rest) <= MAX_LINE_BYTES + len(piece)
    said = list(output.take(b"end\n" + _lines({"type": "text", "text": "next"})))
    assert [type(event) for event in said] == [Notice, TextDelta]
    assert isinstance(said[0], Notice)
    assert f"longer than {MAX_LINE_BYTES} bytes" in said[0].message


def test_an_endless_last_line_is_told_at_the_end() -> None:
    output = LinesOutput()
    assert list(output.take(b"x" * (MAX_LINE_BYTES + 1))) == []
    assert [type(event) for event in output.close()] == [Notice]


def test_a_whole_long_line_is_left_out() -> None:
    line = _lines({"type": "text", "text": "x" * MAX_LINE_BYTES})
    assert [type(event) for event in _events(LinesOutput(), line)] == [Notice]


def test_notices_about_bad_lines_end() -> None:
    said = _events(LinesOutput(), b"bad\n" * 1000 + _lines({"type": "text", "text": "good"}))
    assert len(said) == MAX_BAD_LINES + 1
    assert said[-1] == TextDelta("good")
