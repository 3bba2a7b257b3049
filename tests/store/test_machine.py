"""The store as a state machine: uploads, removals, sweeps, clocks, restarts and crashes.

Whatever happens in whatever order: every confirmed reference resolves to its bytes until its time
is over, and after a sweep nothing else is stored.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
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

from app.errors import NotFound, Unavailable
from app.store import ContentStore, Reference, migrate
from tests.store import victim
from tests.store.stores import (
    LARGE,
    count,
    crash,
    get,
    published,
    put,
    staged,
    store_settings,
)
from tests.store.victim import Deed, Moment

RETENTION = timedelta(days=10)
BODIES = [b"", b"small", b"other", LARGE, LARGE[::-1]]
SCOPES = ["a", "b"]

bodies = st.sampled_from(BODIES)
scopes = st.sampled_from(SCOPES)
steps = st.sampled_from(sorted(victim.STEPS))
moments: st.SearchStrategy[Moment] = st.sampled_from(["before", "after"])


@dataclass(frozen=True)
class Kept:
    """A reference that was confirmed, and what it must give."""

    reference: Reference
    data: bytes


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.data_dir = Path(tempfile.mkdtemp(prefix="consignee-"))
        self.settings = store_settings(self.data_dir, retention=RETENTION)
        self.kept: dict[str, Kept] = {}
        self.offset = 0.0
        self._clock = time.time
        self._patch = patch("time.time", lambda: self._clock() + self.offset)
        self._patch.start()
        self._runner = asyncio.Runner()
        migrate(self.settings)
        self.store = self._runner.run(ContentStore.start(self.settings))

    def teardown(self) -> None:
        try:
            self._check_only_the_kept_is_left()
        finally:
            self._runner.run(self.store.close())
            self._runner.close()
            self._patch.stop()
            shutil.rmtree(self.data_dir)

    @rule(data=bodies, scope=scopes)
    def receive(self, data: bytes, scope: str) -> None:
        reference = self._runner.run(put(self.store, data, scope))
        self._keep(reference, data)

    @rule(data=bodies, scope=scopes, copies=st.integers(2, 5))
    def receive_at_once(self, data: bytes, scope: str, copies: int) -> None:
        async def receive() -> list[Reference]:
            return await asyncio.gather(*(put(self.store, data, scope) for _ in range(copies)))

        for reference in self._runner.run(receive()):
            self._keep(reference, data)

    @rule(data=bodies, turns=st.integers(0, 6))
    def receive_and_cancel(self, data: bytes, turns: int) -> None:
        async def receive() -> Reference | None:
            task = asyncio.create_task(put(self.store, data))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()

        if (reference := self._runner.run(receive())) is not None:
            self._keep(reference, data)

    @rule(data=st.data())
    @precondition(lambda self: self.kept)
    def remove(self, data: st.DataObject) -> None:
        kept = data.draw(st.sampled_from(list(self.kept.values())))
        self._runner.run(self.store.remove(kept.reference.scope, kept.reference.ref))
        del self.kept[kept.reference.ref]

    @rule(days=st.sampled_from([-3, 1, 5, 11]))
    def turn_the_clock(self, days: int) -> None:
        self.offset += days * 86400

    @rule()
    def sweep(self) -> None:
        self._runner.run(self.store.sweep())

    @rule(data=bodies)
    def sweep_during_an_upload(self, data: bytes) -> None:
        async def both() -> Reference:
            kept, *_ = await asyncio.gather(
                self._put_or_refused(data), self.store.sweep(), self.store.sweep()
            )
            return kept or await put(self.store, data)

        self._keep(self._runner.run(both()), data)

    async def _put_or_refused(self, data: bytes) -> Reference | None:
        """None where a sweep, by a clock that was turned, took the bytes before they counted.

        By any other clock they are too young for that, and nothing refuses them.
        """
        try:
            return await put(self.store, data)
        except Unavailable:
            if self.offset < self.settings.orphan_age_seconds:
                raise
            return None

    @rule()
    def restart(self) -> None:
        self._runner.run(self.store.close())
        self._open()

    @rule()
    def crash_while_idle(self) -> None:
        crash(self.store)
        self._open()

    @rule(data=bodies, step=steps, moment=moments)
    def another_process_is_killed_receiving(self, data: bytes, step: str, moment: Moment) -> None:
        self._kill("receive", step, moment, data)

    @rule(step=st.sampled_from(["commit", "unlink"]), moment=moments)
    def another_process_is_killed_sweeping(self, step: str, moment: Moment) -> None:
        self._kill("sweep", step, moment)

    @invariant()
    def every_confirmed_reference_gives_its_bytes(self) -> None:
        self._runner.run(self._check_references())

    def _open(self) -> None:
        self.store = self._runner.run(ContentStore.start(self.settings))
        assert staged(self.data_dir) == []

    def _keep(self, reference: Reference, data: bytes) -> None:
        self.kept[reference.ref] = Kept(reference, data)

    def _kill(self, deed: Deed, step: str, moment: Moment, data: bytes = b"") -> None:
        confirmed, status = victim.run(self.data_dir, deed, step, moment, data, offset=self.offset)
        assert status in (0, -signal.SIGKILL)
        for reference in confirmed:
            self._keep(reference, data)

    async def _check_references(self) -> None:
        now = int(time.time())
        for kept in self.kept.values():
            reference, data = kept.reference, kept.data
            if reference.expires_at is not None and reference.expires_at <= now:
                with pytest.raises(NotFound):
                    await self.store.resolve(reference.scope, reference.ref)
            else:
                assert await self.store.resolve(reference.scope, reference.ref) == reference
                assert await get(self.store, reference.ref, reference.scope) == data
        # What is over for good: a clock that goes back must not ask for it again after a sweep.
        self.kept = {
            ref: kept
            for ref, kept in self.kept.items()
            if kept.reference.expires_at is None or kept.reference.expires_at > now
        }

    def _check_only_the_kept_is_left(self) -> None:
        """After a sweep at which every orphan is old, before anything kept is over."""
        self.offset = max(self.offset, 0) + 2 * 3600
        self._runner.run(self._check_references())
        self._runner.run(self._remove_what_was_never_confirmed())
        self._runner.run(self.store.sweep())
        self._runner.run(self._check_references())
        live = Counter(kept.data for kept in self.kept.values())
        assert count(self.data_dir, "content_refs") == live.total()
        assert count(self.data_dir, "blobs") == len(live)
        assert len(published(self.data_dir)) == sum(len(data) > 1024 for data in live)
        assert staged(self.data_dir) == []
        assert self._runner.run(self._findings()) == []

    async def _remove_what_was_never_confirmed(self) -> None:
        for scope in SCOPES:
            for listed in await self.store.references(scope, limit=10_000):
                if listed.ref not in self.kept:
                    await self.store.remove(scope, listed.ref)

    async def _findings(self) -> list[object]:
        return [finding async for finding in self.store.verify()]


@pytest.mark.requirement("AHP-R26", "B09", "B74")
def test_whatever_happens_in_whatever_order() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
