"""`consignee copy`, `backup` and `restore`, from the command line."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from app import cli
from app.commands.moving import Bars, _summary
from app.settings import Settings
from app.store.body_copies import CopyReport
from app.store.records import Finding
from tests.store.moves import fill, in_store, resolved
from tests.store.stores import LARGE, get, put


@pytest.fixture(autouse=True)
def empty_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables, no configuration file, and the process's loggers left as they were."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers


@pytest.fixture
def origin(tmp_path: Path) -> Settings:
    """A migrated store that has a configuration file, and its cursors a key."""
    settings = configured(tmp_path, "origin")
    settings.secret_key.write_bytes(b"k" * 32)
    return settings


@pytest.fixture
def goal(tmp_path: Path) -> Settings:
    """Another one, empty."""
    return configured(tmp_path, "goal")


def configured(folder: Path, name: str, more: str = "") -> Settings:
    """A migrated store in `name`, with `name`.toml beside it."""
    (folder / f"{name}.toml").write_text(f'data_dir = "{name}"\ninline_bytes = 1024\n{more}')
    assert cli.main(["migrate", "--config", str(folder / f"{name}.toml")]) == 0
    return Settings.model_validate({"data_dir": folder / name, "inline_bytes": 1024})


def copy(folder: Path, *options: str) -> int:
    ends = ("--config", str(folder / "origin.toml"), "--to", str(folder / "goal.toml"))
    return cli.main(["copy", *ends, *options])


def test_a_copy_is_made_verified_and_summed_up(
    tmp_path: Path, origin: Settings, goal: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    references = in_store(origin, fill)
    capsys.readouterr()
    assert copy(tmp_path, "--verify") == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("copied: ")
    assert lines[0].endswith("updated: 0 rows; removed: 0 rows; there already: 0 bodies, 0 rows")
    assert lines[1:] == ["verified: no damage"]
    assert told.err.splitlines()[0].startswith("bodies: ")
    assert "content_refs: 6 rows" in told.err.splitlines()
    assert goal.secret_key.read_bytes() == origin.secret_key.read_bytes()

    assert in_store(goal, lambda store: resolved(store, references))
    assert copy(tmp_path) == 0
    assert "copied: 0 bodies (0 bytes), 0 rows;" in capsys.readouterr().out


def test_variables_that_place_the_source_do_not_place_the_target(
    tmp_path: Path, origin: Settings, goal: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = in_store(origin, lambda store: put(store, LARGE))
    monkeypatch.setenv("CONSIGNEE_DATA_DIR", str(origin.data_dir))
    monkeypatch.setenv("CONSIGNEE_BLOB_URL", origin.blobs)
    assert cli.main(["copy", "--to", str(tmp_path / "goal.toml")]) == 0
    assert os.environ["CONSIGNEE_DATA_DIR"] == str(origin.data_dir)
    assert in_store(goal, lambda store: get(store, kept.ref)) == LARGE


def test_damage_in_the_source_is_named_and_the_status_is_1(
    tmp_path: Path, origin: Settings, goal: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    hurt = in_store(origin, lambda store: put(store, LARGE))
    for body in (origin.data_dir / "blobs").glob("*/*"):
        body.write_bytes(LARGE[::-1])
    goal.secret_key.write_bytes(b"o" * 32)
    capsys.readouterr()
    assert copy(tmp_path, "--verify") == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[0] == (
        "secret_key_file: the target has its own; open listings begin again there"
    )
    assert told.out.splitlines()[2:] == [
        "damaged in the source: 1 bodies",
        "verified: 1 damaged",
    ]
    faults = [line.split("\t")[:2] for line in told.err.splitlines() if "\t" in line]
    assert faults == [["wrong_digest", hurt.sha256], ["missing", hurt.sha256]]


def test_a_target_that_is_wrong_is_one_line(
    tmp_path: Path, origin: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert copy(tmp_path) == 2
    assert "goal.toml: cannot be read" in capsys.readouterr().err
    (tmp_path / "goal.toml").write_text(f'data_dir = "{origin.data_dir}"')
    assert copy(tmp_path) == 2
    assert "--to: names the database that is to be copied" in capsys.readouterr().err


def test_a_backup_and_the_way_back(
    tmp_path: Path, origin: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = in_store(origin, lambda store: put(store, LARGE))
    capsys.readouterr()
    folder, back = tmp_path / "backup", tmp_path / "back"
    of_origin = ("--config", str(tmp_path / "origin.toml"))
    assert cli.main(["backup", *of_origin, str(folder)]) == 0
    told = f"backed up: 1 references, 1 bodies in files ({len(LARGE)} bytes, 1 linked)\n"
    assert capsys.readouterr().out == told
    assert cli.main(["restore", "--data-dir", str(back), str(folder)]) == 0
    told = f"restored: 1 bodies in files ({len(LARGE)} bytes)\nno damage\n"
    assert capsys.readouterr().out == told
    assert in_store(Settings(data_dir=back), lambda store: get(store, kept.ref)) == LARGE
    assert cli.main(["restore", "--data-dir", str(back), str(folder)]) == 1
    assert "restore into an empty data_dir" in capsys.readouterr().err


def test_what_a_backup_misses_is_said_and_the_status_is_1(
    tmp_path: Path, origin: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    in_store(origin, lambda store: put(store, LARGE))
    for body in (origin.data_dir / "blobs").glob("*/*"):
        body.unlink()
    capsys.readouterr()
    folder = tmp_path / "backup"
    assert cli.main(["backup", "--config", str(tmp_path / "origin.toml"), str(folder)]) == 1
    assert "lost in the store itself: 1 bodies" in capsys.readouterr().out
    assert cli.main(["restore", "--data-dir", str(tmp_path / "back"), str(folder)]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == "1 damaged"
    assert told.err.splitlines()[-1].startswith("missing\t")


@pytest.mark.parametrize("command", ["backup", "restore"])
def test_other_engines_are_sent_to_their_own_tools(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.toml").write_text('data_dir = "d"\nblob_url = "s3://bucket/prefix"\n')
    options = ("--config", str(tmp_path / "other.toml"), str(tmp_path / "backup"))
    assert cli.main([command, *options]) == 2
    assert "pg_dump" in capsys.readouterr().err


def test_each_command_leaves_its_audit_record(
    tmp_path: Path, origin: Settings, goal: Settings
) -> None:
    for name in ("origin", "back"):
        (tmp_path / f"{name}.toml").write_text(f'data_dir = "{name}"\naudit = "file"\n')
    of_origin = ("--config", str(tmp_path / "origin.toml"))
    assert cli.main(["backup", *of_origin, str(tmp_path / "backup")]) == 0
    assert copy(tmp_path) == 0
    of_back = ("--config", str(tmp_path / "back.toml"))
    assert cli.main(["restore", *of_back, str(tmp_path / "backup")]) == 0
    records = [
        json.loads(line)
        for folder in (origin.data_dir, tmp_path / "back")
        for line in (folder / "audit.jsonl").read_text().splitlines()
    ]
    assert [one["action"] for one in records] == ["store.backup", "store.copy", "store.restore"]


def test_bars_show_each_step_and_faults_above_them() -> None:
    console = Console(record=True, width=100, force_terminal=True)
    with Progress(console=console) as progress:
        bars = Bars(progress)
        bars.begin("bodies", 10)
        bars.advance(10)
        bars.begin("[files]", 2)
        bars.advance(1)
        bars.fault(Finding("missing", "nothing lies there", "ab" * 32))
        assert [(task.completed, task.total) for task in progress.tasks] == [(10, 10), (1, 2)]
    assert f"missing {'ab' * 32}" in " ".join(console.export_text().split())


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_there_are_bars(
    tmp_path: Path, origin: Settings, goal: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_store(origin, lambda store: put(store, LARGE))
    assert goal.secret_key.name == "secret.key"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert copy(tmp_path) == 0
    assert "content_refs" in terminal.getvalue()
    assert "100%" in terminal.getvalue()


def test_bodies_that_a_sweep_took_meanwhile_ask_for_one_more_copy() -> None:
    told = _summary(CopyReport(swept=2)).splitlines()
    assert told[1:] == ["2 bodies went from the source meanwhile: copy once more"]


def test_a_key_that_is_the_same_already_is_left(
    tmp_path: Path, origin: Settings, goal: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    goal.secret_key.write_bytes(origin.secret_key.read_bytes())
    capsys.readouterr()
    assert copy(tmp_path) == 0
    origin.secret_key.unlink()
    assert copy(tmp_path) == 0
    assert "secret_key_file" not in capsys.readouterr().out
