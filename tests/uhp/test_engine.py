"""Running tasks: they belong to the server, and have exactly one end, whatever happens to it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from time import monotonic, time_ns
from typing import Any
from unittest.mock import patch

import pytest

from app.errors import Exhausted, NotFound, Unavailable
from app.harness.base import BudgetSpent, HarnessFailed, HarnessUnavailable, Notice, Usage
from app.store import ContentStore
from app.uhp import engine as engine_module
from app.uhp import relays as relays_module
from app.uhp.engine import Engine
from app.uhp.life_signs import LifeSigns
from tests.http.messages import DISCONNECT, Sent, chunk, http_scope, receiving
from tests.store.sessions import add_artifact, begin
from tests.store.stores import crash
from tests.uhp.calling import FIRST
from tests.uhp.schema import validate
from tests.uhp.tasking import (
    HARNESS,
    Desk,
    Puppet,
    configured,
    desk_in,
    events_of,
    session_of,
    text_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATHER_SECONDS", "POLL_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(engine_module, name, 0.001)


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
async def desk(tmp_path: Path, puppet: Puppet) -> AsyncIterator[Desk]:
    async with desk_in(tmp_path, configured(puppet)) as opened:
        yield opened


async def until_kept(desk: Desk, response: dict[str, Any], count: int) -> None:
    """Wait until so many events of a task are in the store."""
    async with asyncio.timeout(20):
        while len(await desk.store.responses.events(response["id"])) < count:
            await asyncio.sleep(0.001)


async def test_a_task_to_its_end(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background("Work!", instructions="Be brief.", max_step=3)
    assert (begun["status"], begun["output"]) == ("in_progress", [])
    await puppet.started.wait()
    puppet.write("out/report.md", b"# Report")
    puppet.say("Here is report.md, ")
    puppet.say("done.")
    puppet.tell(Usage(3, 4, cache_read_tokens=1))
    puppet.end()
    ended = await desk.finished(begun)
    assert (ended["status"], text_of(ended)) == ("completed", "Here is report.md, done.")
    assert ended["usage"] == {
        "input_tokens": 3,
        "output_tokens": 4,
        "total_tokens": 7,
        "cache_read_tokens": 1,
    }
    task = puppet.tasks[0]
    assert (task.prompt, task.instructions, task.max_step) == ("Work!", "Be brief.", 3)
    assert (task.model, task.history, task.timeout_seconds) == ("default", (), 3600)


@pytest.mark.requirement("UHP-11", "UHP-12", "UHP-13", "UHP-14")
async def test_artifacts_are_cited_and_listed(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    puppet.write("out/report.md", b"# Report")
    puppet.say("Here is report.md, done.")
    puppet.end()
    ended = await desk.finished(begun)
    (annotation,) = ended["output"][0]["content"][0]["annotations"]
    (listed,) = await desk.files(ended)
    assert annotation["file_id"] == listed["id"]
    assert annotation["container_id"] == listed["container_id"]
    assert annotation["download_url"] == listed["download_url"]
    assert listed["download_url"].startswith("https://files.example/v1/containers/cntr_")
    assert listed["path"] == "out/report.md"
    start, stop = annotation["start_index"], annotation["end_index"]
    assert text_of(ended)[start:stop] == annotation["filename"] == "report.md"


async def test_an_unreadable_file_is_reported(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    (puppet.tasks[0].workspace / "link").symlink_to("/etc/passwd")
    puppet.end()
    await desk.finished(begun)
    stream = await desk.call("GET", f"/v1/responses/{begun['id']}?stream=true")
    *_, notice, last = events_of(stream)
    assert (notice["type"], notice["code"]) == ("error", "consignee_artifact_skipped")
    assert last["type"] == "response.completed"


@pytest.mark.parametrize(
    ("ending", "status", "code", "details"),
    [
        (HarnessFailed("It broke."), "failed", "harness_error", None),
        (HarnessFailed("No.", "provider_error"), "failed", "provider_error", None),
        (HarnessUnavailable("No room."), "failed", "harness_unavailable", None),
        (BudgetSpent("max_steps"), "incomplete", None, {"reason": "max_steps"}),
        (Exhausted(), "failed", "harness_error", None),
        (RuntimeError("secret"), "failed", "harness_error", None),
    ],
)
async def test_ends_other_than_well_keep_what_was_done(
    desk: Desk,
    puppet: Puppet,
    ending: Exception,
    status: str,
    code: str | None,
    details: dict[str, str] | None,
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    puppet.write("a.txt", b"half")
    puppet.say("Half an ans")
    puppet.tell(ending)
    ended = await desk.finished(begun)
    assert (ended["status"], ended["incomplete_details"]) == (status, details)
    assert (ended["error"] and ended["error"]["code"]) == code
    assert "secret" not in json.dumps(ended)
    assert text_of(ended) == "Half an ans"
    assert len(await desk.files(ended)) == 1
    assert ended["output"][0]["status"] == "incomplete"


async def test_a_harness_that_breaks_off_by_itself_has_failed(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    with patch.object(Puppet, "run", side_effect=asyncio.CancelledError):
        second = await desk.background()
        assert (await desk.finished(second))["status"] == "failed"
    puppet.end()
    assert (await desk.finished(begun))["status"] == "completed"


async def test_a_notice_is_followed_by_the_end(desk: Desk, puppet: Puppet) -> None:
    puppet.tell(Notice("provider_error", "Trying again."))
    puppet.say("Done.")
    puppet.end()
    sent = await desk.call("POST", "/v1/responses", {"input": "x", "stream": True})
    events = events_of(sent)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "error" in [event["type"] for event in events]
    assert events[-1]["type"] == "response.completed"


@pytest.mark.requirement("B96")
async def test_a_client_that_leaves_takes_nothing_with_it(desk: Desk, puppet: Puppet) -> None:
    for body in (b'{"input": "x", "stream": true}', b'{"input": "x"}'):
        token = (b"authorization", b"Bearer " + FIRST.encode())
        length = (b"content-length", b"%d" % len(body))
        scope = http_scope("POST", "/v1/responses", [token, length])
        await desk.app(scope, receiving(chunk(body, more=False), DISCONNECT), Sent())
    assert desk.engine.running == 2
    runs = list(desk.engine._runs.values())
    for _ in range(2):
        puppet.say("Still here.")
        puppet.end()
    for run in runs:
        await run.finished.wait()
        assert run.response["status"] == "completed"


async def test_cancelling_keeps_what_was_said_and_written(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    puppet.write("a.txt", b"half")
    puppet.say("Half")
    await until_kept(desk, begun, 3)
    sent = await desk.call("POST", f"/v1/responses/{begun['id']}/cancel")
    validate("Response", sent.json)
    assert (sent.json["status"], sent.json["error"]) == ("cancelled", None)
    assert text_of(sent.json) == "Half"
    assert len(await desk.files(begun)) == 1
    again = await desk.call("POST", f"/v1/responses/{begun['id']}/cancel")
    assert (again.status, again.json) == (200, sent.json)
    stream = await desk.call("GET", f"/v1/responses/{begun['id']}?stream=true")
    last = events_of(stream)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")


async def test_a_cancel_is_answered_though_the_harness_takes_its_time(
    desk: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "CANCEL_ANSWER_SECONDS", 0.01)
    puppet.stubborn = asyncio.Event()
    begun = await desk.background()
    await puppet.started.wait()
    sent = await desk.call("POST", f"/v1/responses/{begun['id']}/cancel")
    assert (sent.status, sent.json["status"]) == (200, "in_progress")
    puppet.stubborn.set()
    assert (await desk.finished(begun))["status"] == "cancelled"


async def test_a_cancel_before_the_start_is_heard(desk: Desk, puppet: Puppet) -> None:
    accepted = desk.store.responses.begin

    async def begin_and_cancel(beginning: Any) -> Any:
        begun = await accepted(beginning)
        await desk.store.responses.request_cancel("a", begun.response.id)
        return begun

    with patch.object(desk.store.responses, "begin", begin_and_cancel):
        begun = await desk.background()
    assert (await desk.finished(begun))["status"] == "cancelled"
    assert puppet.tasks == []
    assert await desk.files(begun) == []


async def test_a_cancel_during_the_preparation_is_heard(desk: Desk, puppet: Puppet) -> None:
    preparing, forever = asyncio.Event(), asyncio.Event()

    async def prepare(*_: Any) -> Any:
        preparing.set()
        await forever.wait()

    with patch.object(desk.services.workspaces, "prepare", prepare):
        begun = await desk.background()
        await preparing.wait()
        sent = await desk.call("POST", f"/v1/responses/{begun['id']}/cancel")
    assert sent.json["status"] == "cancelled"
    assert puppet.tasks == []


async def test_a_cancel_during_the_collection_keeps_the_artifacts(
    desk: Desk, puppet: Puppet
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    puppet.write("a.txt", b"whole")
    run = desk.engine._runs[begun["id"]]
    real = Engine._collect

    async def collect(self: Engine, *given: Any) -> None:
        run.cancel()
        await real(self, *given)

    with patch.object(Engine, "_collect", collect):
        puppet.end()
        ended = await desk.finished(begun)
    assert ended["status"] == "cancelled"
    assert len(await desk.files(ended)) == 1


@pytest.mark.parametrize("error", [Exhausted(), RuntimeError("secret")])
async def test_a_task_that_cannot_be_prepared_or_collected_has_failed(
    desk: Desk, puppet: Puppet, error: Exception
) -> None:
    async def fail(*_: Any) -> Any:
        raise error

    with patch.object(desk.services.workspaces, "prepare", fail):
        assert (await desk.run())["status"] == "failed"
    puppet.end()
    with patch.object(Engine, "_collect", fail):
        ended = await desk.run()
    assert ended["status"] == "failed"
    assert "secret" not in json.dumps(ended)


async def test_the_end_of_the_process_ends_its_tasks(
    desk: Desk, puppet: Puppet, tmp_path: Path
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    puppet.write("a.txt", b"half")
    puppet.say("Half")
    await until_kept(desk, begun, 3)
    blocked = asyncio.create_task(desk.run(previous_response_id=None))
    feed = asyncio.create_task(desk.call("GET", f"/v1/harnesses/{HARNESS}/events"))
    while desk.engine.running < 2:
        await asyncio.sleep(0)
    await desk.engine.close()
    ended = await desk.read(begun)
    assert (ended["status"], ended["error"]["code"]) == ("failed", "harness_error")
    assert "server ended" in ended["error"]["message"]
    assert text_of(ended) == "Half"
    assert len(await desk.files(ended)) == 1
    assert (await blocked)["status"] == "failed"
    assert (await feed).is_complete
    refused = await desk.call("POST", "/v1/responses", {"input": "x"})
    assert (refused.status, refused.json["error"]["code"]) == (503, "harness_unavailable")


async def test_a_task_that_begins_while_the_process_ends_is_ended(
    desk: Desk, puppet: Puppet
) -> None:
    accepted = desk.store.responses.begin

    async def begin_and_stop(beginning: Any) -> Any:
        desk.engine.stop()
        return await accepted(beginning)

    with patch.object(desk.store.responses, "begin", begin_and_stop):
        assert (await desk.run())["status"] == "failed"
    assert puppet.tasks == []


async def test_an_end_is_told_only_once_it_is_kept(desk: Desk, puppet: Puppet) -> None:
    real, refusals = desk.store.responses.finish, [Unavailable("x", "y"), Exhausted()]

    async def finish(*given: Any) -> bool:
        if refusals:
            assert not run.finished.is_set()
            raise refusals.pop()
        return await real(*given)

    begun = await desk.background()
    run = desk.engine._runs[begun["id"]]
    with patch.object(desk.store.responses, "finish", finish):
        puppet.end()
        assert (await desk.finished(begun))["status"] == "completed"
    assert refusals == []


async def test_without_a_store_there_is_no_end(
    desk: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> bool:
        raise Exhausted

    waiting = asyncio.create_task(desk.call("POST", "/v1/responses", {"input": "x"}))
    streaming = asyncio.create_task(
        desk.call("POST", "/v1/responses", {"input": "x", "stream": True})
    )
    while len(puppet.tasks) < 2:
        await asyncio.sleep(0)
    with patch.object(desk.store.responses, "finish", refuse):
        await desk.engine.close()
    assert (await waiting).status == 503
    with pytest.raises(Unavailable):
        await streaming


async def test_events_are_kept_once_the_store_can(desk: Desk, puppet: Puppet) -> None:
    real, refusals = desk.store.responses.append_events, [Exhausted(), Exhausted()]

    async def append(*given: Any) -> None:
        if refusals:
            raise refusals.pop()
        await real(*given)

    with patch.object(desk.store.responses, "append_events", append):
        begun = await desk.background()
        await puppet.started.wait()
        puppet.say("Hello")
        await until_kept(desk, begun, 5)
        puppet.end()
        await desk.finished(begun)
    stream = await desk.call("GET", f"/v1/responses/{begun['id']}?stream=true")
    assert [event["sequence_number"] for event in events_of(stream)] == list(range(9))


@pytest.mark.requirement("UHP-28", "UHP-34", "B89")
async def test_deleting_a_session_ends_its_task_first(
    desk: Desk, puppet: Puppet, tmp_path: Path
) -> None:
    waiting = asyncio.create_task(desk.run())
    await puppet.started.wait()
    puppet.write("a.txt", b"late")
    puppet.say("Half")
    session_id = puppet.tasks[0].session_id
    sent = await desk.call("DELETE", f"/v1/sessions/{session_id}")
    assert (sent.status, sent.json["deleted"]) == (200, True)
    assert puppet.cancelled.is_set()
    assert (await waiting)["status"] == "cancelled"
    assert list((tmp_path / "workspaces").iterdir()) == []
    for method, target in (
        ("GET", f"/v1/sessions/{session_id}"),
        ("DELETE", f"/v1/sessions/{session_id}"),
        ("DELETE", f"/v1/traces/{session_id}"),
        ("GET", f"/v1/sessions/{session_id}/files"),
        ("GET", f"/v1/sessions/{session_id}/turns"),
        ("POST", f"/v1/sessions/{session_id}/cancel"),
        ("GET", f"/v1/responses/{puppet.tasks[0].response_id}"),
    ):
        assert (await desk.call(method, target)).status == 404
    assert (await desk.store.files.totals("a")).files == 0


@pytest.mark.requirement("B89")
async def test_a_session_deleted_under_a_running_task_ends_it(
    desk: Desk, puppet: Puppet, tmp_path: Path
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    run = desk.engine._runs[begun["id"]]
    await desk.store.sessions.delete("a", session_of(begun), running=True)
    puppet.write("a.txt", b"late")
    puppet.say("Hello?")
    await run.finished.wait()
    assert run.response["status"] == "cancelled"
    await asyncio.gather(*desk.engine._tasks)
    assert list((tmp_path / "workspaces").iterdir()) == []
    assert (await desk.store.files.totals("a")).files == 0


async def test_a_deleted_response_runs_on(desk: Desk, puppet: Puppet) -> None:
    waiting = asyncio.create_task(desk.run())
    await puppet.started.wait()
    response_id = puppet.tasks[0].response_id
    assert (await desk.call("DELETE", f"/v1/responses/{response_id}")).status == 200
    puppet.say("Done")
    puppet.end()
    assert (await waiting)["status"] == "completed"
    assert (await desk.call("GET", f"/v1/responses/{response_id}")).status == 404


async def test_a_slow_follower_reads_from_the_store(
    desk: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.uhp.runs.HELD_EVENTS", 3)
    begun = await desk.background()
    await puppet.started.wait()
    for _ in range(50):
        puppet.say("x")
    await until_kept(desk, begun, 50)
    run = desk.engine._runs[begun["id"]]
    while run.log.held > 3:
        await asyncio.sleep(0.001)
    streaming = asyncio.create_task(desk.call("GET", f"/v1/responses/{begun['id']}?stream=true"))
    await asyncio.sleep(0)
    puppet.end()
    events = events_of(await streaming)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len(events) > 50


async def test_a_harness_that_is_faster_than_the_store_waits(
    desk: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.uhp.runs.MAX_UNKEPT_EVENTS", 10)
    real, may = desk.store.responses.append_events, asyncio.Event()

    async def append(*given: Any) -> None:
        await may.wait()
        await real(*given)

    with patch.object(desk.store.responses, "append_events", append):
        for _ in range(100):
            puppet.say("x")
        puppet.end()
        begun = await desk.background()
        await puppet.started.wait()
        run = desk.engine._runs[begun["id"]]
        for _ in range(1000):
            await asyncio.sleep(0)
        assert run.log.end == 10
        may.set()
        assert text_of(await desk.finished(begun)) == "x" * 100


# --- several processes ----------------------------------------------------------------------------


@pytest.fixture
async def other(tmp_path: Path, desk: Desk) -> AsyncIterator[Desk]:
    """Another process on the same store."""
    async with desk_in(tmp_path, configured(Puppet())) as opened:
        yield opened


async def test_a_task_is_followed_from_another_process(
    desk: Desk, other: Desk, puppet: Puppet
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    target = f"/v1/responses/{begun['id']}?stream=true"
    streaming = asyncio.create_task(other.call("GET", target))
    waiting = asyncio.create_task(
        other.engine.wait(await other.store.responses.get("a", begun["id"]))
    )
    puppet.say("Hello")
    await until_kept(desk, begun, 5)
    puppet.end()
    ended = await desk.finished(begun)
    events = events_of(await streaming)
    assert events[-1]["response"] == ended == await waiting
    resumed = await other.call("GET", target, headers=[(b"last-event-id", b"3")])
    assert events_of(resumed) == events[4:]
    over = await other.call("GET", target, headers=[(b"last-event-id", b"999")])
    assert events_of(over) == []


async def test_a_task_is_cancelled_from_another_process(
    desk: Desk, other: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    monkeypatch.setattr(engine_module, "CANCEL_ANSWER_SECONDS", 0.001)
    sent = await other.call("POST", f"/v1/responses/{begun['id']}/cancel")
    assert (sent.status, sent.json["status"]) == (200, "in_progress")
    monkeypatch.setattr(engine_module, "CANCEL_ANSWER_SECONDS", 20)
    cancelling = asyncio.create_task(other.call("POST", f"/v1/responses/{begun['id']}/cancel"))
    await desk.engine._heed()
    assert (await cancelling).json["status"] == "cancelled"
    assert (await desk.finished(begun))["status"] == "cancelled"


async def test_a_session_is_deleted_from_another_process(
    desk: Desk, other: Desk, puppet: Puppet
) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    deleting = asyncio.create_task(other.call("DELETE", f"/v1/sessions/{session_of(begun)}"))
    async with asyncio.timeout(20):
        while not deleting.done():
            await desk.engine._heed()
            await asyncio.sleep(0.001)
    assert (await deleting).status == 200
    assert puppet.cancelled.is_set()


async def test_a_session_goes_though_its_process_hangs(
    desk: Desk, other: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "STOP_SECONDS", 0.01)
    begun = await desk.background()
    await puppet.started.wait()
    sent = await other.call("DELETE", f"/v1/sessions/{session_of(begun)}")
    assert sent.status == 200
    puppet.say("Hello?")
    run = desk.engine._runs[begun["id"]]
    await run.finished.wait()
    assert (await other.call("GET", f"/v1/responses/{begun['id']}")).status == 404


@contextmanager
def later(seconds: float = 31.0) -> Iterator[None]:
    """So much later than now, by the clocks of this process."""
    with (
        patch.object(LifeSigns, "_now", lambda _: monotonic() + seconds),
        patch("time.time", lambda: time_ns() / 1e9 + seconds),
    ):
        yield


async def test_the_living_are_not_buried(desk: Desk, other: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    await other.engine._heed()
    with later(10_000):
        await other.engine._heed()
        await desk.engine._heed()
    assert (await desk.read(begun))["status"] == "in_progress"
    (task,) = await desk.store.responses.unfinished()
    assert task.seen_at >= begun["created_at"] + 10_000


async def test_clocks_that_disagree_make_nobody_dead(desk: Desk) -> None:
    """What counts is that another machine's sign of life changes, whatever it says."""
    begun = await begin(desk.store, owner="elsewhere-x", describe=described)
    with patch("time.time", lambda: 1_000):  # its clock is decades behind
        await desk.store.responses.show_life([begun.response.id])
    await desk.engine._heed()
    with later(20):
        await desk.engine._heed()
    with patch("time.time", lambda: 1_001):
        await desk.store.responses.show_life([begun.response.id])
    with later(40):
        await desk.engine._heed()
    assert not (await desk.store.responses.get("a", begun.response.id)).is_terminal
    with later(71):
        await desk.engine._heed()
    assert (await desk.store.responses.get("a", begun.response.id)).status == "failed"


