"""Tasks: run, followed, read back, cancelled, deleted (Tasks chapter).

POST        /v1/responses
GET, DELETE /v1/responses/{id}          GET with ?stream=true takes a stream up again
GET         /v1/responses/{id}/input_items
POST        /v1/responses/{id}/cancel
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from app import audit
from app.errors import NotFound
from app.harness.base import Turn
from app.http import media_types
from app.http.answers import JSON, encode_json, send_whole
from app.http.streams import while_connected
from app.store.files import file_not_found
from app.store.responses import Beginning, IdempotencyKey, response_not_found
from app.uhp.errors import UhpError, invalid_input
from app.uhp.harnesses import harness_not_found
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.runs import Work
from app.uhp.shapes import assistant_text, user_text
from app.uhp.sse import EventStream
from app.uhp.task_requests import (
    FilePart,
    TaskRequest,
    check_key,
    digest_of_request,
    parse_task,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.types import Receive, Scope, Send

    from app.harness.registry import ConfiguredHarness
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.files import FileRecord
    from app.store.responses import Begun, ResponseRecord
    from app.store.sessions import SessionRecord
    from app.store.staging import Sealed
    from app.uhp.engine import Engine
    from app.uhp.services import Services

Claim = tuple[str, str, str]
"""An Idempotency-Key in the principal of a scope."""

RESERVED_METADATA = frozenset(
    {
        "session_id",
        "harness_id",
        "container_id",
        "requested_model",
        "model_fallback",
        "model_fallback_reason",
        "ignored_fields",
    }
)
"""What the server says in a response's metadata; nobody else says it in its place."""

_RESPONSE_ID = re.compile(r"resp_[A-Za-z0-9]{1,64}")
_FILE_ID = re.compile(r"file_[A-Za-z0-9]{1,64}")
_SEQUENCE = re.compile(r"[0-9]{1,9}")


def routes(services: Services) -> list[UhpRoute]:
    """The routes of tasks."""
    handlers = TaskRoutes(services.settings, services.store, services.harnesses, services.engine)
    one = "/v1/responses/{response_id}"
    return [
        UhpRoute("/v1/responses", {"POST": handlers.create}),
        UhpRoute(
            one,
            {"GET": handlers.inspect, "HEAD": handlers.inspect, "DELETE": handlers.delete},
        ),
        UhpRoute(f"{one}/input_items", {"GET": handlers.input_items, "HEAD": handlers.input_items}),
        UhpRoute(f"{one}/cancel", {"POST": handlers.cancel}),
    ]


