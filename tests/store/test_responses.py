"""Tasks: one at a time in a session, once for a key, and an end that never changes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from app.errors import Conflict, NotFound, Refusal
from app.store import ContentStore
from app.store.responses import Begun, Elsewhere, Other, Unfinished
from tests.store.sessions import (
    HARNESS,
    add_artifact,
    add_input,
    begin,
    counted,
    executed,
    finish,
    key_of,
    noted,
    plans_of,
)
from tests.store.stores import count, new_sqlite_store

pytestmark = pytest.mark.anyio

UNKNOWN = "resp_0123456789abcdef0123456789abcdef"


async def status_of(store: ContentStore, begun: Begun) -> str:
    record = await store.responses.get("a", begun.response.id, also_hidden=True)
    return record.status


async def test_a_task_begins_with_a_session_of_its_own(store: ContentStore) -> None:
    begun = await begin(store, title="First", request={"input_items": [{"type": "message"}]})
    assert not begun.repeated
    assert begun.response.id.startswith("resp_")
    assert begun.response.response["id"] == begun.response.id
    assert begun.response.request == {"input_items": [{"type": "message"}]}
    assert (begun.session.title, begun.session.status) == ("First", "in_progress")
    assert await store.responses.get("a", begun.response.id) == begun.response
    running = await store.responses.running("a", begun.session.id)
    assert running == begun.response
    assert await finish(store, begun)
    assert await store.responses.running("a", begun.session.id) is None
    assert (await store.sessions.get("a", begun.session.id)).status == "completed"


async def test_a_task_continues_a_session(store: ContentStore) -> None:
    first = await begin(store)
    await finish(store, first)
    second = await begin(store, previous_response_id=first.response.id)
    assert second.session.id == first.session.id
    assert second.response.previous_response_id == first.response.id
    assert (await store.sessions.get("a", first.session.id)).status == "in_progress"
    turns = await store.responses.turns("a", first.session.id)
    assert [turn.id for turn in turns] == [first.response.id, second.response.id]


async def test_what_cannot_be_continued(store: ContentStore) -> None:
    first = await begin(store)
    for scope, previous, code in (
        ("a", UNKNOWN, "response_not_found"),
        ("b", first.response.id, "response_not_found"),
    ):
        with pytest.raises(NotFound) as missing:
            await begin(store, scope, previous_response_id=previous)
        assert missing.value.code == code
    for harness_id, code in (("chrn_other", "harness_mismatch"), ("chrn_one", "session_busy")):
        with pytest.raises(Conflict) as refused:
            await begin(store, previous_response_id=first.response.id, harness_id=harness_id)
        assert refused.value.code == code
    assert len(await store.responses.turns("a", first.session.id)) == 1


async def test_of_many_tasks_at_once_one_gets_the_session(store: ContentStore) -> None:
    first = await begin(store)
    await finish(store, first)
    outcomes = await asyncio.gather(
        *(begin(store, previous_response_id=first.response.id) for _ in range(10)),
        return_exceptions=True,
    )
    refused = [one.code for one in outcomes if isinstance(one, Refusal)]
    assert refused == ["session_busy"] * 9


@pytest.mark.requirement("B94")
async def test_a_key_begins_one_task(store: ContentStore) -> None:
    begun = await asyncio.gather(*(begin(store, idempotency=key_of()) for _ in range(20)))
    assert len({one.response.id for one in begun}) == 1
    assert [one.repeated for one in begun].count(False) == 1
    known = await store.responses.known("a", key_of())
    assert known is not None
    assert known.response.id == begun[0].response.id
    assert await store.responses.known("a", key_of("other")) is None


@pytest.mark.requirement("B94")
async def test_a_key_belongs_to_its_principal_and_its_request(store: ContentStore) -> None:
    first = await begin(store, idempotency=key_of())
    for other in (
        await begin(store, idempotency=key_of(principal="bob")),
        await begin(store, "b", idempotency=key_of()),
    ):
        assert other.response.id != first.response.id
    with pytest.raises(Conflict) as refused:
        await begin(store, idempotency=key_of(digest=b"2"))
    assert refused.value.code == "consignee_idempotency_mismatch"


@pytest.mark.requirement("B94")
async def test_a_key_gives_the_first_result_whatever_became_of_it(store: ContentStore) -> None:
    first = await begin(store, idempotency=key_of())
    await finish(store, first, "failed")
    await store.responses.delete("a", first.response.id)
    again = await begin(store, idempotency=key_of())
    assert (again.repeated, again.response.status) == (True, "failed")
    await store.sessions.delete("a", first.session.id)
    with pytest.raises(NotFound, match="no such response"):
        await begin(store, idempotency=key_of())


async def test_keys_are_forgotten(store: ContentStore) -> None:
    await begin(store, idempotency=key_of())
    now = int(time.time())
    assert await store.responses.forget_keys(before=now - 10) == 0
    assert await store.responses.forget_keys(before=now + 10) == 1
    assert await store.responses.known("a", key_of()) is None


async def test_events_are_kept_in_order_until_the_end(store: ContentStore) -> None:
    begun = await begin(store)
    response_id = begun.response.id
    await store.responses.append_events(response_id, [(0, "zero"), (1, "one")])
    await store.responses.append_events(response_id, [(1, "one"), (2, "two")])
    assert await store.responses.events(response_id, after=0) == [(1, "one"), (2, "two")]
    assert await store.responses.events(response_id, limit=1) == [(0, "zero")]
    ended = {**begun.response.response, "status": "completed"}
    assert await store.responses.finish(response_id, ended, [(3, "three")])
    assert (await store.responses.events(response_id))[-1] == (3, "three")
    with pytest.raises(NotFound):
        await store.responses.append_events(response_id, [(4, "late")])
    with pytest.raises(NotFound):
        await store.responses.append_events(UNKNOWN, [(0, "zero")])


async def test_an_end_never_changes(store: ContentStore) -> None:
    begun = await begin(store)
    assert await finish(store, begun, "completed")
    assert not await finish(store, begun, "failed")
    assert not await finish(store, Begun(begun.response, begun.session), "cancelled")
    record = await store.responses.get("a", begun.response.id)
    assert (record.status, record.is_terminal) == ("completed", True)
    assert record.finished_at is not None


async def test_events_of_old_tasks_are_dropped(store: ContentStore, tmp_path: Path) -> None:
    old, running = await begin(store), await begin(store)
    for begun in (old, running):
        await store.responses.append_events(begun.response.id, [(0, "{}")])
    await finish(store, old)
    now = int(time.time())
    assert await store.responses.drop_events(before=now - 10) == 0
    assert await store.responses.drop_events(before=now + 10) == 1
    assert await store.responses.drop_events(before=now + 10) == 0
    assert count(tmp_path, "response_events") == 1
    assert await status_of(store, old) == "completed"


async def test_what_is_deleted_is_gone_and_runs_on(store: ContentStore) -> None:
    begun = await begin(store)
    await store.responses.delete("a", begun.response.id)
    for gone in (
        store.responses.get("a", begun.response.id),
        store.responses.delete("a", begun.response.id),
        store.responses.request_cancel("a", begun.response.id),
        begin(store, previous_response_id=begun.response.id),
    ):
        with pytest.raises(NotFound, match="no such response"):
            await gone
    assert await store.responses.turns("a", begun.session.id) == []
    assert await status_of(store, begun) == "in_progress"
    asked = await store.responses.request_cancel("a", begun.response.id, also_deleted=True)
    assert asked.id == begun.response.id
    assert await store.responses.cancelled("me") == [begun.response.id]
    assert await finish(store, begun)
    with pytest.raises(NotFound):
        await store.responses.get("a", begun.response.id)


async def test_what_is_not_retained_is_gone_after_its_end(store: ContentStore) -> None:
    begun, deleted = await begin(store), await begin(store)
    assert (await store.responses.get("a", begun.response.id)).status == "in_progress"
    await store.responses.delete("a", deleted.response.id)
    for one in (begun, deleted):
        assert await finish(store, one, retain=False)
        with pytest.raises(NotFound):
            await store.responses.get("a", one.response.id)
    # Cancelling twice is no error; what was deleted stays unknown.
    assert (await store.responses.request_cancel("a", begun.response.id)).is_terminal
    with pytest.raises(NotFound):
        await store.responses.request_cancel("a", deleted.response.id)
    now = int(time.time())
    assert await store.responses.purge(before=now - 10) == 0
    assert await store.responses.purge(before=now + 10) == 2
    with pytest.raises(NotFound):
        await store.responses.get("a", begun.response.id, also_hidden=True)


@pytest.mark.requirement("UHP-29", "B85")
async def test_a_foreign_task_is_unknown(store: ContentStore) -> None:
    begun = await begin(store)
    for refusing in (
        store.responses.get("b", begun.response.id),
        store.responses.get("b", begun.response.id, also_hidden=True),
        store.responses.delete("b", begun.response.id),
        store.responses.request_cancel("b", begun.response.id),
        store.responses.turns("b", begun.session.id),
        store.responses.running("b", begun.session.id),
    ):
        with pytest.raises(NotFound):
            await refusing
    assert not (await store.responses.get("a", begun.response.id)).cancel_requested


async def test_a_wish_to_cancel_reaches_the_owner(store: ContentStore) -> None:
    mine, other = await begin(store), await begin(store, owner="other")
    for begun in (mine, other):
        await store.responses.request_cancel("a", begun.response.id)
    assert await store.responses.cancelled("me") == [mine.response.id]
    await finish(store, mine)
    assert await store.responses.cancelled("me") == []
    assert (await store.responses.request_cancel("a", mine.response.id)).status == "completed"


async def test_who_runs_what_and_when_that_last_showed(store: ContentStore) -> None:
    begun, ended = await begin(store), await begin(store)
    await finish(store, ended)
    later = int(time.time()) + 1000
    with patch("time.time", lambda: later):
        await store.responses.show_life([begun.response.id, ended.response.id, UNKNOWN])
    assert await store.responses.unfinished() == [Unfinished(begun.response.id, "a", "me", later)]


async def test_undoing_leaves_nothing(store: ContentStore, tmp_path: Path) -> None:
    begun = await begin(store, idempotency=key_of())
    await add_input(store, begun)
    await store.responses.undo(begun)
    for table in ("sessions", "responses", "idempotency_keys", "files"):
        assert count(tmp_path, table) == 0
    assert (counted(tmp_path), noted(tmp_path)) == ({}, {})
    await store.responses.undo(begun)


async def test_a_session_knows_its_newest_task_and_a_task_the_one_before_it(
    store: ContentStore,
) -> None:
    first = await begin(store)
    assert first.session.newest_task is None
    await finish(store, first)
    second = await begin(store, previous_response_id=first.response.id)
    assert second.session.newest_task == first.response.id
    await finish(store, second)
    await store.responses.delete("a", second.response.id)
    undone = await begin(store, previous_response_id=first.response.id)
    assert undone.session.newest_task == second.response.id
    await store.responses.undo(undone)
    session = await store.sessions.get("a", first.session.id)
    assert session.newest_task == second.response.id


async def test_tasks_of_other_processes_are_told_in_order(store: ContentStore) -> None:
    of = Other("a", HARNESS, "me")
    assert await store.responses.position() == 0
    theirs = await begin(store, owner="they")
    position = await store.responses.position()
    await begin(store, owner="me")
    await begin(store, "b", owner="they")
    await begin(store, owner="they", harness_id="chrn_other")
    later = await begin(store, owner="they")
    await finish(store, theirs)
    expected = Elsewhere(later.response.id, later.response.position)
    assert await store.responses.begun_elsewhere(position, of) == [expected]
    assert await store.responses.running_elsewhere(of) == [expected]
    assert [task.id for task in await store.responses.begun_elsewhere(0, of)] == [
        theirs.response.id,
        later.response.id,
    ]
    assert await store.responses.newest_event(later.response.id) == -1
    await store.responses.append_events(later.response.id, [(0, "{}"), (1, "{}")])
    assert await store.responses.newest_event(later.response.id) == 1


async def test_undoing_leaves_the_session_that_was_there(store: ContentStore) -> None:
    first = await begin(store)
    await finish(store, first)
    await add_artifact(store, first.session)
    second = await begin(store, previous_response_id=first.response.id, idempotency=key_of())
    await store.responses.undo(second)
    assert (await store.sessions.get("a", first.session.id)).status == "completed"
    assert len(await store.responses.turns("a", first.session.id)) == 1
    third = await begin(store, previous_response_id=first.response.id, idempotency=key_of())
    assert not third.repeated


async def test_watching_over_tasks_of_sqlite_reads_an_index(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path)
    begun = await begin(store)
    with executed(store) as statements:
        await store.responses.unfinished()
        await store.responses.cancelled("me")
        await store.responses.running("a", begun.session.id)
        await store.responses.turns("a", begun.session.id)
    plans = plans_of(tmp_path, statements)
    assert plans[0] == "SCAN responses USING INDEX uq_responses_running"
    assert plans[1] == "SCAN responses USING INDEX uq_responses_running"
    assert [plan for plan in plans[2:] if "SEARCH" not in plan] == []
    await store.close()
