"""How long tasks have been silent, by this process's own clock.

Two machines need not agree on the time: a sign of life is that what the task's process writes has
changed since it was last looked at, and silence is measured by whoever listens.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.store.responses import Unfinished


class LifeSigns:
    """What was last seen of each task without an end, and since when it is the same."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def silences(self, tasks: Iterable[Unfinished]) -> dict[str, float]:
        """The seconds of silence of each of `tasks`, by id; others are forgotten."""
        now, before = self._now(), self._seen
        self._seen = {task.id: (task.seen_at, now) for task in tasks}
        for response_id, (sign, _) in self._seen.items():
            earlier, since = before.get(response_id, (None, now))
            if earlier == sign:
                self._seen[response_id] = (sign, since)
        return {response_id: now - since for response_id, (_, since) in self._seen.items()}

    def _now(self) -> float:
        return time.monotonic()
