"""What a harness tells, as events and as the response that they add up to."""

from __future__ import annotations

import json
from typing import Any

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
from app.uhp.streaming import (
    CITED_CHARACTERS,
    Citation,
    Event,
    Transcript,
    condensed,
    frame,
    renumbered,
)
from tests.uhp.schema import validate

CITATION = Citation("cntr_1", "file_1", "report.md", "https://x.example/v1/containers/c/files/f")
ANSWER: list[HarnessEvent] = [
    ReasoningDelta("Think"),
    ReasoningDelta("ing."),
    TextDelta("First "),
    TextDelta("text."),
    ToolCall("call_1", "read", '{"a":1}'),
    ToolResult("call_1", "out"),
    TextDelta("Here is report.md."),
    Notice("provider_error", "Hm."),
    Usage(1, 2, cache_read_tokens=3, cache_write_tokens=4),
]


def beginning() -> dict[str, Any]:
    return {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "previous_response_id": None,
        "model": "default",
        "output": [],
        "store": True,
        "usage": None,
        "metadata": {"session_id": "hsess_1"},
    }


def told(transcript: Transcript, *events: HarnessEvent) -> list[Event]:
    return [*transcript.begin(), *(made for event in events for made in transcript.take(event))]


def parsed(events: list[Event]) -> list[dict[str, Any]]:
    shown = [json.loads(payload) for _, payload in events]
    for event in shown:
        validate("Event", event)
    assert [event["sequence_number"] for event in shown] == list(range(len(shown)))
    assert [number for number, _ in events] == list(range(len(shown)))
    return shown


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together, checking the order of each item's events."""
    output: list[dict[str, Any]] = []
    texts: dict[str, str] = {}
    done = set()
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(output)
                output.append(event["item"])
            case "response.output_item.done":
                output[event["output_index"]] = event["item"]
                done.add(event["item"]["id"])
            case "response.output_text.delta":
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
            case "response.output_text.done":
                assert texts.get(event["item_id"], "") == event["text"]
        assert event.get("item_id") not in done
    return output


def test_one_answer_with_everything() -> None:
    transcript = Transcript(beginning())
    events = parsed([*told(transcript, *ANSWER), *transcript.end("completed", [CITATION])])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "error",
        "output_text.done",
        "output_text.annotation.added",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    response = events[-1]["response"]
    validate("Response", response)
    assert response == transcript.response
    assert assembled(events) == response["output"]
    assert response["usage"] == {
        "input_tokens": 1,
        "output_tokens": 2,
        "total_tokens": 3,
        "cache_read_tokens": 3,
        "cache_write_tokens": 4,
    }
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ]


texts = st.text(min_size=0, max_size=8)
harness_events = st.one_of(
    st.builds(TextDelta, texts),
    st.builds(ReasoningDelta, texts),
    st.builds(ToolCall, st.just("call_1"), st.just("read"), st.just("{}")),
    st.builds(ToolResult, st.just("call_1"), texts),
    st.builds(Usage, st.integers(0, 9), st.integers(0, 9)),
    st.builds(Notice, st.just("provider_error"), texts),
)


@given(
    events=st.lists(harness_events, max_size=12),
    status=st.sampled_from(["completed", "incomplete", "failed", "cancelled"]),
    citations=st.sampled_from([[], [CITATION], [CITATION] * 30]),
    cut=st.integers(0, 60),
)
def test_streamed_and_kept_events_give_the_same_output(
    events: list[HarnessEvent], status: str, citations: list[Citation], cut: int
) -> None:
    transcript = Transcript(beginning())
    made = told(transcript, *events)
    ended = parsed([*made, *transcript.end(status, citations)])
    assert assembled(ended) == transcript.response["output"]
    assert transcript.response["status"] == status
    resumed = Transcript(beginning())
    resumed.replay(payload for _, payload in made[:cut])
    assert resumed.has_begun == (cut > 0)
    if cut > 0:
        rest = parsed([*made[:cut], *resumed.end("failed", citations)])
        assert assembled(rest) == resumed.response["output"]
        validate("Response", resumed.response)


@pytest.mark.requirement("UHP-13")
def test_without_text_the_artifacts_are_named() -> None:
    transcript = Transcript(beginning())
    transcript.begin()
    transcript.end("completed", [CITATION] * 21)
    (message,) = transcript.response["output"]
    part = message["content"][0]
    assert part["text"].startswith("Files: report.md, report.md")
    assert part["text"].endswith(" and more.")
    assert len(part["annotations"]) == 21


@pytest.mark.requirement("UHP-13")
def test_an_annotation_that_is_not_in_the_text_is_of_all_of_it() -> None:
    for text, places in (
        ("Done.", (0, 5)),
        ("report.md" + "x" * CITED_CHARACTERS, (0, 9 + CITED_CHARACTERS)),
        ("x" * CITED_CHARACTERS + "report.md", (CITED_CHARACTERS, CITED_CHARACTERS + 9)),
    ):
        transcript = Transcript(beginning())
        told(transcript, TextDelta(text))
        transcript.end("completed", [CITATION])
        (annotation,) = transcript.response["output"][0]["content"][0]["annotations"]
        assert (annotation["start_index"], annotation["end_index"]) == places


def test_an_end_made_by_somebody_else_is_told() -> None:
    transcript = Transcript(beginning())
    transcript.begin()
    event = transcript.end("completed")[-1]
    theirs = {**beginning(), "status": "failed"}
    number, payload = transcript.ended_as(event, theirs)
    assert number == event[0]
    assert json.loads(payload)["type"] == "response.failed"
    assert transcript.response == theirs


def test_a_stream_whose_events_are_gone() -> None:
    response = {**beginning(), "status": "completed"}
    created, ending = parsed(condensed(response, -1))
    assert (created["type"], created["response"]["status"]) == ("response.created", "in_progress")
    assert (ending["type"], ending["response"]) == ("response.completed", response)
    ((number, payload),) = condensed(response, 7)
    assert (number, json.loads(payload)["sequence_number"]) == (8, 8)


def test_a_frame_is_one_line_of_ascii() -> None:
    transcript = Transcript(beginning())
    *_, (number, payload) = told(transcript, TextDelta("a\nb\r\n\u2028é"))
    shown = frame(number, payload)
    assert shown.startswith(b"id: 4\nevent: response.output_text.delta\ndata: {")
    assert shown.endswith(b"}\n\n")
    assert shown.count(b"\n") == 4
    assert json.loads(renumbered(payload, 77)) == {**json.loads(payload), "sequence_number": 77}
    with pytest.raises(ValueError, match="begins with"):
        frame(0, "{}")
