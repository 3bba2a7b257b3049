"""The budgets of a task, held for every kind of harness alike: steps and wall clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from app.harness.base import BudgetSpent, HarnessEvent, Task, ToolCall


class Running(Protocol):
    """A harness whose run can be closed: its cleaning up is then over before anything else."""

    def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        """Do the work, as `Harness.run`."""
        ...


class Budgeted:
    """A harness that is stopped when its task's budget is spent.

    A step is a tool call that the harness tells of. The time is the lesser of the task's and
    the harness's own; it runs from the first event that is asked for.
    """

    def __init__(self, harness: Running, timeout_seconds: float) -> None:
        self._harness = harness
        self._timeout_seconds = timeout_seconds

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        """Do the work as the harness does; raises BudgetSpent as well as what that raises."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._seconds_of(task)
        steps = 0
        async with aclosing(self._harness.run(task)) as events:
            while (event := await _next_until(deadline, events)) is not None:
                steps += isinstance(event, ToolCall)
                if task.max_step is not None and steps > task.max_step:
                    raise BudgetSpent("max_steps")
                yield event

    def _seconds_of(self, task: Task) -> float:
        return min(self._timeout_seconds, task.timeout_seconds or self._timeout_seconds)


async def _next_until(
    deadline: float, events: AsyncGenerator[HarnessEvent, None]
) -> HarnessEvent | None:
    """The next event, None at the end. Raises BudgetSpent at `deadline` (of the loop's clock)."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            return await anext(events, None)
    except TimeoutError:
        if limit.expired():
            raise BudgetSpent("timeout") from None
        raise
