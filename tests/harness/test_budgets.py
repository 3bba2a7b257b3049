"""Budgets: steps and time, held for any harness, and a harness that is left cleans up first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from app.harness.base import BudgetSpent, HarnessEvent, Task, TextDelta, ToolCall
from app.harness.budgets import Budgeted
from tests.harness.tasks import a_task, events_of, run_until_error

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("UHP-01")]


class Steps:
    def __init__(self) -> None:
        self.is_closed = False

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        try:
            for number in range(3):
                yield ToolCall(f"{number}", "step", "{}")
                yield TextDelta("said")
        finally:
            await asyncio.sleep(0)
            self.is_closed = True


class Silent:
    """Says one thing, then nothing for ever; takes a moment to clean up."""

    def __init__(self) -> None:
        self.is_closed = False

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        try:
            yield TextDelta("said")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.is_closed = True


class Impatient:
    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        yield TextDelta("said")
        raise TimeoutError("of its own")


async def test_a_task_within_its_budget_runs_to_its_end(tmp_path: Path) -> None:
    for steps in (None, 3):
        said = await events_of(Budgeted(Steps(), 60), a_task(tmp_path, max_step=steps))
        assert len(said) == 6


@pytest.mark.parametrize(("max_step", "told"), [(0, 0), (1, 2), (2, 4)])
async def test_one_step_too_many_stops_the_task(tmp_path: Path, max_step: int, told: int) -> None:
    harness = Steps()
    said, error = await run_until_error(Budgeted(harness, 60), a_task(tmp_path, max_step=max_step))
    assert isinstance(error, BudgetSpent)
    assert (error.reason, len(said)) == ("max_steps", told)
    assert harness.is_closed


@pytest.mark.parametrize(("own", "asked"), [(0.05, None), (60, 0.05), (0.05, 60)])
async def test_the_lesser_time_counts_and_the_harness_cleans_up(
    tmp_path: Path, own: float, asked: float | None
) -> None:
    harness = Silent()
    task = a_task(tmp_path, timeout_seconds=asked)
    said, error = await run_until_error(Budgeted(harness, own), task)
    assert isinstance(error, BudgetSpent)
    assert (error.reason, said) == ("timeout", [TextDelta("said")])
    assert harness.is_closed


async def test_a_timeout_of_the_harness_itself_is_no_budget(tmp_path: Path) -> None:
    _, error = await run_until_error(Budgeted(Impatient(), 60), a_task(tmp_path))
    assert isinstance(error, TimeoutError)


async def test_a_cancelled_task_cleans_up_first(tmp_path: Path) -> None:
    harness = Silent()
    running = asyncio.create_task(events_of(Budgeted(harness, 60), a_task(tmp_path)))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert harness.is_closed
