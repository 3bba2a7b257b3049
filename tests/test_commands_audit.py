"""`consignee audit`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app import audit, cli
from app.settings import load_settings


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the records of two scopes."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    with audit.kept(load_settings(audit="file", data_dir=folder)):
        audit.record("reference.store", scope="a", principal="alice", ref="ref_1", bytes=5)
        audit.record("reference.read", scope="a", principal="bob", ref="ref_1")
        audit.record("file.store", scope="b", principal="alice", file_id="file_1")
    return folder


def shown(
    capsys: pytest.CaptureFixture[str], data_dir: Path, *arguments: str
) -> tuple[list[str], str]:
    """The actions that the command prints, and what it says beside them."""
    assert cli.main(["audit", "--data-dir", str(data_dir), *arguments]) == 0
    out, err = capsys.readouterr()
    return [json.loads(line)["action"] for line in out.splitlines()], err


@pytest.mark.parametrize(
    ("arguments", "actions"),
    [
        ([], ["reference.store", "reference.read", "file.store"]),
        (["--scope", "a"], ["reference.store", "reference.read"]),
        (["--principal", "alice"], ["reference.store", "file.store"]),
        (["--action", "reference.read"], ["reference.read"]),
        (["--about", "ref_1"], ["reference.store", "reference.read"]),
        (["--about", "ref_1", "--principal", "bob"], ["reference.read"]),
        (["--about", "ref_2"], []),
    ],
)
def test_the_records_that_match_are_shown(
    data_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], actions: list[str]
) -> None:
    assert shown(capsys, data_dir, *arguments) == (actions, "")


def test_a_line_is_shown_as_it_was_written(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", "--data-dir", str(data_dir)]) == 0
    assert capsys.readouterr().out == (data_dir / "audit.jsonl").read_text()


def test_files_that_were_moved_away_can_be_named(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = (data_dir / "audit.jsonl").rename(data_dir / "audit.jsonl.1")
    actions, _ = shown(capsys, data_dir, str(earlier), "--scope", "b")
    assert actions == ["file.store"]


def test_lines_that_are_no_records_are_counted(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (data_dir / "audit.jsonl").open("ab") as file:
        file.write(b'{"time":"2026\n{"message":"listening"}\n[1]\n\xff\n')
    actions, told = shown(capsys, data_dir)
    assert len(actions) == 3
    assert told == "4 lines are no records\n"


def test_without_records_the_error_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data_dir: Path
) -> None:
    (data_dir / "audit.jsonl").unlink()
    assert cli.main(["audit", "--data-dir", str(data_dir)]) == 1
    assert "audit.jsonl: No such file" in capsys.readouterr().err
