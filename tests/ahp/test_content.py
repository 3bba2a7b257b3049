"""The content model of the first document: AHP-C01 to AHP-C25 and the ways around them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from app.ahp.content import (
    AttachmentPart,
    ContentSelection,
    Message,
    Part,
    TextPart,
    Withheld,
    admit_edit,
    category_of,
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
from app.errors import Malformed

DIGEST = hashlib.sha256(b"abc").hexdigest()
SECRET = "the launch code is 0000"

JSON = dict[str, Any]


def text(value: str | None = "hello", **members: Any) -> JSON:
    part = {"id": "t1", "kind": "text", "mediaType": "text/plain", "selection": "body"}
    return part | ({} if value is None else {"text": value}) | members


def attachment(ref: str | None = "ref-1", **members: Any) -> JSON:
    part = {"id": "a1", "kind": "attachment", "mediaType": "image/png", "selection": "body"}
    return part | ({} if ref is None else {"body": {"ref": ref}}) | members


def message(*parts: JSON, **members: Any) -> JSON:
    return {"id": "m1", "role": "assistant", "parts": list(parts)} | members


def messages_of(*parts: JSON, **members: Any) -> tuple[Message, ...]:
    return parse_messages([message(*parts, **members)])


def selection(**modes: Any) -> ContentSelection:
    return parse_selection({"default": "body"} | modes)


def refusal(value: JSON) -> Malformed:
    with pytest.raises(Malformed) as caught:
        parse_part(value)
    assert caught.value.code == "invalid_content"
    return caught.value


def message_refusal(value: JSON) -> Malformed:
    with pytest.raises(Malformed) as caught:
        parse_messages([value])
    return caught.value


def edit_refusal(before: list[JSON], after: list[JSON]) -> str:
    with pytest.raises(Malformed) as caught:
        admit_edit(parse_messages(before), parse_messages(after))
    return caught.value.code


def shown(messages: tuple[Message, ...]) -> list[JSON]:
    return [part.wire() for item in messages for part in item.parts]


@pytest.mark.parametrize("kind", ["json", "data", "reasoning", "Text", "TEXT", "", None, 1, []])
def test_ahp_c01_there_is_no_part_but_text_and_attachment(kind: Any) -> None:
    assert refusal(text(kind=kind)).param is not None
    assert "kind" in refusal(text(kind="json")).message


def test_ahp_c01_a_part_without_a_kind_is_refused() -> None:
    value = text()
    del value["kind"]
    assert "kind is text or attachment" in refusal(value).message


@pytest.mark.parametrize("value", [None, "text", 1, [], [text()]])
def test_ahp_c01_a_part_is_an_object(value: Any) -> None:
    assert refusal(value).param == "part"


@pytest.mark.parametrize("mode", ["metadata", "omit"])
def test_ahp_c02_a_selection_holds_for_inline_text_and_for_attachments(mode: str) -> None:
    view = project(messages_of(text(), attachment()), selection(default=mode))
    assert shown(view.messages) == [
        text(None, selection=mode),
        attachment(None, selection=mode),
    ]
    assert {(item.text, item.ref) for item in view.withheld} == {("hello", None), (None, "ref-1")}


def test_ahp_c02_a_copy_of_withheld_text_under_another_category_is_withheld_too() -> None:
    view = project(
        messages_of(text(SECRET, category="reasoning"), text(SECRET, id="t2"), text(id="t3")),
        selection(reasoning="omit"),
    )
    assert [part.selection for part in view.messages[0].parts] == ["omit", "omit", "body"]


def test_ahp_c02_a_reference_that_is_withheld_in_one_part_is_withheld_in_all() -> None:
    view = project(
        messages_of(attachment(), attachment(id="a2", category="files")),
        selection(images="metadata"),
    )
    assert references_in(view.messages) == ()
    assert view.wanted == ()


def test_ahp_c02_copies_in_another_slot_of_the_event_count() -> None:
    hidden = parse_parts([text(SECRET, category="reasoning")])
    policy = selection(reasoning="omit")
    assert (
        project(messages_of(text(SECRET)), policy, beside=hidden).messages[0].parts[0].content
        is None
    )
    assert (
        project_parts(parse_parts([text(SECRET)]), policy, beside=hidden).parts[0].content is None
    )


def test_ahp_c02_empty_text_repeats_nothing() -> None:
    view = project(
        messages_of(text("", category="reasoning"), text("", id="t2")), selection(reasoning="omit")
    )
    assert shown(view.messages)[1] == text("", id="t2")
    assert view.withheld == ()


def test_ahp_c03_a_message_has_id_role_and_ordered_parts() -> None:
    value = message(text(), attachment(), synthesized=True)
    assert parse_messages([value])[0].wire() == value
    for name in ("id", "role", "parts"):
        partial = {key: member for key, member in value.items() if key != name}
        assert message_refusal(partial).param == f"messages.0.{name}"


@pytest.mark.parametrize(
    "members",
    [
        {"id": ""},
        {"id": 1},
        {"parts": None},
        {"parts": {}},
        {"parts": "text"},
        {"name": "bob"},
        {"content": "hello"},
        {"synthesized": None},
    ],
)
def test_ahp_c03_a_message_of_another_shape_is_refused(members: JSON) -> None:
    assert message_refusal(message(text(), **members)).code == "invalid_content"


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_ahp_c04_the_five_roles_are_taken(role: str) -> None:
    assert messages_of(text(), role=role)[0].role == role


@pytest.mark.parametrize("role", ["function", "model", "human", "ai", "User", "", None, 1])
def test_ahp_c04_a_provider_native_role_is_refused(role: Any) -> None:
    refused = message_refusal(message(text(), role=role))
    assert "role" in (refused.param or "") or role is None


@pytest.mark.parametrize("part", [text(role="user"), attachment(role="user")])
def test_ahp_c05_a_part_has_no_role(part: JSON) -> None:
    assert refusal(part).param == "part.role"


def test_ahp_c05_a_body_has_no_role() -> None:
    assert refusal(attachment(body={"ref": "r", "role": "user"})).param == "part.body.role"


def test_ahp_c06_a_view_keeps_the_order_of_messages_and_parts() -> None:
    value = [message(text(id=f"{i}.{j}"), id=f"m{i}") for i in (3, 1, 2) for j in (2, 1)]
    view = project(parse_messages(value), selection(text="metadata"))
    assert [item.id for item in view.messages] == [item["id"] for item in value]
    assert [part["id"] for part in shown(view.messages)] == [m["parts"][0]["id"] for m in value]


@pytest.mark.parametrize(
    "value",
    [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"id": "m1", "role": "user", "parts": [{"text": "hello"}]},
        {"id": "m1", "role": "user", "body": {"ref": "prompt-json"}},
    ],
)
def test_ahp_c07_a_provider_native_message_is_no_message(value: JSON) -> None:
    assert message_refusal(value).code == "invalid_content"


def test_ahp_c08_a_slot_without_roles_takes_parts_alone() -> None:
    parts = parse_parts([text(), attachment()])
    assert [part.wire() for part in parts] == [text(), attachment()]
    with pytest.raises(Malformed):
        parse_parts([message(text())])
    view = project_parts(parts, selection(images="omit"))
    assert [part.wire() for part in view.parts] == [text(), attachment(None, selection="omit")]
    assert [item.ref for item in view.withheld] == ["ref-1"]


@pytest.mark.parametrize("name", ["id", "mediaType", "selection"])
@pytest.mark.parametrize("value", [text(), attachment()])
def test_ahp_c09_a_part_has_id_media_type_and_selection(value: JSON, name: str) -> None:
    assert refusal({k: v for k, v in value.items() if k != name}).param == f"part.{name}"


@pytest.mark.parametrize(
    "members",
    [
        {"id": ""},
        {"id": None},
        {"selection": "Body"},
        {"selection": "none"},
        {"selection": True},
        {"category": ""},
        {"category": None},
        {"category": 1},
        {"url": "https://example.org/x"},
        {"path": "x.png"},
        {"bodyBase64": "YWJj"},
        {"media_type": "image/png"},
        {"content_name": "x"},
    ],
)
@pytest.mark.parametrize("value", [text(), attachment()])
def test_ahp_c09_a_part_of_another_shape_is_refused(value: JSON, members: JSON) -> None:
    assert refusal(value | members).code == "invalid_content"


@pytest.mark.parametrize(
    "media_type",
    ["text/markdown", "Text/Plain", "text/plain; charset=utf-8", "text/plain ", "application/json"],
)
def test_ahp_c10_text_is_text_plain(media_type: str) -> None:
    assert refusal(text(mediaType=media_type)).param == "part.mediaType"


@pytest.mark.parametrize("value", [None, 1, {"a": 1}, ["a"], True])
def test_ahp_c10_the_text_of_a_part_is_a_string(value: Any) -> None:
    assert refusal(text(None, text=value)).code == "invalid_content"


def test_ahp_c10_structure_in_text_stays_the_string_that_it_is() -> None:
    serialized = '{"b": 1,  "a": [1, 2.0, null]}'
    part = parse_part(text(serialized))
    assert isinstance(part, TextPart)
    assert part.text == serialized
    assert category_of(part) == "text"


def test_ahp_c11_text_is_never_a_reference() -> None:
    assert refusal(text(None, body={"ref": "r"})).code == "invalid_content"
    assert refusal(text(body={"ref": "r"})).param == "part.body"
    assert refusal(attachment(None, text="hello")).code == "invalid_content"


@pytest.mark.parametrize("category", ["reasoning", "skills", "a category of the future"])
@pytest.mark.parametrize("value", [text(), attachment()])
def test_ahp_c12_reasoning_and_skills_are_categories_of_parts(value: JSON, category: str) -> None:
    part = parse_part(value | {"category": category})
    assert category_of(part) == category
    assert part.wire() == value | {"category": category}


def test_ahp_c12_reasoning_stays_in_its_message() -> None:
    thought = text(SECRET, category="reasoning")
    before = [message(thought), message(text("hi", id="t2"), id="m2")]
    assert edit_refusal(before, [message(thought, id="m2")]) == "reasoning_moved"
    admit_edit(parse_messages(before), parse_messages([message(thought)]))


@pytest.mark.parametrize(
    "body",
    [
        None,
        "ref-1",
        {},
        {"ref": ""},
        {"ref": None},
        {"ref": 1},
        {"ref": "r", "size": 3},
        {"ref": "r", "sha256": DIGEST},
        {"ref": "r", "url": "https://example.org/x"},
        [{"ref": "r"}],
    ],
)
def test_ahp_c13_a_body_is_a_reference_and_nothing_else(body: Any) -> None:
    assert "part.body" in f"{refusal(attachment(body=body)).param}.body"


def test_ahp_c13_the_pending_reference_of_a_sender_is_never_valid() -> None:
    assert refusal(attachment("ahp:owned:pending")).param == "part.body.ref"


TEXT_OR_JSON = [
    "text/plain",
    "TEXT/html",
    "tExT/x",
    "text/csv;header=present",
    "application/json",
    "Application/JSON",
    "application/json;charset=utf-8",
    "application/json ; a=b",
    "application/json\t;a=b",
    'application/json; a="b;c"',
    "application/vnd.x+json",
    "application/vnd.x+JSON; a=b",
    "application/ld+Json",
    "image/x+json",
    "application/json+json",
    "application/json+x",
    "application/json-seq",
    "application/geo+json-seq",
    "application/jsonl",
    "application/x-ndjson",
    "application/x-JSONLines",
    "application/json5",
    "model/json",
    "*/json",
]
NOT_A_MEDIA_TYPE = [
    "",
    " ",
    "x",
    "/",
    "image/",
    "/png",
    "*/*",
    "image/*",
    " text/plain",
    "text /plain",
    "text/ plain",
    "image/png, text/plain",
    "image/png;text/plain",
    "image/png\r\nX: y",
    "application/json\n",
    "\u200btext/plain",
    "te\u0445t/plain",
    "text\u2215plain",
    "application/json\0",
    "image/png; a=" + "b" * 300,
]


@pytest.mark.parametrize("media_type", TEXT_OR_JSON)
@pytest.mark.parametrize("mode", ["body", "metadata", "omit"])
def test_ahp_c14_an_attachment_is_neither_text_nor_json(media_type: str, mode: str) -> None:
    value = attachment("r" if mode == "body" else None, mediaType=media_type, selection=mode)
    assert refusal(value).param == "part.mediaType"
    assert not is_attachment_type(media_type)


@pytest.mark.parametrize("media_type", NOT_A_MEDIA_TYPE)
def test_ahp_c14_what_is_no_media_type_cannot_be_shown_to_be_neither(media_type: str) -> None:
    assert refusal(attachment(mediaType=media_type)).param == "part.mediaType"
    assert not is_attachment_type(media_type)


@pytest.mark.parametrize(
    "media_type",
    [
        "image/png",
        "IMAGE/PNG",
        "application/octet-stream",
        "application/pdf; version=1.7",
        'image/png; name="text/plain"',
        'application/x; type="application/json"',
        "application/jsonnet",
        "application/vnd.json-api.x+zip",
        "image/svg+xml",
        "application/xml",
        "message/rfc822",
        "textual/plain",
        "x-text/plain",
    ],
)
def test_ahp_c14_what_is_neither_is_taken_as_it_is_spelled(media_type: str) -> None:
    assert is_attachment_type(media_type)
    assert parse_part(attachment(mediaType=media_type)).media_type == media_type


def test_ahp_c15_an_edit_may_remove_reorder_add_and_rewrite_text() -> None:
    before = [message(text(), attachment()), message(attachment("ref-2", id="a2"), id="m2")]
    after = [
        message(attachment("ref-2", id="a2"), text("hello again"), id="m2"),
        message(text("new", id="t9"), id="m9"),
    ]
    admit_edit(parse_messages(before), parse_messages(after))
    admit_edit(parse_messages(before), ())


def test_ahp_c15_an_edit_may_show_an_attachment_without_its_body() -> None:
    admit_edit(
        messages_of(attachment()),
        messages_of(attachment(None, selection="metadata"), attachment(None, gap={"reason": "x"})),
    )


def test_ahp_c15_an_edit_may_carry_an_attachment_into_another_part() -> None:
    admit_edit(messages_of(attachment()), messages_of(attachment(id="a9")))


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (attachment("invented"), "reference_unknown"),
        (attachment("invented", id="a9"), "reference_unknown"),
        (attachment("ref-2"), "reference_rebound"),
        (attachment(mediaType="image/jpeg"), "reference_rebound"),
        (attachment("ref-3", id="a1"), "reference_rebound"),
        (attachment("ref-1", id="a4"), "reference_rebound"),
        (attachment("ref-1", id="t1", category="images"), "reference_rebound"),
    ],
)
def test_ahp_c15_an_edit_cannot_bind_a_part_to_other_bytes(after: JSON, code: str) -> None:
    before = message(
        text(),
        attachment(),
        attachment("ref-2", id="a2"),
        attachment("ref-3", id="a3"),
        attachment(None, id="a4", selection="metadata"),
    )
    assert edit_refusal([before], [message(after)]) == code


def test_ahp_c16_changed_bytes_get_the_reference_of_their_own_upload() -> None:
    part = parse_part(attachment())
    assert isinstance(part, AttachmentPart)
    changed = part.ready("ref-2")
    assert changed.wire() == attachment("ref-2")
    assert part.wire() == attachment()
    assert edit_refusal([message(attachment())], [message(changed.wire())]) == "reference_unknown"


@pytest.mark.parametrize("members", [{"size": 3}, {"sha256": DIGEST}, {"size": 0}])
@pytest.mark.parametrize("value", [text(), attachment()])
def test_ahp_c17_a_ready_part_has_no_size_and_no_digest(value: JSON, members: JSON) -> None:
    assert "receipt" in refusal(value | members).message


def test_ahp_c17_a_part_that_becomes_ready_leaves_size_and_digest_with_the_receipt() -> None:
    part = parse_part(
        attachment(None, gap={"reason": "unavailable"}, size=3, sha256=DIGEST, category="files")
    )
    assert isinstance(part, AttachmentPart)
    assert part.ready("ref-9").wire() == attachment("ref-9", category="files")
    with pytest.raises(ValueError, match="not uploaded yet"):
        part.ready("ahp:owned:pending")


@pytest.mark.parametrize(
    ("value", "category"),
    [
        (text(), "text"),
        (attachment(), "images"),
        (attachment(mediaType="IMAGE/Png; a=b"), "images"),
        (attachment(mediaType="audio/ogg"), "audio"),
        (attachment(mediaType="video/mp4"), "video"),
        (attachment(mediaType="application/pdf"), "files"),
        (attachment(mediaType="imagery/png"), "files"),
        (attachment(category="reasoning"), "reasoning"),
        (text(category="skills"), "skills"),
    ],
)
def test_ahp_c18_an_explicit_category_overrides_the_media_type(value: JSON, category: str) -> None:
    assert category_of(parse_part(value)) == category


@pytest.mark.parametrize(
    ("modes", "mode"),
    [
        ({}, "body"),
        ({"default": "omit"}, "omit"),
        ({"images": "metadata"}, "metadata"),
        ({"default": "omit", "images": "body"}, "body"),
        ({"default": "omit", "files": "body", "text": "body"}, "omit"),
        ({"image": "omit", "default": "metadata"}, "metadata"),
    ],
)
def test_ahp_c18_an_unlisted_category_gets_the_default(modes: JSON, mode: str) -> None:
    assert selection(**modes).view_of(parse_part(attachment())) == mode


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"text": "body"},
        {"default": None},
        {"default": "none"},
        {"default": "body", "text": None},
        {"default": "body", "anything": "Body"},
        {"default": "body", "anything": True},
        {"default": ["body"]},
        [],
        "body",
    ],
)
def test_ahp_c18_a_selection_has_a_default_and_three_modes(value: Any) -> None:
    with pytest.raises(Malformed) as caught:
        parse_selection(value)
    assert caught.value.code == "invalid_content"


def test_ahp_c18_a_view_gives_no_more_than_the_part_itself_says() -> None:
    omitted = text(None, selection="omit")
    described = attachment(None, selection="metadata", size=3)
    assert shown(project(messages_of(omitted, described), selection()).messages) == [
        omitted,
        described,
    ]


def test_ahp_c19_known_reasoning_keeps_its_category_in_every_view() -> None:
    for mode in ("body", "metadata", "omit"):
        view = project(messages_of(text(category="reasoning")), selection(reasoning=mode))
        assert view.messages[0].parts[0].category == "reasoning"


@pytest.mark.parametrize(
    "category",
    ["reasoning", "Reasoning", "REASONING", " reasoning", "reasoning\n", "rea\u200bsoning",
     "reasoning.", "re-as_oning", "\uff52easoning"],
)  # fmt: skip
def test_ahp_c19_another_spelling_of_a_category_is_no_way_around_its_policy(category: str) -> None:
    view = project(messages_of(text(SECRET, category=category)), selection(reasoning="omit"))
    assert SECRET not in json.dumps(shown(view.messages))
    assert view.withheld[0].text == SECRET


def test_ahp_c19_another_spelling_gets_no_more_than_the_default_either() -> None:
    policy = selection(default="omit", reasoning="body")
    assert policy.mode_of("reasoning") == "body"
    assert policy.mode_of("Reasoning") == "omit"


@pytest.mark.parametrize(
    "after",
    [
        text(SECRET, category="text"),
        text(SECRET),
        text(SECRET, id="t9"),
        text("rewritten", category="skills"),
        text(SECRET, id="t9", category="Reasoning"),
    ],
)
def test_ahp_c19_an_edit_cannot_rename_a_category(after: JSON) -> None:
    before = [message(text(SECRET, category="reasoning"))]
    assert edit_refusal(before, [message(after)]) == "category_changed"


def test_ahp_c19_an_edit_cannot_rename_the_category_of_an_attachment() -> None:
    before = [message(attachment(category="reasoning"))]
    assert edit_refusal(before, [message(attachment(id="a9"))]) == "category_changed"


@pytest.mark.parametrize("mode", ["metadata", "omit"])
@pytest.mark.parametrize(
    "value",
    [text(), attachment(), text(None, gap={"reason": "x"}), attachment(None, gap={"reason": "x"})],
)
def test_ahp_c20_a_withheld_part_has_neither_content_nor_gap(value: JSON, mode: str) -> None:
    assert "not body" in refusal(value | {"selection": mode}).message


@pytest.mark.parametrize("value", [text(None), attachment(None)])
def test_ahp_c20_a_missing_requested_body_is_a_gap(value: JSON) -> None:
    assert "gap" in refusal(value).message
    gap = {"gap": {"reason": "unavailable", "path": "items.0"}, "size": 3, "sha256": DIGEST}
    assert parse_part(value | gap).wire() == value | gap


@pytest.mark.parametrize("value", [text(), attachment()])
def test_ahp_c20_content_and_a_gap_exclude_each_other(value: JSON) -> None:
    assert "either" in refusal(value | {"gap": {"reason": "unavailable"}}).message


@pytest.mark.parametrize(
    "gap", [None, {}, "x", {"reason": ""}, {"reason": None}, {"path": "x"},
            {"reason": "x", "path": ""}, {"reason": "x", "ref": "r"}]
)  # fmt: skip
def test_ahp_c20_a_gap_of_another_shape_is_refused(gap: Any) -> None:
    assert refusal(attachment(None, gap=gap)).code == "invalid_content"


def test_ahp_c20_a_part_that_goes_missing_keeps_nothing_of_its_content() -> None:
    assert parse_part(attachment()).missing("transfer_failed").wire() == attachment(
        None, gap={"reason": "transfer_failed"}
    )
    assert parse_part(text(SECRET)).missing("withheld", "items.0").wire() == text(
        None, gap={"reason": "withheld", "path": "items.0"}
    )


def test_ahp_c21_a_description_implies_no_body() -> None:
    described = attachment(None, selection="metadata", size=3, sha256=DIGEST)
    view = project(messages_of(described), selection(default="metadata"))
    assert shown(view.messages) == [described]
    assert references_in(view.messages) == ()


def test_ahp_c21_size_and_digest_go_with_omission() -> None:
    described = attachment(None, selection="metadata", size=3, sha256=DIGEST)
    view = project(messages_of(described), selection(default="omit"))
    assert shown(view.messages) == [attachment(None, selection="omit")]


@pytest.mark.parametrize("mode", ["metadata", "omit"])
def test_ahp_c22_a_withheld_attachment_is_not_to_be_uploaded(mode: str) -> None:
    missing = attachment(None, gap={"reason": "not_uploaded"})
    view = project(messages_of(missing, attachment(id="a2")), selection(images=mode))
    assert view.wanted == ()


def test_ahp_c22_selected_attachments_and_they_alone_are_to_be_uploaded() -> None:
    missing = attachment(None, gap={"reason": "not_uploaded"})
    view = project(
        messages_of(text(), missing, attachment("ref-2", id="a2", mediaType="audio/ogg")),
        selection(audio="omit"),
    )
    assert [part.wire() for part in view.wanted] == [missing]


def test_ahp_c23_intentional_selection_is_not_a_gap() -> None:
    view = project(
        messages_of(text(None, gap={"reason": "limit_exceeded"}), attachment()),
        selection(default="metadata"),
    )
    assert all(part.gap is None for part in view.messages[0].parts)


def test_ahp_c23_a_gap_stays_visible_where_the_body_was_asked_for() -> None:
    missing = text(None, gap={"reason": "limit_exceeded"})
    assert shown(project(messages_of(missing), selection()).messages) == [missing]


@pytest.mark.parametrize("value", [1, 0, "true", None, [], "yes"])
def test_ahp_c24_synthesized_is_true_or_false(value: Any) -> None:
    assert refusal(text(synthesized=value)).code == "invalid_content"
    assert refusal(attachment(synthesized=value)).code == "invalid_content"
    assert message_refusal(message(synthesized=value)).code == "invalid_content"


@pytest.mark.parametrize("mode", ["body", "metadata", "omit"])
def test_ahp_c24_the_marker_of_a_made_up_id_stays_in_every_view(mode: str) -> None:
    view = project(
        messages_of(text(synthesized=True), attachment(synthesized=False), synthesized=True),
        selection(default=mode),
    )
    assert view.messages[0].synthesized is True
    assert [part.synthesized for part in view.messages[0].parts] == [True, False]


@pytest.mark.parametrize(
    "sha256",
    [DIGEST.upper(), DIGEST[:-1], DIGEST + "0", DIGEST[:-1] + "g", DIGEST + "\n", "", None, 0,
     "\uff10" * 64, "sha256:" + DIGEST],
)  # fmt: skip
def test_ahp_c25_a_digest_is_64_lowercase_hex(sha256: Any) -> None:
    assert refusal(attachment(None, selection="metadata", sha256=sha256)).param is not None
    assert refusal(text(None, gap={"reason": "x"}, sha256=sha256)).code == "invalid_content"


@pytest.mark.parametrize("size", [-1, 1.5, True, "3", None, float("inf"), float("nan")])
def test_a_size_is_a_number_of_bytes(size: Any) -> None:
    assert refusal(attachment(None, selection="metadata", size=size)).code == "invalid_content"


def test_references_are_given_in_order_and_once() -> None:
    messages = parse_messages(
        [
            message(attachment("b"), text(), attachment("a", id="a2")),
            message(attachment("b", id="a3"), attachment(None, id="a4", selection="omit")),
        ]
    )
    assert references_in(messages) == ("b", "a")


def test_a_refusal_names_the_member_and_shows_nothing_of_the_content() -> None:
    with pytest.raises(Malformed) as caught:
        parse_messages([message(text()), message(attachment(SECRET, selection="omit"))], param="it")
    assert caught.value.param == "it.1.parts.0"
    assert SECRET not in caught.value.message
    assert refusal(text(kind=SECRET)).message.count(SECRET) == 0


def test_a_refusal_cuts_the_name_of_an_unknown_member() -> None:
    assert len(refusal(text() | {"x" * 5000: 1}).message) < 400


def test_neither_text_nor_withheld_text_is_in_a_repr() -> None:
    assert SECRET not in repr(messages_of(text(SECRET)))
    assert SECRET not in repr(Withheld("text", SECRET))


def test_models_are_immutable() -> None:
    part = parse_part(text())
    with pytest.raises(ValueError, match="frozen"):
        part.selection = "omit"


def test_content_that_another_part_still_shows_is_not_withheld() -> None:
    before: tuple[Part, ...] = parse_parts([text(), text("hello", id="t2"), text("gone", id="t3")])
    assert [item.text for item in withheld_from(before, before[1:2])] == ["gone"]
