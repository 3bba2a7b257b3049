"""Silence, measured by whoever listens."""

from __future__ import annotations

from unittest.mock import patch

from app.store.responses import Unfinished
from app.uhp.life_signs import LifeSigns


def task(name: str, sign: int) -> Unfinished:
    return Unfinished(name, "a", "elsewhere-x", sign)


def silences(signs: LifeSigns, now: float, *tasks: Unfinished) -> dict[str, float]:
    with patch.object(LifeSigns, "_now", lambda _: now):
        return signs.silences(tasks)


def test_silence_begins_when_it_is_first_heard_and_ends_with_any_change() -> None:
    signs = LifeSigns()
    assert silences(signs, 100, task("x", 5)) == {"x": 0}
    assert silences(signs, 110, task("x", 5), task("y", 7)) == {"x": 10, "y": 0}
    assert silences(signs, 120, task("x", 4), task("y", 7)) == {"x": 0, "y": 10}
    assert silences(signs, 150, task("x", 4)) == {"x": 30}
    assert silences(signs, 151, task("x", 4), task("y", 7)) == {"x": 31, "y": 0}


def test_the_clock_is_a_real_one() -> None:
    signs = LifeSigns()
    signs.silences([task("x", 1)])
    assert 0 <= signs.silences([task("x", 1)])["x"] < 3600
