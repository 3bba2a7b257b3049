"""The harness without an agent: it answers with what it was asked, always in the same way.

It is there for tests and for those who write clients. Every answer takes at least PACE_SECONDS and
comes in at least four pieces where it has four characters. Words in the input change what it does:

    Reply with exactly: TEXT                                the answer is TEXT
    Create a file named PATH containing exactly: TEXT       writes that file
    Count slowly from 1 to N                                one number a line, five in a second
    [files N]         writes N small files, files/00001.txt and on
    [tool]            thinks, and calls a tool
    [slow SECONDS]    says nothing for so long first
    [fail]            fails after half of the answer
    [incomplete]      stops at a budget after half of the answer; also [incomplete timeout]
                      and [incomplete max_output]
    [unavailable]     cannot start

Otherwise the answer is the input; on a continued session a line tells how many turns were before.
When files came with the task, `digests.txt` holds a line "SHA256  SIZE  PATH" for each. It never
counts tokens, except that an answer over `max_output_tokens` words stops there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from itertools import pairwise

from app.harness.base import (
    BudgetReason,
    BudgetSpent,
    HarnessEvent,
    HarnessFailed,
    HarnessUnavailable,
    ReasoningDelta,
    Task,
    TextDelta,
    ToolCall,
    ToolResult,
)
from app.harness.blocking import run_blocking
from app.harness.layout import opened_path
from app.harness.tree import Draft, NotPlain, fault_of_path, open_file

PACE_SECONDS = 0.65
"""How long an answer takes: the public suite wants to see it come over half a second."""

COUNT_SECONDS = 0.2
"""The pause between two numbers."""

MIN_PIECES = 4
MAX_PIECES = 24

MAX_COUNT = 100_000
MAX_FILES = 100_000
MAX_SLOW_SECONDS = 3600.0

DIGESTS = "digests.txt"

_REPLY = re.compile(r"Reply with exactly: (?P<text>.+)", re.DOTALL)
_CREATE = re.compile(
    r"Create a file named (?P<path>[^\n]+?) containing exactly: (?P<text>.*)", re.DOTALL
)
_COUNT = re.compile(r"Count slowly from 1 to (?P<count>\d{1,9})")
_FILES = re.compile(r"\[files (?P<count>\d{1,9})\]")
_SLOW = re.compile(r"\[slow (?P<seconds>\d{1,6}(\.\d{1,3})?)\]")
_INCOMPLETE = re.compile(r"\[incomplete(?: (?P<reason>max_steps|timeout|max_output))?\]")
_REASONS: dict[str | None, BudgetReason] = {
    None: "max_steps",
    "max_steps": "max_steps",
    "timeout": "timeout",
    "max_output": "max_output",
}

Sleep = Callable[[float], Awaitable[None]]


class EchoHarness:
    """See the module. `sleep` is what it paces its answers with."""

    def __init__(self, sleep: Sleep = asyncio.sleep) -> None:
        self._sleep = sleep

    def is_available(self) -> bool:
        """It always is."""
        return True

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        """Answer `task`; raises what its words ask for."""
        if "[unavailable]" in task.prompt:
            raise HarnessUnavailable("The echo harness is unavailable because it was asked to be.")
        if slow := _SLOW.search(task.prompt):
            await self._sleep(min(float(slow["seconds"]), MAX_SLOW_SECONDS))
        if "[tool]" in task.prompt:
            for event in _tool_events(task):
                yield event
        await run_blocking(_write_artifacts, task)
        if count := _COUNT.search(task.prompt):
            said = self._count(min(int(count["count"]), MAX_COUNT))
        else:
            said = self._say(task)
        async for delta in said:
            yield delta

    async def _count(self, last: int) -> AsyncGenerator[TextDelta, None]:
        for number in range(1, last + 1):
            yield TextDelta(f"{number}\n")
            await self._sleep(COUNT_SECONDS)

    async def _say(self, task: Task) -> AsyncGenerator[TextDelta, None]:
        answer, ending = _answer(task)
        pieces = split(answer)
        for piece in pieces:
            await self._sleep(PACE_SECONDS / len(pieces))
            yield TextDelta(piece)
        if ending is not None:
            raise ending


def _answer(task: Task) -> tuple[str, Exception | None]:
    """What is said, and how it ends other than well."""
    text = _text(task)
    if "[fail]" in task.prompt:
        return text[: len(text) // 2], HarnessFailed("The echo harness failed as it was asked to.")
    if asked := _INCOMPLETE.search(task.prompt):
        return text[: len(text) // 2], BudgetSpent(_REASONS[asked["reason"]])
    words = list(re.finditer(r"\S+", text))
    if task.max_output_tokens is not None and len(words) > task.max_output_tokens:
        end = words[task.max_output_tokens - 1].end() if task.max_output_tokens > 0 else 0
        return text[:end], BudgetSpent("max_output")
    return text, None


def _text(task: Task) -> str:
    if reply := _REPLY.search(task.prompt):
        return reply["text"]
    if create := _CREATE.search(task.prompt):
        return f"Created {create['path']}."
    if task.history:
        return f"{task.prompt}\n\nTurns before this one: {len(task.history)}."
    return task.prompt or "(nothing)"


def split(text: str) -> list[str]:
    """`text` in pieces of equal length: MIN_PIECES to MAX_PIECES, fewer for fewer characters."""
    count = min(max(MIN_PIECES, len(text) // 8), MAX_PIECES, max(len(text), 1))
    ends = [len(text) * number // count for number in range(count + 1)]
    return [text[begin:end] for begin, end in pairwise(ends)]


def _tool_events(task: Task) -> Iterator[HarnessEvent]:
    yield ReasoningDelta("The input asks for a tool. ")
    yield ReasoningDelta("Counting its characters is one.")
    yield ToolCall("call_1", "count_characters", json.dumps({"text": task.prompt}))
    yield ToolResult("call_1", str(len(task.prompt)))


def _write_artifacts(task: Task) -> None:
    with opened_path(task.workspace) as root:
        if task.inputs:
            _write(root, DIGESTS, "".join(_digest_lines(root, task)))
        if create := _CREATE.search(task.prompt):
            _create(root, create["path"], create["text"])
        if files := _FILES.search(task.prompt):
            for number in range(1, min(int(files["count"]), MAX_FILES) + 1):
                _write(root, f"files/{number:05}.txt", f"File {number}.\n")


def _create(root: int, path: str, text: str) -> None:
    if (fault := fault_of_path(path)) is not None:
        raise HarnessFailed(f"The file cannot be created: {fault}.")
    try:
        _write(root, path, text)
    except OSError as error:
        raise HarnessFailed(f"The file cannot be created: {error.strerror}.") from None


def _write(root: int, path: str, text: str) -> None:
    draft = Draft(path)
    try:
        draft.open(root)
        draft.write(text.encode("utf-8", "replace"))
        draft.keep()
    finally:
        draft.discard()


def _digest_lines(root: int, task: Task) -> Iterator[str]:
    for file in task.inputs:
        try:
            descriptor = open_file(root, file.path)
        except (OSError, NotPlain):
            yield f"(cannot be read)  {file.path}\n"
            continue
        with os.fdopen(descriptor, "rb") as opened:
            size = os.fstat(descriptor).st_size
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        yield f"{digest}  {size}  {file.path}\n"