async def test_a_task_lives_while_its_files_are_kept(desk: Desk, other: Desk) -> None:
    """It is accepted, and its inputs take longer to keep than a task may be silent."""
    with desk.engine.place() as place:
        begun = await begin(desk.store, owner="elsewhere-x", describe=described)
        place.response_id = begun.response.id
        await other.engine._heed()
        with later():
            await desk.engine._heed()
            await other.engine._heed()
    assert not (await desk.store.responses.get("a", begun.response.id)).is_terminal


async def test_draining_waits_for_tasks_and_ends_feeds(desk: Desk, puppet: Puppet) -> None:
    feed = asyncio.create_task(desk.call("GET", f"/v1/harnesses/{HARNESS}/events"))
    begun = await desk.background()
    await puppet.started.wait()
    with desk.engine.place():
        draining = asyncio.create_task(desk.engine.drain())
        assert events_of(await feed)[0]["type"] == "response.created"
        puppet.end()
        assert (await desk.finished(begun))["status"] == "completed"
        assert not draining.done()
    await draining
    assert (await desk.run("A straggler", background=True))["status"] == "in_progress"


async def test_a_feed_tells_of_the_tasks_of_other_processes(
    desk: Desk, other: Desk, puppet: Puppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays_module, "RELAY_SECONDS", 0.001)
    before = await desk.background()
    await puppet.started.wait()
    puppet.say("before")
    await until_kept(desk, before, 5)
    async with aclosing(other.engine.feed("a", HARNESS)) as feed, asyncio.timeout(20):
        following = asyncio.ensure_future(anext(feed))
        while not (readings := other.engine._relays._readings):
            await asyncio.sleep(0.001)
        await readings["a", HARNESS].relay.begun.wait()
        puppet.say("now")
        puppet.end()
        heard = [json.loads((await following)[1])]
        while heard[-1]["type"] != "response.completed":
            heard.append(json.loads((await anext(feed))[1]))
        assert heard[0]["type"] == "response.output_text.delta"
        assert heard[0]["delta"] == "now"
        assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
        puppet.end()
        again = await desk.run("again")
        heard = [json.loads((await anext(feed))[1])]
        while heard[-1]["type"] != "response.completed":
            heard.append(json.loads((await anext(feed))[1]))
        assert (heard[0]["type"], heard[-1]["response"]) == ("response.created", again)
    assert other.engine._relays._readings == {}


