"""Running the operator's code: bounded, once for each event, and with an outcome on record.

An event is stored before its handler starts, so nothing that happens here can lose it. A run is a
task of its own: it goes on when the host that delivered the event is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from app import telemetry
from app.ahp.events import event_of
from app.ahp.hook_replies import HandlerFailed
from app.errors import Refusal

if TYPE_CHECKING:
    from app.ahp.events import Effects, Handler
    from app.ahp.hook_messages import Delivery
    from app.ahp.hook_replies import Answered, Replies
    from app.store.events import Events, Outcome, StoredEvent

T = TypeVar("T")

log = logging.getLogger("consignee.events")

MAX_RUNS: Final = 64
"""Events that handlers work on at once in this process; others wait for their turn."""

OBSERVE_SECONDS: Final = 1.0
"""How long the answer to an observation waits for its handler. A handler that needs longer goes on
behind the answer: observing must not hold up a host."""

SETTLING_SECONDS: Final = 2.0
"""What it takes at most to write an outcome once a handler's time is up."""

POLL_SECONDS: Final = 0.1
"""Pause between two looks for the result that another process has still to record."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A delivered event as it was stored."""

    delivery: Delivery
    stored: StoredEvent

    @property
    def size(self) -> int:
        """The size of the message in bytes."""
        return len(self.stored.message)

    @property
    def key(self) -> tuple[str, str]:
        """What no second event has."""
        return self.stored.scope, self.stored.event_id


class Runs:
    """The handler, and its runs in this process; `seconds` is what it has for one event."""

    def __init__(
        self, handler: Handler, replies: Replies, events: Events, *, seconds: float
    ) -> None:
        self._handler = handler
        self._replies = replies
        self._events = events
        self._seconds = seconds
        self._turns = asyncio.Semaphore(MAX_RUNS)
        self._intercepting: dict[tuple[str, str], asyncio.Task[Answered]] = {}
        self._runs: set[asyncio.Task[Any]] = set()
        self._calls: set[asyncio.Task[Effects]] = set()

    async def observe(self, event: Accepted) -> None:
        """Run the handler for an observation; returns when it ended, or goes on without us."""
        begun = asyncio.Event()
        run = self._start(self._observe(event, begun))
        await begun.wait()
        await asyncio.wait({run}, timeout=OBSERVE_SECONDS)

    async def intercept(self, event: Accepted) -> Answered:
        """Run the handler for an interception and give its answer."""
        run = self._start(self._intercept(event))
        self._intercepting[event.key] = run
        run.add_done_callback(lambda _: self._intercepting.pop(event.key))
        return await asyncio.shield(run)

    async def repeated(self, event: Accepted) -> Answered:
        """The answer to an interception that was delivered before: the handler runs only once.

        A run that has not ended is waited for, here or in another process. When that process is
        gone there will be no result, and the answer is the error of a handler that failed.
        """
        run = self._intercepting.get(event.key)
        if run is not None:
            return await asyncio.shield(run)
        result = await self._recorded(event)
        if result is None:
            return await self._replies.failure(event.delivery, event.size)
        return result, "duplicate"

    async def close(self) -> None:
        """Let every run end, which each does in time, and leave its outcome on record.

        A handler that goes on after its time is cancelled once more, and not waited for.
        """
        while self._runs:
            await asyncio.wait(self._runs)
        for call in self._calls:
            call.cancel()

    async def _recorded(self, event: Accepted) -> bytes | None:
        stored = event.stored
        # From now on, whenever it came: the clock of the machine that received it is another one.
        ends = time.monotonic() + self._seconds + SETTLING_SECONDS
        while stored.result is None and time.monotonic() < ends:
            await asyncio.sleep(POLL_SECONDS)
            stored = await self._events.find(stored.scope, stored.event_id)
        return stored.result

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        run = asyncio.get_running_loop().create_task(work)
        self._runs.add(run)
        run.add_done_callback(self._runs.discard)
        return run

    async def _observe(self, event: Accepted, begun: asyncio.Event) -> None:
        outcome, effects = await self._call(event, begun)
        if effects is not None:
            outcome = "failed"
            log.error("the handler gave effects for an observation", extra=_named(event))
        await self._settle(event, outcome, None)

    async def _intercept(self, event: Accepted) -> Answered:
        outcome, effects = await self._call(event, asyncio.Event())
        if outcome == "done":
            octets, told = await self._replies.effects(event.delivery, effects, event.size)
        else:
            octets, told = await self._replies.failure(event.delivery, event.size)
        if outcome == "done" and told != "done":
            outcome = "failed"
            log.error("the handler's effects are not valid here: %s", told, extra=_named(event))
        await self._settle(event, outcome, octets)
        return octets, told

    async def _call(self, event: Accepted, begun: asyncio.Event) -> tuple[Outcome, Effects]:
        """Call the handler when it is this event's turn; waiting for it counts as its time."""
        ends = asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(ends):
                await self._turns.acquire()
        except TimeoutError:
            log.warning("the handler had no time for an event", extra=_named(event))
            return "timed_out", None
        finally:
            begun.set()
        with telemetry.span("handler"):
            return await self._outcome(event, self._started(event), ends)

    def _started(self, event: Accepted) -> asyncio.Task[Effects]:
        given = event_of(event.delivery, event.stored, self._events)
        call = asyncio.get_running_loop().create_task(_guarded(self._handler(given)))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: asyncio.Task[Effects]) -> None:
        self._calls.discard(call)
        self._turns.release()
        if not call.cancelled():
            call.exception()  # seen, also where nobody waits for it any more

    async def _outcome(
        self, event: Accepted, call: asyncio.Task[Effects], ends: float
    ) -> tuple[Outcome, Effects]:
        # Not awaited: a handler that does not let itself be cancelled must not delay the answer.
        await asyncio.wait({call}, timeout=ends - asyncio.get_running_loop().time())
        if not call.done():
            call.cancel()
            log.warning("the handler took too long", extra=_named(event))
            return "timed_out", None
        if call.cancelled() or call.exception() is not None:
            error = None if call.cancelled() else call.exception()
            log.error("the handler failed", exc_info=error, extra=_named(event))
            return "failed", None
        return "done", call.result()

    async def _settle(self, event: Accepted, outcome: Outcome, result: bytes | None) -> None:
        try:
            await self._events.settle(*event.key, outcome, result)
        except Refusal as refusal:
            log.warning("an outcome could not be recorded", extra=_named(event, refusal.code))


async def _guarded(work: Awaitable[Effects]) -> Effects:
    """What a handler gives. One that would end the process has failed like any other."""
    try:
        return await work
    except SystemExit as error:
        raise HandlerFailed from error


def _named(event: Accepted, code: str | None = None) -> dict[str, str | None]:
    stored = event.stored
    return {"event": stored.event_id, "type": stored.type, "mode": stored.mode, "code": code}
