"""`POST` on a hooks path: one JSON-RPC message, an event or the question for the configuration.

After method and credential come 400 for the head and 413 for the declared length, and only then
the body. An event is valid or it is not stored; all its references are resolved in the scope of
the credential, or none of it is stored and the answer is 404 `content_not_found` (AHP-R34, R36,
R43). What is stored is answered, and what is stored twice is answered as the first time.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from app.ahp.endpoints import NO_CONTENT, Endpoint, Request
from app.ahp.hook_messages import Delivery, read_delivery
from app.ahp.hook_replies import LARGE_BYTES, no_effects
from app.ahp.hook_runs import Accepted, Runs
from app.errors import Conflict, Malformed, TooLarge
from app.http.answers import JSON
from app.http.resources import Answer
from app.store.events import Arrival

if TYPE_CHECKING:
    from app.ahp.hook_replies import Answered, Replies
    from app.auth.authenticator import Authenticator
    from app.http.metrics import Metrics
    from app.settings import Settings
    from app.store.events import Events, StoredEvent

_LENGTH = re.compile(rb"[0-9]{1,19}")


class HooksEndpoint(Endpoint):
    """The ASGI application of one hooks path; `runs` is None where no handler is configured."""

    permission = "ahp.hooks"
    action = "event.store"

    def __init__(
        self,
        path: str,
        settings: Settings,
        authenticator: Authenticator,
        events: Events,
        metrics: Metrics,
        replies: Replies,
        runs: Runs | None,
    ) -> None:
        super().__init__(path, settings, authenticator)
        self._limit = int(settings.max_event_bytes)
        self._events = events
        self._metrics = metrics
        self._replies = replies
        self._runs = runs

    async def answer(self, request: Request) -> Answer:
        """Read the message, keep it when it is an event, and answer it. Raises Refusal."""
        check_head(request.headers, limit=self._limit)
        octets = await request.body.whole(self._limit)
        delivery = await _delivery(octets)
        if delivery is None:
            answered = await self._replies.answer(octets)
        else:
            answered = await self._accept(request, delivery, octets)
        return self._answered(request, *answered)

    def count(self, outcome: str) -> None:
        """One message more that ended so."""
        self._metrics.count_event(outcome)

    async def _accept(self, request: Request, delivery: Delivery, octets: bytes) -> Answered:
        principal = request.principal
        request.record.note(
            event_id=delivery.event_id, references=len(delivery.refs), bytes=len(octets)
        )
        arrival = Arrival(
            event_id=delivery.event_id,
            type=delivery.type,
            mode=delivery.mode,
            scope=principal.scope,
            principal=principal.name,
            message=octets,
            refs=delivery.refs,
        )
        try:
            stored, is_new = await self._events.accept(arrival)
        except Conflict:
            if not await self._is_retold(arrival):
                raise
            return None, "retold"
        return await self._answer_stored(delivery, stored, is_new=is_new)

    async def _is_retold(self, arrival: Arrival) -> bool:
        """Whether an event on record is told again in other words, with which nothing is to do.

        A host observes what became of an interception under the same id, and shows the same event
        to two subscriptions in two views.
        """
        if arrival.mode == "intercept":
            return False
        known = await self._events.find(arrival.scope, arrival.event_id)
        return known.type == arrival.type

    async def _answer_stored(
        self, delivery: Delivery, stored: StoredEvent, *, is_new: bool
    ) -> Answered:
        event = Accepted(delivery, stored)
        if delivery.mode == "observe":
            if self._runs is not None and is_new:
                await self._runs.observe(event)
            return None, "accepted" if is_new else "duplicate"
        return await self._answer_intercepted(event, is_new=is_new)

    async def _answer_intercepted(self, event: Accepted, *, is_new: bool) -> Answered:
        if event.stored.result is not None:
            return event.stored.result, "duplicate"
        if self._runs is None:
            return no_effects(event.delivery), "accepted" if is_new else "duplicate"
        if not is_new:
            return await self._runs.repeated(event)
        octets, outcome = await self._runs.intercept(event)
        return octets, "accepted" if outcome == "done" else outcome

    def _answered(self, request: Request, octets: bytes | None, outcome: str) -> Answer:
        self.count(outcome)
        if outcome not in ("accepted", "configuration"):
            request.record.code = outcome
        return Answer(NO_CONTENT, b"", b"") if octets is None else Answer(200, JSON, octets)


async def _delivery(octets: bytes) -> Delivery | None:
    if len(octets) < LARGE_BYTES:
        return read_delivery(octets)
    return await asyncio.to_thread(read_delivery, octets)


def check_head(headers: list[tuple[bytes, bytes]], *, limit: int) -> None:
    """Judge the head of a message from its ASGI `headers`.

    Raises Malformed for anything but plain `application/json`, parameters aside, and TooLarge for
    a declared length over `limit` bytes.
    """
    types = [value for name, value in headers if name == b"content-type"]
    if len(types) != 1 or types[0].partition(b";")[0].strip().lower() != JSON:
        raise Malformed("content_type", "Content-Type must be application/json.")
    for name, value in headers:
        if name == b"content-encoding":
            raise Malformed("content_encoding", "Send the JSON as it is, without an encoding.")
        if name == b"content-length" and _LENGTH.fullmatch(value) and int(value) > limit:
            raise TooLarge(limit)
