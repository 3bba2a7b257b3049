"""The rate of requests: a bucket for each principal, and numbers that a client can use."""

from __future__ import annotations

import asyncio
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from app.auth.principals import Principal
from app.errors import Unavailable
from app.store.budgets import Rate, RequestBudgets, Share
from app.uhp import limits
from app.uhp.errors import RateLimited
from app.uhp.limits import SHARE_SECONDS, RequestRate, SharedRate
from tests.store.stores import new_store

pytestmark = pytest.mark.anyio

ALICE = Principal("alice", "a", frozenset())
BOB = Principal("bob", "a", frozenset())
STRANGER = Principal("alice", "b", frozenset())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_bucket_empties_and_fills() -> None:
    clock = Clock()
    rate = RequestRate(2, clock=clock)
    for principal in (ALICE, BOB, STRANGER):
        await rate.admit(principal)
        await rate.admit(principal)
        with pytest.raises(RateLimited) as refused:
            await rate.admit(principal)
        assert refused.value.detail == {"retry_after_ms": 1000}
        assert (b"retry-after", b"1") in refused.value.headers
    clock.now += 0.5
    await rate.admit(ALICE)
    with pytest.raises(RateLimited):
        await rate.admit(ALICE)
    clock.now += 1000
    for _ in range(2):
        await rate.admit(ALICE)
    with pytest.raises(RateLimited):
        await rate.admit(ALICE)


async def test_a_slow_rate_says_how_long_to_wait() -> None:
    clock = Clock()
    rate = RequestRate(0.1, clock=clock)
    await rate.admit(ALICE)
    with pytest.raises(RateLimited) as refused:
        await rate.admit(ALICE)
    assert refused.value.detail == {"retry_after_ms": 10_000}
    clock.now += 10
    await rate.admit(ALICE)


async def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PRINCIPALS", 2)
    rate = RequestRate(1, clock=Clock())
    for name in ("one", "two", "three"):
        await rate.admit(Principal(name, "a", frozenset()))
    assert len(rate._buckets) == 2
    await rate.admit(Principal("one", "a", frozenset()))
    with pytest.raises(RateLimited):
        await rate.admit(Principal("three", "a", frozenset()))


# --- all processes together -----------------------------------------------------------------------


class Budgets(RequestBudgets):
    """Gives out what a test puts in, and counts how often it is asked."""

    def __init__(self, *shares: Share) -> None:
        self.shares = list(shares)
        self.asked: list[int] = []

    async def take(self, scope: str, principal: str, rate: Rate, most: int) -> Share:
        self.asked.append(most)
        await asyncio.sleep(0)
        return self.shares.pop(0)


async def admitted(rate: SharedRate, count: int, principal: Principal = ALICE) -> int:
    """How many of so many requests at once are admitted."""
    done = await asyncio.gather(
        *(rate.admit(principal) for _ in range(count)), return_exceptions=True
    )
    assert {type(each) for each in done} <= {type(None), RateLimited}
    return done.count(None)


async def test_shares_are_taken_and_not_single_requests() -> None:
    budgets = Budgets(Share(10), Share(10), Share(5), Share(0, 0.25))
    rate = SharedRate(100, budgets, clock=Clock())
    assert await admitted(rate, 40) == 25
    assert budgets.asked == [10, 10, 10, 10]


async def test_a_slow_rate_is_taken_one_by_one() -> None:
    budgets = Budgets(Share(1), Share(1))
    assert await admitted(SharedRate(2, budgets, clock=Clock()), 2) == 2
    assert budgets.asked == [1, 1]


async def test_nobody_asks_before_there_can_be_anything() -> None:
    clock, budgets = Clock(), Budgets(Share(0, 2.5), Share(1))
    rate = SharedRate(0.4, budgets, clock=clock)
    for _ in range(10):
        with pytest.raises(RateLimited) as refused:
            await rate.admit(ALICE)
        assert refused.value.detail == {"retry_after_ms": 3000}
    assert len(budgets.asked) == 1
    clock.now += 2.6
    await rate.admit(ALICE)
    assert len(budgets.asked) == 2


async def test_a_share_is_good_for_a_moment() -> None:
    clock, budgets = Clock(), Budgets(Share(10), Share(10))
    rate = SharedRate(100, budgets, clock=clock)
    await rate.admit(ALICE)
    clock.now += SHARE_SECONDS
    await rate.admit(ALICE)
    assert len(budgets.asked) == 2


async def test_the_principals_of_a_process_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PRINCIPALS", 2)
    budgets = Budgets(*(Share(10) for _ in range(4)))
    rate = SharedRate(100, budgets, clock=Clock())
    for principal in (ALICE, BOB, STRANGER, STRANGER, ALICE):
        await rate.admit(principal)
    assert len(rate._purses) == 2
    assert len(budgets.asked) == 4


async def test_a_database_that_does_not_answer_refuses_and_is_asked_again() -> None:
    class Silent(Budgets):
        async def take(self, *given: Any) -> Share:
            if not self.shares:
                raise Unavailable("storage_unavailable", "Gone.")
            return await super().take(*given)

    budgets = Silent()
    rate = SharedRate(100, budgets, clock=Clock())
    with pytest.raises(Unavailable):
        await rate.admit(ALICE)
    budgets.shares.append(Share(1))
    await rate.admit(ALICE)


async def test_two_processes_share_one_rate(tmp_path: Path) -> None:
    """With real databases: never more than the bucket holds, whoever is asked."""
    stores = [await new_store(tmp_path) for _ in range(2)]
    began = monotonic()
    rates = [SharedRate(50, store.budgets) for store in stores]
    counts = await asyncio.gather(*(admitted(rate, 200) for rate in rates))
    took = monotonic() - began
    assert 50 <= sum(counts) <= 50 + 50 * took
    for store in stores:
        await store.close()
