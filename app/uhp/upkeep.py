"""What ends by itself: uploads, sessions, events, idempotency keys, and folders without a session.

| what | kept |
|---|---|
| uploads | `upload_ttl` |
| sessions with their tasks and files | `session_ttl` after they were last touched |
| that a session expired | TOMBSTONE_SECONDS |
| the events of a task | EVENTS_SECONDS after its end; its response stays with its session |
| idempotency keys, and results that their client did not want retained | KEYS_SECONDS |

Every process does this, at whatever time: each step is a transaction that leaves nothing to do for
a second one, and a folder is taken away by its name first.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.errors import NotFound

if TYPE_CHECKING:
    from app.harness.workspace import Workspaces
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.uhp.previews import Previews

KEYS_SECONDS = 2 * 86400
"""Twice as long as the Tasks chapter (section 6) asks for."""

EVENTS_SECONDS = 86400
"""Long enough for every client that takes up a stream; what they add up to is the response."""

TOMBSTONE_SECONDS = 30 * 86400
"""So long an expired session is told from one that never was (UHP-35)."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Ends what is past its time; every step takes a bounded bite."""

    settings: Settings
    store: ContentStore
    workspaces: Workspaces
    previews: Previews

    async def run(self) -> None:
        """One round."""
        now = int(time.time())
        await self._end_records(now)
        await self._end_sessions(now)
        await self._end_folders()
        await self.previews.sweep()

    async def _end_records(self, now: int) -> None:
        responses = self.store.responses
        while await self.store.files.expire():
            continue
        await self.store.budgets.forget_full()
        await responses.forget_keys(before=now - KEYS_SECONDS)
        while await responses.purge(before=now - KEYS_SECONDS):
            continue
        while await responses.drop_events(before=now - EVENTS_SECONDS):
            continue

    async def _end_sessions(self, now: int) -> None:
        sessions, ttl = self.store.sessions, self.settings.session_ttl
        if ttl is not None:
            idle_since = now - int(ttl.total_seconds())
            while expired := await sessions.expire(idle_since=idle_since):
                for session in expired:
                    await self.workspaces.destroy(session.id)
                    await self.previews.forget(session.id)
        while over := await sessions.expired(before=now - TOMBSTONE_SECONDS):
            for session in over:
                await self._delete(session.scope, session.id)

    async def _delete(self, scope: str, session_id: str) -> None:
        with suppress(NotFound):
            await self.store.sessions.delete(scope, session_id, running=True)

    async def _end_folders(self) -> None:
        for session_id in await self.store.sessions.missing(await self.workspaces.session_ids()):
            with suppress(NotFound):  # a folder that is no session's is not ours to remove
                await self.workspaces.destroy(session_id)
