"""What holds for all content, and where our verdict differs from that of the draft's schemas.

The SDK ships the schemas but no fixtures, so the corpus is made here: every valid shape of a part
with every single change out of a pool, by hand and by hypothesis.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from itertools import product
from typing import Any

import pytest
from agenthooksprotocol._content import project_content
from agenthooksprotocol.runtime import ProtocolError, Validator
from hypothesis import example, given
from hypothesis import strategies as st

from app.ahp.content import (
    PENDING_REF,
    AttachmentPart,
    ContentSelection,
    Message,
    Part,
    TextPart,
    admit_edit,
    is_attachment_type,
    parse_messages,
    parse_part,
    parse_parts,
    parse_selection,
    project,
    project_parts,
    references_in,
    withheld_from,
)
from app.ahp.opaque import OPAQUE_SLOTS, conceal, find_duplicates
from app.errors import Malformed

JSON = dict[str, Any]

DIGEST = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
MODES = ("body", "metadata", "omit")
ABSENT = object()

TEXT: JSON = {"id": "t1", "kind": "text", "mediaType": "text/plain"}
ATTACHMENT: JSON = {"id": "a1", "kind": "attachment", "mediaType": "image/png"}
GAP: JSON = {"selection": "body", "gap": {"reason": "unavailable"}}
VALID: list[JSON] = [
    TEXT | {"selection": "body", "text": "hello"},
    TEXT | {"selection": "body", "text": "", "category": "reasoning", "synthesized": True},
    TEXT | GAP | {"size": 3, "sha256": DIGEST},
    TEXT | {"selection": "metadata", "size": 0},
    TEXT | {"selection": "omit", "sha256": DIGEST},
    ATTACHMENT | {"selection": "body", "body": {"ref": "ref-1"}},
    ATTACHMENT | {"selection": "body", "body": {"ref": "ref-1"}, "synthesized": False},
    ATTACHMENT | GAP | {"gap": {"reason": "x", "path": "items.0"}, "size": 3},
    ATTACHMENT | {"selection": "metadata", "size": 3, "sha256": DIGEST, "category": "files"},
    ATTACHMENT | {"selection": "omit"},
]
POOL: dict[str, list[Any]] = {
    "id": ["x", "", " ", 1, "\ud800"],
    "kind": ["text", "attachment", "json", "Text", ""],
    "mediaType": [
        "text/plain",
        "text/html",
        "TEXT/plain",
        "text/plain;charset=utf-8",
        "image/png",
        "IMAGE/PNG;a=b",
        "application/json",
        "Application/JSON",
        "application/json;a=b",
        "application/json ;a=b",
        " application/json",
        "application/json\n",
        "application/vnd.x+json",
        "application/vnd.x+JSON; a=b",
        "application/vnd.x+json ; a=b",
        "application/json-seq",
        "application/x-ndjson",
        "application/json+zip",
        "application/json5",
        "application/jsonl",
        " text/plain",
        "text /plain",
        "image/*",
        "text",
        "",
    ],
    "selection": [*MODES, "Body", ""],
    "category": ["text", "reasoning", "x", ""],
    "synthesized": [True, False, 1, 0, "true"],
    "size": [0, 3, 3.0, 3.5, -1, True, "3", 10**30, float("inf")],
    "sha256": [DIGEST, DIGEST.upper(), DIGEST[:-1], DIGEST + "\n", "g" * 64, ""],
    "gap": [
        {"reason": "x"},
        {"reason": "x", "path": "y"},
        {"reason": ""},
        {"reason": "x", "path": ""},
        {"reason": "x", "ref": "y"},
        {},
        "x",
    ],
    "text": ["hello", "", "\ud800", '{"a": 1}', {"a": 1}],
    "body": [
        {"ref": "r"},
        {"ref": "\ud800"},
        {"ref": PENDING_REF},
        {"ref": ""},
        {"ref": "r", "size": 3},
        {"ref": "r", "sha256": DIGEST},
        {"ref": "r", "url": "https://example.org"},
        {},
        "r",
    ],
    "url": ["https://example.org"],
    "role": ["user"],
    "media_type": ["image/png"],
}


@cache
def _sdk() -> Validator:
    return Validator()


def sdk_accepts_part(value: Any) -> bool:
    """The SDK's verdict; it has the pending reference, which it looks for in whole events only."""
    try:
        _sdk().validate("content-item", value)
    except ProtocolError:
        return False
    return True


