"""One span of time that everything an upload needs is taken from (AHP-S12, AHP-S43)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from app.sender.errors import BudgetExceeded


class Budget:
    """`seconds`, counted from now. Discovery, tokens, transfer and retries share one."""

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends = clock() + seconds

    def remaining(self) -> float:
        """Seconds that are left; never negative."""
        return max(0.0, self._ends - self._clock())

    def part(self, seconds: float) -> Budget:
        """A budget of `seconds` from now that ends with this one at the latest."""
        return Budget(min(seconds, self.remaining()), clock=self._clock)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """End the block when the time is over. Raises BudgetExceeded, at once if it is already."""
        left = self.remaining()
        if not left:
            raise BudgetExceeded
        deadline = asyncio.timeout(left)
        try:
            async with deadline:
                yield
        except TimeoutError:
            if not deadline.expired():  # a timeout of the block's own says nothing of this budget
                raise
            raise BudgetExceeded from None
