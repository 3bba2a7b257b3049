"""Work that several want at once and that is done once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from app.sender.errors import AuthorizationError

_Result = TypeVar("_Result")


class Turns:
    """One at a time; who waited for one that failed shares its failure.

    Each works within its own budget: a turn that is cancelled or runs out of time says nothing to
    those who wait, and the next of them works itself.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._failures = 0
        self._last = AuthorizationError("", "")

    async def take(self, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """What `work` gives, which looks first whether an earlier turn has already done it."""
        failures = self._failures
        async with self._lock:
            if self._failures != failures:
                raise AuthorizationError(self._last.code, self._last.message)
            try:
                return await work()
            except AuthorizationError as error:
                self._failures += 1
                self._last = error
                raise
