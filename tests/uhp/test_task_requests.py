"""The body of a task: what is taken, what is ignored, and what is refused, by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Refusal, TooLarge
from app.uhp import task_requests
from app.uhp.errors import UhpError, translate
from app.uhp.task_requests import TaskRequest, check_key, digest_of_request, parse_task

URL = "data:text/plain;base64,aGk="
PNG = "data:image/png;base64,aGk="


def parse(**body: Any) -> TaskRequest:
    return parse_task({"input": "x", **body}, file_limit=10)


def parts(*content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": list(content)}]


def text(value: str) -> dict[str, str]:
    return {"type": "input_text", "text": value}


def test_a_string_is_one_message() -> None:
    asked = parse(input="Summarise.")
    assert asked.prompt == "Summarise."
    assert asked.items == [{"type": "message", "role": "user", "content": [text("Summarise.")]}]
    assert (asked.stream, asked.background, asked.store) == (False, False, True)
    assert (asked.model, asked.harness_id, asked.instructions) == (None, None, None)
    assert asked.ignored_fields == ()


def test_everything_that_is_understood() -> None:
    asked = parse(
        background=True,
        stream=True,
        store=False,
        instructions="Be brief.",
        max_output_tokens=1,
        max_step=2,
        timeout_seconds=3,
        metadata={"harness_id": "chrn_1", "note": 1},
        model="m",
        previous_response_id="resp_1",
    )
    assert (asked.background, asked.stream, asked.store) == (True, True, False)
    assert (asked.max_output_tokens, asked.max_step, asked.timeout_seconds) == (1, 2, 3)
    assert (asked.harness_id, asked.metadata) == ("chrn_1", {"note": 1})
    assert (asked.model, asked.previous_response_id) == ("m", "resp_1")
    assert asked.instructions == "Be brief."


def test_nothing_is_the_default() -> None:
    names = ("stream", "store", "metadata", "model", "max_step", "instructions")
    assert parse(**dict.fromkeys(names)) == parse()


def test_roles_are_told_apart() -> None:
    asked = parse(
        input=[
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": [text("Be brief.")]},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "input_text", "text": "Go on."},
        ],
        instructions="Be exact.",
    )
    assert asked.prompt == "Hello\nAssistant: Hi\nGo on."
    assert asked.instructions == "Be kind.\nBe brief.\nBe exact."
    assert [item["role"] for item in asked.items] == [
        "system",
        "developer",
        "user",
        "assistant",
        "user",
    ]
    assert asked.items[3]["content"] == [{"type": "output_text", "text": "Hi"}]


@pytest.mark.requirement("UHP-02", "UHP-05", "UHP-33")
def test_files_by_every_way() -> None:
    asked = parse(
        input=parts(
            {"type": "input_file", "filename": "a.txt", "file_data": URL},
            {"type": "input_file", "file_id": "file_1"},
            {"type": "input_image", "image_url": PNG},
            {"type": "input_image", "file_data": PNG, "filename": "b.png"},
            {"type": "input_image", "file_id": "file_2", "filename": "c.png"},
            {"type": "input_image", "image_url": "data:image/svg+xml,x"},
            {"type": "input_image", "image_url": "data:image/x-y,x"},
            {"type": "input_image", "image_url": "data:image/jpeg,x"},
        )
    )
    assert [(file.filename, file.file_id) for file in asked.files] == [
        ("a.txt", None),
        (None, "file_1"),
        ("image.png", None),
        ("b.png", None),
        ("c.png", "file_2"),
        ("image.svg", None),
        ("image", None),
        ("image.jpg", None),
    ]
    data = asked.files[0].data
    assert data is not None
    assert data.content() == b"hi"
    assert asked.files[2].param == "input.0.content.2.image_url"
    assert asked.items[0]["content"][:2] == [
        {"type": "input_file", "filename": "a.txt", "media_type": "text/plain", "bytes": 2},
        {"type": "input_file", "file_id": "file_1"},
    ]


FILE: dict[str, Any] = {"type": "input_file", "filename": "a", "file_data": URL}


@pytest.mark.requirement("B90")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input.0"),
        ({"input": [{"type": "function_call_output"}]}, "input.0.type"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "user", "content": []}]}, "input.0.content"),
        ({"input": parts("x")}, "input.0.content.0.type"),
        ({"input": parts({"type": "input_audio"})}, "input.0.content.0.type"),
        ({"input": parts({"type": "input_text", "text": 5})}, "input.0.content.0.text"),
        ({"input": parts({"type": "input_file"})}, "input.0.content.0"),
        ({"input": parts({**FILE, "file_id": "file_1"})}, "input.0.content.0"),
        ({"input": parts({**FILE, "filename": 5})}, "input.0.content.0.filename"),
        ({"input": parts({**FILE, "filename": "a\0b"})}, "input.0.content.0.filename"),
        ({"input": parts({**FILE, "filename": None})}, "input.0.content.0.filename"),
        ({"input": parts({**FILE, "file_data": "aGk="})}, "input.0.content.0.file_data"),
        ({"input": parts({**FILE, "file_data": "https://x/y"})}, "input.0.content.0.file_data"),
        ({"input": parts({"type": "input_file", "file_id": 5})}, "input.0.content.0.file_id"),
        (
            {"input": parts({"type": "input_file", "image_url": PNG})},
            "input.0.content.0.image_url",
        ),
        ({"metadata": []}, "metadata"),
        ({"metadata": {"harness_id": 5}}, "metadata.harness_id"),
        ({"model": 5}, "model"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"instructions": []}, "instructions"),
        ({"stream": "true"}, "stream"),
        ({"store": 1}, "store"),
        ({"max_step": 0}, "max_step"),
        ({"max_step": True}, "max_step"),
        ({"timeout_seconds": 1.5}, "timeout_seconds"),
        ({"max_output_tokens": 10**10}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse(**body)
    error = translate(refused.value)
    assert (error.code, error.param) == ("invalid_input", param)


@pytest.mark.requirement("UHP-09")
def test_a_file_over_the_limit() -> None:
    with pytest.raises(TooLarge):
        parse(input=parts({**FILE, "file_data": "data:,12345678901"}))


def test_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_requests, "MAX_PARTS", 2)
    parse(input=parts(text("a"), text("b")))
    with pytest.raises(UhpError, match="at most 2 parts"):
        parse(input=parts(text("a"), text("b"), text("c")))


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(UhpError, match="JSON object"):
        parse_task(body, file_limit=1)


def test_a_title_is_a_short_line() -> None:
    assert parse(input="  Sum\n\nit\0up ").title == "Sum it up"
    assert len(parse(input="word " * 10_000).title) == 120
    assert parse(input=parts({"type": "input_file", "file_id": "file_1"})).title == ""


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "text", "file_id", "file_data", "x"]),
            inner | st.sampled_from(["input_text", "input_file", "message", "user", URL]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(body=st.dictionaries(st.sampled_from(["input", "metadata", "stream", "x"]), values))
def test_whatever_comes_is_taken_or_refused(body: dict[str, Any]) -> None:
    try:
        asked = parse_task(body, file_limit=10)
    except Refusal:
        return
    assert asked.items


def test_equal_json_is_the_same_request() -> None:
    assert digest_of_request({"a": 1, "b": "é"}) == digest_of_request({"b": "é", "a": 1})
    assert digest_of_request({"a": 1}) != digest_of_request({"a": 1.5})


@pytest.mark.requirement("B94")
def test_a_key_has_bounds() -> None:
    assert check_key(None) is None
    assert check_key("k" * 255) == "k" * 255
    for wrong in ("", "k" * 256, "a\nb", "\x85"):
        with pytest.raises(UhpError, match="1 to 255"):
            check_key(wrong)
