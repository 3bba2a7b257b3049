"""The operator's code of these tests: it does what the test that runs has set."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from app.ahp.events import Effects, Event

Behaviour = Callable[[Event], Awaitable[Effects]]

seen: list[Event] = []
"""The events that the handler was called with."""

_behaviours: list[Behaviour] = []


def behave(behaviour: Behaviour) -> None:
    """Let the handler do that from now on."""
    _behaviours[:] = [behaviour]


def reset() -> None:
    """Forget what was seen and set."""
    seen.clear()
    _behaviours.clear()


async def handle(event: Event) -> Effects:
    """The handler."""
    seen.append(event)
    return await _behaviours[0](event) if _behaviours else None


def giving(effects: Effects) -> Behaviour:
    """A handler that gives that."""

    async def give(_: Event) -> Effects:
        return effects

    return give


def raising(error: BaseException) -> Behaviour:
    """A handler that raises that."""

    async def fail(_: Event) -> Effects:
        raise error

    return fail


class Gate:
    """A handler that stays where it is until it is let through."""

    def __init__(self, effects: Effects = None) -> None:
        self.entered = asyncio.Event()
        self.opened = asyncio.Event()
        self._effects = effects

    async def __call__(self, _: Event) -> Effects:
        self.entered.set()
        await self.opened.wait()
        return self._effects
