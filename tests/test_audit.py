"""The audit records: what they say, where they go, and that nothing is left out."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from app import audit, cli, logs
from app.settings import Settings, SettingsError, load_settings
from tests import backends
from tests.store.events import deliver
from tests.store.sessions import add_upload, begin, finish
from tests.store.stores import database, new_sqlite_store, new_store, put, sha256

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def empty_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables, no configuration file, and the process's loggers left as they were."""
    for name in [name for name in os.environ if name.startswith("CONSIGNEE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    root = logging.getLogger()
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in ("consignee", "uvicorn.error")}
    costs = (logging.logThreads, logging.logProcesses, logging.logMultiprocessing)
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = costs


def in_file(tmp_path: Path, **more: Any) -> Settings:
    return load_settings(audit="file", audit_file=tmp_path / "audit.jsonl", **more)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def facts_of(path: Path) -> list[dict[str, Any]]:
    """The records, without what every log line has."""
    return [
        {k: v for k, v in line.items() if k not in ("time", "level", "logger", "message")}
        for line in lines_of(path)
    ]


def test_a_record_is_one_json_line_in_a_file_of_this_user(tmp_path: Path) -> None:
    settings = in_file(tmp_path)
    with audit.kept(settings):
        assert audit.is_kept()
        audit.record("reference.store", scope="a", ref="r\n1", bytes=5, address=None)
    (line,) = lines_of(tmp_path / "audit.jsonl")
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "consignee.audit",
        "message": "audit",
        "action": "reference.store",
        "outcome": "done",
        "scope": "a",
        "ref": "r\n1",
        "bytes": 5,
    }
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_nothing_is_recorded_unless_it_is_configured(tmp_path: Path) -> None:
    settings = load_settings(audit_file=tmp_path / "audit.jsonl")
    with audit.kept(settings):
        assert not audit.is_kept()
        audit.record("reference.store")
    assert not (tmp_path / "audit.jsonl").exists()


def test_the_file_lies_in_the_data_folder_when_nothing_else_is_said(tmp_path: Path) -> None:
    settings = load_settings(audit="file", data_dir=tmp_path)
    with audit.kept(settings):
        audit.record("reference.store")
    assert len(lines_of(tmp_path / "audit.jsonl")) == 1


def test_after_the_block_nothing_is_recorded_any_more(tmp_path: Path) -> None:
    with audit.kept(in_file(tmp_path)):
        audit.record("before")
    audit.record("after")
    assert [line["action"] for line in lines_of(tmp_path / "audit.jsonl")] == ["before"]


@pytest.mark.parametrize("way", ["moved", "removed", "replaced"])
def test_a_file_that_is_moved_away_is_begun_anew(tmp_path: Path, way: str) -> None:
    path, earlier = tmp_path / "audit.jsonl", tmp_path / "audit.jsonl.1"
    with audit.kept(in_file(tmp_path)):
        audit.record("first")
        if way == "removed":
            path.unlink()
        else:
            path.rename(earlier)
        if way == "replaced":  # by another process, which came first
            path.write_text("")
        audit.record("second")
    assert [line["action"] for line in lines_of(path)] == ["second"]
    if way != "removed":
        assert [line["action"] for line in lines_of(earlier)] == ["first"]


def test_two_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with audit.kept(in_file(tmp_path)), audit.kept(in_file(tmp_path)):
        audit.record("both")
    assert [line["action"] for line in lines_of(path)] == ["both", "both"]


