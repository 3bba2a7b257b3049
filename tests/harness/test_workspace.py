"""A workspace from its making to its end: what is an artifact, what is not, and what is left."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import ByteSize

from app.errors import Exhausted, NotFound, Unavailable
from app.harness import survey as surveying
from app.harness.layout import Layout
from app.harness.tree import GONE_PREFIX
from app.harness.workspace import (
    ChangedWhileRead,
    Found,
    Turn,
    Unreadable,
    Workspace,
    Workspaces,
    media_type_of,
)
from app.settings import TASK_FILE_VARIABLE, Settings
from tests.harness.tasks import SESSION, Stored, workspaces_in

pytestmark = pytest.mark.anyio


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
async def workspaces(tmp_path: Path) -> Workspaces:
    made = workspaces_in(tmp_path / "workspaces")
    await made.start()
    return made


@pytest.fixture
async def workspace(workspaces: Workspaces, stored: Stored) -> Workspace:
    return await workspaces.prepare(SESSION, [], [], stored.open)


async def _body(content: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in content])


async def _collected(workspace: Workspace) -> dict[str, bytes | str]:
    """Every path with its bytes, or with the reason why it has none."""
    collected: dict[str, bytes | str] = {}
    async for found in workspace.collect():
        kept = await found.read(_body) if isinstance(found, Found) else found
        collected[found.path] = kept.reason if isinstance(kept, Unreadable) else kept
    return collected


@pytest.mark.requirement("UHP-11", "UHP-17")
async def test_new_files_are_collected_by_path(workspace: Workspace) -> None:
    assert await _collected(workspace) == {}
    (workspace.path / "b.txt").write_bytes(b"b")
    (workspace.path / "a").mkdir()
    (workspace.path / "a" / "报告.txt").write_bytes(b"\x00\xff" * 1_000_000)
    (workspace.path / "empty").touch()
    collected = await _collected(workspace)
    assert collected == {"a/报告.txt": b"\x00\xff" * 1_000_000, "b.txt": b"b", "empty": b""}
    assert list(collected) == sorted(collected)


@pytest.mark.requirement("UHP-02", "UHP-05")
async def test_inputs_lie_in_the_workspace_and_are_no_artifacts(
    workspaces: Workspaces, stored: Stored
) -> None:
    records = [
        stored.add("a.txt", b"one"),
        stored.add("a.txt", b"two"),
        stored.add("a.txt", b"one"),
        stored.add("../../x", b"x" * 5000, media_type="image/png"),
    ]
    workspace = await workspaces.prepare(SESSION, [], records, stored.open)
    assert [file.path for file in workspace.inputs] == [
        "inputs/a.txt",
        "inputs/a-2.txt",
        "inputs/a.txt",
        "inputs/x",
    ]
    assert [(workspace.path / file.path).read_bytes() for file in workspace.inputs] == [
        b"one",
        b"two",
        b"one",
        b"x" * 5000,
    ]
    assert workspace.inputs[3].media_type == "image/png"
    assert workspace.inputs[3].sha256 == records[3].sha256
    assert await _collected(workspace) == {}


async def test_an_input_that_the_task_changed_is_an_artifact(
    workspaces: Workspaces, stored: Stored
) -> None:
    inputs = [stored.add("a.txt", b"one"), stored.add("b.txt", b"two")]
    workspace = await workspaces.prepare(SESSION, [], inputs, stored.open)
    (workspace.path / "inputs" / "a.txt").write_bytes(b"ONE")
    (workspace.path / "inputs" / "b.txt").write_bytes(b"two")  # again, and the same
    assert await _collected(workspace) == {"inputs/a.txt": b"ONE"}


@pytest.mark.requirement("UHP-16")
async def test_only_what_a_task_changed_is_its_artifact(
    workspaces: Workspaces, stored: Stored
) -> None:
    current = [stored.add(name, b"old") for name in ("kept", "longer", "other", "touched", "gone")]
    workspace = await workspaces.prepare(SESSION, current, [], stored.open)
    (workspace.path / "longer").write_bytes(b"older")
    (workspace.path / "other").write_bytes(b"new")
    os.utime(workspace.path / "touched")
    (workspace.path / "gone").unlink()
    assert await _collected(workspace) == {"longer": b"older", "other": b"new"}


async def test_a_file_nobody_knows_is_an_artifact_once_it_changes(
    workspaces: Workspaces, stored: Stored
) -> None:
    workspace = await workspaces.prepare(SESSION, [], [], stored.open)
    (workspace.path / "left").write_bytes(b"left over")
    (workspace.path / "same").write_bytes(b"left over")
    workspace = await workspaces.prepare(SESSION, [], [], stored.open)
    assert await _collected(workspace) == {}
    (workspace.path / "left").write_bytes(b"and again")
    assert await _collected(workspace) == {"left": b"and again"}


@pytest.mark.requirement("B04")
async def test_a_workspace_is_made_from_current_artifacts(
    workspaces: Workspaces, stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.md").write_bytes(b"SERVER")
    current = [stored.add("report.md", b"SESSION"), stored.add("a/b.txt", b"b")]
    workspace = await workspaces.prepare(SESSION, current, [], stored.open)
    assert (workspace.path / "report.md").read_bytes() == b"SESSION"
    await workspaces.destroy(SESSION)
    workspace = await workspaces.prepare(SESSION, current, [], stored.open)
    assert (workspace.path / "report.md").read_bytes() == b"SESSION"
    assert (workspace.path / "a" / "b.txt").read_bytes() == b"b"


async def test_a_deleted_artifact_stays_deleted_and_a_new_one_comes_in(
    workspaces: Workspaces, stored: Stored
) -> None:
    current = [stored.add("a", b"a"), stored.add("b", b"b")]
    workspace = await workspaces.prepare(SESSION, current, [], stored.open)
    (workspace.path / "a").unlink()
    (workspace.path / "b").write_bytes(b"the agent's")
    from_elsewhere = stored.add("b", b"put")
    workspace = await workspaces.prepare(SESSION, [current[0], from_elsewhere], [], stored.open)
    assert [path.name for path in workspace.path.iterdir()] == ["b"]
    assert (workspace.path / "b").read_bytes() == b"put"


async def test_a_workspace_goes_on_where_the_task_before_left_it(
    workspaces: Workspaces, stored: Stored
) -> None:
    current = [stored.add("a", b"a")]
    first = await workspaces.prepare(SESSION, current, [], stored.open, Turn("resp_1", None))
    (first.path / "a").unlink()
    (first.path / "notes").write_bytes(b"no artifact yet")
    (first.layout.home / "settings").write_bytes(b"the agent's")
    second = await workspaces.prepare(SESSION, current, [], stored.open, Turn("resp_2", "resp_1"))
    assert [path.name for path in second.path.iterdir()] == ["notes"]
    assert (second.layout.home / "settings").exists()


async def test_a_workspace_that_a_task_elsewhere_has_left_behind_is_made_anew(
    tmp_path: Path, stored: Stored
) -> None:
    """Nothing of the older state is left, and the current artifacts are all there."""
    here, there = workspaces_in(tmp_path / "here"), workspaces_in(tmp_path / "there")
    for machine in (here, there):
        await machine.start()
    old, kept = stored.add("a", b"old"), stored.add("kept", b"kept")
    first = await here.prepare(SESSION, [old, kept], [], stored.open, Turn("resp_1", None))
    (first.path / "stale").write_bytes(b"stale")
    (first.path / "kept").unlink()
    current = [stored.add("a", b"new"), kept]
    second = await there.prepare(SESSION, current, [], stored.open, Turn("resp_2", "resp_1"))
    assert (second.path / "a").read_bytes() == b"new"
    third = await here.prepare(SESSION, current, [], stored.open, Turn("resp_3", "resp_2"))
    found = {path.name: path.read_bytes() for path in third.path.iterdir()}
    assert found == {"a": b"new", "kept": b"kept"}
    fourth = await here.prepare(SESSION, current, [], stored.open, Turn("resp_4", "resp_3"))
    assert (fourth.path / "a").exists()


async def test_a_mark_that_the_agent_has_put_something_over_counts_as_none(
    workspaces: Workspaces, stored: Stored
) -> None:
    first = await workspaces.prepare(SESSION, [], [], stored.open, Turn("resp_1", None))
    mark = first.layout.root / "newest"
    mark.unlink()
    mark.symlink_to("/etc/hostname")
    (first.path / "x").write_bytes(b"x")
    second = await workspaces.prepare(SESSION, [], [], stored.open, Turn("resp_2", "resp_1"))
    assert list(second.path.iterdir()) == []
    assert mark.read_text() == "resp_2"
    assert not mark.is_symlink()


async def test_two_processes_that_take_away_the_same_folder_do_no_harm(
    tmp_path: Path, stored: Stored
) -> None:
    both = [workspaces_in(tmp_path / "workspaces") for _ in range(2)]
    for _ in range(10):
        workspace = await both[0].prepare(SESSION, [], [], stored.open)
        for number in range(20):
            (workspace.path / f"folder {number}").mkdir()
            (workspace.path / f"folder {number}" / "file").write_bytes(b"x")
        await asyncio.gather(
            *(each.destroy(SESSION) for each in both), *(each.start() for each in both)
        )
        await asyncio.gather(*(each.start() for each in both))
        assert list((tmp_path / "workspaces").iterdir()) == []


async def test_an_artifact_that_is_there_already_is_not_written_again(
    workspaces: Workspaces, workspace: Workspace, stored: Stored
) -> None:
    (workspace.path / "a").write_bytes(b"a")
    before = (workspace.path / "a").stat()
    await workspaces.prepare(SESSION, [stored.add("a", b"a")], [], stored.open)
    assert (workspace.path / "a").stat() == before


async def test_a_folder_is_not_given_up_for_an_artifact_of_its_name(
    workspaces: Workspaces, stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    current = [stored.add("a/b", b"b"), stored.add("a", b"a")]
    workspace = await workspaces.prepare(SESSION, current, [], stored.open)
    assert (workspace.path / "a" / "b").read_bytes() == b"b"
    assert "has the name of an artifact" in caplog.text


@pytest.mark.parametrize("document", [b"{", b"\xff", b"{}", b"[1]", b"[" * 100_000])
async def test_a_list_of_known_artifacts_that_is_none_counts_as_empty(
    workspaces: Workspaces, workspace: Workspace, stored: Stored, document: bytes
) -> None:
    (workspace.layout.root / "known.json").write_bytes(document)
    record = stored.add("a", b"a")
    await workspaces.prepare(SESSION, [record], [], stored.open)
    assert (workspace.path / "a").read_bytes() == b"a"
    assert json.loads(workspace.layout.read_known()) == [record.id]


@pytest.mark.requirement("B39")
async def test_links_and_special_files_are_reported_and_not_read(
    workspace: Workspace, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (workspace.path / "p.txt").symlink_to("/etc/passwd")
    (workspace.path / "slash").symlink_to("/")
    (workspace.path / "session").symlink_to("../../hsess_2")
    (workspace.path / "a").symlink_to("b")
    (workspace.path / "b").symlink_to("a")
    (workspace.path / "hard").hardlink_to(outside)
    os.mkfifo(workspace.path / "fifo")
    assert await _collected(workspace) == {
        "a": "it is a link",
        "b": "it is a link",
        "fifo": "it is not a regular file",
        "hard": "it is a hard link to a file outside",
        "p.txt": "it is a link",
        "session": "it is a link",
        "slash": "it is a link",
    }


@pytest.mark.requirement("B39")
async def test_hard_links_inside_are_files(workspace: Workspace) -> None:
    (workspace.path / "a").write_bytes(b"x")
    (workspace.path / "b").hardlink_to(workspace.path / "a")
    assert await _collected(workspace) == {"a": b"x", "b": b"x"}


@pytest.mark.requirement("B39")
async def test_a_folder_swapped_for_a_link_while_collecting_is_not_followed(
    workspace: Workspace, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for folder in (workspace.path / "d", outside):
        folder.mkdir(exist_ok=True)
        (folder / "x").write_bytes(folder.name.encode())
    found = [each async for each in workspace.collect()]
    (workspace.path / "d" / "x").unlink()
    (workspace.path / "d").rmdir()
    (workspace.path / "d").symlink_to(outside)
    [file] = found
    assert isinstance(file, Found)
    kept = await file.read(_body)
    assert isinstance(kept, Unreadable)
    assert kept.reason == "it cannot be read: Not a directory"


async def test_a_file_that_became_something_else_is_reported(
    workspace: Workspace, tmp_path: Path
) -> None:
    (workspace.path / "fifo").write_text("x")
    (workspace.path / "linked").write_text("x")
    found = [each async for each in workspace.collect() if isinstance(each, Found)]
    (workspace.path / "fifo").unlink()
    os.mkfifo(workspace.path / "fifo")
    (tmp_path / "outside").hardlink_to(workspace.path / "linked")
    reasons = [await each.read(_body) for each in found]
    assert reasons == [
        Unreadable("fifo", "it cannot be read: it is not a regular file"),
        Unreadable("linked", "it cannot be read: it has a further name outside"),
    ]


@pytest.mark.requirement("UHP-36")
async def test_a_sparse_giant_is_reported_and_not_read(
    workspaces: Workspaces, workspace: Workspace
) -> None:
    with (workspace.path / "giant").open("wb") as file:
        file.truncate(1 << 40)
    assert await _collected(workspace) == {"giant": "it is larger than 10000000 bytes"}


@pytest.mark.requirement("UHP-36")
async def test_more_files_than_allowed_are_reported_together(
    tmp_path: Path, stored: Stored
) -> None:
    workspaces = workspaces_in(tmp_path, max_files=3)
    workspace = await workspaces.prepare(SESSION, [], [], stored.open)
    for number in range(5):
        (workspace.path / f"{number}").touch()
    assert await _collected(workspace) == {
        "0": b"",
        "1": b"",
        "2": b"",
        ".": "2 files over the limit of 3 a task",
    }


async def test_many_reports_are_told_by_their_number(workspace: Workspace) -> None:
    for number in range(60):
        (workspace.path / f"{number}").symlink_to("/")
    collected = await _collected(workspace)
    assert len(collected) == 51
    assert collected["."] == "10 more could not be collected"


async def test_a_walk_ends_where_there_is_too_much(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "MAX_ENTRIES", 3)
    monkeypatch.setattr(surveying, "BATCH", 2)
    for number in range(6):
        (workspace.path / f"{number}").touch()
    collected = await _collected(workspace)
    assert len(collected) == 5
    assert collected["."] == "it holds more than 3 files; not all were looked at"


async def test_a_workspace_that_the_agent_removed_is_reported(workspace: Workspace) -> None:
    workspace.path.rmdir()
    workspace.path.symlink_to("/etc")
    assert await _collected(workspace) == {".": "it cannot be read: Not a directory"}


async def test_a_file_that_changes_while_it_is_read_is_read_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.harness.workspace.CHUNK", 4)
    file = workspace.path / "x"
    file.write_bytes(b"first")
    [found] = [each async for each in workspace.collect() if isinstance(each, Found)]
    tries = 0

    async def keep(content: AsyncIterator[bytes]) -> bytes:
        nonlocal tries
        tries += 1
        if tries == 1:
            body = await anext(content)
            file.write_bytes(b"second")
            await anext(content)
            return body
        return await _body(content)

    assert await found.read(keep) == b"second"
    assert tries == 2


@pytest.mark.parametrize("change", [b"", b"longer and longer", b"SECOND"])
async def test_a_file_that_never_stands_still_is_reported(
    workspace: Workspace, change: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.harness.workspace.CHUNK", 4)
    file = workspace.path / "x"
    file.write_bytes(b"first!")
    [found] = [each async for each in workspace.collect() if isinstance(each, Found)]

    async def keep(content: AsyncIterator[bytes]) -> bytes:
        body = await anext(content)
        file.write_bytes(change)
        os.utime(file, ns=(0, 0))
        try:
            return body + await _body(content)
        finally:
            file.write_bytes(b"first!")

    assert await found.read(keep) == Unreadable("x", "it changes while it is read")


async def test_a_file_that_grows_without_end_is_left(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.harness.workspace.CHUNK", 4)
    file = workspace.path / "x"
    file.write_bytes(b"x" * 10)
    [found] = [each async for each in workspace.collect() if isinstance(each, Found)]
    async with found.opened() as content:
        file.write_bytes(b"x" * 5_000_000)
        with pytest.raises(ChangedWhileRead):
            await _body(content)
    file.write_bytes(b"x" * 10_000_001)
    too_large = Unreadable("x", "it cannot be read: it is larger than 10000000 bytes")
    assert await found.read(_body) == too_large


async def test_what_keeping_raises_passes_through(workspace: Workspace) -> None:
    (workspace.path / "x").write_bytes(b"x")
    [found] = [each async for each in workspace.collect() if isinstance(each, Found)]
    before = len(os.listdir("/proc/self/fd"))

    async def keep(content: AsyncIterator[bytes]) -> None:
        await anext(content)
        raise Exhausted

    with pytest.raises(Exhausted):
        await found.read(keep)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_change_within_one_tick_of_the_clock_is_seen(
    workspaces: Workspaces, stored: Stored
) -> None:
    record = stored.add("a", b"old")
    workspace = await workspaces.prepare(SESSION, [record], [], stored.open)
    (workspace.path / "a").write_bytes(b"new")
    # As if the clock had not moved: the file looks now as it did before.
    entry = (await surveying.survey(workspace.layout)).files["a"]
    workspace._before.files["a"] = entry
    assert await _collected(workspace) == {"a": b"new"}


async def test_a_file_that_stood_still_is_not_read_again(
    workspaces: Workspaces, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.harness.workspace._TICK_NS", -(10**18))
    workspace = await workspaces.prepare(SESSION, [stored.add("a", b"old")], [], stored.open)
    monkeypatch.setattr("app.harness.workspace._digest", None)
    assert await _collected(workspace) == {}


async def test_a_changed_file_that_cannot_be_compared_is_reported(
    workspaces: Workspaces, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stored.add("a", b"old")
    workspace = await workspaces.prepare(SESSION, [record], [], stored.open)
    (workspace.path / "a").write_bytes(b"new")

    def refuse(root: int, path: str) -> int:
        raise PermissionError(13, "closed")

    monkeypatch.setattr("app.harness.workspace.open_file", refuse)
    assert await _collected(workspace) == {"a": "it cannot be read: Permission denied"}


@pytest.mark.requirement("B32")
async def test_a_file_sixty_levels_deep_is_an_artifact(workspace: Workspace) -> None:
    folder = workspace.path.joinpath(*["level"] * 60)
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"deep")
    assert await _collected(workspace) == {"level/" * 60 + "x": b"deep"}


async def test_names_that_cannot_be_shown_are_reported_as_escapes(workspace: Workspace) -> None:
    (workspace.path / os.fsdecode(b"\xff")).touch()
    (workspace.path / "a\nb").touch()
    assert await _collected(workspace) == {
        "\\udcff": "its name is not UTF-8",
        "a\\x0ab": "its name holds control characters",
    }


@pytest.mark.requirement("UHP-28", "UHP-34")
async def test_a_destroyed_workspace_is_gone(workspaces: Workspaces, workspace: Workspace) -> None:
    (workspace.path / "a" / "b").mkdir(parents=True)
    (workspace.path / "a" / "b" / "x").write_text("x")
    assert await workspaces.session_ids() == [SESSION]
    await asyncio.gather(workspaces.destroy(SESSION), workspaces.destroy(SESSION))
    await workspaces.destroy(SESSION)
    assert await workspaces.session_ids() == []
    assert list(workspace.layout.root.parent.iterdir()) == []


@pytest.mark.requirement("B89")
async def test_destroying_ends_what_still_writes(
    workspaces: Workspaces, workspace: Workspace
) -> None:
    script = 'while :; do mkdir -p "$0"; date > "$0/$$"; sleep 0.01; done'
    writer = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        script,
        str(workspace.path / "again"),
        env={TASK_FILE_VARIABLE: str(workspace.layout.task_file), "PATH": os.environ["PATH"]},
    )
    while not (workspace.path / "again").exists():
        await asyncio.sleep(0.01)
    await workspaces.destroy(SESSION)
    assert await writer.wait() == -9
    assert list(workspace.layout.root.parent.iterdir()) == []


@pytest.mark.requirement("B89")
async def test_destroying_tries_again_and_then_tells(
    workspaces: Workspaces,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries = []

    def busy(base: int, name: str) -> list[str]:
        tries.append(name)
        return [name]

    monkeypatch.setattr("app.harness.workspace.remove_tree", busy)
    monkeypatch.setattr("app.harness.workspace._DESTROY_PAUSE_SECONDS", 0)
    await workspaces.destroy(SESSION)
    assert len(tries) == 50
    assert not workspace.path.exists()
    assert "something still writes into it" in caplog.text
    monkeypatch.undo()
    await workspaces.start()
    assert list(workspace.layout.root.parent.iterdir()) == []


async def test_what_cannot_be_removed_is_logged_without_its_path(
    workspaces: Workspaces,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(base: int, name: str) -> list[str]:
        raise OSError(errno.EBUSY, "busy", str(workspace.path))

    monkeypatch.setattr("app.harness.workspace.remove_tree", refuse)
    await workspaces.destroy(SESSION)
    assert "Device or resource busy" in caplog.text
    assert str(workspace.path) not in caplog.text


async def test_a_start_finishes_what_an_earlier_process_began(tmp_path: Path) -> None:
    (tmp_path / f"{GONE_PREFIX}1" / "a").mkdir(parents=True)
    (tmp_path / "hsess_1").mkdir()
    await workspaces_in(tmp_path).start()
    assert [path.name for path in tmp_path.iterdir()] == ["hsess_1"]


@pytest.mark.requirement("UHP-30")
async def test_what_is_no_session_id_has_no_workspace(
    workspaces: Workspaces, stored: Stored
) -> None:
    with pytest.raises(NotFound):
        await workspaces.prepare("..", [], [], stored.open)
    with pytest.raises(NotFound):
        await workspaces.destroy("../..")


@pytest.mark.parametrize(
    ("number", "refusal"), [(errno.ENOSPC, Exhausted), (errno.EACCES, Unavailable)]
)
async def test_what_the_disk_refuses_is_a_refusal(
    workspaces: Workspaces,
    stored: Stored,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    refusal: type[Exception],
) -> None:
    def refuse(self: object, data: bytes) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr("app.harness.tree.Draft.write", refuse)
    with pytest.raises(refusal):
        await workspaces.prepare(SESSION, [], [stored.add("a", b"a")], stored.open)
    assert list((Layout.of_session(workspaces._folder, SESSION).files / "inputs").iterdir()) == []


async def test_a_cancelled_preparation_leaves_no_half_file(
    workspaces: Workspaces, stored: Stored
) -> None:
    record = stored.add("a", b"a" * 100_000)
    preparing = asyncio.create_task(workspaces.prepare(SESSION, [], [record], stored.open))
    inputs = Layout.of_session(workspaces._folder, SESSION).files / "inputs"
    while not inputs.exists():
        await asyncio.sleep(0)
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert [path.name for path in inputs.iterdir() if path.name != "a"] == []


def test_the_settings_say_where_workspaces_are_and_how_much_they_give(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, max_session_files=None, max_upload_bytes=ByteSize(5))
    workspaces = Workspaces.of(settings)
    assert (workspaces._folder, workspaces._max_file_bytes) == (tmp_path / "workspaces", 5)


@pytest.mark.requirement("B50", "B56")
@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("a/report.md", "text/markdown"),
        ("x.HTML", "text/html"),
        ("x.svg", "image/svg+xml"),
        ("x.tar.gz", "application/gzip"),
        ("x.html.gz", "application/gzip"),
        ("x.txt.Z", "application/x-compress"),
        ("Makefile", "application/octet-stream"),
        ("x.unknown", "application/octet-stream"),
    ],
)
def test_a_media_type_is_guessed_from_the_extension(path: str, media_type: str) -> None:
    assert media_type_of(path) == media_type