def schema_accepts_messages(value: Any) -> bool:
    schema = _sdk().validators["content-item.schema.json"]
    messages = schema.evolve(schema={"$ref": f"{schema.schema['$id']}#/$defs/messages"})
    return bool(messages.is_valid(value))


def we_accept_part(value: Any) -> bool:
    try:
        parse_part(value)
    except Malformed:
        return False
    return True


def has_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def differences(value: JSON) -> set[str]:
    """Why the document is stricter with a part that the schema accepts. All there is:

    media_type  the schema's pattern sees neither blanks before a parameter or around the type, nor
                JSON that does not say +json (application/jsonl), nor whether it is a media type
    pending     a reference that no receiver gave
    surrogate   a string that has no form in UTF-8, so that no digest of the text exists
    """
    attached = value["kind"] == "attachment"
    found = {
        "media_type": attached and not is_attachment_type(value["mediaType"]),
        "pending": value.get("body") == {"ref": PENDING_REF},
        "surrogate": has_surrogate(value),
    }
    return {name for name, holds in found.items() if holds}


def changed(value: JSON, name: str, replacement: Any) -> JSON:
    rest = {key: member for key, member in value.items() if key != name}
    return rest if replacement is ABSENT else rest | {name: replacement}


CORPUS = VALID + [
    changed(value, name, replacement)
    for value, (name, pool) in product(VALID, POOL.items())
    for replacement in [ABSENT, None, *pool]
]


def compare(value: JSON) -> None:
    theirs = sdk_accepts_part(value)
    assert we_accept_part(value) == (theirs and not differences(value))


def test_every_part_of_the_corpus_has_the_verdict_of_the_schema_or_a_named_difference() -> None:
    for value in CORPUS:
        compare(value)


def test_the_corpus_has_valid_and_invalid_parts_and_each_difference() -> None:
    accepted = [value for value in CORPUS if sdk_accepts_part(value)]
    assert len(VALID) < len(accepted) < len(CORPUS) - len(VALID)
    assert set().union(*map(differences, accepted)) == {"media_type", "pending", "surrogate"}


def test_nothing_of_the_corpus_gets_in_changed() -> None:
    for value in filter(we_accept_part, CORPUS):
        assert parse_part(value).wire() == value


MEMBERS = st.sampled_from(sorted(POOL)).flatmap(
    lambda name: st.tuples(st.just(name), st.sampled_from([ABSENT, None, *POOL[name]]))
)


@given(st.sampled_from(VALID), st.lists(MEMBERS, max_size=4))
def test_several_changes_at_once_have_the_verdict_of_the_schema(
    value: JSON, changes: list[tuple[str, Any]]
) -> None:
    for name, replacement in changes:
        value = changed(value, name, replacement)
    if not isinstance(value.get("mediaType"), str) or not isinstance(value.get("kind"), str):
        assert not we_accept_part(value)
        assert not sdk_accepts_part(value)
    else:
        compare(value)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
ANY_JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(ANY_JSON)
def test_any_json_is_parsed_or_refused_and_never_anything_else(value: Any) -> None:
    assert we_accept_part(value) == sdk_accepts_part(value) is False
    for parse in (parse_messages, parse_parts, parse_selection):
        with suppress(Malformed):
            assert parse(value) is not None


MESSAGE_CHANGES: dict[str, list[Any]] = {
    "id": ["x", "", 1],
    "role": ["system", "developer", "user", "assistant", "tool", "function", "User", ""],
    "parts": [[], [VALID[0]], VALID, [VALID[0] | {"kind": "json"}], {}, "x", [None]],
    "synthesized": [True, False, 1, "true"],
    "name": ["bob"],
    "content": ["hello"],
}


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        (name, replacement)
        for name, pool in MESSAGE_CHANGES.items()
        for replacement in [ABSENT, None, *pool]
    ],
)
def test_every_message_of_the_corpus_has_the_verdict_of_the_schema(
    name: str, replacement: Any
) -> None:
    value = [changed({"id": "m1", "role": "user", "parts": [VALID[5]]}, name, replacement)]
    try:
        parse_messages(value)
    except Malformed:
        assert not schema_accepts_messages(value)
    else:
        assert schema_accepts_messages(value)


