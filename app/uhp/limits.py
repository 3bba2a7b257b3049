"""How many requests one principal may make: a bucket that fills at a steady rate."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.uhp.errors import RateLimited

if TYPE_CHECKING:
    from app.auth.principals import Principal

MAX_PRINCIPALS = 10_000
"""Buckets that are remembered; the one unused for longest goes first, and starts full again."""


class RequestRate:
    """Admits `rate` requests a second for each principal, and as many at once, at least one."""

    def __init__(self, rate: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = max(1.0, rate)
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def admit(self, principal: Principal) -> None:
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
            raise RateLimited(math.ceil((1.0 - level) / self._rate))
