"""One task as it runs in this process: its events, whoever follows them, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from app.errors import Unavailable
from app.uhp.streaming import Citation, Event, Transcript

if TYPE_CHECKING:
    from app.harness.base import Turn
    from app.harness.registry import ConfiguredHarness
    from app.harness.workspace import Workspace
    from app.store.files import FileRecord
    from app.store.responses import ResponseRecord
    from app.store.sessions import SessionRecord

HELD_EVENTS = 1_000
HELD_CHARACTERS = 1024 * 1024
"""Kept events that stay in memory for those who follow closely; others read them from the store."""

MAX_UNKEPT_EVENTS = 5_000
MAX_UNKEPT_CHARACTERS = 4 * 1024 * 1024
"""So many events may wait for the store; a harness that is faster than that waits."""

Read = Callable[[int], Awaitable[list[Event]]]
"""The next kept events behind a number."""


@dataclass(frozen=True, slots=True)
class Work:
    """Everything that a task needs to run."""

    response: ResponseRecord
    session: SessionRecord
    harness: ConfiguredHarness
    initial: dict[str, Any]
    prompt: str
    instructions: str | None = None
    history: tuple[Turn, ...] = ()
    inputs: tuple[FileRecord, ...] = ()
    max_step: int | None = None
    max_output_tokens: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended."""

    status: Literal["completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None = None
    reason: str | None = None


def failed(code: str, message: str) -> Outcome:
    """A task that did not do its work; `message` is safe to show."""
    error = {
        "type": "harness_error",
        "code": code,
        "message": message,
        "param": None,
        "detail": None,
    }
    return Outcome("failed", error)


class EventLog:
    """The events of a run in order, of which memory holds a window: the rest is in the store."""

    def __init__(self) -> None:
        self._held: list[Event] = []
        self._first = 0
        self._kept = 0
        self._characters = 0
        self._unkept_characters = 0
        self._is_complete = False
        self._grown = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def end(self) -> int:
        """The number that the next event has."""
        return self._first + len(self._held)

    @property
    def held(self) -> int:
        """How many events are in memory."""
        return len(self._held)

    def add(self, events: Sequence[Event]) -> None:
        """Append events, which are told once they are kept."""
        self._held.extend(events)
        size = sum(len(payload) for _, payload in events)
        self._characters += size
        self._unkept_characters += size
        self._measure_room()

    def complete(self) -> None:
        """Nothing more comes."""
        self._is_complete = True
        self._room.set()
        self._wake()

    @property
    def _told(self) -> int:
        """The number of the first event that nobody may be told yet."""
        return self.end if self._is_complete else self._kept

    def unkept(self) -> list[Event]:
        """The events that the store does not have yet."""
        return self._held[self._kept - self._first :]

    def keep(self, events: Sequence[Event]) -> None:
        """The store has these now, the first ones that it did not have."""
        self._kept += len(events)
        self._unkept_characters -= sum(len(payload) for _, payload in events)
        self._forget()
        self._measure_room()
        self._wake()

    async def room(self) -> None:
        """Wait until the store has caught up."""
        await self._room.wait()

    async def follow(self, after: int, read: Read) -> AsyncGenerator[Event, None]:
        """The events behind `after` as they are kept, to the last one.

        Not before: what a client has seen keeps its number and its meaning, also when this
        process dies. Raises Unavailable when kept events are gone that were not read yet.
        """
        place = after + 1
        while True:
            if place < self._first:
                events = await read(place - 1)
                if not events:
                    raise Unavailable("consignee_unavailable", "The events of this task are gone.")
            elif place < self._told:
                events = self._held[place - self._first : place - self._first + 1]
            else:
                events = []
            for event in events:
                yield event
                place = event[0] + 1
            if not events:
                if self._is_complete:
                    return
                await self._grown.wait()

    def _forget(self) -> None:
        surplus = 0
        for _, payload in self._held[: self._kept - self._first]:
            held = len(self._held) - surplus
            if held <= HELD_EVENTS and self._characters <= HELD_CHARACTERS:
                break
            self._characters -= len(payload)
            surplus += 1
        del self._held[:surplus]
        self._first += surplus

    def _measure_room(self) -> None:
        waiting = self.end - self._kept
        if waiting < MAX_UNKEPT_EVENTS and self._unkept_characters < MAX_UNKEPT_CHARACTERS:
            self._room.set()
        else:
            self._room.clear()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class Run:
    """One task as it runs here.

    Three things can end it early, and they do not mean the same: `cancel` is the client's wish,
    `interrupt` the end of this process, `abandon` the end of the session and of all that it has.
    """

    def __init__(self, work: Work, publish: Callable[[Work, str], None]) -> None:
        self.work = work
        self.transcript = Transcript(work.initial)
        self.log = EventLog()
        self.citations: list[Citation] = []
        self.workspace: Workspace | None = None
        self.is_cancelled = False
        self.is_interrupted = False
        self.is_abandoned = False
        self.is_kept = False
        self.closing = asyncio.Event()
        self.finished = asyncio.Event()
        self.stirred = asyncio.Event()
        self._publish = publish
        self._harness: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        """The response's id."""
        return self.work.response.id

    @property
    def response(self) -> dict[str, Any]:
        """The terminal response of a run that is finished, or Unavailable: it has none to show."""
        self._require_end()
        return self.transcript.response

    def add(self, events: Sequence[Event]) -> None:
        """Note events and tell whoever follows."""
        self.log.add(events)
        for _, payload in events:
            self._publish(self.work, payload)
        self.stirred.set()

    def cancel(self) -> None:
        """End the harness's part; the run itself goes on to its terminal state."""
        self.is_cancelled = True
        self._end_harness()

    def interrupt(self) -> None:
        """End the harness's part because this process ends."""
        self.is_interrupted = True
        self._end_harness()

    def abandon(self) -> None:
        """End it because its session goes: nothing of it is kept any more."""
        self.is_abandoned = True
        self.cancel()

    def close(self) -> None:
        """The work is over; what is left is its end."""
        self.closing.set()
        self.stirred.set()

    def finish(self) -> None:
        """Nothing more comes."""
        self.log.complete()
        self.finished.set()

    async def drive(self, harness: asyncio.Task[None]) -> None:
        """Wait for the harness's part, which the ways to end it early may cancel."""
        self._harness = harness
        if self.is_cancelled or self.is_interrupted:
            harness.cancel()
        try:
            await asyncio.wait([harness])
        finally:
            self._harness = None

    async def follow(self, after: int, read: Read) -> AsyncGenerator[Event, None]:
        """The events behind `after`, as they come, to the terminal one.

        Raises Unavailable when there will be no terminal one.
        """
        async for event in self.log.follow(after, read):
            yield event
        self._require_end()

    def _require_end(self) -> None:
        if not self.is_kept:
            raise Unavailable(
                "consignee_unavailable", "This server ended before the task had its end."
            )

    def _end_harness(self) -> None:
        if self._harness is not None:
            self._harness.cancel()