@dataclass(frozen=True, slots=True)
class TaskRoutes:
    """The handlers."""

    settings: Settings
    store: ContentStore
    harnesses: Mapping[str, ConfiguredHarness]
    engine: Engine
    claims: WeakValueDictionary[Claim, asyncio.Lock] = field(default_factory=WeakValueDictionary)

    async def create(self, request: UhpRequest) -> UhpAnswer:
        """`POST /v1/responses`."""
        body = await request.json(int(self.settings.max_request_bytes))
        limit = int(self.settings.max_upload_bytes)
        asked = await asyncio.to_thread(parse_task, body, file_limit=limit)
        key = await self._key(request, body)
        if key is None:
            record = await self._begin(request, asked, None)
        else:
            async with self._claim((request.scope, key.principal, key.key)):
                known = await self.store.responses.known(request.scope, key)
                record = known.response if known else await self._begin(request, asked, key)
        request.note({"response_id": record.id, "session_id": record.session_id})
        return await self._answer(request, asked, record)

    async def inspect(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/responses/{id}`, as one object or as the stream of its events."""
        record = await self.store.responses.get(request.scope, _response_id(request))
        if not request.query.flag("stream"):
            return json_answer(record.response)
        return EventStream(self.engine.follow(record, _last_event(request)))

    async def delete(self, request: UhpRequest) -> UhpAnswer:
        """`DELETE /v1/responses/{id}`: out of the history; a running task runs on."""
        response_id = _response_id(request)
        await self.store.responses.delete(request.scope, response_id)
        return json_answer({"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/responses/{id}/input_items`."""
        record = await self.store.responses.get(request.scope, _response_id(request))
        return json_answer({"object": "list", "data": record.request["input_items"]})

    async def cancel(self, request: UhpRequest) -> UhpAnswer:
        """`POST /v1/responses/{id}/cancel`: a terminal response stays as it is."""
        record = await self.engine.cancel(request.scope, _response_id(request))
        return json_answer(record.response)

    async def _key(self, request: UhpRequest, body: Any) -> IdempotencyKey | None:
        key = check_key(request.header(b"idempotency-key"))
        if key is None:
            return None
        digest = await asyncio.to_thread(digest_of_request, body)
        return IdempotencyKey(key, request.principal.name, digest)

    @asynccontextmanager
    async def _claim(self, claim: Claim) -> AsyncIterator[None]:
        """One beginning at a time for a key: whoever waits then finds what the first one began.

        Of several processes, the transaction of the beginning lets one win.
        """
        lock = self.claims.setdefault(claim, asyncio.Lock())
        async with lock:
            yield

    async def _begin(
        self, request: UhpRequest, asked: TaskRequest, key: IdempotencyKey | None
    ) -> ResponseRecord:
        harness = await self._harness(request.scope, asked)
        if not harness.is_available():
            raise UhpError("harness_unavailable", "This harness cannot be started here now.")
        async with AsyncExitStack() as staged:
            place = staged.enter_context(self.engine.place())
            uploads = await self._uploads(request.scope, asked)
            inline = [
                (part, await staged.enter_async_context(self.store.stage(part.data.pieces())))
                for part in asked.files
                if part.data is not None
            ]
            begun = await self.store.responses.begin(self._beginning(request, asked, harness, key))
            if not begun.repeated:
                place.response_id = begun.response.id
                work = await self._prepared(begun, asked, harness, uploads, inline)
                self.engine.begin(work, place)
        return begun.response

    async def _prepared(
        self,
        begun: Begun,
        asked: TaskRequest,
        harness: ConfiguredHarness,
        uploads: list[FileRecord],
        inline: list[tuple[FilePart, Sealed]],
    ) -> Work:
        """What the store has accepted, ready to start; or it is taken back."""
        try:
            kept = [await self._keep_one(begun, part, sealed) for part, sealed in inline]
            named, brought = iter(uploads), iter(kept)
            inputs = tuple(next(named if part.file_id else brought) for part in asked.files)
            return await self._work(begun, asked, harness, inputs)
        except BaseException:
            await self.store.responses.undo(begun)
            raise

    async def _harness(self, scope: str, asked: TaskRequest) -> ConfiguredHarness:
        """The harness that is asked for, that of the session, or the first one configured."""
        wanted = asked.harness_id
        if wanted is not None and wanted not in self.harnesses:
            raise harness_not_found()
        if asked.previous_response_id is not None:
            of_session = await self._harness_of(scope, asked.previous_response_id)
            wanted = wanted or of_session
        return self.harnesses[wanted or next(iter(self.harnesses))]

    async def _harness_of(self, scope: str, response_id: str) -> str:
        if _RESPONSE_ID.fullmatch(response_id) is None:
            raise _of_previous(response_not_found())
        try:
            previous = await self.store.responses.get(scope, response_id)
        except NotFound as refusal:
            raise _of_previous(refusal) from None
        session = await self.store.sessions.get(scope, previous.session_id)
        if session.harness_id is None or session.harness_id not in self.harnesses:
            raise UhpError(
                "harness_unavailable", "The harness of this session is no longer configured."
            )
        return session.harness_id

    async def _uploads(self, scope: str, asked: TaskRequest) -> list[FileRecord]:
        """The files that are named by id, in the caller's scope, or 404 (UHP-29)."""
        return [await self._upload(scope, part) for part in asked.files if part.file_id is not None]

    async def _upload(self, scope: str, part: FilePart) -> FileRecord:
        try:
            if part.file_id is None or _FILE_ID.fullmatch(part.file_id) is None:
                raise file_not_found()
            return await self.store.files.get(scope, part.file_id)
        except NotFound as refusal:
            raise UhpError(refusal.code, refusal.message, param=part.param) from None

    def _beginning(
        self,
        request: UhpRequest,
        asked: TaskRequest,
        harness: ConfiguredHarness,
        key: IdempotencyKey | None,
    ) -> Beginning:
        return Beginning(
            scope=request.scope,
            principal=request.principal.name,
            harness_id=harness.description.id,
            request={"input_items": asked.items, "instructions": asked.instructions},
            describe=lambda response_id, session, created_at: _initial(
                asked, harness, response_id, session, created_at
            ),
            owner=self.engine.owner,
            title=asked.title or None,
            previous_response_id=asked.previous_response_id,
            idempotency=key,
        )

    async def _keep_one(self, begun: Begun, part: FilePart, sealed: Sealed) -> FileRecord:
        assert part.data is not None
        assert part.filename is not None
        session = begun.session
        record = await self.store.files.add_input(
            sealed,
            scope=session.scope,
            principal=session.principal,
            session=session,
            response_id=begun.response.id,
            filename=part.filename,
            media_type=media_types.accept(part.data.media_type, param=part.param),
        )
        audit.record("input.store", principal=record.principal, **record.audited)
        return record

    async def _work(
        self,
        begun: Begun,
        asked: TaskRequest,
        harness: ConfiguredHarness,
        inputs: tuple[FileRecord, ...],
    ) -> Work:
        return Work(
            response=begun.response,
            session=begun.session,
            harness=harness,
            initial=begun.response.response,
            prompt=asked.prompt,
            instructions=asked.instructions,
            history=await self._history(begun),
            inputs=inputs,
            max_step=asked.max_step,
            max_output_tokens=asked.max_output_tokens,
            timeout_seconds=_least(asked.timeout_seconds, harness.description.timeout_seconds),
        )

    async def _history(self, begun: Begun) -> tuple[Turn, ...]:
        if begun.response.previous_response_id is None:
            return ()
        earlier = await self.store.responses.turns(begun.session.scope, begun.session.id)
        return tuple(
            Turn(user_text(record), assistant_text(record))
            for record in earlier
            if record.id != begun.response.id
        )

    async def _answer(
        self, request: UhpRequest, asked: TaskRequest, record: ResponseRecord
    ) -> UhpAnswer:
        if asked.stream:
            return EventStream(self.engine.follow(record, -1))
        if not asked.background:
            return partial(self._result, record)
        current = await self.store.responses.get(request.scope, record.id, also_hidden=True)
        return json_answer(current.response)

    async def _result(
        self, record: ResponseRecord, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """The terminal response, for as long as the client waits; the task does not need it to."""
        del scope
        response = await while_connected(receive, self.engine.wait(record))
        await send_whole(send, 200, JSON, encode_json(response))


def _initial(
    asked: TaskRequest,
    harness: ConfiguredHarness,
    response_id: str,
    session: SessionRecord,
    created_at: int,
) -> dict[str, Any]:
    """The response as it begins."""
    description = harness.description
    metadata = {
        **{name: value for name, value in asked.metadata.items() if name not in RESERVED_METADATA},
        "session_id": session.id,
        "harness_id": description.id,
        "container_id": session.container_id,
    }
    model = asked.model or description.default_model
    if model not in description.models:
        metadata |= {
            "requested_model": model,
            "model_fallback": True,
            "model_fallback_reason": f"This harness does not serve the model {model!r}.",
        }
        model = description.default_model
    if asked.ignored_fields:
        metadata["ignored_fields"] = list(asked.ignored_fields)
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "previous_response_id": asked.previous_response_id,
        "model": model,
        "output": [],
        "background": asked.background,
        "store": asked.store,
        "usage": None,
        "metadata": metadata,
    }


def _of_previous(refusal: NotFound) -> UhpError:
    return UhpError(refusal.code, refusal.message, param="previous_response_id")


def _least(*values: int | None) -> int | None:
    given = [value for value in values if value is not None]
    return min(given) if given else None


def _response_id(request: UhpRequest) -> str:
    response_id = request.path["response_id"]
    if _RESPONSE_ID.fullmatch(response_id) is None:
        raise response_not_found()
    return response_id


def _last_event(request: UhpRequest) -> int:
    value = request.header(b"last-event-id") or request.query.text("starting_after")
    if value is None or value == "":
        return -1
    if _SEQUENCE.fullmatch(value) is None:
        raise invalid_input("Last-Event-ID is the sequence_number of the last event seen.")
    return int(value)
