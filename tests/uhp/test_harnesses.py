"""Harnesses and models, as the configuration has them, and the live feed of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.uhp.calling import SECOND, error_of
from tests.uhp.schema import validate
from tests.uhp.tasking import (
    HARNESS,
    OTHER_HARNESS,
    Desk,
    Puppet,
    configured,
    desk_in,
    events_of,
    quick_echo,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    asleep = configured(Puppet(), OTHER_HARNESS, is_available=lambda: False)
    async with desk_in(tmp_path, configured(quick_echo()), asleep) as opened:
        yield opened


async def test_harnesses(desk: Desk) -> None:
    listing = (await desk.call("GET", "/v1/harnesses")).json["harnesses"]
    assert [harness["id"] for harness in listing] == [HARNESS, OTHER_HARNESS]
    for harness in listing:
        validate("Harness", harness)
        shown = await desk.call("GET", f"/v1/harnesses/{harness['id']}")
        assert shown.json == harness
    assert (await desk.call("GET", "/v1/harnesses", token=SECOND)).json["harnesses"] == listing


async def test_models(desk: Desk) -> None:
    for harness_id, available in ((HARNESS, True), (OTHER_HARNESS, False)):
        shown = (await desk.call("GET", f"/v1/harnesses/{harness_id}/models")).json
        validate("HarnessModels", shown)
        assert (shown["harness_id"], shown["default"]) == (harness_id, "default")
        assert [model["available"] for model in shown["models"]] == [available] * 2
    catalogue = (await desk.call("GET", "/v1/models")).json
    validate("ModelCatalog", catalogue)
    assert [model["id"] for model in catalogue["backends"]["echo"]["models"]] == [
        "default",
        "other",
    ]
    assert catalogue["backends"]["echo"]["models"][0]["available"] is True


@pytest.mark.parametrize("last", ["", "/models", "/events"])
async def test_an_unknown_harness(desk: Desk, last: str) -> None:
    sent = await desk.call("GET", f"/v1/harnesses/chrn_unknown{last}")
    assert (sent.status, error_of(sent)["code"]) == (404, "harness_not_found")


async def test_the_feed_tells_of_the_callers_tasks_alone(desk: Desk) -> None:
    target = f"/v1/harnesses/{HARNESS}/events"
    mine = asyncio.create_task(desk.call("GET", target))
    theirs = asyncio.create_task(desk.call("GET", target, token=SECOND))
    while len(desk.engine._feeds._listening) < 2:
        await asyncio.sleep(0)
    responses = [await desk.run(), await desk.run()]
    desk.engine.stop()
    events = events_of(await mine)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ended = [event["response"]["id"] for event in events if event["type"] == "response.completed"]
    assert ended == [response["id"] for response in responses]
    assert events_of(await theirs) == []
    assert json.dumps(responses)
