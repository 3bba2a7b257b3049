"""One span of time for everything."""

from __future__ import annotations

import asyncio

import pytest

from app.sender.budget import Budget
from app.sender.errors import BudgetExceeded, SendError

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_counts_from_its_beginning_and_is_never_negative() -> None:
    clock = Clock()
    budget = Budget(2, clock=clock)
    assert budget.remaining() == 2
    clock.now += 1.5
    assert budget.remaining() == 0.5
    clock.now += 5
    assert budget.remaining() == 0


@pytest.mark.requirement("AHP-S43")
def test_ahp_s43_a_part_ends_with_the_whole_at_the_latest() -> None:
    clock = Clock()
    whole = Budget(10, clock=clock)
    clock.now += 4
    assert whole.part(3).remaining() == 3
    assert whole.part(60).remaining() == 6


async def test_a_block_within_the_budget_is_left_alone() -> None:
    async with Budget(60).limit():
        await asyncio.sleep(0)


@pytest.mark.requirement("AHP-S12")
async def test_ahp_s12_a_block_ends_with_the_budget() -> None:
    budget = Budget(0.01)
    with pytest.raises(BudgetExceeded) as caught:
        async with budget.limit():
            await asyncio.Event().wait()
    assert isinstance(caught.value, SendError)
    assert caught.value.code == "budget_exceeded"


async def test_a_spent_budget_begins_nothing() -> None:
    begun = []
    with pytest.raises(BudgetExceeded):
        async with Budget(0).limit():
            begun.append(1)
    assert not begun


async def test_a_timeout_of_the_block_itself_is_not_the_budgets() -> None:
    with pytest.raises(TimeoutError):
        async with Budget(60).limit():
            raise TimeoutError


async def test_a_cancellation_stays_one() -> None:
    async def wait() -> None:
        async with Budget(60).limit():
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
