"""Observation: best effort, never a gate, and over when its time is (AHP-S25, S45).

    async with Observations(publish) as observations:
        observations.start(delivery)      # returns at once; the host goes on
        …

What a receiver does or fails to do changes nothing that is settled. Nothing is kept for later:
where too many observations run already, the next is dropped and counted. Leaving waits for those
that run, each at most until the budget of its delivery ends, so that nothing goes on detached.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self

from app.sender.interception import Publish, Turn, called
from app.sender.publication import PublicationState
from app.sender.threads import ended

if TYPE_CHECKING:
    from types import TracebackType

    from app.sender.delivery import Delivery
    from app.sender.receivers import Receiver

logger = logging.getLogger(__name__)

CONCURRENT_OBSERVATIONS = 64
"""Observations that run at once before further ones are dropped."""


async def observe(delivery: Delivery, publish: Publish) -> tuple[Turn, ...]:
    """Publish to every observer of `delivery`, each as soon as its own uploads are through.

    A failure is in the turn of that observer and nowhere else. The turns are in the order of the
    receivers.
    """
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_turn_of(delivery, receiver, publish))
            for receiver in delivery.receivers
            if receiver.mode == "observe"
        ]
    return tuple(task.result() for task in tasks)


async def _turn_of(delivery: Delivery, receiver: Receiver, publish: Publish) -> Turn:
    publication = await delivery.publication(receiver)
    if publication.state is not PublicationState.READY:
        return Turn(publication)
    return await called(publication, publish, delivery.budget)


class Observations:
    """Deliveries that are observed beside what the host does; an async context manager.

    `turns` is what happened so far, `dropped` how many deliveries found no place.
    """

    def __init__(self, publish: Publish, *, at_once: int = CONCURRENT_OBSERVATIONS) -> None:
        self._publish = publish
        self._at_once = at_once
        self._running: set[asyncio.Task[None]] = set()
        self.turns: list[Turn] = []
        self.dropped = 0

    def start(self, delivery: Delivery) -> bool:
        """Enter and observe `delivery` beside the caller; False if it was dropped instead."""
        if len(self._running) >= self._at_once:
            self.dropped += 1
            return False
        task = asyncio.create_task(self._observe(delivery))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def _observe(self, delivery: Delivery) -> None:
        try:
            async with delivery:
                self.turns += await observe(delivery, self._publish)
        except Exception:
            # Nobody waits for it, and it must not reach what is settled: the log is told.
            logger.exception("An observation failed.")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what runs, or after an error of the block end it."""
        async with AsyncExitStack() as ending:
            for task in self._running:
                ending.push_async_callback(ended, task)
            if error is None and self._running:
                await asyncio.wait(self._running)
