"""What a view withholds is not to be found in the opaque JSON of its event (AHP-C02, S46, S47)."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest

from app.ahp.content import (
    Withheld,
    parse_messages,
    parse_part,
    parse_selection,
    project,
    withheld_from,
)
from app.ahp.opaque import MAX_OPAQUE_DEPTH, OPAQUE_SLOTS, conceal, find_duplicates

DIGEST = hashlib.sha256(b"abc").hexdigest()
SECRET = "the launch code is 0000"
TEXT = {"id": "t1", "kind": "text", "mediaType": "text/plain", "selection": "body"}
ATTACHMENT = {"id": "a1", "kind": "attachment", "mediaType": "image/png", "selection": "body"}

JSON = dict[str, Any]

MESSAGE = {"id": "m1", "role": "user", "parts": [TEXT | {"text": "hello"}]}
EVENT: JSON = {
    "id": "e1",
    "type": "tool.after",
    "tool": {"name": "read", "input": {"path": "a"}, "origin": "native"},
    "error": {"message": "no", "class": "x", "native": {"code": 1}},
    "native": [{"prompt": SECRET}],
    "extensions": {"org.example": {"a": 1}},
    "items": [MESSAGE],
}


def test_opaque_json_is_left_out_unless_the_producer_projected_it() -> None:
    assert conceal(EVENT, ()) == {
        "id": "e1",
        "type": "tool.after",
        "tool": {"name": "read", "input": {}, "origin": "native"},
        "error": {"message": "no", "class": "x"},
        "items": [MESSAGE],
    }


def test_opaque_json_that_the_producer_projected_is_kept_as_it_is() -> None:
    assert conceal(EVENT, (), explicit=OPAQUE_SLOTS) == EVENT


@pytest.mark.parametrize("value", [None, 0, False, "x", [], {}, [None, {"a": []}]])
def test_an_approved_native_value_may_be_any_json(value: Any) -> None:
    assert conceal({"native": value}, (), explicit={"native"}) == {"native": value}


def test_the_parameters_of_a_request_that_are_not_projected_are_empty() -> None:
    assert conceal({"params": {"prompt": SECRET}}, ()) == {"params": {}}


def test_what_a_selection_withholds_is_found_in_no_projected_slot() -> None:
    thought = TEXT | {"text": SECRET, "category": "reasoning"}
    image = ATTACHMENT | {"body": {"ref": "urn:uuid:1234"}}
    messages = parse_messages([{"id": "m1", "role": "assistant", "parts": [thought, image]}])
    view = project(messages, parse_selection({"default": "omit"}))
    event = {
        "native": {"a": [SECRET, "x"], "b": f"<{SECRET}>", "c": {"ref": "urn:uuid:1234"}},
        "tool": {"name": "t", "input": {SECRET: 1, "kept": 2}},
        "output": SECRET,
    }
    concealed = conceal(event, view.withheld, explicit={"native", "input", "output"})
    assert concealed == {
        "native": {"a": [None, "x"], "c": {}},
        "tool": {"name": "t", "input": {"kept": 2}},
    }


def test_an_input_that_is_withheld_whole_becomes_an_empty_object() -> None:
    withheld = [Withheld("text", '{"city": "Ulm"}')]
    event = {"tool": {"input": {"city": "Ulm"}}}
    assert conceal(event, withheld, explicit={"input"}) == {"tool": {"input": {}}}


LINES = "line one\nline two ü"
STRUCTURE = {"b": [1, None], "a": "ü\n"}


@pytest.mark.parametrize(
    "copy",
    [
        LINES,
        "before line one\nline two ü after",
        json.dumps({"t": LINES}),
        json.dumps({"t": LINES}, ensure_ascii=False),
        base64.b64encode(LINES.encode()).decode(),
        "data:text/plain;base64," + base64.urlsafe_b64encode(LINES.encode()).decode(),
    ],
)  # fmt: skip
def test_withheld_text_is_recognized_in_other_spellings(copy: str) -> None:
    assert find_duplicates({"x": [copy]}, [Withheld("text", LINES)]) == ("/x/0",)


def test_withheld_text_is_recognized_as_the_structure_that_it_serializes() -> None:
    withheld = [Withheld("text", json.dumps(STRUCTURE, indent=2))]
    assert find_duplicates({"deep": [STRUCTURE]}, withheld) == ("/deep/0",)
    assert find_duplicates({"deep": [{**STRUCTURE, "b": [2]}]}, withheld) == ()


@pytest.mark.parametrize("serialized", ["{}", "[]", "{broken", "[" * 100_000, "3"])
def test_text_that_is_no_structure_is_recognized_as_text_alone(serialized: str) -> None:
    withheld = [Withheld("text", serialized)]
    assert find_duplicates([{}, [], 3], withheld) == ()
    assert find_duplicates([serialized], withheld) == ("/0",)


def test_short_withheld_text_is_found_only_where_it_is_the_whole_string() -> None:
    withheld = [Withheld("text", "no")]
    assert find_duplicates(["no", "know", base64.b64encode(b"no").decode()], withheld) == (
        "/0",
        "/2",
    )


@pytest.mark.parametrize(
    "copy",
    ["abc", "YWJj", "data:image/png;base64,YWJj", "YW\nJj", " YWJj "],
)
def test_a_body_of_which_only_the_digest_is_known_is_recognized(copy: str) -> None:
    described = parse_part(ATTACHMENT | {"selection": "metadata", "sha256": DIGEST})
    withheld = withheld_from([described], [described])
    assert find_duplicates({"a": copy}, withheld) == ("/a",)


def test_a_string_that_is_neither_content_nor_base64_is_no_duplicate() -> None:
    withheld = [Withheld("images", sha256=DIGEST)]
    assert find_duplicates(["%%", "YWJ", "\ud800", "", 1, None], withheld) == ()


def test_pointers_escape_what_rfc_6901_escapes() -> None:
    assert find_duplicates({"a/b": {"~": SECRET}}, [Withheld("text", SECRET)]) == ("/a~1b/~0",)
    assert find_duplicates(SECRET, [Withheld("text", SECRET)]) == ("",)


def test_opaque_json_that_is_too_deep_to_look_through_is_left_out() -> None:
    value: Any = SECRET
    for _ in range(MAX_OPAQUE_DEPTH + 1):
        value = [value]
    assert len(find_duplicates(value, ())) == 1
    assert SECRET not in json.dumps(conceal({"native": value}, (), explicit={"native"}))
