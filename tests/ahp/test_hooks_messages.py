"""Whether a message is valid: the SDK's verdict, and the document's where that is stricter."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from agenthooksprotocol.runtime import ProtocolError
from agenthooksprotocol.runtime import Validator as SdkValidator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.ahp.content import is_attachment_type, parse_messages
from app.ahp.hook_messages import Validator, delivery_of, parse, read_delivery
from app.ahp.hook_slots import MESSAGE_OF, Mode, event_types, slots_of
from tests.ahp.hook_examples import (
    TEXT,
    attachment,
    delivered,
    event,
    filled,
    interception,
    message,
    observation,
)

SDK = SdkValidator()
OURS = Validator()

CASES: list[tuple[Mode, str]] = [
    (mode, event_type)
    for mode in ("observe", "intercept")
    for event_type in sorted(event_types(mode))
]


def sdk_takes(mode: Mode, sent: Any) -> bool:
    try:
        SDK.validate(MESSAGE_OF[mode], sent)
    except (ProtocolError, AttributeError, TypeError):
        return False  # it stumbles over params that are no object, and a type that is no text
    return True


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(("mode", "event_type"), CASES)
def test_every_type_of_event_is_taken(mode: Mode, event_type: str) -> None:
    for sent in (delivered(mode, event(event_type)), filled(mode, event_type)):
        assert sdk_takes(mode, sent)
        delivery = read_delivery(encoded(sent))
        assert delivery is not None
        assert (delivery.mode, delivery.type) == (mode, event_type)
        assert delivery.message == sent


# Bits that mutations put anywhere: right in one place, wrong in most.
BITS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, 1, -1, 1.0, 1.5, "", "x", "body", "omit", "metadata",
            "text/plain", "image/png", "TEXT/plain", "application/json", "a/b+json",
            "a/b+JSON; c=d", "turn.start", "tool.before", "draft", "2.0", "hooks/observe",
            "hooks/intercept", "2026-13-01T00:00:00Z",
            "ahp:owned:pending", "urn:x:y", "not a uri", [], {}, {"ref": "r"}, {"ref": ""},
            {"ref": "r", "size": 1}, {"reason": "r"}, TEXT, attachment(), message(TEXT),
        ]
    ),
    st.text(max_size=3),
)  # fmt: skip
NAMES = st.sampled_from(
    ["id", "kind", "text", "body", "gap", "size", "sha256", "synthesized", "category", "selection",
     "items", "native", "turn", "extensions", "state", "x", "mediaType", "role", "parts"]
)  # fmt: skip


def spots(value: Any, found: list[Any] | None = None) -> list[Any]:
    """Every array and object in `value`."""
    found = [] if found is None else found
    if isinstance(value, dict | list):
        found.append(value)
        for child in value.values() if isinstance(value, dict) else value:
            spots(child, found)
    return found


@st.composite
def mutated(draw: st.DrawFn) -> tuple[Mode, Any]:
    mode, event_type = draw(st.sampled_from(CASES))
    sent = filled(mode, event_type)
    for _ in range(draw(st.integers(1, 3))):
        spot = draw(st.sampled_from(spots(sent)))
        bit = copy.deepcopy(draw(BITS))
        if isinstance(spot, list):
            spot.append(bit)
        elif spot and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(spot)))
            if draw(st.booleans()):
                spot[name] = bit
            else:
                del spot[name]
        else:
            spot[draw(NAMES)] = bit
    return mode, sent


def explained(mode: Mode, sent: Any) -> bool:
    """Whether the document, or the engine, refuses what the schemas let pass.

    * An attachment's media type that is none, or is text or JSON in a spelling of its own: AHP-C14.
    * An interception whose id is not the event's: the engine's own check, after the schemas.
    * The other mode's message, and a text that ends with a line break where a pattern ends.
    """
    if sent.get("method") != {"observe": "hooks/observe", "intercept": "hooks/intercept"}[mode]:
        return True
    if mode == "intercept" and sent["id"] != sent["params"]["event"]["id"]:
        return True
    if "\\n" in json.dumps(sent):
        return True
    parts = slots_of(mode, sent["params"]["event"]["type"]).parts_in(sent)
    return not all(
        is_attachment_type(part["mediaType"]) for part in parts if part["kind"] == "attachment"
    )


@pytest.mark.parametrize(("mode", "event_type"), CASES[:1] + CASES[-1:])
@pytest.mark.parametrize("wrong", [[], {}, ["turn.start"], None, 5, True])
def test_a_type_that_is_no_text_is_no_event(mode: Mode, event_type: str, wrong: Any) -> None:
    sent = filled(mode, event_type)
    sent["params"]["event"]["type"] = wrong
    assert not sdk_takes(mode, sent)
    assert read_delivery(encoded(sent)) is None


@given(mutated())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_verdict_is_the_sdks(case: tuple[Mode, Any]) -> None:
    mode, sent = case
    delivery = delivery_of(sent)
    taken = delivery is not None and delivery.mode == mode
    if taken:
        assert sdk_takes(mode, sent)
        parse_messages(slots_of(mode, sent["params"]["event"]["type"]).messages_in(sent))
    elif sdk_takes(mode, sent):
        assert explained(mode, sent)


@pytest.mark.requirement("AHP-C14")
@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "TEXT/x",
        " text/plain",
        "application/json ;a=b",
        "a/b+JSON",
        "a/jsonl",
        "image",
    ],
)
@pytest.mark.parametrize("member", [{}, {"selection": "omit"}, {"selection": "metadata"}])
def test_ahp_c14_text_and_json_are_no_attachments(media_type: str, member: dict[str, str]) -> None:
    part = {**attachment(media_type=media_type), **member}
    if member:
        del part["body"]
    assert delivery_of(observation(event(items=[message(part)]))) is None


@pytest.mark.requirement("AHP-C13")
@pytest.mark.parametrize(
    "body", [{"ref": "ahp:owned:pending"}, {"ref": ""}, {"ref": "r", "size": 1}, {}, None, "r"]
)
def test_ahp_c13_a_body_is_a_confirmed_reference_alone(body: Any) -> None:
    part = {**attachment(), "body": body}
    assert delivery_of(observation(event(items=[message(part)]))) is None


def test_references_are_kept_once_with_the_media_type_that_comes_first() -> None:
    parts = [attachment("b", "image/png"), attachment("a", "audio/ogg"), attachment("b", "a/b")]
    delivery = delivery_of(observation(event(items=[message(*parts)])))
    assert delivery is not None
    assert delivery.refs == ("b", "a")
    assert delivery.media_types == {"b": "image/png", "a": "audio/ogg"}


@pytest.mark.requirement("AHP-C20", "AHP-C21")
def test_ahp_c20_what_is_withheld_refers_to_nothing() -> None:
    withheld = {"id": "p1", "kind": "attachment", "mediaType": "image/png"}
    shown = [
        {**withheld, "selection": "metadata", "size": 3, "sha256": "0" * 64},
        {**withheld, "selection": "omit"},
        {**withheld, "selection": "body", "gap": {"reason": "too_large"}},
    ]
    delivery = delivery_of(observation(event(items=[message(*shown)])))
    assert delivery is not None
    assert delivery.refs == ()


def test_an_interception_is_of_the_event_that_its_id_names() -> None:
    asked = interception(event(id="e"))
    assert delivery_of(asked) is not None
    assert delivery_of({**asked, "id": "other"}) is None


@pytest.mark.parametrize(
    "octets",
    [
        b"", b"{", b"[]", b"null", b"\xff", b'{"a":1,"a":1}', b'{"a":NaN}', b'{"a":1e999}',
        b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"method":"hooks/configuration"}', b'{"method":[]}',
    ],
)  # fmt: skip
def test_what_is_no_event_is_told_from_one(octets: bytes) -> None:
    assert read_delivery(octets) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_does_not_have_is_refused_in_opaque_json_too(number: str) -> None:
    octets = encoded(observation(event(native="N"))).replace(b'"N"', number.encode())
    assert read_delivery(octets) is None
    with pytest.raises(ValueError, match=r"number"):
        parse(octets)


def test_half_a_character_is_taken_in_opaque_json_and_in_no_part() -> None:
    """A host cuts a text in the middle of a character: that is no reason to lose the event."""
    sent = observation(event(native="\ud83d", items=[message(TEXT)]))
    assert read_delivery(encoded(sent)) is not None
    sent["params"]["event"]["items"][0]["parts"][0]["text"] = "\ud83d"
    assert read_delivery(encoded(sent)) is None
    sent["params"]["event"]["items"][0]["parts"][0]["text"] = "\U0001f600"
    assert read_delivery(encoded(sent)) is not None


def test_the_engines_other_kinds_are_judged_by_their_schemas() -> None:
    receipt = {"ref": "r", "size": 1, "sha256": "0" * 64}
    assert OURS.validate("content-upload-receipt", receipt) is receipt
    with pytest.raises(ProtocolError, match="content-upload-receipt"):
        OURS.validate("content-upload-receipt", {**receipt, "x": 1})


@pytest.mark.parametrize("native", [float("inf"), float("nan"), object()])
def test_the_engine_is_told_of_what_json_does_not_have(native: Any) -> None:
    with pytest.raises(ProtocolError):
        OURS.validate("observe-notification", observation(event(native=native)))
    assert OURS.validate("observe-notification", observation(event()))
