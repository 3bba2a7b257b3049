"""What a harness tells, as the events of the Streaming chapter and as the response they add up to.

One object assembles both, so a streamed task and a blocking one give the same `output` by
construction (Streaming section 6). Events carry gapless sequence numbers from 0 (S-04); the first
is `response.created`, the last is the one terminal event, which carries the whole response.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from app.harness.base import (
    HarnessEvent,
    Notice,
    ReasoningDelta,
    TextDelta,
    ToolCall,
    ToolResult,
    Usage,
)

TERMINAL_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
}
"""A cancelled task ends with `response.failed`; its status is what counts (Streaming section 4)."""

KEEP_ALIVE = b": keep-alive\n\n"

CITED_CHARACTERS = 16 * 1024
"""How much of the end of a text is searched for the names of artifacts: there can be thousands of
them, and a text can be very long."""

NAMED_FILES = 20
"""Artifacts that are named in the text where the assistant said nothing itself."""

Item = dict[str, Any]
Event = tuple[int, str]
"""A sequence number, and the JSON of the event, which begins with its type and that number."""

_HEAD = re.compile(r'\{"type":"(?P<kind>[a-z_.]+)","sequence_number":(?P<number>[0-9]+)')


@dataclass(frozen=True, slots=True)
class Citation:
    """An artifact as the assistant message names it (UHP-12)."""

    container_id: str
    file_id: str
    filename: str
    download_url: str


def frame(sequence_number: int, payload: str) -> bytes:
    """One event as Server-Sent Events sends it; the id is what `Last-Event-ID` gives back."""
    kind = _head_of(payload)["kind"]
    return f"id: {sequence_number}\nevent: {kind}\ndata: {payload}\n\n".encode("ascii")


def renumbered(payload: str, number: int) -> str:
    """The same event in another stream, in which it has another number."""
    head = _head_of(payload)
    return f"{payload[: head.start('number')]}{number}{payload[head.end('number') :]}"


def _head_of(payload: str) -> re.Match[str]:
    head = _HEAD.match(payload)
    if head is None:
        raise ValueError("an event begins with its type and its number")
    return head


def event_of(number: int, kind: str, **fields: Any) -> Event:
    """An event of the type `kind`."""
    event = {"type": kind, "sequence_number": number, **fields}
    return number, json.dumps(event, separators=(",", ":"))


def ending(number: int, response: dict[str, Any]) -> Event:
    """The terminal event of a terminal response."""
    return event_of(number, TERMINAL_EVENTS[response["status"]], response=response)


def condensed(response: dict[str, Any], after: int) -> list[Event]:
    """A terminal response as the shortest stream behind `after`.

    For when its events are kept no longer: who begins anew gets a whole stream of two, who resumes
    gets the terminal event, which carries everything.
    """
    if after >= 0:
        return [ending(after + 1, response)]
    started = {**response, "status": "in_progress", "output": [], "error": None, "usage": None}
    return [event_of(0, "response.created", response=started), ending(1, response)]


class Transcript:
    """The response as it grows. Every method returns the events that it makes.

    The text of an item that is still open is in pieces; it is whole in the response once the item
    is closed. Taking in a long text so costs what it is long, and not its square.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._sequence = 0
        self._open: _OpenText | _OpenReasoning | None = None

    @property
    def _output(self) -> list[Item]:
        output: list[Item] = self.response["output"]
        return output

    def replay(self, payloads: Iterable[str]) -> None:
        """Take in kept events of a task whose response is as it began."""
        for payload in payloads:
            self._replay(json.loads(payload))

    def _replay(self, event: dict[str, Any]) -> None:
        self._sequence = event["sequence_number"] + 1
        match event["type"]:
            case "response.output_item.added":
                self._output.append(event["item"])
            case "response.output_item.done":
                self._output[event["output_index"]] = event["item"]
                self._open = None
            case "response.content_part.added":
                self._open = _OpenText.again(self._output, event)
            case "response.reasoning_summary_part.added":
                self._open = _OpenReasoning.again(self._output, event)
            case "response.output_text.delta" | "response.reasoning_summary_text.delta":
                if self._open is not None:
                    self._open.pieces.append(event["delta"])

    @property
    def has_begun(self) -> bool:
        """Whether there is any event yet."""
        return self._sequence > 0

    def begin(self) -> list[Event]:
        """The task was accepted, and work has started."""
        return [
            self._event("response.created", response=self.response),
            self._event("response.in_progress", response=self.response),
        ]

    def take(self, event: HarnessEvent) -> list[Event]:
        """What one thing that the harness tells adds."""
        match event:
            case TextDelta():
                return self._text(event.text) if event.text else []
            case ReasoningDelta():
                return self._reasoning(event.text) if event.text else []
            case ToolCall():
                return [*self._close(), *self._tool_call(event)]
            case ToolResult():
                return [*self._close(), *self._tool_result(event)]
            case Usage():
                self.response["usage"] = _usage(event)
                return []
            case Notice():
                return [self.notice(event.code, event.message)]

    def notice(self, code: str, message: str) -> Event:
        """An error that does not end the task (Streaming section 2.6)."""
        return self._event("error", code=code, message=message, param=None)

    def end(
        self,
        status: str,
        citations: Sequence[Citation] = (),
        *,
        error: dict[str, Any] | None = None,
        incomplete_reason: str | None = None,
    ) -> list[Event]:
        """Close what is open, cite the artifacts, and bring the response to its terminal state."""
        events = self._cite(citations)
        events += self._close("completed" if status == "completed" else "incomplete")
        self.response["status"] = status
        self.response["error"] = error
        if incomplete_reason is not None:
            self.response["incomplete_details"] = {"reason": incomplete_reason}
        return [*events, self._ending()]

    def ended_as(self, event: Event, response: dict[str, Any]) -> Event:
        """The terminal event `event`, with what somebody else made of the response meanwhile."""
        self.response = response
        return ending(event[0], response)

    def _text(self, text: str) -> list[Event]:
        events = []
        if not isinstance(self._open, _OpenText):
            events += [*self._close(), *self._open_text()]
        assert isinstance(self._open, _OpenText)
        self._open.pieces.append(text)
        return [*events, self._event("response.output_text.delta", **self._open.place, delta=text)]

    def _open_text(self) -> list[Event]:
        part: Item = {"type": "output_text", "text": "", "annotations": []}
        item: Item = {
            "id": _item_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        added = self._add(item)
        self._open = _OpenText(item, part, len(self._output) - 1)
        opened = self._event("response.content_part.added", **self._open.place, part=part)
        item["content"] = [part]
        return [added, opened]

    def _reasoning(self, text: str) -> list[Event]:
        events = []
        if not isinstance(self._open, _OpenReasoning):
            events += [*self._close(), *self._open_reasoning()]
        assert isinstance(self._open, _OpenReasoning)
        self._open.pieces.append(text)
        kind = "response.reasoning_summary_text.delta"
        return [*events, self._event(kind, **self._open.place, delta=text)]

    def _open_reasoning(self) -> list[Event]:
        part: Item = {"type": "summary_text", "text": ""}
        item: Item = {
            "id": _item_id("rs"),
            "type": "reasoning",
            "summary": [],
            "status": "in_progress",
        }
        added = self._add(item)
        self._open = _OpenReasoning(item, part, len(self._output) - 1)
        kind = "response.reasoning_summary_part.added"
        opened = self._event(kind, **self._open.place, part=part)
        item["summary"] = [part]
        return [added, opened]

    def _close(self, status: str = "completed") -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        opened.item["status"] = status
        opened.join()
        place, part = opened.place, opened.part
        if isinstance(opened, _OpenText):
            closing = [
                self._event("response.output_text.done", **place, text=part["text"]),
                *self._annotations(opened),
                self._event("response.content_part.done", **place, part=part),
            ]
        else:
            closing = [self._event("response.reasoning_summary_part.done", **place, part=part)]
        return [*closing, self._done(opened.item, opened.index)]

    def _annotations(self, opened: _OpenText) -> Iterable[Event]:
        for index, annotation in enumerate(opened.part["annotations"]):
            yield self._event(
                "response.output_text.annotation.added",
                **opened.place,
                annotation_index=index,
                annotation=annotation,
            )

    def _cite(self, citations: Sequence[Citation]) -> list[Event]:
        if not citations:
            return []
        events: list[Event] = []
        if not isinstance(self._open, _OpenText):
            names = ", ".join(citation.filename for citation in citations[:NAMED_FILES])
            more = " and more" if len(citations) > NAMED_FILES else ""
            events = self._text(f"Files: {names}{more}.")
        assert isinstance(self._open, _OpenText)
        text = self._open.join()
        self._open.part["annotations"] = [_annotation(citation, text) for citation in citations]
        return events

    def _tool_call(self, call: ToolCall) -> list[Event]:
        item: Item = {
            "id": _item_id("fc"),
            "type": "function_call",
            "call_id": call.call_id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        added = self._add(item)
        index = len(self._output) - 1
        place = {"item_id": item["id"], "output_index": index}
        item |= {"arguments": call.arguments, "status": "completed"}
        return [
            added,
            self._event("response.function_call_arguments.delta", **place, delta=call.arguments),
            self._event("response.function_call_arguments.done", **place, arguments=call.arguments),
            self._done(item, index),
        ]

    def _tool_result(self, result: ToolResult) -> list[Event]:
        item: Item = {
            "id": _item_id("fco"),
            "type": "function_call_output",
            "call_id": result.call_id,
            "output": result.output,
            "status": "completed",
        }
        added = self._add(item)
        return [added, self._done(item, len(self._output) - 1)]

    def _add(self, item: Item) -> Event:
        self._output.append(item)
        index = len(self._output) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _done(self, item: Item, index: int) -> Event:
        return self._event("response.output_item.done", output_index=index, item=item)

    def _ending(self) -> Event:
        return self._event(TERMINAL_EVENTS[self.response["status"]], response=self.response)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._sequence = self._sequence, self._sequence + 1
        return event_of(number, kind, **fields)


@dataclass(slots=True)
class _Open:
    """The item that grows, and its one part; `index` is the item's place in the output."""

    parts: ClassVar[str]
    part_index: ClassVar[str]

    item: Item
    part: dict[str, Any]
    index: int
    pieces: list[str] = field(default_factory=list)

    @classmethod
    def again(cls, output: list[Item], event: dict[str, Any]) -> Self:
        """The item whose part `event` tells of, with that part."""
        item, part = output[event["output_index"]], event["part"]
        item[cls.parts] = [part]
        return cls(item, part, event["output_index"])

    @property
    def place(self) -> dict[str, Any]:
        """What every event about the part says of where it is."""
        return {"item_id": self.item["id"], "output_index": self.index, self.part_index: 0}

    def join(self) -> str:
        """The text so far, which is in the part from here on."""
        self.part["text"] = text = "".join(self.pieces)
        self.pieces = [text]
        return text


class _OpenText(_Open):
    parts = "content"
    part_index = "content_index"


class _OpenReasoning(_Open):
    parts = "summary"
    part_index = "summary_index"


def _item_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def _usage(event: Usage) -> dict[str, int]:
    usage = {
        "input_tokens": event.input_tokens,
        "output_tokens": event.output_tokens,
        "total_tokens": event.input_tokens + event.output_tokens,
    }
    if event.cache_read_tokens is not None:
        usage["cache_read_tokens"] = event.cache_read_tokens
    if event.cache_write_tokens is not None:
        usage["cache_write_tokens"] = event.cache_write_tokens
    return usage


def _annotation(citation: Citation, text: str) -> dict[str, Any]:
    """Where the end of the text names the file, that place; else the whole of it (UHP-13)."""
    start = text.find(citation.filename, max(0, len(text) - CITED_CHARACTERS))
    stop = start + len(citation.filename)
    if start < 0:
        start, stop = 0, len(text)
    return {
        "type": "container_file_citation",
        "container_id": citation.container_id,
        "file_id": citation.file_id,
        "filename": citation.filename,
        "download_url": citation.download_url,
        "start_index": start,
        "end_index": stop,
    }