async def test_a_task_that_this_process_lost_gets_its_end(desk: Desk) -> None:
    begun = await begin(desk.store, owner=desk.engine.owner, describe=described)
    await desk.engine._heed()
    assert not (await desk.store.responses.get("a", begun.response.id)).is_terminal
    with later():
        await desk.engine._heed()
    assert (await desk.store.responses.get("a", begun.response.id)).status == "failed"


async def test_a_task_of_another_machine_gets_its_end_in_time(desk: Desk) -> None:
    begun = await begin(desk.store, owner="elsewhere-0123456789abcdef", describe=described)
    await desk.engine._heed()
    assert not (await desk.store.responses.get("a", begun.response.id)).is_terminal
    await desk.store.responses.request_cancel("a", begun.response.id)
    with later():
        await desk.engine._heed()
    record = await desk.store.responses.get("a", begun.response.id)
    assert record.status == "cancelled"
    events = [json.loads(payload) for _, payload in await desk.store.responses.events(record.id)]
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.failed",
    ]


async def test_tasks_of_dead_processes_have_their_end_at_the_start(
    tmp_path: Path, puppet: Puppet
) -> None:
    async with desk_in(tmp_path, configured(puppet)) as dead:
        begun = await dead.background()
        await puppet.started.wait()
        puppet.say("Half an ")
        puppet.say("answer")
        await until_kept(dead, begun, 5)
        await add_artifact_of(dead, begun)
        await stopped_dead(dead)
        async with desk_in(tmp_path, configured(puppet)) as desk:
            ended = await desk.read(begun)
            assert (ended["status"], text_of(ended)) == ("failed", "Half an answer")
            assert ended["error"]["code"] == "harness_error"
            (annotation,) = ended["output"][0]["content"][0]["annotations"]
            assert annotation["filename"] == "a.txt"
            target = f"/v1/responses/{begun['id']}?stream=true"
            events = events_of(await desk.call("GET", target))
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["response"] == ended
            resumed = await desk.call("GET", target, headers=[(b"last-event-id", b"2")])
            assert events_of(resumed) == events[3:]
            puppet.end()
            again = await desk.run(previous_response_id=begun["id"])
            assert again["status"] == "completed"
            assert puppet.tasks[-1].history[0].assistant == "Half an answer"


