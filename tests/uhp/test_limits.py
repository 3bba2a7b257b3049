"""The rate of requests: a bucket for each principal, and numbers that a client can use."""

from __future__ import annotations

import pytest

from app.auth.principals import Principal
from app.uhp import limits
from app.uhp.errors import RateLimited
from app.uhp.limits import RequestRate

ALICE = Principal("alice", "a", frozenset())
BOB = Principal("bob", "a", frozenset())
STRANGER = Principal("alice", "b", frozenset())


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_empties_and_fills() -> None:
    clock = Clock()
    rate = RequestRate(2, clock=clock)
    for principal in (ALICE, BOB, STRANGER):
        rate.admit(principal)
        rate.admit(principal)
        with pytest.raises(RateLimited) as refused:
            rate.admit(principal)
        assert refused.value.detail == {"retry_after_ms": 1000}
        assert (b"retry-after", b"1") in refused.value.headers
    clock.now += 0.5
    rate.admit(ALICE)
    with pytest.raises(RateLimited):
        rate.admit(ALICE)
    clock.now += 1000
    for _ in range(2):
        rate.admit(ALICE)
    with pytest.raises(RateLimited):
        rate.admit(ALICE)


def test_a_slow_rate_says_how_long_to_wait() -> None:
    clock = Clock()
    rate = RequestRate(0.1, clock=clock)
    rate.admit(ALICE)
    with pytest.raises(RateLimited) as refused:
        rate.admit(ALICE)
    assert refused.value.detail == {"retry_after_ms": 10_000}
    clock.now += 10
    rate.admit(ALICE)


def test_buckets_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PRINCIPALS", 2)
    rate = RequestRate(1, clock=Clock())
    for name in ("one", "two", "three"):
        rate.admit(Principal(name, "a", frozenset()))
    assert len(rate._buckets) == 2
    rate.admit(Principal("one", "a", frozenset()))
    with pytest.raises(RateLimited):
        rate.admit(Principal("three", "a", frozenset()))