SELECTION_VALUES = st.sampled_from([*MODES, "Body", "", None, True, 1])


@given(
    st.dictionaries(
        st.sampled_from(["default", "text", "reasoning", "images", "x", ""]), SELECTION_VALUES
    )
)
def test_a_selection_has_the_verdict_of_the_schema(value: JSON) -> None:
    try:
        _sdk().validate("content-selection", value)
    except ProtocolError:
        with pytest.raises(Malformed):
            parse_selection(value)
    else:
        assert parse_selection(value).wire() == value


@given(st.text() | st.sampled_from(["ref", PENDING_REF]))
def test_a_reference_has_the_verdict_of_the_schema_but_for_the_pending_one(ref: str) -> None:
    try:
        _sdk().validate("content-reference", {"ref": ref})
    except ProtocolError:
        accepted = False
    else:
        accepted = ref != PENDING_REF
    part = ATTACHMENT | {"selection": "body", "body": {"ref": ref}}
    assert we_accept_part(part) == accepted


CATEGORIES = st.sampled_from(["text", "reasoning", "Reasoning", "images", "skills", "x"])
TEXTS = st.sampled_from(["", "yes", "the answer is long enough", '{"a": [1, 2]}', "ü\n"])
REFS = st.sampled_from(["ref-1", "urn:uuid:0001", "r"])
MEDIA_TYPES = st.sampled_from(["image/png", "audio/ogg", "video/mp4", "application/pdf"])


@st.composite
def parts(draw: st.DrawFn) -> JSON:
    value = draw(st.sampled_from([TEXT, ATTACHMENT])) | {"id": draw(st.sampled_from("abcdef"))}
    if draw(st.booleans()):
        value |= {"category": draw(CATEGORIES)}
    if value["kind"] == "attachment":
        value |= {"mediaType": draw(MEDIA_TYPES)}
    shape = draw(st.sampled_from(["content", "content", "gap", "metadata", "omit"]))
    if shape == "content":
        text = value["kind"] == "text"
        content = {"text": draw(TEXTS)} if text else {"body": {"ref": draw(REFS)}}
        return value | {"selection": "body"} | content
    if draw(st.booleans()):
        value |= {"size": 3, "sha256": DIGEST}
    return value | (GAP if shape == "gap" else {"selection": shape})


MESSAGES = st.lists(
    st.builds(
        lambda name, role, inside: {"id": name, "role": role, "parts": inside},
        st.sampled_from(["m1", "m2", "m3"]),
        st.sampled_from(["user", "assistant"]),
        st.lists(parts(), max_size=5),
    ),
    max_size=4,
).map(parse_messages)
SELECTIONS = st.builds(
    lambda default, modes: parse_selection(modes | {"default": default}),
    st.sampled_from(MODES),
    st.dictionaries(
        st.sampled_from(["text", "reasoning", "images", "audio", "files", "X"]),
        st.sampled_from(MODES),
    ),
)


def parts_of(messages: tuple[Message, ...]) -> list[Part]:
    return [part for message in messages for part in message.parts]


def wire(messages: tuple[Message, ...]) -> list[JSON]:
    return [message.wire() for message in messages]


