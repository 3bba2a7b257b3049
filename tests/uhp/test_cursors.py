"""Cursors: opaque, bound to scope and listing; and the key that seals them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import SettingsError
from app.uhp.cursors import KEY_BYTES, Cursors, load_key
from app.uhp.errors import UhpError

CURSORS = Cursors(b"k" * KEY_BYTES)
POSITIONS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3).map(tuple)


def refused(scope: str, listing: str, cursor: str, cursors: Cursors = CURSORS) -> None:
    with pytest.raises(UhpError) as caught:
        cursors.open(scope, listing, cursor)
    assert (caught.value.code, caught.value.param) == ("invalid_input", "cursor")


@given(st.text(st.characters(codec="utf-8")), st.text("abc/"), POSITIONS)
def test_a_position_comes_back(scope: str, listing: str, position: tuple[int, ...]) -> None:
    cursor = CURSORS.seal(scope, listing, position)
    assert cursor.isascii()
    assert CURSORS.open(scope, listing, cursor) == position


def test_no_cursor_is_the_first_page() -> None:
    assert CURSORS.open("a", "files", None) is None


@pytest.mark.requirement("UHP-29", "B85")
def test_a_cursor_is_worth_nothing_elsewhere() -> None:
    cursor = CURSORS.seal("a", "files", (5,))
    refused("b", "files", cursor)
    refused("a", "sessions", cursor)
    refused("afiles", "", cursor)
    refused("a", "files", cursor, Cursors(b"x" * KEY_BYTES))


@given(st.text(max_size=60) | st.text("abcdefABCDEF0123456789_-", max_size=60))
def test_anything_else_is_refused(cursor: str) -> None:
    refused("a", "files", cursor)


@given(st.integers(0, 31), st.sampled_from("ABab01_-"))
def test_a_changed_cursor_is_refused(place: int, letter: str) -> None:
    cursor = CURSORS.seal("a", "files", (5,))
    changed = cursor[:place] + letter + cursor[place + 1 :]
    if changed != cursor:
        refused("a", "files", changed)
    refused("a", "files", "A" * 201)


def test_the_key_is_made_once_for_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "secret.key"
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: load_key(path), range(32)))
    assert len(keys) == 1
    assert len(keys.pop()) == KEY_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["secret.key"]


def test_another_process_that_was_first_has_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret.key"
    first = load_key(path)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert load_key(path) == first
    assert os.listdir(tmp_path) == ["secret.key"]


def test_a_key_that_is_none_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    short = tmp_path / "short.key"
    short.write_bytes(b"too short")
    with pytest.raises(SettingsError, match="32 random bytes"):
        load_key(short)
    with pytest.raises(SettingsError, match="secret_key_file: cannot be used"):
        load_key(tmp_path / "missing" / "secret.key")
