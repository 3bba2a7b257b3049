"""What happens on a harness, live, for whoever listens (Streaming section 5).

A feed is a stream of its own: it begins where the listener comes in and is numbered from 0. What a
slow listener does not take in time is dropped, the oldest first, and shows as a gap in the numbers.
Tasks of this process are heard at once, those of others through the store; see relays.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from app.uhp.streaming import Event, renumbered

MAX_WAITING_CHARACTERS = 4 * 1024 * 1024
"""What is held for one listener; a single event is held whatever its size is."""

Key = tuple[str, str]
"""A scope, and a harness."""


class Feed:
    """The events that one listener has not taken yet."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._characters = 0
        self._number = 0
        self._closed = False
        self._stirred = asyncio.Event()

    def put(self, payload: str) -> None:
        """Add an event, at the cost of the oldest if there are too many."""
        event = (self._number, renumbered(payload, self._number))
        self._waiting.append(event)
        self._number += 1
        self._characters += len(event[1])
        while self._characters > MAX_WAITING_CHARACTERS and len(self._waiting) > 1:
            self._take()
        self._stirred.set()

    def close(self) -> None:
        """Nothing more comes."""
        self._closed = True
        self._stirred.set()

    async def events(self) -> AsyncGenerator[Event, None]:
        """The events as they come, until the feed is closed."""
        while True:
            while self._waiting:
                yield self._take()
            if self._closed:
                return
            self._stirred.clear()
            await self._stirred.wait()

    def _take(self) -> Event:
        event = self._waiting.popleft()
        self._characters -= len(event[1])
        return event


class Feeds:
    """Every listener of this process."""

    def __init__(self) -> None:
        self._listening: dict[Key, set[Feed]] = {}
        self._closed = False

    def publish(self, key: Key, payload: str) -> None:
        """Tell whoever listens."""
        for feed in self._listening.get(key, ()):
            feed.put(payload)

    async def listen(self, key: Key) -> AsyncGenerator[Event, None]:
        """Every event from now on."""
        if self._closed:
            return
        feed = Feed()
        listening = self._listening.setdefault(key, set())
        listening.add(feed)
        try:
            async for event in feed.events():
                yield event
        finally:
            listening.discard(feed)
            if not listening:
                self._listening.pop(key, None)

    def close(self) -> None:
        """End every feed, those that are still to come included."""
        self._closed = True
        for listening in self._listening.values():
            for feed in listening:
                feed.close()
