"""How many requests one principal may make: a bucket that fills at a steady rate.

`RequestRate` keeps its buckets in this process. `SharedRate` takes from buckets in the database,
which all processes have in common, a tenth of a second's worth at a time: a trip to the database
for every request would cost more than most requests do. What it has taken is good for
SHARE_SECONDS, so that no moment can see more than that on top, and a process that is asked no more
holds nothing back for long.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.store.budgets import Rate
from app.uhp.errors import RateLimited

if TYPE_CHECKING:
    from app.auth.principals import Principal
    from app.store.budgets import RequestBudgets

MAX_PRINCIPALS = 10_000
"""Buckets that are remembered; the one unused for longest goes first, and starts full again."""

SHARES_PER_SECOND = 10
SHARE_SECONDS = 1.0

Key = tuple[str, str]
"""A scope, and the name of a principal."""


class RequestRate:
    """Admits `rate` requests a second for each principal, and as many at once, at least one."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, rate)
        self._clock = clock
        self._buckets: OrderedDict[Key, tuple[float, float]] = OrderedDict()

    async def admit(self, principal: Principal) -> None:
        """Take one request of `principal`, or raise RateLimited."""
        key = (principal.scope, principal.name)
        now = self._clock()
        level, since = self._buckets.pop(key, (self._burst, now))
        level = min(self._burst, level + (now - since) * self._rate)
        allowed = level >= 1.0
        self._buckets[key] = (level - 1.0 if allowed else level, now)
        if len(self._buckets) > MAX_PRINCIPALS:
            self._buckets.popitem(last=False)
        if not allowed:
            raise _limited((1.0 - level) / self._rate)


@dataclass(slots=True)
class _Purse:
    """Requests that were taken out of a shared bucket; `empty_until` is when to ask again."""

    requests: int = 0
    good_until: float = 0.0
    empty_until: float = 0.0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def spend(self, now: float) -> bool:
        """Take one request, if there is one that is still good."""
        if self.requests < 1 or now >= self.good_until:
            return False
        self.requests -= 1
        return True


class SharedRate:
    """Admits what `RequestRate` does, of all processes together."""

    def __init__(
        self, rate: float, budgets: RequestBudgets, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = Rate(rate, max(1.0, rate))
        self._most = max(1, int(rate / SHARES_PER_SECOND))
        self._budgets = budgets
        self._clock = clock
        self._purses: OrderedDict[Key, _Purse] = OrderedDict()

    async def admit(self, principal: Principal) -> None:
        """Take one request of `principal`, or raise RateLimited; Unavailable as the database is."""
        purse = self._purse((principal.scope, principal.name))
        if purse.spend(self._clock()):
            return
        async with purse.turn:
            if purse.spend(self._clock()):
                return
            await self._fill(purse, principal)
            purse.requests -= 1

    def _purse(self, key: Key) -> _Purse:
        purse = self._purses.pop(key, None) or _Purse()
        self._purses[key] = purse
        if len(self._purses) > MAX_PRINCIPALS:
            self._purses.popitem(last=False)
        return purse

    async def _fill(self, purse: _Purse, principal: Principal) -> None:
        """Take a share of the bucket, at least one request, or raise RateLimited."""
        wait = purse.empty_until - self._clock()
        if wait > 0:  # others only take: it is no fuller than it was said to be
            raise _limited(wait)
        share = await self._budgets.take(principal.scope, principal.name, self._rate, self._most)
        now = self._clock()
        if not share.requests:
            purse.empty_until = now + share.wait_seconds
            raise _limited(share.wait_seconds)
        purse.requests, purse.good_until = share.requests, now + SHARE_SECONDS


def _limited(wait_seconds: float) -> RateLimited:
    return RateLimited(math.ceil(wait_seconds))
