"""Requests that are counted in the database: one bucket for all processes, by one clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.store import ContentStore
from app.store import budgets as budgets_module
from app.store.budgets import SECOND, Rate, Share, _taken
from tests.store.stores import new_store

pytestmark = pytest.mark.anyio

TEN = Rate(10, 10)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ContentStore]:
    opened = await new_store(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def other(tmp_path: Path, store: ContentStore) -> AsyncIterator[ContentStore]:
    """Another process on the same store."""
    opened = await new_store(tmp_path)
    yield opened
    await opened.close()


@contextmanager
def at(seconds: float) -> Iterator[None]:
    """At this time of the database."""
    with patch.object(budgets_module, "_now", lambda _: round(seconds * SECOND)):
        yield


async def test_two_processes_take_from_one_bucket(store: ContentStore, other: ContentStore) -> None:
    with at(1000):
        assert await store.budgets.take("a", "alice", TEN, 4) == Share(4)
        assert await other.budgets.take("a", "alice", TEN, 100) == Share(6)
        assert await store.budgets.take("a", "alice", TEN, 1) == Share(0, 0.1)
        assert await store.budgets.take("a", "bob", TEN, 100) == Share(10)
        assert await store.budgets.take("b", "alice", TEN, 100) == Share(10)
    with at(1000.5):
        assert await other.budgets.take("a", "alice", TEN, 100) == Share(5)
    with at(9000):
        assert await other.budgets.take("a", "alice", TEN, 100) == Share(10)


async def test_of_many_at_once_nobody_takes_what_another_has(
    store: ContentStore, other: ContentStore
) -> None:
    with at(1000):
        shares = await asyncio.gather(
            *(each.budgets.take("a", "alice", TEN, 1) for each in (store, other) for _ in range(20))
        )
    assert sum(share.requests for share in shares) == 10


async def test_a_clock_that_was_set_back_locks_nobody_out(store: ContentStore) -> None:
    with at(100_000):
        await store.budgets.take("a", "alice", TEN, 10)
    with at(1000):
        assert await store.budgets.take("a", "alice", TEN, 1) == Share(0, 0.1)
    with at(1001):
        assert (await store.budgets.take("a", "alice", TEN, 10)).requests == 0
    with at(100_001):
        assert (await store.budgets.take("a", "alice", TEN, 10)).requests == 10


async def test_full_buckets_are_forgotten(store: ContentStore) -> None:
    with at(1000):
        await store.budgets.take("a", "alice", TEN, 10)
        await store.budgets.take("a", "bob", TEN, 1)
    with at(1000.5):
        assert await store.budgets.forget_full() == 1
    with at(1000.6):
        assert await store.budgets.take("a", "alice", TEN, 100) == Share(6)


async def test_the_clock_of_the_database_is_that_of_today(store: ContentStore) -> None:
    now = await store._catalogue.write(budgets_module._now)
    assert 1_700_000_000 < now / SECOND < 5_000_000_000


@given(
    rate=st.floats(0.01, 1000),
    steps=st.lists(st.tuples(st.integers(0, 5 * SECOND), st.integers(1, 50)), max_size=40),
)
async def test_no_more_is_given_than_the_rate_allows(
    rate: float, steps: list[tuple[int, int]]
) -> None:
    bucket = Rate(rate, max(1.0, rate))
    now, full_at, given_so_far = 0, 0, 0
    for pause, most in steps:
        now += pause
        share, full_at = _taken(now, max(full_at, now), bucket, most)
        given_so_far += share.requests
        assert share.requests <= most
        assert given_so_far <= bucket.burst + now / SECOND * rate + 1e-3 * (1 + rate)
        if not share.requests:
            assert 0 < share.wait_seconds <= 1 / rate + 1e-6
