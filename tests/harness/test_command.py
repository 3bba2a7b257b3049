"""The command harness: what a program is given, what becomes of what it does, how it ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from app.harness.base import (
    BudgetSpent,
    HarnessFailed,
    HarnessUnavailable,
    Notice,
    ReasoningDelta,
    Task,
    TextDelta,
    ToolCall,
    ToolResult,
    Turn,
    Usage,
)
from app.harness.budgets import Budgeted
from app.harness.command import CommandHarness
from app.harness.workspace import Found
from app.settings import HarnessSettings
from tests.harness.tasks import (
    SESSION,
    Stored,
    a_task,
    events_of,
    run_until_error,
    text_of,
    workspaces_in,
)
from tests.loops import ON_BOTH_LOOPS

pytestmark = [pytest.mark.anyio, ON_BOTH_LOOPS]

REPORT_AGENT = Path(__file__).parents[2] / "deploy" / "agents" / "report_agent.py"


@pytest.fixture
def others() -> list[psutil.Process]:
    """Processes that are there before a test: servers of other tests live for a session."""
    return psutil.Process().children()


def _command(*argv: str, **settings: Any) -> CommandHarness:
    given = HarnessSettings(name="agent", base="command", argv=argv, **settings)
    return CommandHarness(given, grace_seconds=0.2)


def _shell(script: str, **settings: Any) -> CommandHarness:
    return _command("sh", "-c", script, **settings)


async def _said(harness: CommandHarness, task: Task) -> str:
    return text_of(await events_of(harness, task))


async def test_the_prompt_goes_in_and_the_answer_comes_out(tmp_path: Path) -> None:
    assert await _said(_command("cat"), a_task(tmp_path, "报告 🚀\n")) == "报告 🚀\n"


async def test_what_is_not_text_is_replaced(tmp_path: Path) -> None:
    harness = _shell("printf 'a\\377b\\000c\\303'")
    assert await _said(harness, a_task(tmp_path, "\ud800")) == "a\ufffdb\ufffdc\ufffd"


@pytest.mark.requirement("B04")
async def test_it_works_in_the_workspace_of_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.md").write_text("SERVER")
    task = a_task(tmp_path)
    (task.workspace / "report.md").write_text("SESSION")
    said = await _said(_shell("cat report.md; pwd; echo made > new"), task)
    assert said == f"SESSION{task.workspace}\n"
    assert (task.workspace / "new").read_text() == "made\n"


async def test_no_shell_reads_the_arguments(tmp_path: Path) -> None:
    harness = _command("printf", "%s|", "$HOME", "a b", "{model}", "--model={model}")
    said = await _said(harness, a_task(tmp_path, model="large; rm -rf /"))
    assert said == "$HOME|a b|large; rm -rf /|--model=large; rm -rf /|"


@pytest.mark.requirement("AHP-R14")
async def test_its_environment_is_what_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "secret")
    monkeypatch.setenv("AGENT_KEY", "key")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("PATH", f".:relative:{os.environ['PATH']}:")
    monkeypatch.setenv("LANG", "C.UTF-8")
    task = a_task(tmp_path)
    root = task.workspace.parent
    harness = _command("env", environment=("AGENT_KEY", "NOT_SET", "HOME"))
    lines = (await _said(harness, task)).splitlines()
    assert dict(line.split("=", 1) for line in lines) == {
        "AGENT_KEY": "key",
        "CONSIGNEE_TASK_FILE": str(root / "task.json"),
        "HOME": str(root / "home"),
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"].removeprefix(".:relative:").removesuffix(":"),
        "TMPDIR": str(root / "scratch"),
    }


async def test_its_task_file_tells_everything_else(tmp_path: Path) -> None:
    task = a_task(
        tmp_path,
        "now",
        model="large",
        instructions="Be brief.",
        history=(Turn("before", "answer"),),
        max_step=3,
        timeout_seconds=60.0,
    )
    said = await _said(_shell('cat "$CONSIGNEE_TASK_FILE"'), task)
    assert json.loads(said) == {
        "response_id": "resp_1",
        "session_id": SESSION,
        "model": "large",
        "prompt": "now",
        "instructions": "Be brief.",
        "history": [{"user": "before", "assistant": "answer"}],
        "inputs": [],
        "max_step": 3,
        "max_output_tokens": None,
        "timeout_seconds": 60.0,
    }


async def test_lines_are_events(tmp_path: Path) -> None:
    lines = [
        {"type": "reasoning", "text": "hm"},
        {"type": "tool_call", "call_id": "1", "name": "x", "arguments": {"a": 1}},
        {"type": "tool_result", "call_id": "1", "output": "done"},
        {"type": "text", "text": "answer"},
        {"type": "usage", "input_tokens": 1, "output_tokens": 2},
    ]
    prompt = "\n".join([*map(json.dumps, lines), "no event"])
    events = await events_of(_command("cat", output="jsonl"), a_task(tmp_path, prompt))
    assert events[:-1] == [
        ReasoningDelta("hm"),
        ToolCall("1", "x", '{"a": 1}'),
        ToolResult("1", "done"),
        TextDelta("answer"),
        Usage(1, 2),
    ]
    assert isinstance(events[-1], Notice)


async def test_what_it_says_comes_as_it_says_it(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    go_on = task.workspace / "go on"
    events = _shell("echo one; while [ ! -e 'go on' ]; do sleep 0.01; done; echo two").run(task)
    assert await anext(events) == TextDelta("one\n")
    go_on.touch()
    assert [event async for event in events] == [TextDelta("two\n")]


async def test_one_that_fails_keeps_what_it_said_and_wrote(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = a_task(tmp_path)
    script = "echo said; echo made > made; echo token=secret >&2; exit 7"
    said, error = await run_until_error(_shell(script), task)
    assert said == [TextDelta("said\n")]
    assert isinstance(error, HarnessFailed)
    assert (error.code, error.message) == ("harness_error", "The harness ended with status 7.")
    assert (task.workspace / "made").exists()
    [record] = caplog.records
    assert "token=secret" in record.getMessage()
    assert vars(record)["ref"] == "resp_1"


async def test_one_that_a_signal_ends_has_failed(tmp_path: Path) -> None:
    _, error = await run_until_error(_shell("kill -9 $$"), a_task(tmp_path))
    assert isinstance(error, HarnessFailed)
    assert error.message == "The harness was ended by a signal."


@pytest.mark.parametrize("program", ["no-such-program", "/no/such/program"])
async def test_one_that_is_not_there_is_unavailable(tmp_path: Path, program: str) -> None:
    harness = _command(program)
    assert not harness.is_available()
    said, error = await run_until_error(harness, a_task(tmp_path))
    assert said == []
    assert isinstance(error, HarnessUnavailable)
    assert error.message == "The harness 'agent' cannot be started here."


async def test_one_that_cannot_be_executed_is_unavailable(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    harness = _command(str(program))
    assert harness.is_available()
    _, error = await run_until_error(harness, a_task(tmp_path))
    assert isinstance(error, HarnessUnavailable)


async def test_one_whose_workspace_is_gone_is_unavailable(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    task.workspace.rmdir()
    _, error = await run_until_error(_command("true"), task)
    assert isinstance(error, HarnessUnavailable)


async def test_one_that_says_too_much_is_stopped(tmp_path: Path) -> None:
    harness = _command("yes", max_output_bytes=10_001)
    said, error = await run_until_error(harness, a_task(tmp_path))
    assert isinstance(error, BudgetSpent)
    assert error.reason == "max_output"
    assert text_of(said) == "y\n" * 5000 + "y"


async def test_one_that_says_exactly_enough_is_not(tmp_path: Path) -> None:
    harness = _shell("printf 12345", max_output_bytes=5)
    assert await _said(harness, a_task(tmp_path)) == "12345"


@pytest.mark.parametrize(
    ("script", "limits", "told"),
    [
        ("for i in 1 2 3 4 5; do sleep 1000 & done; wait", {"max_processes": 3}, "processes"),
        ("mkdir a; cd a; i=0; while :; do i=$((i+1)); echo x > $i; done", {}, "size"),
    ],
)
async def test_one_that_goes_over_a_limit_has_failed(
    tmp_path: Path, script: str, limits: dict[str, Any], told: str
) -> None:
    harness = _shell(script, max_workspace_bytes=1_000_000, **limits)
    _, error = await run_until_error(harness, a_task(tmp_path))
    assert isinstance(error, HarnessFailed)
    assert told in error.message


async def test_one_that_takes_too_long_is_stopped(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    harness = Budgeted(_shell("echo said; exec sleep 1000"), 3)  # a busy machine starts late
    said, error = await run_until_error(harness, a_task(tmp_path))
    assert said == [TextDelta("said\n")]
    assert isinstance(error, BudgetSpent)
    assert error.reason == "timeout"
    assert psutil.Process().children() == others


@pytest.mark.requirement("UHP-34", "B89")
async def test_a_cancelled_one_writes_nothing_any_more(
    tmp_path: Path, others: list[psutil.Process]
) -> None:
    task = a_task(tmp_path)
    script = "trap '' TERM; while :; do date +%N > beat; sleep 0.01; done"
    running = asyncio.create_task(events_of(_shell(script), task))
    beat = task.workspace / "beat"
    while not beat.exists():
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    last = beat.stat().st_mtime_ns
    await asyncio.sleep(0.1)
    assert beat.stat().st_mtime_ns == last
    assert psutil.Process().children() == others


async def test_one_that_kills_its_launcher_leaves_nothing(tmp_path: Path) -> None:
    task = a_task(tmp_path)
    script = "setsid sleep 1000 & echo $! > pid; kill -9 $PPID; sleep 1000"
    _, error = await run_until_error(_shell(script), task)
    assert isinstance(error, HarnessFailed)
    pid = int((task.workspace / "pid").read_text())
    async with asyncio.timeout(30):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.01)


async def test_many_tasks_leave_no_descriptor(tmp_path: Path, others: list[psutil.Process]) -> None:
    harness = _shell("echo x; exit $(cat)")
    await run_until_error(harness, a_task(tmp_path, "0"))
    await asyncio.sleep(0.05)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        await run_until_error(harness, a_task(tmp_path, f"{number % 2}"))
    async with asyncio.timeout(30):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
    assert psutil.Process().children() == others


@pytest.mark.requirement("UHP-02", "UHP-11")
async def test_the_example_reports_on_its_files(tmp_path: Path) -> None:
    stored = Stored()
    body = b"one\ntwo\n" * 1000
    inputs = [
        stored.add("q|3 <b>.txt", body),
        stored.add("报告.bin", b"\xff" * 100, media_type="application/octet-stream"),
    ]
    workspaces = workspaces_in(tmp_path)
    workspace = await workspaces.prepare(SESSION, [], inputs, stored.open)
    task = Task(
        response_id="resp_1",
        session_id=SESSION,
        model="default",
        prompt="What is in these?",
        workspace=workspace.path,
        inputs=workspace.inputs,
    )
    harness = _command(sys.executable, str(REPORT_AGENT), output="jsonl")
    events = await events_of(harness, task)
    assert text_of(events).startswith("I looked at 2 files, 8100 bytes.")
    assert [event.call_id for event in events if isinstance(event, ToolCall)] == ["1", "2"]
    assert not any(isinstance(event, Notice) for event in events)
    found = [each async for each in workspace.collect()]
    assert [(each.path, getattr(each, "media_type", None)) for each in found] == [
        ("report.md", "text/markdown"),
        ("sizes.svg", "image/svg+xml"),
    ]
    assert all(isinstance(each, Found) for each in found)
    report = (workspace.path / "report.md").read_text()
    assert hashlib.sha256(body).hexdigest() in report
    assert "| q\\|3 &lt;b>.txt | text/plain | 8000 | 2000 |" in report
    assert ElementTree.parse(workspace.path / "sizes.svg").getroot().tag.endswith("svg")


async def test_the_example_says_when_there_is_nothing_to_do(tmp_path: Path) -> None:
    harness = _command(sys.executable, str(REPORT_AGENT), output="jsonl")
    task = a_task(tmp_path, "Hello?")
    assert "no file" in await _said(harness, task)
    assert list(task.workspace.iterdir()) == []
