"""Uploads, events, removals, clocks and sweeps in any order.

Whatever happens: every accepted event opens all its bytes until its time is over, and after a sweep
nothing is stored that neither a reference nor an event names.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from itertools import count as counting
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

from app.errors import NotFound
from app.store import ContentStore, Reference, migrate
from app.store.events import StoredEvent
from tests.store.events import arrival, read
from tests.store.stores import LARGE, count, crash, published, put, sha256, store_settings

T = TypeVar("T")

DAY = 86400
RETENTION = timedelta(days=10)
EVENT_RETENTION = timedelta(days=15)

bodies = st.sampled_from([b"", b"small", LARGE, LARGE[::-1]])
scopes = st.sampled_from(["a", "b"])


@dataclass(frozen=True)
class Uploaded:
    """A reference, and the bytes that are behind it."""

    reference: Reference
    data: bytes


@dataclass(frozen=True)
class Delivered:
    """An accepted event, and the bytes behind what it uses, by reference."""

    event: StoredEvent
    data: dict[str, bytes]
    expires_at: int


class EventMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.data_dir = Path(tempfile.mkdtemp(prefix="consignee-"))
        self.settings = store_settings(
            self.data_dir, retention=RETENTION, event_retention=EVENT_RETENTION
        )
        self.uploaded: dict[str, Uploaded] = {}
        self.delivered: dict[str, Delivered] = {}
        self.ids = counting()
        self.offset = 0.0
        self._clock = time.time
        self._patch = patch("time.time", lambda: self._clock() + self.offset)
        self._patch.start()
        self._runner = asyncio.Runner()
        migrate(self.settings)
        self.store = self._run(ContentStore.start(self.settings))

    def teardown(self) -> None:
        try:
            self._check_only_the_named_is_left()
        finally:
            self._run(self.store.close())
            self._runner.close()
            self._patch.stop()
            shutil.rmtree(self.data_dir)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    @rule(data=bodies, scope=scopes)
    def upload(self, data: bytes, scope: str) -> None:
        reference = self._run(put(self.store, data, scope))
        self.uploaded[reference.ref] = Uploaded(reference, data)

    @rule(data=st.data(), scope=scopes)
    @precondition(lambda self: self.uploaded)
    def deliver(self, data: st.DataObject, scope: str) -> None:
        self._run(self._deliver(self._draw_refs(data), scope))

    @rule(data=st.data(), scope=scopes)
    @precondition(lambda self: self.uploaded)
    def deliver_while_all_that_it_uses_is_removed_and_swept(
        self, data: st.DataObject, scope: str
    ) -> None:
        refs = self._draw_refs(data)

        async def everything() -> None:
            accepted, *_ = await asyncio.gather(
                self._deliver_or_not(refs, scope),
                *(self._remove(ref) for ref in refs),
                self.store.sweep(),
                self.store.sweep(),
            )
            if not accepted:  # whoever won, the steps that follow find as many events
                await self._deliver_or_not([], scope)

        self._run(everything())
        self._forget_what_is_over()

    @rule(data=st.data())
    @precondition(lambda self: self.delivered)
    def deliver_again(self, data: st.DataObject) -> None:
        before = data.draw(st.sampled_from(list(self.delivered.values())))
        event = before.event
        again, is_new = self._run(
            self.store.events.accept(
                arrival(*before.data, event_id=event.event_id, scope=event.scope)
            )
        )
        assert (again, is_new) == (event, False)

    @rule(data=st.data())
    @precondition(lambda self: self.uploaded)
    def remove(self, data: st.DataObject) -> None:
        self._run(self._remove(data.draw(st.sampled_from(list(self.uploaded)))))

    @rule(days=st.sampled_from([1, 5, 11]))
    def turn_the_clock(self, days: int) -> None:
        self.offset += days * DAY

    @rule()
    def sweep(self) -> None:
        self._run(self.store.sweep())
        self._forget_what_is_over()

    @rule(crashing=st.booleans())
    def restart(self, crashing: bool) -> None:
        if crashing:
            crash(self.store)
        else:
            self._run(self.store.close())
        self.store = self._run(ContentStore.start(self.settings))

    @invariant()
    def every_event_gives_the_bytes_that_it_uses(self) -> None:
        self._run(self._check_events())

    def _draw_refs(self, data: st.DataObject) -> list[str]:
        some = st.lists(st.sampled_from(list(self.uploaded)), unique=True, max_size=3)
        return data.draw(some)

    def _resolves(self, ref: str, scope: str) -> bool:
        reference = self.uploaded[ref].reference
        assert reference.expires_at is not None
        return reference.scope == scope and reference.expires_at > int(time.time())

    async def _deliver(self, refs: list[str], scope: str) -> None:
        stored = count(self.data_dir, "events")
        accepted = await self._deliver_or_not(refs, scope)
        assert accepted == all(self._resolves(ref, scope) for ref in refs)
        assert count(self.data_dir, "events") == stored + accepted

    async def _deliver_or_not(self, refs: list[str], scope: str) -> bool:
        data = {ref: self.uploaded[ref].data for ref in refs}
        given = arrival(*refs, event_id=f"evt_{next(self.ids)}", scope=scope)
        try:
            event, is_new = await self.store.events.accept(given)
        except NotFound:
            return False
        assert is_new
        end = event.received_at + int(EVENT_RETENTION.total_seconds())
        self.delivered[event.event_id] = Delivered(event, data, end)
        return True

    async def _remove(self, ref: str) -> None:
        reference = self.uploaded.pop(ref).reference
        try:
            await self.store.remove(reference.scope, ref)
        except NotFound:
            assert reference.expires_at is not None
            assert reference.expires_at <= int(time.time())

    def _forget_what_is_over(self) -> None:
        """What a sweep has taken. (Up to then an event is there, also past its time.)"""
        now = int(time.time())
        self.delivered = {k: d for k, d in self.delivered.items() if d.expires_at > now}
        self.uploaded = {
            ref: uploaded
            for ref, uploaded in self.uploaded.items()
            if uploaded.reference.expires_at is None or uploaded.reference.expires_at > now
        }

    async def _check_events(self) -> None:
        now = int(time.time())
        for delivered in self.delivered.values():
            if delivered.expires_at <= now:
                continue  # the next sweep takes it
            event = delivered.event
            assert await self.store.events.find(event.scope, event.event_id) == event
            for attached in event.attachments:
                data = await read(self.store, attached.ref, event.event_id, event.scope)
                assert data == delivered.data[attached.ref]
                assert (len(data), sha256(data)) == (attached.size, attached.sha256)

    def _check_only_the_named_is_left(self) -> None:
        self._run(self.store.sweep())
        self._forget_what_is_over()
        self._run(self._check_events())
        named = {uploaded.data for uploaded in self.uploaded.values()}
        for delivered in self.delivered.values():
            named.update(delivered.data.values())
        assert count(self.data_dir, "events") == len(self.delivered)
        assert count(self.data_dir, "blobs") == len(named)
        assert len(published(self.data_dir)) == sum(len(data) > 1024 for data in named)
        assert self._run(self._findings()) == []

    async def _findings(self) -> list[object]:
        return [finding async for finding in self.store.verify()]


@pytest.mark.requirement("AHP-R38", "AHP-R43")
def test_accepted_events_open_their_bytes_whatever_happens() -> None:
    run_state_machine_as_test(
        EventMachine,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
