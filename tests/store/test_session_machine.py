"""Sessions, tasks and files as a state machine: whatever happens in whatever order.

A session has at most one running task, an end never changes, what a scope keeps is what its rows
add up to, and nothing of one scope is ever seen by another.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from app.errors import Conflict, NotFound, QuotaExhausted
from app.store import ContentStore, migrate
from app.store.responses import Begun
from tests.store.sessions import (
    add_artifact,
    add_input,
    add_upload,
    begin,
    counted,
    finish,
    key_of,
    noted,
)
from tests.store.stores import LARGE, database, store_settings, stored_files

T = TypeVar("T")

DAY = 86400
OTHER = {"a": "b", "b": "a"}

scopes = st.sampled_from(["a", "b"])
bodies = st.sampled_from([b"", b"small", LARGE])
paths = st.sampled_from(["a.txt", "b.txt", "dir/a.txt"])
ends = st.sampled_from(["completed", "failed", "incomplete", "cancelled"])


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.data_dir = Path(tempfile.mkdtemp(prefix="consignee-"))
        self.begun: list[Begun] = []
        self.ends: dict[str, str] = {}
        self.offset = 0
        self._clock = time.time
        self._patch = patch("time.time", lambda: self._clock() + self.offset)
        self._patch.start()
        self._runner = asyncio.Runner()
        chosen = store_settings(self.data_dir, max_session_files=4, max_scope_bytes=30_000)
        migrate(chosen)
        self.store = self._runner.run(ContentStore.start(chosen))

    def teardown(self) -> None:
        for scope in OTHER:
            for session in self._runner.run(self.store.sessions.page(scope, limit=1000)):
                self._runner.run(self.store.sessions.delete(scope, session.id, running=True))
            for upload in self._runner.run(self.store.files.uploads(scope, limit=1000)):
                self._runner.run(self.store.files.delete_upload(scope, upload.id))
        assert noted(self.data_dir) == counted(self.data_dir) == {}
        self._runner.run(self.store.close())
        assert stored_files(self.data_dir) == []
        self._runner.close()
        self._patch.stop()
        shutil.rmtree(self.data_dir)

    @rule(scope=scopes, key=st.sampled_from([None, "K"]))
    def begin_a_task(self, scope: str, key: str | None) -> None:
        known = None
        if key is not None:
            known = self._try(self.store.responses.known(scope, key_of(key)))
        idempotency = None if key is None else key_of(key)
        begun = self._try(begin(self.store, scope, idempotency=idempotency))
        if begun is None:
            return  # the key's session is gone
        if known is not None:
            assert begun.response.id == known.response.id
        if not begun.repeated:
            self.begun.append(begun)

    @rule(data=st.data())
    @precondition(lambda self: self.begun)
    def continue_a_session(self, data: st.DataObject) -> None:
        before = self._some(data)
        begun = self._try(
            begin(self.store, before.session.scope, previous_response_id=before.response.id)
        )
        if begun is not None:
            assert begun.session.id == before.session.id
            self.begun.append(begun)

    @rule(data=st.data(), status=ends, keep=st.booleans())
    @precondition(lambda self: self.begun)
    def finish_a_task(self, data: st.DataObject, status: str, keep: bool) -> None:
        begun = self._some(data)
        if self._runner.run(finish(self.store, begun, status, retain=keep)):
            assert begun.response.id not in self.ends
            self.ends[begun.response.id] = status

    @rule(data=st.data())
    @precondition(lambda self: self.begun)
    def undo_a_task(self, data: st.DataObject) -> None:
        begun = self._some(data)
        if begun.response.previous_response_id is not None and begun.response.id not in self.ends:
            self._try(self.store.responses.undo(begun))
            self.begun.remove(begun)

    @rule(data=st.data(), body=bodies, path=paths)
    @precondition(lambda self: self.begun)
    def add_an_artifact(self, data: st.DataObject, body: bytes, path: str) -> None:
        begun = self._some(data)
        record = self._try(add_artifact(self.store, begun.session, body, path))
        if record is not None:
            foreign = self.store.files.get(OTHER[record.scope], record.id)
            assert self._try(foreign) is None

    @rule(data=st.data(), body=bodies)
    @precondition(lambda self: self.begun)
    def add_an_input(self, data: st.DataObject, body: bytes) -> None:
        self._try(add_input(self.store, self._some(data), body))

    @rule(scope=scopes, body=bodies)
    def upload(self, scope: str, body: bytes) -> None:
        self._try(add_upload(self.store, body, scope, expires_at=int(time.time()) + DAY))

    @rule(data=st.data())
    @precondition(lambda self: self.begun)
    def delete_a_session(self, data: st.DataObject) -> None:
        begun = self._some(data)
        self._try(self.store.sessions.delete(begun.session.scope, begun.session.id))

    @rule(data=st.data())
    @precondition(lambda self: self.begun)
    def delete_a_response(self, data: st.DataObject) -> None:
        begun = self._some(data)
        self._try(self.store.responses.delete(begun.session.scope, begun.response.id))

    @rule()
    def purge(self) -> None:
        before = int(time.time()) + 1
        self._runner.run(self.store.responses.purge(before=before))

    @rule(days=st.integers(1, 3))
    def let_time_pass(self, days: int) -> None:
        self.offset += days * DAY
        self._runner.run(self.store.files.expire())
        self._runner.run(self.store.sessions.expire(idle_since=int(time.time()) - 2 * DAY))

    @invariant()
    def a_session_has_at_most_one_running_task(self) -> None:
        with database(self.data_dir) as rows:
            running = rows.execute(
                "select session_id from responses where status = 'in_progress'"
            ).fetchall()
        assert len(set(running)) == len(running)

    @invariant()
    def what_is_noted_is_what_is_there(self) -> None:
        assert noted(self.data_dir) == counted(self.data_dir)
        with database(self.data_dir) as rows:
            wrong = rows.execute(
                "select session_id from sessions s where files != (select count(*) from files f"
                " where f.session_id = s.session_id) or bytes != (select coalesce(sum(size), 0)"
                " from files f where f.session_id = s.session_id)"
            ).fetchall()
        assert wrong == []

    @invariant()
    def an_end_never_changes(self) -> None:
        with database(self.data_dir) as rows:
            found = dict(rows.execute("select response_id, status from responses").fetchall())
        for response_id, status in found.items():
            assert status == self.ends.get(response_id, "in_progress")

    @invariant()
    def nobody_sees_what_is_foreign(self) -> None:
        for begun in self.begun:
            other = OTHER[begun.session.scope]
            for foreign in (
                self.store.responses.get(other, begun.response.id, also_hidden=True),
                self.store.sessions.get(other, begun.session.id),
                self.store.files.of_session(other, begun.session.id),
            ):
                assert self._try(foreign) is None

    def _some(self, data: st.DataObject) -> Begun:
        return data.draw(st.sampled_from(self.begun))

    def _try(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The outcome, None where the state of things does not allow it."""
        try:
            return self._runner.run(work)
        except (NotFound, Conflict, QuotaExhausted):
            return None


@pytest.mark.requirement("UHP-29", "UHP-34", "B89", "B94")
def test_whatever_happens_in_whatever_order() -> None:
    run_state_machine_as_test(
        SessionMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