@given(MESSAGES, SELECTIONS)
def test_ahp_c06_a_projection_keeps_order_identity_and_category(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    view = project(messages, selection).messages
    assert [(m.id, m.role, len(m.parts)) for m in view] == [
        (m.id, m.role, len(m.parts)) for m in messages
    ]
    for before, after in zip(parts_of(messages), parts_of(view), strict=True):
        assert (before.id, before.kind, before.media_type, before.category) == (
            after.id,
            after.kind,
            after.media_type,
            after.category,
        )


@given(MESSAGES, SELECTIONS)
def test_a_projection_is_valid_and_projecting_it_again_changes_nothing(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    view = project(messages, selection).messages
    assert parse_messages(wire(view)) == view
    assert schema_accepts_messages(wire(view))
    assert project(view, selection).messages == view


@given(MESSAGES, SELECTIONS)
def test_ahp_c02_no_part_shows_more_than_its_category_and_its_own_selection_allow(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    ranks = {"omit": 0, "metadata": 1, "body": 2}
    view = project(messages, selection).messages
    for before, after in zip(parts_of(messages), parts_of(view), strict=True):
        assert ranks[after.selection] <= ranks[before.selection]
        assert ranks[after.selection] <= ranks[selection.view_of(before)]
        assert after.content in (None, before.content)


@given(MESSAGES, SELECTIONS)
def test_ahp_c02_content_is_shown_everywhere_or_nowhere(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    projection = project(messages, selection)
    seen = {(part.kind, part.content) for part in parts_of(projection.messages)}
    hidden = {("text", item.text) for item in projection.withheld if item.text}
    hidden |= {("attachment", item.ref) for item in projection.withheld if item.ref}
    assert seen.isdisjoint(hidden)
    assert {(p.kind, p.content) for p in parts_of(messages) if p.content} <= seen | hidden


@given(MESSAGES)
def test_ahp_c20_omission_leaves_no_text_reference_gap_or_digest(
    messages: tuple[Message, ...],
) -> None:
    projection = project(messages, parse_selection({"default": "omit"}))
    left = {name for part in parts_of(projection.messages) for name in part.wire()}
    assert left <= {"id", "kind", "mediaType", "selection", "category"}
    assert references_in(projection.messages) == ()
    assert projection.wanted == ()


@given(MESSAGES)
def test_selecting_every_body_takes_away_what_describes_omitted_parts_alone(
    messages: tuple[Message, ...],
) -> None:
    projection = project(messages, parse_selection({"default": "body"}))
    for before, after in zip(parts_of(messages), parts_of(projection.messages), strict=True):
        assert after == before.viewed(before.selection)
        assert after == before or before.selection == "omit"
    assert references_in(projection.messages) == references_in(messages)


@given(parts(), st.text(min_size=1), st.sampled_from(MODES))
def test_ahp_c18_an_unknown_category_uses_the_default(
    value: JSON, category: str, mode: str
) -> None:
    part = parse_part(value | {"category": f"unlisted {category}"})
    assert parse_selection({"default": mode, "text": "omit"}).view_of(part) == mode


@given(MESSAGES, SELECTIONS)
def test_ahp_c22_only_selected_attachments_are_to_be_uploaded(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    projection = project(messages, selection)
    selected = [part for part in parts_of(projection.messages) if part.selection == "body"]
    assert list(projection.wanted) == [p for p in selected if isinstance(p, AttachmentPart)]


@given(MESSAGES, SELECTIONS)
def test_ahp_c08_parts_without_roles_get_the_view_that_they_get_in_a_message(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    alone = project_parts(parts_of(messages), selection)
    together = project(messages, selection)
    assert list(alone.parts) == parts_of(together.messages)
    assert (alone.wanted, alone.withheld) == (together.wanted, together.withheld)


@given(parts(), SELECTIONS)
def test_a_view_of_one_part_is_that_of_the_sdk_or_stricter_in_a_named_way(
    value: JSON, selection: ContentSelection
) -> None:
    """Stricter are: a category in another spelling, and size and digest of an omitted part."""
    ours = project_parts([parse_part(value)], selection).parts[0].wire()
    theirs = project_content(value, selection.wire())
    if ours["selection"] == "omit":
        theirs = {k: v for k, v in theirs.items() if k not in ("size", "sha256")}
    if value.get("category") in ("Reasoning", "x"):
        assert MODES.index(ours["selection"]) >= MODES.index(theirs["selection"])
    else:
        assert ours == theirs


@given(MESSAGES, st.randoms(use_true_random=False))
def test_ahp_c15_removing_and_reordering_is_always_admitted(
    messages: tuple[Message, ...], random: Any
) -> None:
    kept = [message for message in messages if random.random() < 0.7]
    random.shuffle(kept)
    edited = [
        message.model_copy(
            update={"parts": tuple(random.sample(message.parts, len(message.parts)))}
        )
        for message in kept
    ]
    admit_edit(messages, messages)
    admit_edit(messages, edited)


@given(MESSAGES)
def test_ahp_c15_a_new_reference_is_never_admitted(messages: tuple[Message, ...]) -> None:
    for message in messages:
        for part in message.parts:
            if isinstance(part, AttachmentPart):
                edited = message.model_copy(update={"parts": (part.ready("invented"),)})
                with pytest.raises(Malformed) as caught:
                    admit_edit(messages, [edited])
                assert caught.value.code == "reference_unknown"


@given(MESSAGES, SELECTIONS)
def test_an_edit_of_a_view_that_changes_nothing_is_admitted(
    messages: tuple[Message, ...], selection: ContentSelection
) -> None:
    view = project(messages, selection).messages
    admit_edit(messages, view)
    admit_edit(view, view)


@given(MESSAGES, SELECTIONS, ANY_JSON)
@example(
    parse_messages([{"id": "m", "role": "user", "parts": [VALID[0]]}]),
    parse_selection({"default": "omit"}),
    ["hello", {"hello": "hello"}, {"x": {"y": "hello"}}],
)
def test_ahp_c02_nothing_withheld_stands_in_what_is_left_of_opaque_json(
    messages: tuple[Message, ...], selection: ContentSelection, noise: Any
) -> None:
    withheld = project(messages, selection).withheld
    copies = [part.content for part in parts_of(messages)]
    native = {"copies": copies, "noise": noise, "whole": wire(messages)}
    concealed = conceal(
        {"native": native, "tool": {"input": native}}, withheld, explicit=OPAQUE_SLOTS
    )
    assert find_duplicates(concealed, withheld) == ()
    if not withheld:
        assert concealed == {"native": native, "tool": {"input": native}}


@given(ANY_JSON, ANY_JSON)
def test_opaque_json_is_gone_by_default_whatever_it_is(native: Any, normalized: Any) -> None:
    concealed = conceal({"native": native, "id": "e1", "deep": {"native": normalized}}, ())
    assert concealed == {"id": "e1", "deep": {}}


@given(MESSAGES)
def test_what_is_shown_is_not_withheld(messages: tuple[Message, ...]) -> None:
    undescribed = [part for part in parts_of(messages) if part.sha256 is None]
    assert withheld_from(undescribed, undescribed) == ()
    texts = {part.text for part in undescribed if isinstance(part, TextPart) and part.text}
    assert {item.text for item in withheld_from(undescribed, []) if item.text} == texts


TOKENS = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-", min_size=1, max_size=12)
CASES = st.sampled_from([str.lower, str.upper, str.title])
PARAMETERS = st.sampled_from(["", ";", "; a=b", " ; a=b", ';a="b;c"', "\t;\ta=b", ";a=b;c=d"])


@given(TOKENS, CASES, PARAMETERS)
def test_ahp_c14_text_and_json_are_recognized_in_any_case_with_any_parameters(
    token: str, case: Any, parameters: str
) -> None:
    for essence in (f"text/{token}", "application/json", f"{token}/{token}+json"):
        assert not is_attachment_type(case(essence) + parameters)


@given(TOKENS, CASES, PARAMETERS, PARAMETERS)
def test_ahp_c14_the_verdict_does_not_depend_on_case_and_parameters(
    subtype: str, case: Any, one: str, other: str
) -> None:
    essence = f"application/{subtype}"
    assert is_attachment_type(essence + one) == is_attachment_type(case(essence) + other)


@given(st.text(max_size=40))
def test_ahp_c14_what_the_schema_takes_for_text_or_json_we_do_too(media_type: str) -> None:
    if is_attachment_type(media_type):
        assert sdk_accepts_part(ATTACHMENT | {"mediaType": media_type, "selection": "omit"})
