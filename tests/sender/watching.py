"""What a block of a test leaves behind, which should be nothing."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from typing import Any, Self


class Leaks:
    """Tasks, descriptors and threads beyond those at the beginning of the block."""

    def __enter__(self) -> Self:
        gc.collect()
        self._descriptors = self._open()
        self._threads = threading.active_count()
        self._tasks = asyncio.all_tasks()
        return self

    def __exit__(self, *_: object) -> None:
        return

    def descriptors(self) -> int:
        """How many more descriptors are open."""
        gc.collect()
        return self._open() - self._descriptors

    def threads(self) -> int:
        """How many more threads there are."""
        return threading.active_count() - self._threads

    def tasks(self) -> set[asyncio.Task[Any]]:
        """The tasks that are new."""
        return asyncio.all_tasks() - self._tasks

    @staticmethod
    def _open() -> int:
        return len(os.listdir("/proc/self/fd"))
