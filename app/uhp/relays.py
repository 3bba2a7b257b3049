"""Events of tasks that other processes run, for who listens to a harness here.

They are read from the store, and only while somebody listens: one reader for each scope and
harness, however many listen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from app.store.responses import Other
from app.uhp.troubles import reported

if TYPE_CHECKING:
    from app.store.responses import Responses
    from app.uhp.feeds import Feeds, Key

RELAY_SECONDS = 0.3
"""How often the store is asked."""


class Relay:
    """What comes of the tasks of one scope on one harness that `of.owner` does not run."""

    def __init__(self, responses: Responses, of: Other, publish: Callable[[str], None]) -> None:
        self._responses = responses
        self._of = of
        self._publish = publish
        self._position = 0
        self._told: dict[str, int] = {}
        self.begun = asyncio.Event()

    async def begin(self) -> None:
        """Take note of what is told already: a feed begins now."""
        self._position = await self._responses.position()
        for task in await self._responses.running_elsewhere(self._of):
            if task.position <= self._position:
                self._told[task.id] = await self._responses.newest_event(task.id)
        self.begun.set()

    async def round(self) -> None:
        """Tell what has come since the last time."""
        for task in await self._responses.begun_elsewhere(self._position, self._of):
            self._told.setdefault(task.id, -1)
            self._position = task.position
        running = {task.id for task in await self._responses.running_elsewhere(self._of)}
        for response_id in [*self._told]:
            await self._tell(response_id)
            if response_id not in running:  # before its events were read: these were the last
                del self._told[response_id]

    async def _tell(self, response_id: str) -> None:
        while events := await self._responses.events(response_id, after=self._told[response_id]):
            for number, payload in events:
                self._publish(payload)
                self._told[response_id] = number


@dataclass(slots=True)
class _Reading:
    """A reader at work, and how many listen to it."""

    relay: Relay
    task: asyncio.Task[None]
    listeners: int = 0


class Relays:
    """The readers for everybody who listens in this process, which is `owner`."""

    def __init__(self, responses: Responses, owner: str, feeds: Feeds) -> None:
        self._responses = responses
        self._owner = owner
        self._feeds = feeds
        self._readings: dict[Key, _Reading] = {}

    @asynccontextmanager
    async def reading(self, key: Key) -> AsyncIterator[None]:
        """See to it that `key` is read for as long as the block lasts."""
        reading = self._readings.get(key) or self._begin(key)
        reading.listeners += 1
        try:
            yield
        finally:
            reading.listeners -= 1
            if not reading.listeners:
                del self._readings[key]
                reading.task.cancel()
                await asyncio.wait([reading.task])

    def _begin(self, key: Key) -> _Reading:
        of = Other(*key, self._owner)
        relay = Relay(self._responses, of, partial(self._feeds.publish, key))
        reading = self._readings[key] = _Reading(relay, asyncio.create_task(_read(relay)))
        return reading


async def _read(relay: Relay) -> None:
    while True:
        with reported("the tasks of other processes are not heard"):
            await (relay.round() if relay.begun.is_set() else relay.begin())
        await asyncio.sleep(RELAY_SECONDS)
