"""Where a workspace lies: ids that are checked, names that are names, links that are replaced."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app.errors import NotFound
from app.harness.layout import Layout, name_of_input


@pytest.mark.requirement("UHP-30", "B37")
@pytest.mark.parametrize(
    "session_id", ["", "..", "hsess_", "hsess_..", "hsess_a/b", "hsess_a\n", "file_1", "hsess_é"]
)
def test_only_a_session_id_becomes_a_folder(tmp_path: Path, session_id: str) -> None:
    with pytest.raises(NotFound) as refused:
        Layout.of_session(tmp_path, session_id)
    assert refused.value.code == "session_not_found"


def test_folders_are_private_and_made_once(tmp_path: Path) -> None:
    layout = Layout.of_session(tmp_path, "hsess_1")
    layout.make()
    (layout.files / "x").write_text("x")
    layout.make()
    assert (layout.files / "x").read_text() == "x"
    folders = (layout.root, layout.files, layout.home, layout.scratch)
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}


@pytest.mark.requirement("B39")
def test_what_an_agent_put_in_the_place_of_a_folder_is_replaced(tmp_path: Path) -> None:
    layout = Layout.of_session(tmp_path, "hsess_1")
    layout.root.mkdir()
    layout.files.symlink_to("/")
    layout.home.write_text("a file")
    layout.scratch.symlink_to("missing")
    layout.make()
    assert all(
        folder.is_dir() and not folder.is_symlink()
        for folder in (layout.files, layout.home, layout.scratch)
    )


def test_the_places_around_a_workspace_are_those_of_its_session(tmp_path: Path) -> None:
    layout = Layout.of_session(tmp_path, "hsess_1")
    assert Layout.around(layout.files) == layout


@pytest.mark.requirement("B39")
def test_the_task_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    layout = Layout.of_session(tmp_path, "hsess_1")
    layout.make()
    target = tmp_path / "target"
    target.write_text("mine")
    layout.task_file.symlink_to(target)
    layout.write_task(b"{}")
    assert (target.read_text(), layout.task_file.read_bytes()) == ("mine", b"{}")


def test_known_artifacts_are_read_from_a_plain_file_only(tmp_path: Path) -> None:
    layout = Layout.of_session(tmp_path, "hsess_1")
    layout.make()
    assert layout.read_known() == b""
    os.mkfifo(layout.root / "known.json")
    assert layout.read_known() == b""
    layout.write_known(b"[]")
    assert layout.read_known() == b"[]"


@pytest.mark.requirement("B24", "B32")
@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("q3.pdf", "q3.pdf"),
        ("报告.txt", "报告.txt"),
        ("../../etc/passwd", "passwd"),
        ("C:\\docs\\x.txt", "x.txt"),
        ("a\nb\x00.txt", "a_b_.txt"),
        ("", "file"),
        ("..", "file"),
        ("dir/", "file"),
        (" padded.txt ", "padded.txt"),
        (".bashrc", ".bashrc"),
    ],
)
def test_an_input_keeps_its_name_as_far_as_a_file_can_have_it(filename: str, name: str) -> None:
    assert name_of_input(filename, ()) == name


@pytest.mark.requirement("B32")
@pytest.mark.parametrize("stem", ["a" * 300, "я" * 200, "🚀" * 100])
def test_a_long_name_is_cut_between_characters_and_keeps_its_extension(stem: str) -> None:
    name = name_of_input(stem + ".txt", ())
    assert 190 < len(name.encode()) <= 200
    assert name.endswith(".txt")
    assert stem.startswith(name.removesuffix(".txt"))


def test_a_long_extension_is_cut_like_a_name() -> None:
    assert name_of_input("a." + "x" * 300, ()) == "a." + "x" * 198


def test_a_taken_name_gets_a_number() -> None:
    assert name_of_input("a.txt", {"a.txt", "a-2.txt"}) == "a-3.txt"


def test_a_mark_that_cannot_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    layout = Layout.of_session(tmp_path, "hsess_1")
    assert layout.read_newest() is None
    layout.make()
    assert layout.read_newest() is None
    layout.write_newest("resp_1")
    assert layout.read_newest() == "resp_1"
    monkeypatch.setattr("app.harness.layout.open_file", fail)
    with pytest.raises(OSError, match="broken"):
        layout.read_newest()