def test_a_record_that_cannot_be_written_is_counted_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[None] = []

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with audit.kept(in_file(tmp_path), lambda: lost.append(None)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            audit.record("lost")
        audit.record("kept")
    assert [line["action"] for line in lines_of(tmp_path / "audit.jsonl")] == ["kept"]
    assert len(lost) == 1
    assert [r.message for r in caplog.records if r.levelno >= logging.ERROR] == [
        "an audit record is lost"
    ]


def test_a_record_that_is_cut_short_does_not_spoil_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    lost: list[None] = []

    with audit.kept(in_file(tmp_path), lambda: lost.append(None)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", lambda number, data: write(number, data[:10]))
            audit.record("torn")
        audit.record("whole")
    torn, whole = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["action"] == "whole"
    assert len(lost) == 1


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    with audit.kept(in_file(tmp_path)):
        audit.record("file.read", file_id="x" * 70_000)
    (line,) = lines_of(tmp_path / "audit.jsonl")
    assert line["file_id"] == "x" * audit.MAX_CHARACTERS


def test_a_file_that_cannot_be_opened_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    settings = load_settings(audit="file", audit_file=tmp_path / "taken" / "audit.jsonl")
    with pytest.raises(SettingsError, match=r"audit_file: .* name a file") as told:
        audit.kept(settings).__enter__()
    assert str(tmp_path) not in str(told.value)


def test_a_closed_file_can_be_closed_again(tmp_path: Path) -> None:
    handler = audit.AuditFile(tmp_path / "new" / "audit.jsonl", list)
    handler.close()
    handler.close()
    assert (tmp_path / "new" / "audit.jsonl").read_text() == ""


def test_records_can_go_among_the_log_lines() -> None:
    output, settings = io.StringIO(), load_settings(audit="log", log_level="error")
    logs.configure(settings, output)
    with audit.kept(settings):
        audit.record("reference.store", scope="a")
    (line,) = [json.loads(line) for line in output.getvalue().splitlines()]
    assert (line["logger"], line["action"]) == ("consignee.audit", "reference.store")


def test_a_command_that_has_no_log_writes_them_on_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logging.getLogger().handlers[:] = []
    monkeypatch.setattr(sys, "stderr", output := io.StringIO())
    with audit.kept(load_settings(audit="log")):
        audit.record("reference.read", ref="x")
    assert json.loads(output.getvalue())["ref"] == "x"


# --- what ends by itself -------------------------------------------------------------------------


@pytest.fixture
def records(tmp_path: Path) -> Iterator[Path]:
    """The file of the records that the test leaves."""
    with audit.kept(in_file(tmp_path)):
        yield tmp_path / "audit.jsonl"


async def test_what_a_sweep_ends_and_takes_away_is_recorded(tmp_path: Path, records: Path) -> None:
    store = await new_store(tmp_path / "data")
    reference = await put(store, b"gone soon", scope="a")
    event = await deliver(store, event_id="e1")
    with database(tmp_path / "data") as rows:
        rows.execute("update content_refs set expires_at = 1")
        rows.execute("update events set expires_at = 1")
    await store.sweep()
    await store.close()
    assert facts_of(records) == [
        {
            "action": "reference.expire",
            "outcome": "done",
            "scope": "a",
            "principal": "alice",
            "ref": reference.ref,
        },
        {
            "action": "event.expire",
            "outcome": "done",
            "scope": "a",
            "principal": event.principal,
            "event_id": "e1",
        },
        {"action": "body.remove", "outcome": "done", "bodies": 1, "bytes": 9, "orphans": 0},
    ]


async def test_a_sweep_with_nothing_to_do_records_nothing(tmp_path: Path, records: Path) -> None:
    store = await new_store(tmp_path / "data")
    await put(store, b"stays")
    await store.sweep()
    await store.close()
    assert facts_of(records) == []


async def test_an_upload_that_ends_by_itself_is_recorded(tmp_path: Path, records: Path) -> None:
    store = await new_store(tmp_path / "data")
    file = await add_upload(store, b"upload", expires_at=1)
    assert await store.files.expire() == 1
    await store.close()
    assert facts_of(records) == [
        {
            "action": "file.expire",
            "outcome": "done",
            "principal": "alice",
            "scope": "a",
            "file_id": file.id,
            "path": file.path,
            "sha256": sha256(b"upload"),
            "bytes": 6,
        }
    ]


async def test_a_session_that_expires_is_recorded(tmp_path: Path, records: Path) -> None:
    store = await new_store(tmp_path / "data")
    session = await store.sessions.create(scope="a", principal="alice")
    await store.sessions.expire(idle_since=session.updated_at + 1)
    await store.close()
    (record,) = facts_of(records)
    assert (record["action"], record["scope"]) == ("session.expire", "a")
    assert (record["session_id"], record["container_id"]) == (session.id, session.container_id)


async def test_a_result_that_nobody_keeps_is_recorded_when_it_goes(
    tmp_path: Path, records: Path
) -> None:
    store = await new_store(tmp_path / "data")
    begun = await begin(store)
    await finish(store, begun)
    await store.responses.delete("a", begun.response.id)
    with database(tmp_path / "data") as rows:
        rows.execute("update responses set finished_at = 1")
    assert await store.responses.purge(before=2) == 1
    await store.close()
    (record,) = facts_of(records)
    assert (record["action"], record["response_id"]) == ("response.expire", begun.response.id)


# --- commands -------------------------------------------------------------------------------------

SILENT_COMMANDS = {
    "audit": "reads the records, which hold no contents",
    "check": "reads the configuration",
    "dev": "what a server does leaves records of its own",
    "migrate": "changes tables, not what is in them",
    "readyz": "asks a server",
    "send": "is a client: the receiver has the record",
    "serve": "what a server does leaves records of its own",
    "token new": "makes a token, and keeps nothing",
}

COMMAND_ACTIONS = {
    "events list": "event.list",
    "events show": "event.read",
    "events tail": "event.list",
    "fsck": "store.verify",
    "gc": "store.sweep",
    "refs cat": "reference.read",
    "refs list": "reference.list",
    "refs remove": "reference.remove",
    "refs show": "reference.inspect",
    "usage": "usage.read",
}

MOVING_ACTIONS = {"backup": "store.backup", "copy": "store.copy", "restore": "store.restore"}


def all_commands(group: click.Group = cli.cli, prefix: str = "") -> Iterator[str]:
    """Every command by its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from all_commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name


def test_every_command_leaves_a_record_or_there_is_a_reason_why_not() -> None:
    assert sorted(all_commands()) == sorted([*COMMAND_ACTIONS, *MOVING_ACTIONS, *SILENT_COMMANDS])


async def _filled(data_dir: Path) -> str:
    """A store with a reference and an event; the reference."""
    store = await new_store(data_dir)
    reference = await put(store, b"kept", scope="a")
    await deliver(store, event_id="e1")
    await store.close()
    return reference.ref


def arguments_of(command: str, ref: str) -> list[str]:
    """What stands behind a command."""
    scoped = [] if command in ("gc", "fsck") else ["--scope", "a"]
    own = {"events show": ["e1"], "events tail": ["--no-follow"], "refs list": [], "usage": []}
    of_refs = [ref] if command.startswith("refs ") else []
    return [*scoped, *own.get(command, of_refs)]


@pytest.mark.parametrize("command", sorted(COMMAND_ACTIONS))
def test_a_command_leaves_the_record_of_what_it_does(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "data"
    ref = asyncio.run(_filled(data_dir))
    arguments = arguments_of(command, ref)
    for name, value in backends.environment_of(data_dir).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CONSIGNEE_AUDIT", "file")
    assert cli.main([*command.split(), "--data-dir", str(data_dir), *arguments]) == 0
    record = facts_of(data_dir / "audit.jsonl")[0]
    assert record["action"] == COMMAND_ACTIONS[command]
    assert record["operator"] == os.getuid()
    assert record.get("scope") == ("a" if "--scope" in arguments else None)
    assert record.get("ref") == (ref if ref in arguments else None)


def test_moving_a_store_leaves_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill() -> None:
        store = await new_sqlite_store(tmp_path / "data")
        await put(store, b"kept")
        await store.close()

    asyncio.run(fill())
    target = tmp_path / "target.toml"
    target.write_text(f'data_dir = "{tmp_path / "copy"}"')
    monkeypatch.setenv("CONSIGNEE_AUDIT", "file")
    monkeypatch.setenv("CONSIGNEE_AUDIT_FILE", str(tmp_path / "audit.jsonl"))
    data, restored, folder = (str(tmp_path / name) for name in ("data", "restored", "backup"))
    assert cli.main(["migrate", "--config", str(target)]) == 0
    for line in (
        ["copy", "--data-dir", data, "--to", str(target)],
        ["backup", "--data-dir", data, folder],
        ["restore", "--data-dir", restored, folder],
    ):
        assert cli.main(line) == 0
        record = facts_of(tmp_path / "audit.jsonl")[-1]
        assert record["action"] == MOVING_ACTIONS[line[0]]
        assert record["operator"] == os.getuid()


def test_a_rehearsal_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data_dir = tmp_path / "data"
    asyncio.run(_filled(data_dir))
    for name, value in backends.environment_of(data_dir).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CONSIGNEE_AUDIT", "file")
    assert cli.main(["gc", "--dry-run", "--data-dir", str(data_dir)]) == 0
    assert facts_of(data_dir / "audit.jsonl") == []
