"""`consignee events`, and what `refs` and `gc` say of events."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

from app import cli
from app.settings import load_settings
from app.store.content import ContentStore
from app.store.events import StoredEvent
from app.store.records import Reference
from tests import backends
from tests.e2e.processes import ROOT
from tests.store.events import arrival, deliver
from tests.store.stores import put, sha256

T = TypeVar("T")

EXIT_SECONDS = 60
"""Far above what an interrupted command takes: it only keeps a hanging one from hanging tests."""


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
def data_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """The folder of a migrated, empty store."""
    folder = tmp_path / "data"
    backends.name_in_environment(folder, monkeypatch)
    assert cli.main(["migrate", "--data-dir", str(folder)]) == 0
    capsys.readouterr()
    return folder


def in_store(
    data_dir: Path, work: Callable[[ContentStore], Coroutine[Any, Any, T]], **given: Any
) -> T:
    async def opened() -> T:
        store = await ContentStore.start(load_settings(data_dir=data_dir, **given))
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(opened())


def deliver_all(data_dir: Path, *ids: str, scope: str = "a") -> list[StoredEvent]:
    async def accept(store: ContentStore) -> list[StoredEvent]:
        return [await deliver(store, event_id=event_id, scope=scope) for event_id in ids]

    return in_store(data_dir, accept)


def upload_and_deliver(data_dir: Path, *ids: str, **given: Any) -> Reference:
    """Events that use one reference."""

    async def accept(store: ContentStore) -> Reference:
        reference = await put(store, b"used")
        for event_id in ids:
            await deliver(store, reference.ref, event_id=event_id)
        return reference

    return in_store(data_dir, accept, **given)


def events(data_dir: Path, command: str, *arguments: str, scope: str = "a") -> int:
    given = ["--data-dir", str(data_dir), "--scope", scope]
    return cli.main(["events", command, *given, *arguments])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def test_events_are_listed_one_a_line_in_their_scope(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("app.commands.options.PAGE", 2)
    deliver_all(data_dir, "c", "a", "b", "e", "d")
    deliver_all(data_dir, "f", scope="b")
    assert events(data_dir, "list") == 0
    assert [line.split("\t")[0] for line in lines(capsys)] == ["c", "a", "b", "e", "d"]
    assert events(data_dir, "list", scope="nobody") == 0
    assert lines(capsys) == []


def test_a_line_tells_how_an_event_ended_and_has_no_control_characters(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (event, _) = deliver_all(data_dir, "evil\n\x1b[2J\tid", "evt_2")
    in_store(data_dir, lambda store: store.events.settle("a", "evt_2", "failed", None))
    assert events(data_dir, "list") == 0
    first, second = lines(capsys)
    assert first.split("\t")[:4] == [
        "evil\\x0a\\x1b[2J\\x09id",
        "turn.start",
        "observe",
        "unsettled",
    ]
    assert datetime.fromisoformat(first.split("\t")[4]).timestamp() == event.received_at
    assert second.split("\t")[:4] == ["evt_2", "turn.start", "observe", "failed"]


def test_events_are_listed_as_json_lines(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = upload_and_deliver(data_dir, "evt_1")
    assert events(data_dir, "list", "--json") == 0
    (line,) = lines(capsys)
    facts = json.loads(line)
    assert facts.pop("received_at").endswith("Z")
    assert facts == {
        "position": 1,
        "event_id": "evt_1",
        "type": "turn.start",
        "mode": "observe",
        "scope": "a",
        "principal": "alice",
        "outcome": None,
        "attachments": [{"ref": reference.ref, "size": 4, "sha256": sha256(b"used")}],
    }


def test_one_event_is_shown_with_its_message_and_its_answer(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = upload_and_deliver(data_dir, "evt_1")
    assert events(data_dir, "show", "evt_1") == 0
    shown = json.loads("\n".join(lines(capsys)))
    assert shown["message"] == json.loads(arrival(reference.ref).message)
    assert (shown["result"], shown["outcome"]) == (None, None)
    answer = b'{"effects":[]}'
    in_store(data_dir, lambda store: store.events.settle("a", "evt_1", "done", answer))
    assert events(data_dir, "show", "evt_1") == 0
    shown = json.loads("\n".join(lines(capsys)))
    assert (shown["result"], shown["outcome"]) == ({"effects": []}, "done")


@pytest.mark.requirement("AHP-R36")
def test_an_unknown_and_a_foreign_event_look_the_same(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deliver_all(data_dir, "theirs", scope="b")
    said = []
    for event_id in ("theirs", "unknown"):
        assert events(data_dir, "show", event_id) == 1
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] == "consignee: There is no such event in this scope.\n"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], ["2", "3", "4", "5", "6", "7", "8", "9", "10", "11"]),
        (["-n", "2"], ["10", "11"]),
        (["--lines", "0"], []),
        (["--lines", "1000"], [str(n) for n in range(12)]),
    ],
)
def test_tail_begins_with_the_last_events(
    arguments: list[str], shown: list[str], data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deliver_all(data_dir, *map(str, range(12)))
    assert events(data_dir, "tail", "--no-follow", *arguments) == 0
    assert [line.split("\t")[0] for line in lines(capsys)] == shown


def test_tail_of_an_empty_scope_is_empty(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert events(data_dir, "tail", "--no-follow", "--json") == 0
    assert lines(capsys) == []


@pytest.mark.parametrize("lines", ["-1", "1001", "many"])
def test_tail_refuses_a_number_of_lines_that_it_does_not_keep(
    lines: str, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert events(data_dir, "tail", "--lines", lines) == 2
    assert "--lines" in capsys.readouterr().err


@pytest.mark.parametrize("before", [[], ["1", "2"]], ids=["empty", "with events"])
def test_tail_follows_until_it_is_interrupted(before: list[str], data_dir: Path) -> None:
    deliver_all(data_dir, *before)
    line = [sys.executable, "-m", "app.cli", "events", "tail", "--json"]
    line += ["--data-dir", str(data_dir), "--scope", "a", "-n", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as tail:
        assert tail.stdout is not None
        try:
            seen = [json.loads(tail.stdout.readline())["event_id"] for _ in before[-1:]]
            for event_id in ("3", "4"):
                deliver_all(data_dir, event_id)
                seen.append(json.loads(tail.stdout.readline())["event_id"])
            tail.send_signal(signal.SIGINT)
            assert tail.wait(EXIT_SECONDS) == 130
        finally:
            tail.kill()
    assert seen == [*before[-1:], "3", "4"]


# References and gc


def refs(data_dir: Path, command: str, ref: str) -> int:
    return cli.main(["refs", command, "--data-dir", str(data_dir), "--scope", "a", ref])


def test_a_reference_is_shown_with_the_events_that_use_it(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = upload_and_deliver(data_dir, "evt_2", "evt_1")
    assert refs(data_dir, "show", reference.ref) == 0
    facts = json.loads("\n".join(lines(capsys)))
    assert (facts["ref"], facts["events"]) == (reference.ref, ["evt_2", "evt_1"])
    assert "ended" not in facts


@pytest.mark.requirement("AHP-R38")
def test_an_ended_reference_is_shown_while_events_keep_its_bytes(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = upload_and_deliver(data_dir, "evt_1")
    assert refs(data_dir, "remove", reference.ref) == 0
    capsys.readouterr()
    assert refs(data_dir, "show", reference.ref) == 0
    assert json.loads("\n".join(lines(capsys))) == {
        "ref": reference.ref,
        "size": 4,
        "sha256": sha256(b"used"),
        "scope": "a",
        "ended": True,
        "events": ["evt_1"],
    }


def test_gc_says_how_many_events_it_ended(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = upload_and_deliver(data_dir, "evt_1", "evt_2", event_retention="1s")
    assert refs(data_dir, "remove", reference.ref) == 0
    monkeypatch.setattr("app.store.events.time.time", lambda: 10**10)
    capsys.readouterr()
    for said in ("would remove: .* 2 expired events;", "removed: .* 1 bodies .* 2 expired events;"):
        dry = ["--dry-run"] if said.startswith("would") else []
        assert cli.main(["gc", "--data-dir", str(data_dir), *dry]) == 0
        assert re.match(said, lines(capsys)[0])
    assert events(data_dir, "list") == 0
    assert lines(capsys) == []
