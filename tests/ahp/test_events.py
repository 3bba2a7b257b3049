"""The event that the operator's code gets, and finding that code."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from app.ahp.content import AttachmentPart
from app.ahp.events import event_of, load_handler
from app.ahp.hook_messages import delivery_of
from app.settings import SettingsError
from app.store.content import ContentStore
from app.store.events import Arrival
from tests.ahp.hook_examples import TEXT, attachment, event, interception, message, observation
from tests.store.stores import LARGE, SMALL, new_store, put, sha256

pytestmark = pytest.mark.anyio

CODE = """
import functools

async def handle(event):
    return None

def plain(event):
    return None

async def none():
    return None

async def many(event, more):
    return None

async def optional(event, more=1):
    return None

class Handler:
    async def __call__(self, event):
        return None

    async def method(self, event):
        return None

class Plain:
    def __call__(self, event):
        return None

handler = Handler()
unfit = Plain()
bound = functools.partial(handle)
"""


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the operator's."""
    (tmp_path / "operators_code.py").write_text(CODE)
    (tmp_path / "operators_fault.py").write_text("raise RuntimeError('no disk for it')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("operators_code", "operators_fault"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "operators_code"


@pytest.mark.parametrize("path", ["handle", "optional", "handler", "handler.method", "bound"])
def test_an_async_callable_of_one_event_is_a_handler(operator: str, path: str) -> None:
    found = load_handler(f"{operator}:{path}")
    expected: Any = sys.modules[operator]
    for step in path.split("."):
        expected = getattr(expected, step)
    assert found == expected


def test_no_name_is_no_handler() -> None:
    assert load_handler(None) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("operators_code:plain", "async def"),
        ("operators_code:none", "async def"),
        ("operators_code:many", "async def"),
        ("operators_code:Handler", "async def"),
        ("operators_code:unfit", "async def"),
        ("operators_code:nothing", "operators_code has no nothing"),
        ("operators_code:handler.nothing", "operators_code has no handler.nothing"),
        ("operators_code:nothing.more", "operators_code has no nothing.more"),
        ("operators_absence:handle", "operators_absence cannot be imported .*PYTHONPATH"),
        ("operators_fault:handle", "cannot be imported .RuntimeError: no disk for it"),
    ],
)
def test_what_is_no_handler_is_a_fault_of_the_settings(operator: str, name: str, said: str) -> None:
    assert operator
    with pytest.raises(SettingsError, match=f"event_handler: .*{said}"):
        load_handler(name)


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[ContentStore]:
    store = await new_store(tmp_path)
    try:
        yield store
    finally:
        await store.close()


async def test_an_event_says_what_came_and_opens_its_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        small, large = await put(store, SMALL), await put(store, LARGE)
        parts = TEXT, attachment(large.ref, "video/mp4"), attachment(small.ref, ident="p3")
        sent = interception(event(id="e", items=[message(*parts)]), "deny")
        delivery = delivery_of(sent)
        assert delivery is not None
        octets = json.dumps(sent).encode()
        arrival = Arrival("e", "turn.start", "intercept", "a", "alice", octets, delivery.refs)
        stored, _ = await store.events.accept(arrival)
        await store.remove("a", large.ref)

        made = event_of(delivery, stored, store.events)
        assert (made.id, made.type, made.mode) == ("e", "turn.start", "intercept")
        assert (made.scope, made.principal) == ("a", "alice")
        assert made.raw == sent["params"]
        assert made.raw is not delivery.params
        assert made.capabilities == {"effects": ["deny"]}
        assert [part.id for part in made.messages[0].parts] == ["p1", "p2", "p3"]
        assert isinstance(made.messages[0].parts[1], AttachmentPart)
        assert [(a.ref, a.size, a.sha256, a.media_type) for a in made.attachments] == [
            (large.ref, len(LARGE), sha256(LARGE), "video/mp4"),
            (small.ref, len(SMALL), sha256(SMALL), "image/png"),
        ]
        for _ in range(2):
            async with made.attachments[0].open() as stream:
                assert b"".join([chunk async for chunk in stream]) == LARGE


async def test_an_observation_grants_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        sent = observation(event(id="e"))
        delivery = delivery_of(sent)
        assert delivery is not None
        octets = json.dumps(sent).encode()
        arrival = Arrival("e", "turn.start", "observe", "a", "alice", octets, ())
        stored, _ = await store.events.accept(arrival)
        made = event_of(delivery, stored, store.events)
        assert (made.mode, made.capabilities, made.attachments) == ("observe", {}, ())
