"""What an agent writes to standard output, as events. Pure: bytes in, events out.

`text` is the answer itself. `jsonl` is one JSON object a line:

    {"type": "text", "text": "…"}                 {"type": "reasoning", "text": "…"}
    {"type": "tool_call", "call_id": "1", "name": "read_file", "arguments": {"path": "a.txt"}}
    {"type": "tool_result", "call_id": "1", "output": "…"}
    {"type": "usage", "input_tokens": 12, "output_tokens": 34}
    {"type": "notice", "code": "slow_network", "message": "…"}

`arguments` and `output` may be text or any JSON value; `usage` may have `cache_read_tokens` and
`cache_write_tokens`. A line that is none of these is one notice and nothing worse.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from app.harness.base import (
    HarnessEvent,
    Notice,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolResult,
    Usage,
)

MAX_LINE_BYTES = 1024 * 1024
"""The longest line of `jsonl` that is read; longer ones are left out with a notice."""

MAX_BAD_LINES = 20
"""Bad lines that are told one by one; of further ones nothing is said."""

_NO_TEXT = re.compile("[\x00\ud800-\udfff]")

Fields = Mapping[str, Any]


class Output(Protocol):
    """A way of reading standard output."""

    def take(self, data: bytes) -> Iterator[HarnessEvent]:
        """The events that end within `data`."""
        ...

    def close(self) -> Iterator[HarnessEvent]:
        """The events that the end of the output completes."""
        ...


class TextOutput:
    """Everything is the answer; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, data: bytes) -> Iterator[HarnessEvent]:
        return self._decoded(data, final=False)

    def close(self) -> Iterator[HarnessEvent]:
        return self._decoded(b"", final=True)

    def _decoded(self, data: bytes, *, final: bool) -> Iterator[HarnessEvent]:
        if text := plain(self._decoder.decode(data, final)):
            yield TextDelta(text)


class LinesOutput:
    """JSON lines, of which each is one event."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_skipping = False
        self._number = 0
        self._bad = 0

    def take(self, data: bytes) -> Iterator[HarnessEvent]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield from self._line(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._is_skipping = True
        if self._is_skipping:
            self._rest = b""

    def close(self) -> Iterator[HarnessEvent]:
        rest, self._rest = self._rest, b""
        if rest or self._is_skipping:
            yield from self._line(rest)

    def _line(self, line: bytes) -> Iterator[HarnessEvent]:
        self._number += 1
        was_skipping, self._is_skipping = self._is_skipping, False
        if was_skipping or len(line) > MAX_LINE_BYTES:
            yield from self._notice(f"is longer than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            yield from self._event(line)

    def _event(self, line: bytes) -> Iterator[HarnessEvent]:
        try:
            yield event_of(json.loads(line))
        except (ValueError, RecursionError):  # also what is not UTF-8
            yield from self._notice("is not an event")

    def _notice(self, fault: str) -> Iterator[HarnessEvent]:
        self._bad += 1
        if self._bad <= MAX_BAD_LINES:
            message = f"Line {self._number} of the harness's output {fault} and was left out."
            yield Notice("harness_output", message)


def event_of(line: object) -> HarnessEvent:
    """The event that one line says. Raises ValueError."""
    if not isinstance(line, dict):
        raise ValueError("not an object")  # noqa: TRY004 - one error for every bad line
    kind = line.get("type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError("no known type")
    return _READERS[kind](line)


def plain(text: str) -> str:
    """`text` without what no JSON and no database takes: NUL and lone surrogates."""
    return _NO_TEXT.sub("\ufffd", text)


def _text(line: Fields, name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not text")  # noqa: TRY004
    return plain(value)


def _text_or_json(line: Fields, name: str) -> str:
    value = line.get(name)
    return plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _count(line: Fields, name: str) -> int:
    value = line.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is not a count")
    return value


def _count_if_there(line: Fields, name: str) -> int | None:
    return None if line.get(name) is None else _count(line, name)


def _usage(line: Fields) -> Usage:
    return Usage(
        _count(line, "input_tokens"),
        _count(line, "output_tokens"),
        _count_if_there(line, "cache_read_tokens"),
        _count_if_there(line, "cache_write_tokens"),
    )


def _tool_call(line: Fields) -> ToolCall:
    arguments = _text_or_json(line, "arguments") if "arguments" in line else "{}"
    return ToolCall(_text(line, "call_id"), _text(line, "name"), arguments)


_READERS: Mapping[str, Callable[[Fields], HarnessEvent]] = {
    "text": lambda line: TextDelta(_text(line, "text")),
    "reasoning": lambda line: ReasoningDelta(_text(line, "text")),
    "tool_call": _tool_call,
    "tool_result": lambda line: ToolResult(_text(line, "call_id"), _text_or_json(line, "output")),
    "usage": _usage,
    "notice": lambda line: Notice(_text(line, "code"), _text(line, "message")),
}
