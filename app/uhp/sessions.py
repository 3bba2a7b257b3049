"""Sessions: listed, inspected, cancelled, deleted; and made, for artifacts from elsewhere.

GET /v1/sessions?limit&cursor&harness      POST /v1/sessions
GET, DELETE /v1/sessions/{id}              DELETE /v1/traces/{id}
GET /v1/sessions/{id}/turns                POST /v1/sessions/{id}/cancel
GET /v1/sessions/{id}/files
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.errors import Conflict, Refusal
from app.store.files import session_not_found
from app.uhp.errors import invalid_input
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.shapes import artifact_object, session_object, turn_object

if TYPE_CHECKING:
    from app.harness.workspace import Workspaces
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.files import FileRecord
    from app.uhp.cursors import Cursors
    from app.uhp.engine import Engine
    from app.uhp.previews import Previews
    from app.uhp.services import Services

MAX_PAGE = 100
DEFAULT_PAGE = 20
MAX_BODY_BYTES = 64 * 1024
MAX_TITLE_LENGTH = 500

STOP_ATTEMPTS = 3
"""How often the end of a session's task is waited for before the session goes all the same: the
process that runs the task may be gone, or hang."""

log = logging.getLogger("consignee.tasks")

_TITLE = re.compile(rf"[^\x00-\x1f\x7f]{{1,{MAX_TITLE_LENGTH}}}")
_SESSION_ID = re.compile(r"hsess_[A-Za-z0-9]{1,64}")


def routes(services: Services) -> list[UhpRoute]:
    """The routes of sessions, apart from the archive."""
    handlers = SessionRoutes(
        services.settings,
        services.store,
        services.cursors,
        services.engine,
        services.workspaces,
        services.previews,
    )
    one = "/v1/sessions/{session_id}"
    return [
        UhpRoute(
            "/v1/sessions",
            {"GET": handlers.page, "HEAD": handlers.page, "POST": handlers.create},
        ),
        UhpRoute(
            one,
            {"GET": handlers.inspect, "HEAD": handlers.inspect, "DELETE": handlers.delete},
        ),
        UhpRoute("/v1/traces/{session_id}", {"DELETE": handlers.delete}),
        UhpRoute(f"{one}/turns", {"GET": handlers.turns, "HEAD": handlers.turns}),
        UhpRoute(f"{one}/files", {"GET": handlers.files, "HEAD": handlers.files}),
        UhpRoute(f"{one}/cancel", {"POST": handlers.cancel}),
    ]


@dataclass(frozen=True, slots=True)
class SessionRoutes:
    """The handlers."""

    settings: Settings
    store: ContentStore
    cursors: Cursors
    engine: Engine
    workspaces: Workspaces
    previews: Previews

    async def page(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/sessions`, newest first; `next_cursor` is null on the last page."""
        limit = request.query.integer("limit", default=DEFAULT_PAGE, least=1, most=MAX_PAGE)
        harness_id = request.query.text("harness") or None
        listing = f"sessions {harness_id or ''}"
        position = self.cursors.open(request.scope, listing, request.query.text("cursor") or None)
        found = await self.store.sessions.page(
            request.scope,
            before=position[0] if position else None,
            limit=limit + 1,
            harness_id=harness_id,
        )
        shown = found[:limit]
        following = None
        if len(found) > limit:
            following = self.cursors.seal(request.scope, listing, (shown[-1].position,))
        sessions = [session_object(record) for record in shown]
        return json_answer({"sessions": sessions, "next_cursor": following})

    async def create(self, request: UhpRequest) -> UhpAnswer:
        """`POST /v1/sessions`: a session with its container, for a harness that runs elsewhere."""
        body = await request.json(MAX_BODY_BYTES) if not request.body.complete else {}
        record = await self.store.sessions.create(
            scope=request.scope, principal=request.principal.name, title=_title(body)
        )
        request.note({"session_id": record.id, "container_id": record.container_id})
        return json_answer(session_object(record), status=201)

    async def inspect(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/sessions/{id}`."""
        record = await self.store.sessions.get(request.scope, _session_id(request))
        return json_answer(session_object(record))

    async def turns(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/sessions/{id}/turns`, oldest first."""
        session_id = _session_id(request)
        records = await self.store.responses.turns(request.scope, session_id)
        files: dict[str | None, list[FileRecord]] = {}
        for file in await self.store.files.of_session(request.scope, session_id):
            files.setdefault(file.response_id, []).append(file)
        base = self.settings.base_url
        turns = [turn_object(record, files.get(record.id, []), base) for record in records]
        return json_answer({"object": "list", "turns": turns})

    async def files(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/sessions/{id}/files`: every artifact of every task, oldest first (UHP-16)."""
        records = await self.store.files.of_session(request.scope, _session_id(request))
        base = self.settings.base_url
        return json_answer({"files": [artifact_object(record, base) for record in records]})

    async def cancel(self, request: UhpRequest) -> UhpAnswer:
        """`POST /v1/sessions/{id}/cancel`: end whatever runs in it; nothing running is fine."""
        session_id = _session_id(request)
        running = await self.store.responses.running(request.scope, session_id)
        if running is not None:
            await self.engine.cancel(request.scope, running.id, also_deleted=True)
        record = await self.store.sessions.get(request.scope, session_id)
        return json_answer(session_object(record))

    async def delete(self, request: UhpRequest) -> UhpAnswer:
        """`DELETE /v1/sessions/{id}`: its task ends first, then nothing of it is reachable.

        UHP-28, UHP-34, B89.
        """
        session_id = _session_id(request)
        await self._end(request.scope, session_id)
        try:
            await self.workspaces.destroy(session_id)
            await self.previews.forget(session_id)
        except Refusal as refusal:
            log.warning("a session's folders are left for the upkeep: %s", refusal.code)
        return json_answer({"id": session_id, "object": "session", "deleted": True})

    async def _end(self, scope: str, session_id: str) -> None:
        """Delete it once nothing runs in it; a task may still begin between the two."""
        for _ in range(STOP_ATTEMPTS):
            await self.engine.stop_session(scope, session_id)
            with suppress(Conflict):
                await self.store.sessions.delete(scope, session_id)
                return
        await self.store.sessions.delete(scope, session_id, running=True)


def _session_id(request: UhpRequest) -> str:
    session_id = request.path["session_id"]
    if _SESSION_ID.fullmatch(session_id) is None:
        raise session_not_found()
    return session_id


def _title(body: Any) -> str | None:
    if not isinstance(body, dict):
        raise invalid_input("The request body must be a JSON object.")
    title = body.get("title")
    if title is None:
        return None
    if not isinstance(title, str) or _TITLE.fullmatch(title) is None:
        raise invalid_input(
            f"title must be a string of 1 to {MAX_TITLE_LENGTH} characters, without control "
            "characters.",
            param="title",
        )
    return title
