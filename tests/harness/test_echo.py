"""The echo harness does what its docstring says, and nothing by chance."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from app.harness.base import (
    BudgetSpent,
    HarnessFailed,
    HarnessUnavailable,
    InputFile,
    ReasoningDelta,
    Task,
    TextDelta,
    ToolCall,
    ToolResult,
    Turn,
    Usage,
)
from app.harness.echo import COUNT_SECONDS, PACE_SECONDS, EchoHarness, split
from tests.harness.tasks import a_task, events_of, run_until_error, text_of

pytestmark = pytest.mark.anyio


class Pauses:
    """A sleep that takes no time and remembers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


async def _answer(task: Task) -> str:
    return text_of(await events_of(EchoHarness(Pauses()), task))


async def test_it_answers_with_what_it_was_asked(tmp_path: Path) -> None:
    prompt = "Summarise README.md in three bullets.\n报告 🚀"
    pauses = Pauses()
    events = await events_of(EchoHarness(pauses), a_task(tmp_path, prompt))
    assert text_of(events) == prompt
    assert len(events) >= 4
    assert sum(pauses.seconds) == pytest.approx(PACE_SECONDS)
    assert not any(isinstance(event, Usage) for event in events)
    assert list((a_task(tmp_path).workspace).iterdir()) == []


async def test_an_answer_takes_its_time(tmp_path: Path) -> None:
    begun = asyncio.get_running_loop().time()
    await events_of(EchoHarness(), a_task(tmp_path, "Reply with exactly: ok"))
    assert asyncio.get_running_loop().time() - begun >= 0.6


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Reply with exactly: ok", "ok"),
        ("Please. Reply with exactly: two\nlines", "two\nlines"),
        ("", "(nothing)"),
    ],
)
async def test_what_it_replies(tmp_path: Path, prompt: str, answer: str) -> None:
    assert await _answer(a_task(tmp_path, prompt)) == answer


async def test_it_knows_how_many_turns_were_before(tmp_path: Path) -> None:
    history = (Turn("a", "b"), Turn("c", "d"))
    answer = await _answer(a_task(tmp_path, "again", history=history))
    assert answer == "again\n\nTurns before this one: 2."


@pytest.mark.parametrize(
    ("text", "pieces"), [("", [""]), ("ok", ["o", "k"]), ("abcde", ["a", "b", "c", "de"])]
)
def test_text_is_split_evenly(text: str, pieces: list[str]) -> None:
    assert split(text) == pieces


def test_a_long_text_is_split_into_a_bounded_number_of_pieces() -> None:
    pieces = split("x" * 1_000_003)
    assert len(pieces) == 24
    assert "".join(pieces) == "x" * 1_000_003


@pytest.mark.requirement("UHP-11")
async def test_it_creates_the_file_it_is_asked_for(tmp_path: Path) -> None:
    prompt = "Create a file named uhp-conformance.txt containing exactly: artifact-ok"
    task = a_task(tmp_path, prompt)
    assert await _answer(task) == "Created uhp-conformance.txt."
    assert (task.workspace / "uhp-conformance.txt").read_bytes() == b"artifact-ok"


@pytest.mark.requirement("B02", "B35")
@pytest.mark.parametrize("path", ["报告.txt", "plan-🚀.txt", "100% done.txt", 'a "b".txt', "a/b/c"])
async def test_any_plain_path_will_do(tmp_path: Path, path: str) -> None:
    task = a_task(tmp_path, f"Create a file named {path} containing exactly: x\ny")
    await _answer(task)
    assert (task.workspace / path).read_bytes() == b"x\ny"


@pytest.mark.requirement("UHP-30", "B41")
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("../evil", "relative"),
        ("/etc/x", "relative"),
        ("a\x01", "control"),
        ("x" * 300, "too long"),
    ],
)
async def test_a_path_that_leads_out_makes_the_task_fail(
    tmp_path: Path, path: str, why: str
) -> None:
    task = a_task(tmp_path, f"Create a file named {path} containing exactly: x")
    _, error = await run_until_error(EchoHarness(Pauses()), task)
    assert isinstance(error, HarnessFailed)
    assert why in error.message
    assert list(task.workspace.iterdir()) == []


