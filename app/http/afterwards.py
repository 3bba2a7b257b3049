"""What is left to do for a request that has its answer: to count it, and to write its line.

Nobody on the other side of a connection waits for that, so nobody there should be kept waiting by
it. It is put off until this process has to wait itself, for the disk at the end of a transaction,
and for PUT_OFF_SECONDS at most. What is put off is done in its order, and its lines leave in one
write.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from app.logs import gathered

PUT_OFF_SECONDS: Final = 0.005
"""How much later a line is written, at most, and a request counted, than it ended."""

PUT_OFF_AT_ONCE: Final = 256
"""How many requests wait for that at most."""

AFTERWARDS: Final = "consignee.afterwards"
"""The ASGI extension of a server whose requests may be counted and logged behind their end; its
`do` is that of Afterwards."""


class Afterwards:
    """Work that is put off, for one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Put `work` off. On the event loop alone."""
        self._waiting.append(work)
        if self._timer is None:
            self._set_timer()
        if len(self._waiting) >= PUT_OFF_AT_ONCE:
            self.catch_up()

    def catch_up(self) -> None:
        """Do now what is put off. On the event loop alone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            with gathered():
                while self._waiting:
                    self._waiting.popleft()()
        finally:
            if self._waiting:  # one has failed, and the others have their turn all the same
                self._set_timer()

    def have_time(self) -> None:
        """Now is a good time: the caller is going to wait. Of any thread, and it never fails."""
        if self._waiting and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.catch_up)

    def _set_timer(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(PUT_OFF_SECONDS, self.catch_up)