async def test_a_task_that_was_taken_for_dead_tells_what_was_told(
    desk: Desk, puppet: Puppet
) -> None:
    waiting = asyncio.create_task(
        desk.call("POST", "/v1/responses", {"input": "x", "stream": True})
    )
    await puppet.started.wait()
    record = await desk.store.responses.get("a", puppet.tasks[0].response_id)
    buried = {**record.response, "status": "failed", "error": {"code": "x"}}
    buried["error"] = {"type": "harness_error", "code": "harness_error", "message": "Gone."}
    assert await desk.store.responses.finish(record.id, buried)
    puppet.say("I am alive!")
    last = events_of(await waiting)[-1]
    assert last["response"] == buried


async def test_the_watch_goes_on_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "HEARTBEAT_SECONDS", 0.001)
    heeded = asyncio.Event()
    troubles: list[Exception] = [Unavailable("x", "y"), RuntimeError("broken")]

    async def heed(_: Engine) -> None:
        if troubles:
            raise troubles.pop()
        heeded.set()

    with patch.object(Engine, "_heed", heed):
        async with desk_in(tmp_path), asyncio.timeout(20):
            await heeded.wait()


async def test_a_broken_keeper_leaves_the_end_to_the_watch(desk: Desk, puppet: Puppet) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    with patch.object(desk.store.responses, "append_events", broken):
        begun = await desk.background()
        await puppet.started.wait()
        run = desk.engine._runs[begun["id"]]
        await asyncio.sleep(0.01)
        puppet.end()
        await run.finished.wait()
    assert (await desk.read(begun))["status"] == "in_progress"
    assert desk.engine.running == 0