@pytest.mark.requirement("UHP-02", "UHP-05", "UHP-06")
async def test_it_digests_the_files_that_it_was_given(tmp_path: Path) -> None:
    body = bytes(range(256)) * 1000
    inputs = (
        InputFile("inputs/a.bin", "a.bin", "application/octet-stream", len(body), "claimed"),
        InputFile("inputs/empty", "empty", "text/plain", 0, "claimed"),
        InputFile("inputs/missing", "missing", "text/plain", 0, "claimed"),
    )
    task = a_task(tmp_path, "look", inputs=inputs)
    (task.workspace / "inputs").mkdir()
    (task.workspace / "inputs" / "a.bin").write_bytes(body)
    (task.workspace / "inputs" / "empty").touch()
    await _answer(task)
    assert (task.workspace / "digests.txt").read_text().splitlines() == [
        f"{hashlib.sha256(body).hexdigest()}  256000  inputs/a.bin",
        f"{hashlib.sha256().hexdigest()}  0  inputs/empty",
        "(cannot be read)  inputs/missing",
    ]


async def test_it_counts(tmp_path: Path) -> None:
    pauses = Pauses()
    task = a_task(tmp_path, "Count slowly from 1 to 5, one number per line.")
    assert text_of(await events_of(EchoHarness(pauses), task)) == "1\n2\n3\n4\n5\n"
    assert pauses.seconds == [COUNT_SECONDS] * 5


@pytest.mark.requirement("UHP-34")
async def test_counting_ends_at_once_when_it_is_cancelled(tmp_path: Path) -> None:
    task = a_task(tmp_path, "Count slowly from 1 to 200, one number per line.")
    counting = asyncio.create_task(events_of(EchoHarness(), task))
    await asyncio.sleep(0.05)
    counting.cancel()
    await asyncio.wait({counting}, timeout=10)
    assert counting.cancelled()


async def test_it_writes_many_files(tmp_path: Path) -> None:
    task = a_task(tmp_path, "[files 300]")
    await _answer(task)
    files = sorted(path.name for path in (task.workspace / "files").iterdir())
    assert (len(files), files[0], files[-1]) == (300, "00001.txt", "00300.txt")
    assert (task.workspace / "files" / "00300.txt").read_text() == "File 300.\n"


async def test_it_thinks_and_calls_a_tool(tmp_path: Path) -> None:
    events = await events_of(EchoHarness(Pauses()), a_task(tmp_path, "é[tool]"))
    kinds = [type(event) for event in events[:5]]
    assert kinds == [ReasoningDelta, ReasoningDelta, ToolCall, ToolResult, TextDelta]
    assert events[2] == ToolCall("call_1", "count_characters", '{"text": "\\u00e9[tool]"}')
    assert events[3] == ToolResult("call_1", "7")


async def test_it_is_slow_when_it_should_be(tmp_path: Path) -> None:
    pauses = Pauses()
    await events_of(EchoHarness(pauses), a_task(tmp_path, "[slow 90.5] hello"))
    assert pauses.seconds[0] == 90.5
    pauses = Pauses()
    await events_of(EchoHarness(pauses), a_task(tmp_path, "[slow 999999]"))
    assert pauses.seconds[0] == 3600


async def test_it_fails_after_half_of_its_answer(tmp_path: Path) -> None:
    said, error = await run_until_error(EchoHarness(Pauses()), a_task(tmp_path, "[fail] hello"))
    assert text_of(said) == "[fail]"
    assert isinstance(error, HarnessFailed)
    assert error.code == "harness_error"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("[incomplete] and more", "max_steps"),
        ("[incomplete max_steps]", "max_steps"),
        ("[incomplete timeout]", "timeout"),
        ("[incomplete max_output]", "max_output"),
    ],
)
async def test_it_stops_at_a_budget(tmp_path: Path, words: str, reason: str) -> None:
    said, error = await run_until_error(EchoHarness(Pauses()), a_task(tmp_path, words))
    assert isinstance(error, BudgetSpent)
    assert error.reason == reason
    assert text_of(said) == words[: len(words) // 2]


@pytest.mark.parametrize(
    ("limit", "answer"), [(0, ""), (2, "one  two"), (3, "one  two three"), (4, "one  two three")]
)
async def test_a_limit_of_words_cuts_the_answer(tmp_path: Path, limit: int, answer: str) -> None:
    task = a_task(tmp_path, "one  two three", max_output_tokens=limit)
    said, error = await run_until_error(EchoHarness(Pauses()), task)
    assert text_of(said) == answer
    assert isinstance(error, BudgetSpent) is (limit < 3)


async def test_it_is_unavailable_when_it_should_be(tmp_path: Path) -> None:
    said, error = await run_until_error(EchoHarness(Pauses()), a_task(tmp_path, "[unavailable]"))
    assert said == []
    assert isinstance(error, HarnessUnavailable)


def test_it_is_there_otherwise() -> None:
    assert EchoHarness().is_available()
