"""Hostile folders: nothing is followed, only plain files are opened, everything is removed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.harness.layout import opened_path
from app.harness.tree import (
    GONE_PREFIX,
    Draft,
    Entry,
    NotPlain,
    fault_of_path,
    gone_name,
    open_file,
    opened_folder,
    remove_tree,
    walk,
)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    with opened_path(tmp_path) as descriptor:
        yield descriptor


def _walked(root: int) -> dict[str, str | None]:
    return {entry.path: entry.fault for entry in walk(root)}


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "a/b/c.txt",
        ".hidden",
        "报告 100%.txt",
        "..a/b..",
        "a\\..\\b",
        "x" * 1024,
        "/".join("d" for _ in range(60)),
    ],
)
@pytest.mark.requirement("B02", "B32", "B35")
def test_a_plain_path_can_be_an_artifacts(path: str) -> None:
    assert fault_of_path(path) is None


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "relative"),
        ("/etc/passwd", "relative"),
        ("a//b", "relative"),
        ("../x", "relative"),
        ("a/./b", "relative"),
        ("a/", "relative"),
        ("a\nb", "control"),
        ("a\x7f", "control"),
        ("a\x85", "control"),
        ("\udcff", "UTF-8"),
        ("x" * 1025, "longer"),
        ("文" * 342, "longer"),
    ],
)
@pytest.mark.requirement("B32", "B41")
def test_any_other_path_has_a_fault(path: str, why: str) -> None:
    fault = fault_of_path(path)
    assert fault is not None
    assert why in fault


@pytest.mark.requirement("B39")
def test_a_walk_finds_plain_files_and_names_what_is_not(tmp_path: Path, root: int) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "plain.txt").write_text("x")
    (tmp_path / "passwd").symlink_to("/etc/passwd")
    (tmp_path / "slash").symlink_to("/")
    (tmp_path / "a" / "up").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener, opened_folder(root) as folder:
        listener.bind(f"/proc/self/fd/{folder}/socket")
    assert _walked(root) == {
        "a/b/plain.txt": None,
        "passwd": "it is a link",
        "slash": "it is a link",
        "a/up": "it is a link",
        "loop": "it is a link",
        "fifo": "it is not a regular file",
        "socket": "it is not a regular file",
    }


def test_a_walk_names_what_has_no_showable_name(tmp_path: Path, root: int) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("x")
    (tmp_path / "a\nb").mkdir()
    (tmp_path / "a\nb" / "inside").write_text("x")
    faults = list(_walked(root).values())
    assert sorted(str(fault) for fault in faults) == [
        "its name holds control characters",
        "its name is not UTF-8",
    ]


def test_a_walk_knows_another_file_system(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_text("x")
    real = os.fstat

    def elsewhere(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[2] += 1  # st_dev
        return os.stat_result(fields)

    monkeypatch.setattr("app.harness.tree.os.fstat", elsewhere)
    assert _walked(root) == {"x": "it lies on another file system"}


def test_a_walk_goes_on_where_a_folder_is_gone_or_closed(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gone", "closed", "open"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    real = opened_folder

    def opened(root: int, parts: tuple[str, ...] = ()) -> object:
        if list(parts) == ["gone"]:
            raise FileNotFoundError(2, "gone")
        if list(parts) == ["closed"]:
            raise PermissionError(13, "closed")
        return real(root, parts)

    monkeypatch.setattr("app.harness.tree.opened_folder", opened)
    assert _walked(root) == {"open/x": None, "closed": "it cannot be read: Permission denied"}


@pytest.mark.requirement("B32")
def test_a_walk_reaches_a_file_sixty_levels_deep(tmp_path: Path, root: int) -> None:
    folder = tmp_path.joinpath(*["level"] * 60)
    folder.mkdir(parents=True)
    (folder / "x").write_text("deep")
    [entry] = walk(root)
    assert entry.path == "level/" * 60 + "x"
    with os.fdopen(open_file(root, entry.path)) as file:
        assert file.read() == "deep"


@pytest.mark.requirement("B39")
@pytest.mark.parametrize(
    "path", ["link", "slash/etc/passwd", "fifo", "folder", "missing", "plain/x"]
)
def test_only_a_plain_file_is_opened(tmp_path: Path, root: int, path: str) -> None:
    (tmp_path / "plain").write_text("x")
    (tmp_path / "link").symlink_to("plain")
    (tmp_path / "slash").symlink_to("/")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises((OSError, NotPlain)):
        open_file(root, path)


def test_opening_leaves_no_descriptor_behind(tmp_path: Path, root: int) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link").symlink_to("/")
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a/link/x", "a/b/c", "fifo", "a/missing"):
        with pytest.raises((OSError, NotPlain)):
            open_file(root, path)
        list(walk(root))
    assert len(os.listdir("/proc/self/fd")) == before


def _write(root: int, path: str, body: bytes) -> None:
    draft = Draft(path)
    try:
        draft.open(root)
        draft.write(body)
        draft.keep()
    finally:
        draft.discard()


def test_a_draft_replaces_links_and_files_on_its_way(tmp_path: Path, root: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "a").symlink_to(outside)
    (tmp_path / "b").write_text("in the way")
    (tmp_path / "c").symlink_to(outside / "c")
    for path in ("a/x", "b/x", "c"):
        _write(root, path, b"new")
        assert (tmp_path / path).read_bytes() == b"new"
    assert list(outside.iterdir()) == []
    assert not (tmp_path / "c").is_symlink()


def test_a_draft_is_not_there_until_it_is_kept(tmp_path: Path, root: int) -> None:
    draft = Draft("a/x")
    draft.discard()
    draft.open(root)
    draft.write(b"half")
    assert not (tmp_path / "a" / "x").exists()
    draft.discard()
    draft.discard()
    assert list((tmp_path / "a").iterdir()) == []


def test_a_draft_does_not_replace_a_folder(tmp_path: Path, root: int) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        _write(root, "a", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_draft_gives_up_where_no_folder_can_be_made(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def busy(name: str, mode: int, *, dir_fd: int) -> None:
        (tmp_path / name).write_text("again and again")

    monkeypatch.setattr("app.harness.tree.os.mkdir", busy)
    with pytest.raises(NotADirectoryError):
        _write(root, "a/x", b"x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_draft_passes_on_that_the_disk_refuses(
    root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, mode: int, *, dir_fd: int) -> None:
        raise PermissionError(13, "refused")

    monkeypatch.setattr("app.harness.tree.os.mkdir", refuse)
    with pytest.raises(PermissionError):
        Draft("a/x").open(root)


def test_a_draft_passes_on_that_a_folder_may_not_be_entered(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def closed(name: str, flags: int, mode: int = 0o777, **rest: int) -> int:
        if name == "a":
            raise PermissionError(13, "closed")
        return real(name, flags, mode, **rest)

    monkeypatch.setattr("app.harness.tree.os.open", closed)
    with pytest.raises(PermissionError):
        Draft("a/x").open(root)


def test_what_disappears_while_it_is_removed_is_gone(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "x").write_text("x")
    real = os.stat

    def too_late(name: str, **rest: Any) -> os.stat_result:
        (tree / "x").unlink(missing_ok=True)
        return real(name, **rest)

    monkeypatch.setattr("app.harness.tree.os.stat", too_late)
    assert _remove(root, "tree") == []


def _remove(root: int, name: str) -> list[str]:
    return remove_tree(root, name)


def test_a_tree_is_removed_with_everything_in_it(tmp_path: Path, root: int) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "stays").write_text("x")
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "b" / "x").write_text("x")
    (tree / "a" / "link").symlink_to(outside)
    os.mkfifo(tree / "fifo")
    (tree / "a").chmod(0o000)
    assert _remove(root, "tree") == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["outside"]
    assert (outside / "stays").exists()


def test_a_tree_deeper_than_any_path_is_removed(tmp_path: Path, root: int) -> None:
    (tmp_path / "tree").mkdir()
    here = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("deeper", dir_fd=here)
        deeper = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    assert _remove(root, "tree") == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("B89")
def test_a_tree_that_is_written_to_meanwhile_is_reported(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    real = os.rmdir

    def written_to(name: str, *, dir_fd: int) -> None:
        (tmp_path / name / "again").write_text("x")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr("app.harness.tree.os.rmdir", written_to)
    assert _remove(root, "tree") == ["tree"]
    monkeypatch.undo()
    assert _remove(root, "tree") == []


def test_removing_what_is_gone_or_no_folder(tmp_path: Path, root: int) -> None:
    (tmp_path / "link").symlink_to("/")
    assert _remove(root, "missing") == []
    assert _remove(root, "link") == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_opened_is_made_accessible(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir(mode=0o000)
    real = os.open

    def as_its_owner(name: str, flags: int, **rest: int) -> int:
        # Root may open anything; a user may not before the mode allows it.
        if name == "tree" and not flags & os.O_PATH and not tree.stat().st_mode & 0o700:
            raise PermissionError(13, "closed")
        return real(name, flags, **rest)

    monkeypatch.setattr("app.harness.tree.os.open", as_its_owner)
    assert _remove(root, "tree") == []


def test_what_the_disk_refuses_to_remove_is_an_error(
    tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()

    def refuse(name: str, *, dir_fd: int) -> None:
        raise OSError(16, "busy")

    monkeypatch.setattr("app.harness.tree.os.rmdir", refuse)
    with pytest.raises(OSError, match="busy"):
        _remove(root, "tree")


def test_names_of_folders_to_remove_are_fresh() -> None:
    names = {gone_name() for _ in range(100)}
    assert len(names) == 100
    assert all(name.startswith(GONE_PREFIX) for name in names)


def test_an_entry_of_a_walk_tells_its_signature(tmp_path: Path, root: int) -> None:
    (tmp_path / "x").write_text("abc")
    [entry] = walk(root)
    assert isinstance(entry, Entry)
    assert (entry.signature.size, entry.names) == (3, 1)
