"""What ends by itself, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from app.uhp.upkeep import EVENTS_SECONDS, KEYS_SECONDS, TOMBSTONE_SECONDS, Upkeep
from tests.store.sessions import add_upload, counted, noted
from tests.store.stores import count
from tests.uhp.tasking import Desk, configured, desk_in, quick_echo, session_of

pytestmark = pytest.mark.anyio

DAY = 86400


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_in(
        tmp_path, configured(quick_echo()), session_ttl=timedelta(days=90)
    ) as opened:
        yield opened


async def keep_up(desk: Desk, later: float = 0) -> None:
    now = time.time() + later
    with patch("time.time", lambda: now):
        await upkeep_of(desk).run()


def upkeep_of(desk: Desk) -> Upkeep:
    services = desk.services
    return Upkeep(services.settings, services.store, services.workspaces, services.previews)


async def test_nothing_ends_before_its_time(desk: Desk, tmp_path: Path) -> None:
    response = await desk.run("Create a file named a.txt containing exactly: one")
    await add_upload(desk.store, expires_at=int(time.time()) + DAY)
    before = await desk.call("GET", f"/v1/sessions/{session_of(response)}/files")
    await keep_up(desk)
    assert (await desk.call("GET", f"/v1/sessions/{session_of(response)}/files")).body == (
        before.body
    )
    assert await desk.read(response) == response
    assert len(await desk.store.files.uploads("a")) == 1
    assert count(tmp_path, "response_events") > 0
    assert (tmp_path / "workspaces" / session_of(response)).exists()


async def test_uploads_end(desk: Desk, tmp_path: Path) -> None:
    await add_upload(desk.store, expires_at=int(time.time()) - 1)
    await keep_up(desk)
    assert count(tmp_path, "files") == 0


async def test_events_end_and_the_response_stays(desk: Desk, tmp_path: Path) -> None:
    response = await desk.run()
    await keep_up(desk, EVENTS_SECONDS + 10)
    assert count(tmp_path, "response_events") == 0
    assert await desk.read(response) == response


async def test_keys_and_what_is_not_retained_end(desk: Desk, tmp_path: Path) -> None:
    for _ in range(2):
        await desk.call(
            "POST",
            "/v1/responses",
            {"input": "x", "store": False},
            headers=[(b"idempotency-key", b"K")],
        )
    await keep_up(desk, KEYS_SECONDS + 10)
    assert [count(tmp_path, name) for name in ("idempotency_keys", "responses")] == [0, 0]


@pytest.mark.requirement("UHP-28", "UHP-35", "UHP-36")
async def test_sessions_expire_and_are_forgotten_at_last(desk: Desk, tmp_path: Path) -> None:
    response = await desk.run("Create a file named a.txt containing exactly: one")
    (file,) = await desk.files(response)
    await keep_up(desk, 91 * DAY)
    target = f"/v1/sessions/{session_of(response)}"
    assert (await desk.call("GET", target)).json["error"]["code"] == "session_expired"
    content = file["download_url"].removeprefix("https://files.example")
    assert (await desk.call("GET", content)).status == 404
    assert (await desk.store.files.totals("a")).files == 0
    assert list((tmp_path / "workspaces").iterdir()) == []
    await keep_up(desk, 91 * DAY + TOMBSTONE_SECONDS + 10)
    assert (await desk.call("GET", target)).json["error"]["code"] == "session_not_found"


async def test_sessions_stay_for_ever_unless_told(tmp_path: Path) -> None:
    async with desk_in(tmp_path, configured(quick_echo())) as desk:
        response = await desk.run()
        await keep_up(desk, 10_000 * DAY)
        assert (await desk.call("GET", f"/v1/sessions/{session_of(response)}")).status == 200


async def test_folders_that_lost_their_session_go(desk: Desk, tmp_path: Path) -> None:
    response = await desk.run()
    (tmp_path / "workspaces" / "hsess_lost").mkdir()
    (tmp_path / "workspaces" / "foreign").mkdir()
    await desk.store.sessions.delete("a", session_of(response))
    await keep_up(desk)
    assert [path.name for path in (tmp_path / "workspaces").iterdir()] == ["foreign"]


async def test_a_tombstone_that_somebody_else_took_is_no_trouble(desk: Desk) -> None:
    response = await desk.run()
    await keep_up(desk, 91 * DAY)
    (tomb,) = await desk.store.sessions.expired(before=2**40)
    assert tomb.id == session_of(response)
    await desk.store.sessions.delete("a", tomb.id)
    await upkeep_of(desk)._delete("a", tomb.id)
    assert await desk.store.sessions.expired(before=2**40) == []


async def test_processes_that_keep_up_at_once_do_no_harm(tmp_path: Path) -> None:
    """Nothing is counted twice, nothing fails, and what is in use stays."""
    changes: dict[str, Any] = {"session_ttl": timedelta(days=90)}
    async with AsyncExitStack() as opened:
        desks = [
            await opened.enter_async_context(desk_in(tmp_path, configured(quick_echo()), **changes))
            for _ in range(3)
        ]
        over = [await desks[0].run("Create a file named a.txt containing exactly: one")]
        over += [await desks[1].run("[files 3] More.") for _ in range(5)]
        for _ in range(20):
            await add_upload(desks[0].store, expires_at=int(time.time()) - 1)
        now = time.time() + 91 * DAY
        with patch("time.time", lambda: now):
            stays = await desks[2].run("Create a file named b.txt containing exactly: two")
            rounds = [upkeep_of(desk).run() for desk in desks for _ in range(2)]
            sweeps = [desk.store.sweep() for desk in desks]
            await asyncio.gather(*rounds, *sweeps)
            assert await desks[0].read(stays) == stays
            for response in over:
                target = f"/v1/sessions/{session_of(response)}"
                error = (await desks[1].call("GET", target)).json["error"]
                assert error["code"] == "session_expired"
        assert counted(tmp_path) == noted(tmp_path) == {"a": (1, 3)}
        left = {path.name for path in (tmp_path / "workspaces").iterdir()}
        assert left == {session_of(stays)}
        assert [finding async for finding in desks[0].store.verify()] == []
