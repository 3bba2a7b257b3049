"""The routes of sessions: listed, inspected, made, cancelled, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from app.errors import Unavailable
from app.harness.base import ToolCall, ToolResult
from tests.uhp.calling import FIRST, SECOND, error_of
from tests.uhp.schema import validate
from tests.uhp.tasking import (
    HARNESS,
    OTHER_HARNESS,
    Desk,
    Puppet,
    configured,
    desk_in,
    quick_echo,
    session_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
async def desk(tmp_path: Path, puppet: Puppet) -> AsyncIterator[Desk]:
    harnesses = (configured(quick_echo()), configured(puppet, OTHER_HARNESS))
    async with desk_in(tmp_path, *harnesses) as opened:
        yield opened


async def created(desk: Desk, token: str = FIRST, **body: Any) -> dict[str, Any]:
    sent = await desk.call("POST", "/v1/sessions", body, token=token)
    assert sent.status == 201, sent.body
    validate("Session", sent.json)
    made: dict[str, Any] = sent.json
    return made


def check_turn(turn: dict[str, Any]) -> None:
    """The shape that the newer version of the protocol gives a turn (X-04)."""
    assert turn["id"].startswith("resp_")
    assert isinstance(turn["status"], str)
    assert all(isinstance(turn[name], str) for name in ("user", "assistant") if name in turn)
    assert all(isinstance(entry, dict) for name in ("tools", "files") for entry in turn[name])


async def test_making_a_session(desk: Desk) -> None:
    made = await created(desk, title="From elsewhere 🚀")
    assert made["title"] == "From elsewhere 🚀"
    assert made["container_id"].startswith("cntr_")
    assert "harness_id" not in made
    shown = await desk.call("GET", f"/v1/sessions/{made['id']}")
    assert shown.json == made
    files = await desk.call("GET", f"/v1/sessions/{made['id']}/files")
    assert files.json == {"files": []}
    without_body = await desk.call("POST", "/v1/sessions")
    assert without_body.status == 201
    assert "title" not in without_body.json


@pytest.mark.parametrize("body", [[], {"title": 5}, {"title": ""}, {"title": "x" * 501}])
async def test_what_makes_no_session(desk: Desk, body: Any) -> None:
    sent = await desk.call("POST", "/v1/sessions", body)
    assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")
    assert (await desk.call("POST", "/v1/sessions", {"title": "a\0b"})).status == 400


async def test_pages(desk: Desk) -> None:
    ids = [(await created(desk))["id"] for _ in range(5)]
    await created(desk, SECOND)
    listing = (await desk.call("GET", "/v1/sessions?limit=2")).json
    seen = []
    while True:
        validate("SessionList", listing)
        seen += [session["id"] for session in listing["sessions"]]
        if listing["next_cursor"] is None:
            break
        target = f"/v1/sessions?limit=2&cursor={listing['next_cursor']}"
        listing = (await desk.call("GET", target)).json
    assert seen == ids[::-1]
    assert (await desk.call("GET", "/v1/sessions?limit=5")).json["next_cursor"] is None
    assert (await desk.call("GET", "/v1/sessions?cursor=")).status == 200
    for wrong in ("limit=0", "limit=101", "limit=x", "cursor=made-up"):
        sent = await desk.call("GET", f"/v1/sessions?{wrong}")
        assert (sent.status, error_of(sent)["code"]) == (400, "invalid_input")


async def test_pages_of_one_harness(desk: Desk, puppet: Puppet) -> None:
    puppet.end()
    other = await desk.run(metadata={"harness_id": OTHER_HARNESS})
    for _ in range(2):
        await desk.run()
    await created(desk)
    listing = (await desk.call("GET", f"/v1/sessions?harness={OTHER_HARNESS}")).json
    assert [session["id"] for session in listing["sessions"]] == [session_of(other)]
    listing = (await desk.call("GET", f"/v1/sessions?harness={HARNESS}&limit=1")).json
    cursor = listing["next_cursor"]
    sent = await desk.call("GET", f"/v1/sessions?harness={HARNESS}&limit=1&cursor={cursor}")
    assert sent.json["next_cursor"] is None
    foreign = await desk.call("GET", f"/v1/sessions?cursor={cursor}")
    assert foreign.status == 400
    everything = (await desk.call("GET", "/v1/sessions?harness=")).json["sessions"]
    assert len(everything) == 4


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_cursor_of_another_scope_is_none(desk: Desk) -> None:
    for _ in range(2):
        await created(desk)
    cursor = (await desk.call("GET", "/v1/sessions?limit=1")).json["next_cursor"]
    sent = await desk.call("GET", f"/v1/sessions?cursor={cursor}", token=SECOND)
    made_up = await desk.call("GET", "/v1/sessions?cursor=made-up", token=SECOND)
    assert (sent.status, sent.body) == (400, made_up.body)


async def test_turns(desk: Desk, puppet: Puppet) -> None:
    first = await desk.run("Create a file named a.txt containing exactly: one")
    second = await desk.run("[tool] Go on.", previous_response_id=first["id"])
    sent = await desk.call("GET", f"/v1/sessions/{session_of(first)}/turns")
    one, two = sent.json["turns"]
    for turn in (one, two):
        check_turn(turn)
    assert [one["id"], two["id"]] == [first["id"], second["id"]]
    assert one["user"].startswith("Create a file")
    assert one["assistant"] == "Created a.txt."
    assert [file["path"] for file in one["files"]] == ["a.txt"]
    assert [tool["name"] for tool in two["tools"]] == ["count_characters"]
    assert two["files"] == []


async def test_a_running_turn_has_no_answer_yet(desk: Desk, puppet: Puppet) -> None:
    puppet.tell(ToolCall("call_1", "read", "{}"))
    puppet.tell(ToolResult("call_1", "out"))
    begun = await desk.background(metadata={"harness_id": OTHER_HARNESS})
    session_id = session_of(begun)
    (turn,) = (await desk.call("GET", f"/v1/sessions/{session_id}/turns")).json["turns"]
    check_turn(turn)
    assert turn["status"] == "in_progress"
    assert "assistant" not in turn
    shown = (await desk.call("GET", f"/v1/sessions/{session_id}")).json
    assert (shown["status"], shown["harness_id"]) == ("in_progress", OTHER_HARNESS)
    puppet.end()
    await desk.finished(begun)


async def test_cancelling_whatever_runs(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background(metadata={"harness_id": OTHER_HARNESS})
    target = f"/v1/sessions/{session_of(begun)}/cancel"
    await desk.call("DELETE", f"/v1/responses/{begun['id']}")
    sent = await desk.call("POST", target)
    assert (sent.status, sent.json["status"]) == (200, "cancelled")
    assert (await desk.call("POST", target)).json == sent.json
    assert desk.engine.running == 0


@pytest.mark.requirement("UHP-28", "B89")
@pytest.mark.parametrize("route", ["sessions", "traces"])
async def test_deleting(desk: Desk, tmp_path: Path, route: str) -> None:
    response = await desk.run("Create a file named a.txt containing exactly: one")
    session_id = session_of(response)
    (file,) = await desk.files(response)
    sent = await desk.call("DELETE", f"/v1/{route}/{session_id}")
    assert sent.json == {"id": session_id, "object": "session", "deleted": True}
    content = file["download_url"].removeprefix("https://files.example")
    for target in (
        content,
        content.replace("/content", "/pdf"),
        f"/v1/sessions/{session_id}/files",
        f"/v1/sessions/{session_id}/files/archive",
        f"/v1/responses/{response['id']}",
    ):
        assert (await desk.call("GET", target)).status == 404
    assert list((tmp_path / "workspaces").iterdir()) == []
    assert (await desk.store.files.totals("a")).bytes == 0


@pytest.mark.requirement("B89")
async def test_deleting_twice_at_once(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background(metadata={"harness_id": OTHER_HARNESS})
    await puppet.started.wait()
    target = f"/v1/sessions/{session_of(begun)}"
    answers = await asyncio.gather(*(desk.call("DELETE", target) for _ in range(3)))
    assert sorted(answer.status for answer in answers) == [200, 404, 404]


async def test_a_task_that_begins_while_its_session_is_deleted_ends_too(
    desk: Desk, puppet: Puppet
) -> None:
    puppet.end()
    first = await desk.run(metadata={"harness_id": OTHER_HARNESS})
    session_id = session_of(first)
    stop = desk.engine.stop_session
    begun: list[dict[str, Any]] = []

    async def stop_and_begin(scope: str, of: str) -> None:
        await stop(scope, of)
        if not begun:
            begun.append(await desk.background(previous_response_id=first["id"]))

    with patch.object(type(desk.engine), "stop_session", staticmethod(stop_and_begin)):
        sent = await desk.call("DELETE", f"/v1/sessions/{session_id}")
    assert sent.status == 200
    assert desk.engine.running == 0
    assert len(begun) == 1


async def test_folders_that_cannot_be_removed_now_are_left_for_later(desk: Desk) -> None:
    async def refuse(_: str) -> None:
        raise Unavailable("storage_unavailable", "Try again.")

    made = await created(desk)
    with patch.object(desk.services.workspaces, "destroy", refuse):
        sent = await desk.call("DELETE", f"/v1/sessions/{made['id']}")
    assert sent.status == 200


@pytest.mark.requirement("UHP-29", "UHP-30", "B85")
async def test_a_foreign_session_is_unknown_on_every_route(desk: Desk) -> None:
    session_id = (await created(desk))["id"]
    unknown = "hsess_0123456789abcdef0123456789abcdef"
    answers = set()
    for wrong, token in ((session_id, SECOND), (unknown, FIRST), ("x", FIRST), ("a%00b", FIRST)):
        for method, target in (
            ("GET", f"/v1/sessions/{wrong}"),
            ("DELETE", f"/v1/sessions/{wrong}"),
            ("DELETE", f"/v1/traces/{wrong}"),
            ("GET", f"/v1/sessions/{wrong}/turns"),
            ("GET", f"/v1/sessions/{wrong}/files"),
            ("POST", f"/v1/sessions/{wrong}/cancel"),
        ):
            sent = await desk.call(method, target, token=token)
            assert (sent.status, error_of(sent)["code"]) == (404, "session_not_found")
            answers.add(sent.body)
    assert len(answers) == 1


@pytest.mark.requirement("UHP-35")
async def test_an_expired_session_says_so(desk: Desk) -> None:
    session_id = session_of(await desk.run())
    await desk.store.sessions.expire(idle_since=2**40)
    for method, target in (
        ("GET", f"/v1/sessions/{session_id}"),
        ("GET", f"/v1/sessions/{session_id}/turns"),
        ("GET", f"/v1/sessions/{session_id}/files"),
        ("POST", f"/v1/sessions/{session_id}/cancel"),
    ):
        sent = await desk.call(method, target)
        assert (sent.status, error_of(sent)["code"]) == (404, "session_expired")
    assert (await desk.call("DELETE", f"/v1/sessions/{session_id}")).status == 200
    assert (await desk.call("DELETE", f"/v1/sessions/{session_id}")).status == 404