async def test_a_task_that_goes_while_it_is_buried_is_no_trouble(desk: Desk) -> None:
    begun = await begin(desk.store, owner="elsewhere-x", describe=described)
    (task,) = await desk.store.responses.unfinished()
    await desk.store.sessions.delete("a", begun.session.id, running=True)
    await desk.engine._bury(task)
    with pytest.raises(NotFound):
        await desk.engine.wait(begun.response)


def described(response_id: str, session: Any, created_at: int) -> dict[str, Any]:
    """A response as a real one begins."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": "default",
        "output": [],
        "metadata": {"session_id": session.id},
    }


async def add_artifact_of(desk: Desk, response: dict[str, Any]) -> None:
    session = await desk.store.sessions.get("a", session_of(response))

    async def content() -> AsyncIterator[bytes]:
        yield b"data"

    async with desk.store.stage(content()) as sealed:
        await desk.store.files.add_artifact(
            sealed,
            scope="a",
            principal="first",
            session=session,
            response_id=response["id"],
            path="a.txt",
            media_type="text/plain",
        )


async def stopped_dead(desk: Desk) -> None:
    """The end of a process without any of its own doing."""
    engine = desk.engine
    assert engine._watch is not None
    engine._watch.cancel()
    for run in engine._runs.values():
        run._harness = None
    store: ContentStore = desk.store
    await store._catalogue._committer.drain()
    for task in [*engine._tasks]:
        task.cancel()
    await asyncio.gather(*engine._tasks, return_exceptions=True)
    engine._tasks.clear()
    crash(store)
    store._closed = True


@pytest.mark.requirement("UHP-16")
async def test_every_artifact_of_many_is_kept(desk: Desk, puppet: Puppet) -> None:
    begun = await desk.background()
    await puppet.started.wait()
    for number in range(engine_module.BUNCH_FILES + 3):
        puppet.write(f"{number:03}.txt", b"%d" % number)
    puppet.write("large.bin", bytes(engine_module.BUNCH_BYTES + 1))
    puppet.end()
    ended = await desk.finished(begun)
    files = await desk.files(ended)
    assert len(files) == engine_module.BUNCH_FILES + 4
    cited = ended["output"][0]["content"][0]["annotations"]
    assert {file["id"] for file in files} == {annotation["file_id"] for annotation in cited}


@pytest.mark.requirement("UHP-36")
async def test_an_artifact_over_the_quota_is_reported(tmp_path: Path, puppet: Puppet) -> None:
    async with desk_in(tmp_path, configured(puppet), max_session_files=1) as desk:
        begun = await desk.background()
        await puppet.started.wait()
        session = await desk.store.sessions.get("a", session_of(begun))
        await add_artifact(desk.store, session, path="earlier.txt")
        puppet.write("late.txt", b"x")
        puppet.end()
        ended = await desk.finished(begun)
        assert ended["status"] == "completed"
        stream = await desk.call("GET", f"/v1/responses/{begun['id']}?stream=true")
        notices = [event for event in events_of(stream) if event["type"] == "error"]
        assert "late.txt is not an artifact: The limit of 1 files" in notices[0]["message"]
        assert [file["path"] for file in await desk.files(ended)] == ["earlier.txt"]


async def test_of_two_that_bury_a_task_one_does(desk: Desk, other: Desk) -> None:
    begun = await begin(desk.store, owner="elsewhere-x", describe=described)
    (task,) = await desk.store.responses.unfinished()
    await asyncio.gather(desk.engine._bury(task), other.engine._bury(task))
    events = await desk.store.responses.events(begun.response.id)
    assert [number for number, _ in events] == [0, 1, 2]
    assert (await desk.store.responses.get("a", task.id)).status == "failed"


async def test_a_wish_for_a_task_that_is_not_here_is_no_trouble(desk: Desk, puppet: Puppet) -> None:
    lost = await begin(desk.store, owner=desk.engine.owner, describe=described)
    await desk.store.responses.request_cancel("a", lost.response.id)
    begun = await desk.background()
    await desk.engine._heed()
    puppet.end()
    assert (await desk.finished(begun))["status"] == "completed"


async def test_an_engine_that_never_started_can_be_closed(tmp_path: Path) -> None:
    async with desk_in(tmp_path, started=False) as desk:
        await desk.engine.close()
        assert desk.engine.running == 0


@pytest.mark.parametrize("error", [Exhausted(), RuntimeError("broken")])
async def test_what_is_wrong_with_an_earlier_process_does_not_hinder_the_start(
    tmp_path: Path, error: Exception
) -> None:
    async def refuse(_: Engine) -> None:
        raise error

    with patch.object(Engine, "_bury_abandoned", refuse):
        async with desk_in(tmp_path) as desk:
            assert (await desk.call("GET", "/v1/sessions")).status == 200
