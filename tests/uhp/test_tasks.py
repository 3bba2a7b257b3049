"""The routes of tasks: accepted, followed, read back, repeated, refused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from app.errors import Exhausted, Unavailable
from app.uhp.tasks import RESERVED_METADATA
from tests.store.sessions import add_upload, content_of, counted, noted
from tests.store.stores import count, stored_files
from tests.uhp.calling import FIRST, SECOND, SHARING, error_of
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
    session_of,
    text_of,
)

pytestmark = pytest.mark.anyio

UNKNOWN = "resp_0123456789abcdef0123456789abcdef"


@pytest.fixture
def puppet() -> Puppet:
    return Puppet()


@pytest.fixture
async def desk(tmp_path: Path, puppet: Puppet) -> AsyncIterator[Desk]:
    """Echo is the default harness, the puppet the other one."""
    harnesses = (configured(quick_echo()), configured(puppet, OTHER_HARNESS))
    async with desk_in(tmp_path, *harnesses, max_upload_bytes=1000, max_tasks=3) as opened:
        yield opened


def on(harness_id: str, **more: Any) -> dict[str, Any]:
    return {"metadata": {"harness_id": harness_id, **more}}


def key(value: str) -> list[tuple[bytes, bytes]]:
    return [(b"idempotency-key", value.encode("latin-1"))]


def inline(data: bytes, **more: Any) -> list[dict[str, Any]]:
    url = "data:text/plain;base64," + base64.b64encode(data).decode()
    part = {"type": "input_file", "filename": "token.txt", "file_data": url, **more}
    return [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, part]}]


async def test_a_blocking_task(desk: Desk) -> None:
    response = await desk.run("Reply with exactly: ok", metadata={"note": "mine"})
    assert (response["status"], text_of(response), response["model"]) == (
        "completed",
        "ok",
        "default",
    )
    metadata = response["metadata"]
    assert (metadata["harness_id"], metadata["note"]) == (HARNESS, "mine")
    assert "ignored_fields" not in metadata
    assert "model_fallback" not in metadata
    assert (response["usage"], response["store"], response["previous_response_id"]) == (
        None,
        True,
        None,
    )
    assert await desk.read(response) == response


async def test_a_stream_amounts_to_the_same(desk: Desk) -> None:
    sent = await desk.call("POST", "/v1/responses", {"input": "[tool] hello", "stream": True})
    events = events_of(sent)
    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"
    response = events[-1]["response"]
    blocking = await desk.run("[tool] hello")
    assert [item["type"] for item in response["output"]] == [
        item["type"] for item in blocking["output"]
    ]
    again = await desk.call("GET", f"/v1/responses/{response['id']}?stream=true")
    assert events_of(again) == events
    for resumed in (
        await desk.call(
            "GET", f"/v1/responses/{response['id']}?stream=true", headers=[(b"last-event-id", b"2")]
        ),
        await desk.call("GET", f"/v1/responses/{response['id']}?stream=true&starting_after=2"),
    ):
        assert events_of(resumed) == events[3:]
    for bad in ("x", "-1", "1e3", "9" * 10):
        refused = await desk.call(
            "GET", f"/v1/responses/{response['id']}?stream=true&starting_after={bad}"
        )
        assert (refused.status, error_of(refused)["code"]) == (400, "invalid_input")
    head = await desk.call("HEAD", f"/v1/responses/{response['id']}?stream=true")
    assert (head.status, head.body) == (200, b"")


async def test_old_events_are_condensed(desk: Desk) -> None:
    response = await desk.run()
    await desk.store.responses.drop_events(before=2**40)
    target = f"/v1/responses/{response['id']}?stream=true"
    created, ended = events_of(await desk.call("GET", target))
    assert (created["type"], ended["response"]) == ("response.created", response)
    (last,) = events_of(await desk.call("GET", target, headers=[(b"last-event-id", b"5")]))
    assert (last["sequence_number"], last["response"]) == (6, response)


async def test_a_session_goes_on(desk: Desk) -> None:
    first = await desk.run("Create a file named a.txt containing exactly: one")
    second = await desk.run("Second.", previous_response_id=first["id"], model="other")
    assert session_of(second) == session_of(first)
    assert (second["previous_response_id"], second["model"]) == (first["id"], "other")
    assert "Turns before this one: 1." in text_of(second)
    assert [file["path"] for file in await desk.files(second)] == ["a.txt"]


async def test_a_session_keeps_its_harness(desk: Desk, puppet: Puppet) -> None:
    puppet.end()
    first = await desk.run(**on(OTHER_HARNESS))
    puppet.end()
    second = await desk.run(previous_response_id=first["id"])
    assert second["metadata"]["harness_id"] == OTHER_HARNESS
    sent = await desk.call(
        "POST", "/v1/responses", {"input": "x", "previous_response_id": first["id"], **on(HARNESS)}
    )
    assert (sent.status, error_of(sent)["code"]) == (409, "harness_mismatch")


@pytest.mark.requirement("UHP-29", "B85")
@pytest.mark.parametrize("token", [FIRST, SECOND])
async def test_what_cannot_be_continued(desk: Desk, token: str) -> None:
    foreign = (await desk.run())["id"]
    wrong = ["x", "resp_", "resp_\x00", UNKNOWN, *([foreign] if token == SECOND else [])]
    answers = set()
    for previous in wrong:
        for more in ({}, on(HARNESS)):
            body = {"input": "x", "previous_response_id": previous, **more}
            sent = await desk.call("POST", "/v1/responses", body, token=token)
            error = error_of(sent)
            assert (sent.status, error["code"]) == (404, "response_not_found")
            assert error["param"] == "previous_response_id"
            answers.add(sent.body)
    assert len(answers) == 1


@pytest.mark.requirement("UHP-35")
async def test_an_expired_session_cannot_be_continued(desk: Desk) -> None:
    response = await desk.run()
    await desk.store.sessions.expire(idle_since=2**40)
    body = {"input": "x", "previous_response_id": response["id"]}
    sent = await desk.call("POST", "/v1/responses", body)
    assert (sent.status, error_of(sent)["code"]) == (404, "session_expired")
    assert (await desk.call("GET", f"/v1/responses/{response['id']}")).status == 404


async def test_a_busy_session_takes_no_second_task(desk: Desk, puppet: Puppet) -> None:
    puppet.end()
    first = await desk.run(**on(OTHER_HARNESS))
    running = await desk.background(previous_response_id=first["id"])
    sent = await desk.call(
        "POST", "/v1/responses", {"input": "x", "previous_response_id": first["id"]}
    )
    assert (sent.status, error_of(sent)["code"]) == (409, "session_busy")
    puppet.end()
    assert (await desk.finished(running))["status"] == "completed"


async def test_no_harness_that_is_not_there(desk: Desk, tmp_path: Path) -> None:
    sent = await desk.call("POST", "/v1/responses", {"input": "x", **on("chrn_unknown")})
    assert (sent.status, error_of(sent)["code"]) == (404, "harness_not_found")
    gone = await desk.run(**on(HARNESS))
    async with desk_in(tmp_path, configured(Puppet(), OTHER_HARNESS)) as later:
        body = {"input": "x", "previous_response_id": gone["id"]}
        sent = await later.call("POST", "/v1/responses", body)
    assert (sent.status, error_of(sent)["code"]) == (503, "harness_unavailable")


async def test_a_harness_that_cannot_start_is_refused_before_anything_is_kept(
    tmp_path: Path,
) -> None:
    asleep = configured(quick_echo(), is_available=lambda: False)
    async with desk_in(tmp_path, asleep) as desk:
        sent = await desk.call("POST", "/v1/responses", {"input": "x"})
        assert (sent.status, error_of(sent)["code"]) == (503, "harness_unavailable")
        assert count(tmp_path, "sessions") == 0


async def test_no_more_tasks_than_may_run(desk: Desk, puppet: Puppet) -> None:
    body = {"input": "x", "background": True, **on(OTHER_HARNESS)}
    sent = await asyncio.gather(*(desk.call("POST", "/v1/responses", body) for _ in range(8)))
    assert sorted(answer.status for answer in sent) == [200] * 3 + [503] * 5
    assert desk.engine.running == 3
    for _ in range(3):
        puppet.end()
    for run in [*desk.engine._runs.values()]:
        await run.finished.wait()
    assert (await desk.run())["status"] == "completed"


@pytest.mark.requirement("B94")
async def test_a_key_runs_one_task(desk: Desk, puppet: Puppet) -> None:
    body = {"input": "x", **on(OTHER_HARNESS)}
    waiting = [
        asyncio.create_task(desk.call("POST", "/v1/responses", body, headers=key("K")))
        for _ in range(20)
    ]
    await puppet.started.wait()
    puppet.say("Once.")
    puppet.end()
    answers = {(await each).body for each in waiting}
    assert len(answers) == 1
    assert len(puppet.tasks) == 1
    late = await desk.call("POST", "/v1/responses", body, headers=key("K"))
    assert {late.body} == answers


@pytest.mark.requirement("B94")
async def test_a_key_outlives_the_process_and_the_full_house(
    desk: Desk, puppet: Puppet, tmp_path: Path
) -> None:
    upload = await add_upload(desk.store)
    part = {"type": "input_file", "file_id": upload.id}
    body = {"input": [{"role": "user", "content": [part]}]}
    first = await desk.call("POST", "/v1/responses", body, headers=key("K"))
    await desk.store.files.delete_upload("a", upload.id)
    async with desk_in(tmp_path, configured(Puppet()), max_tasks=1) as later:
        await later.background()
        again = await later.call("POST", "/v1/responses", body, headers=key("K"))
    assert (again.status, again.body) == (200, first.body)


@pytest.mark.requirement("B94")
async def test_a_key_is_one_principals(desk: Desk) -> None:
    first = await desk.call("POST", "/v1/responses", {"input": "x"}, headers=key("K"))
    for token in (SHARING, SECOND):
        other = await desk.call(
            "POST", "/v1/responses", {"input": "x"}, headers=key("K"), token=token
        )
        assert other.json["id"] != first.json["id"]
    mismatch = await desk.call("POST", "/v1/responses", {"input": "y"}, headers=key("K"))
    assert error_of(mismatch)["code"] == "consignee_idempotency_mismatch"
    assert mismatch.status == 409
    for bad in ("", "x" * 256, "x" * 10_000, "a\tb"):
        refused = await desk.call("POST", "/v1/responses", {"input": "x"}, headers=key(bad))
        assert (refused.status, error_of(refused)["code"]) == (400, "invalid_input")


async def test_the_loser_of_a_race_between_processes_gets_the_first_result(
    desk: Desk,
) -> None:
    async def unknown(*_: Any) -> None:
        return None

    first = await desk.call("POST", "/v1/responses", {"input": "x"}, headers=key("K"))
    with patch.object(desk.store.responses, "known", unknown):
        again = await desk.call("POST", "/v1/responses", {"input": "x"}, headers=key("K"))
    assert again.body == first.body


async def test_what_is_not_retained_is_answered_once(desk: Desk, puppet: Puppet) -> None:
    puppet.end()
    for response in (await desk.run(store=False), await desk.run(store=False, **on(OTHER_HARNESS))):
        assert (response["status"], response["store"]) == ("completed", False)
        assert (await desk.call("GET", f"/v1/responses/{response['id']}")).status == 404
        cancel = await desk.call("POST", f"/v1/responses/{response['id']}/cancel")
        assert (cancel.status, cancel.json["status"]) == (200, "completed")


async def test_a_running_task_that_is_not_retained_can_be_cancelled(
    desk: Desk, puppet: Puppet
) -> None:
    begun = await desk.background(store=False, **on(OTHER_HARNESS))
    sent = await desk.call("POST", f"/v1/responses/{begun['id']}/cancel")
    assert (sent.status, sent.json["status"]) == (200, "cancelled")


@pytest.mark.requirement("UHP-02", "UHP-05", "UHP-06", "UHP-33")
@pytest.mark.parametrize("data", [b"", b"small", bytes(range(250)) * 4])
async def test_files_reach_the_harness_unchanged(desk: Desk, data: bytes) -> None:
    upload = await add_upload(desk.store, data, filename="token.txt")
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    contents: list[Any] = [
        inline(data),
        [{"role": "user", "content": [{"type": "input_file", "file_id": upload.id}]}],
        [{"role": "user", "content": [{"type": "input_image", "file_id": upload.id}]}],
        [{"type": "input_image", "image_url": url}],
    ]
    for content in contents:
        response = await desk.run(content)
        (file,) = await desk.files(response)
        assert file["path"] == "digests.txt"
        record = await desk.store.files.get("a", file["id"])
        line = (await content_of(desk.store, record)).decode()
        assert line.startswith(f"{hashlib.sha256(data).hexdigest()}  {len(data)}  inputs/")


async def test_files_come_in_the_order_of_the_request(desk: Desk) -> None:
    upload = await add_upload(desk.store, b"second", filename="2.txt")
    parts: list[Any] = [
        {"type": "input_file", "filename": "1.txt", "file_data": "data:text/plain,first"},
        {"type": "input_file", "file_id": upload.id},
        {"type": "input_file", "filename": "3.txt", "file_data": "data:text/plain,third"},
    ]
    response = await desk.run([{"role": "user", "content": parts}])
    (file,) = await desk.files(response)
    record = await desk.store.files.get("a", file["id"])
    lines = (await content_of(desk.store, record)).decode().splitlines()
    names = [line.rpartition("/")[2] for line in lines]
    assert names == ["1.txt", "2.txt", "3.txt"]


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_foreign_file_is_unknown(desk: Desk) -> None:
    upload = await add_upload(desk.store)
    answers = set()
    for file_id in (upload.id, "file_unknown", "x", "../../etc/passwd"):
        part = {"type": "input_file", "file_id": file_id}
        body = {"input": [{"role": "user", "content": [part]}]}
        sent = await desk.call("POST", "/v1/responses", body, token=SECOND)
        error = error_of(sent)
        assert (sent.status, error["code"]) == (404, "file_not_found")
        assert error["param"] == "input.0.content.0.file_id"
        answers.add(sent.body)
    assert len(answers) == 1


@pytest.mark.requirement("UHP-09", "UHP-10", "B90", "B91")
async def test_a_file_that_is_refused_leaves_nothing(desk: Desk, tmp_path: Path) -> None:
    large = await desk.call("POST", "/v1/responses", {"input": inline(bytes(1001))})
    assert (large.status, error_of(large)["detail"]) == (413, {"max_bytes": 1000})
    broken = inline(b"x", file_data="data:;base64,SGk")
    sent = await desk.call("POST", "/v1/responses", {"input": broken})
    assert (sent.status, error_of(sent)["param"]) == (400, "input.0.content.1.file_data")
    assert count(tmp_path, "sessions") == 0
    assert stored_files(tmp_path) == []
    assert desk.engine._places == set()


@pytest.mark.parametrize("error", [Exhausted(), RuntimeError("broken")])
async def test_a_start_that_fails_is_taken_back(
    desk: Desk, tmp_path: Path, error: Exception
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise error

    body = {"input": inline(b"x")}
    with patch.object(desk.store.files, "add_input", fail):
        sent = await desk.call("POST", "/v1/responses", body, headers=key("K"))
    assert sent.status in (429, 500)
    assert [count(tmp_path, name) for name in ("sessions", "responses")] == [0, 0]
    assert (counted(tmp_path), noted(tmp_path)) == ({}, {})
    again = await desk.call("POST", "/v1/responses", body, headers=key("K"))
    assert again.json["status"] == "completed"


@pytest.mark.requirement("UHP-36")
async def test_inline_files_count(tmp_path: Path) -> None:
    async with desk_in(tmp_path, configured(quick_echo()), max_session_bytes=10) as desk:
        sent = await desk.call("POST", "/v1/responses", {"input": inline(b"x" * 11)})
        assert (sent.status, error_of(sent)["code"]) == (429, "quota_exhausted")
        assert count(tmp_path, "sessions") == 0


async def test_reserved_metadata_is_the_servers(desk: Desk) -> None:
    claimed: dict[str, Any] = dict.fromkeys(sorted(RESERVED_METADATA - {"harness_id"}), 5)
    response = await desk.run(metadata={**claimed, "harness_id": None, "own": 1})
    metadata = response["metadata"]
    assert sorted(metadata) == ["container_id", "harness_id", "own", "session_id"]
    assert 5 not in metadata.values()


async def test_what_is_not_understood_is_reported(desk: Desk) -> None:
    response = await desk.run(tools=[{"type": "function", "name": "f"}], include=["x"], zzz=None)
    assert response["metadata"]["ignored_fields"] == ["include", "tools", "zzz"]


async def test_another_model_is_substituted_and_that_is_said(desk: Desk) -> None:
    response = await desk.run(model="gpt-5")
    assert response["model"] == "default"
    assert response["metadata"]["requested_model"] == "gpt-5"
    assert response["metadata"]["model_fallback"] is True
    assert "gpt-5" in response["metadata"]["model_fallback_reason"]


async def test_budgets_end_as_incomplete(desk: Desk) -> None:
    response = await desk.run("one two three", max_output_tokens=2)
    assert (response["status"], text_of(response)) == ("incomplete", "one two")
    assert response["incomplete_details"] == {"reason": "max_output"}


async def test_the_input_is_shown_again(desk: Desk) -> None:
    response = await desk.run(inline(b"secret"))
    sent = await desk.call("GET", f"/v1/responses/{response['id']}/input_items")
    (item,) = sent.json["data"]
    assert item["content"] == [
        {"type": "input_text", "text": "Read."},
        {"type": "input_file", "filename": "token.txt", "media_type": "text/plain", "bytes": 6},
    ]


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_foreign_task_is_unknown_on_every_route(desk: Desk) -> None:
    response_id = (await desk.run())["id"]
    assert (await desk.call("GET", f"/v1/responses/{response_id}", token=SHARING)).status == 200
    answers = set()
    for wrong, token in (
        (response_id, SECOND),
        (UNKNOWN, FIRST),
        ("x", FIRST),
        ("resp_%00", FIRST),
    ):
        for method, last in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("DELETE", ""),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
        ):
            sent = await desk.call(method, f"/v1/responses/{wrong}{last}", token=token)
            assert (sent.status, error_of(sent)["code"]) == (404, "response_not_found")
            answers.add(sent.body)
    assert len(answers) == 1


async def test_deleting(desk: Desk) -> None:
    response = await desk.run()
    target = f"/v1/responses/{response['id']}"
    sent = await desk.call("DELETE", target)
    assert sent.json == {"id": response["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        assert (await desk.call(method, target)).status == 404


async def test_a_store_that_does_not_answer_is_an_envelope(desk: Desk) -> None:
    async def refuse(*_: Any) -> Any:
        raise Unavailable("storage_unavailable", "Try again.")

    with patch.object(desk.store.responses, "begin", refuse):
        sent = await desk.call("POST", "/v1/responses", {"input": "x"})
    assert sent.status == 503
    validate("ErrorEnvelope", sent.json)
