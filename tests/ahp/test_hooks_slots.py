"""Where references may be: what the walk through the schemas finds, and what it does not."""

from __future__ import annotations

import pytest
from agenthooksprotocol._content import normalized_content_slots

from app.ahp import hook_slots
from app.ahp.hook_slots import Tree, event_types, schema_id, slots_of
from tests.ahp.hook_examples import attachment, event, interception, message, observation

EVENT = ("params", "event")


def refs_in(sent: dict[str, object], event_type: str) -> list[str]:
    mode = "intercept" if "id" in sent else "observe"
    parts = slots_of(mode, event_type).parts_in(sent)
    return [part["body"]["ref"] for part in parts if "body" in part]


@pytest.mark.parametrize("event_type", sorted(event_types("observe")))
def test_the_slots_are_those_that_the_sdk_derives(event_type: str) -> None:
    parts, messages = normalized_content_slots()[event_type]
    found = slots_of("observe", event_type)
    assert found.parts == {EVENT + path for path in parts}
    assert found.messages == {EVENT + path for path in messages}


def test_every_type_of_the_catalogue_is_known() -> None:
    assert event_types("observe") == set(normalized_content_slots())
    assert event_types("intercept") < event_types("observe")
    assert {"turn.start", "tool.before"} <= event_types("intercept")
    assert "turn.end" not in event_types("intercept")


@pytest.mark.parametrize("mode", ["observe", "intercept"])
def test_no_slot_lies_inside_another(mode: str) -> None:
    for event_type in event_types(mode):
        paths = sorted(slots_of(mode, event_type).parts)
        pairs = [(a, b) for a in paths for b in paths if a != b and b[: len(a)] == a]
        assert pairs == []


def test_references_come_in_the_order_of_the_document() -> None:
    first, second = message(attachment("ref_a"), attachment("ref_b")), message(attachment("ref_c"))
    sent = observation(event("tool.after", items=[first, second]))
    change = {"path": "f", "change": "modified", "after": attachment("ref_d")}
    before = {"fileChanges": [change], **sent["params"]["event"]}
    after = {**sent["params"]["event"], "fileChanges": [change]}
    sent["params"]["event"] = before
    assert refs_in(sent, "tool.after") == ["ref_d", "ref_a", "ref_b", "ref_c"]
    sent["params"]["event"] = after
    assert refs_in(sent, "tool.after") == ["ref_a", "ref_b", "ref_c", "ref_d"]


def test_opaque_json_holds_no_references() -> None:
    body = attachment("ref_hidden")
    tool = {"name": "t", "origin": "native", "input": {"items": [message(body)], "body": body}}
    sent = observation(
        event(
            "tool.before",
            tool=tool,
            native={"items": [message(body)]},
            extensions={"org.example": body},
            items=[attachment("ref_seen")],
        )
    )
    assert refs_in(sent, "tool.before") == ["ref_seen"]


def test_what_other_receivers_left_in_the_request_is_looked_at() -> None:
    """A candidate of messages and injected messages are slots, a candidate of a tool is not."""
    injection = {
        "type": "inject",
        "target": "context",
        "operation": "append",
        "deliverAt": "now",
        "value": [message(attachment("ref_injected"))],
    }
    candidate = {"value": [message(attachment("ref_candidate"))]}
    state = {"permission": "none", "candidate": candidate, "injections": [injection]}
    asked = interception(event("model.request.before"), state=state)
    assert refs_in(asked, "model.request.before") == ["ref_candidate", "ref_injected"]
    tool = interception(event("tool.before"), state=state)
    assert refs_in(tool, "tool.before") == ["ref_injected"]


def test_messages_are_those_of_the_event_alone() -> None:
    mine = message(attachment())
    state = {"permission": "none", "candidate": {"value": [message(ident="other")]}}
    asked = interception(event("model.request.before", items=[mine]), state=state)
    assert slots_of("intercept", "model.request.before").messages_in(asked) == [mine]


def test_a_request_without_a_candidate_has_nothing_to_look_at() -> None:
    state = {"permission": "none", "candidate": None}
    asked = interception(event("model.request.before"), state=state)
    assert refs_in(asked, "model.request.before") == []


def test_a_value_of_another_shape_than_the_paths_is_passed_over() -> None:
    tree = Tree()
    tree.add(("items", "*", "body"))
    found: list[object] = []
    odd: list[object] = [
        None,
        [],
        {"items": {"body": 1}},
        {"items": [[{"body": 1}], 7, {"other": 1}]},
    ]
    for value in odd:
        tree.find(value, found)
    assert found == []
    tree.find({"items": [{"body": 1}]}, found)
    assert found == [1]


def test_a_schema_that_refers_to_itself_ends_the_walk() -> None:
    uri = schema_id("content-item")
    walk = hook_slots._Walk("turn.start")
    walk.visit({"$ref": uri}, uri, (), frozenset({uri}))
    assert walk.parts == set()
    walk.visit({"$ref": uri}, uri, (), frozenset())
    assert walk.parts == {()}


def test_a_schema_that_is_a_boolean_is_of_no_event() -> None:
    assert hook_slots._event_types(True, "") == frozenset()
