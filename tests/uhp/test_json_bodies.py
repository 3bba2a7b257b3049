"""JSON bodies: what two parsers could read in two ways is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import TooLarge
from app.http.bodies import RequestBody
from app.uhp import json_bodies
from app.uhp.errors import UhpError
from app.uhp.json_bodies import parse_json, read_json
from tests.http.messages import LIMITS, announcing, chunk, http_scope, receiving

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def body_of(*parts: bytes) -> RequestBody:
    messages = [chunk(part) for part in parts]
    messages.append(chunk(b"", more=False))
    scope = http_scope(headers=announcing(sum(map(len, parts))))
    return RequestBody(scope, receiving(*messages), LIMITS)


def refused(octets: bytes) -> UhpError:
    with pytest.raises(UhpError) as caught:
        parse_json(octets)
    assert caught.value.code == "invalid_input"
    return caught.value


@given(VALUES)
def test_every_value_comes_back(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    "octets",
    [
        b"",
        b"{",
        b"{}{}",
        b"\xef\xbb\xbf{}",
        b"{'a': 1}",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        '{"a": 1}'.encode("utf-16"),
        b"NaN",
        b"[Infinity]",
        b"[-Infinity]",
        b"[1e999]",
        b'{"a": 1, "a": 2}',
        b'[{"a": {"b": 1, "b": 1}}]',
        b'"a\nb"',
        b"9" * 5_000,
    ],
)
def test_anything_else_is_refused(octets: bytes) -> None:
    refused(octets)


@pytest.mark.requirement("B30")
@pytest.mark.parametrize(
    ("octets", "param"),
    [
        (rb'{"input":[{"filename":"\ud800.txt"}]}', "input.0.filename"),
        (rb'{"input":"\udc00\ud800"}', "input"),
        (rb'"\ud800"', None),
        (rb'{"a":{"\ud800":1}}', "a"),
        (rb'{"\u0007":"\ud800"}', None),
        (b'{"max_step":1e400}', "max_step"),
    ],
)
def test_half_a_character_is_refused_with_its_field(octets: bytes, param: str | None) -> None:
    assert refused(octets).param == param


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(rb'"\ud83d\ude80"') == "🚀"


@pytest.mark.parametrize("depth", [json_bodies.MAX_DEPTH + 2, 2_000, 200_000])
def test_depth_is_bounded(depth: int) -> None:
    refused(b"[" * depth + b"]" * depth)
    refused(b'{"a":' * depth + b"1" + b"}" * depth)


def test_usual_depth_is_not() -> None:
    depth = json_bodies.MAX_DEPTH
    assert parse_json(b"[" * depth + b"]" * depth) is not None


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "MAX_VALUES", 3)
    assert parse_json(b"[1,2,3]") == [1, 2, 3]
    refused(b"[1,2,3,4]")


@pytest.mark.anyio
async def test_a_body_is_read_in_the_pieces_in_which_it_comes() -> None:
    assert await read_json(body_of(b'{"a"', b":", b"1}"), 7) == {"a": 1}


@pytest.mark.requirement("UHP-09")
@pytest.mark.anyio
async def test_a_body_over_the_limit_is_not_read_to_its_end() -> None:
    body = body_of(b'{"a"', b":1}", b" " * 100)
    with pytest.raises(TooLarge) as caught:
        await read_json(body, 6)
    assert caught.value.limit == 6
    assert body.received == 7


@pytest.mark.requirement("B26")
@pytest.mark.anyio
async def test_a_large_body_is_parsed_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(octets: bytes) -> Any:
        threads.append(threading.current_thread())
        return parse_json(octets)

    monkeypatch.setattr(json_bodies, "parse_json", parse)
    large = b'"' + b"x" * json_bodies.LARGE_BYTES + b'"'
    assert len(await read_json(body_of(large), 2 * len(large))) == json_bodies.LARGE_BYTES
    assert await read_json(body_of(b"1"), 10) == 1
    assert threads[0] is not threading.main_thread()
    assert threads[1] is threading.main_thread()
    await asyncio.get_running_loop().shutdown_default_executor()
