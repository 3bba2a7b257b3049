"""What a harness is: it runs one task in one workspace and tells what happens. It knows no HTTP.

A harness yields events in the order in which things happen and ends by returning. It ends a task
that did not complete by raising:

    HarnessFailed      it ran and could not do the work; what it said and wrote so far is kept
    BudgetSpent        a limit of the task stopped it; the result is incomplete, not failed
    HarnessUnavailable it could not start at all

Cancelling the coroutine that consumes the events cancels the task: a harness then ends its
processes and lets the cancellation through.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that came with the task; its bytes lie at `path`, relative to the workspace."""

    path: str
    filename: str
    media_type: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One earlier task of the session, as text."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of work."""

    response_id: str
    session_id: str
    model: str
    prompt: str
    workspace: Path
    instructions: str | None = None
    history: tuple[Turn, ...] = ()
    inputs: tuple[InputFile, ...] = ()
    max_step: int | None = None
    max_output_tokens: int | None = None
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next fragment of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next fragment of the summarised thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the agent invoked; `arguments` is a JSON string."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the tool gave back, as text."""

    call_id: str
    output: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, when the harness can account for them; never a made-up zero."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that went wrong and did not end the task."""

    code: str
    message: str


HarnessEvent = TextDelta | ReasoningDelta | ToolCall | ToolResult | Usage | Notice


class HarnessFailed(Exception):
    """The harness ran and could not complete the work; `message` is safe to show."""

    def __init__(self, message: str, code: str = "harness_error") -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class HarnessUnavailable(Exception):
    """The harness cannot be started here now; `message` is safe to show."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


BudgetReason = Literal["max_steps", "timeout", "max_output"]


class BudgetSpent(Exception):
    """A limit stopped the work; `reason` goes to `incomplete_details`."""

    def __init__(self, reason: BudgetReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Harness(Protocol):
    """One configured harness."""

    def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        """Do the work; see the module for how it ends. Closing the generator ends it too."""
        ...


@dataclass(frozen=True, slots=True)
class HarnessDescription:
    """What the API tells of a configured harness."""

    id: str
    name: str
    base: str
    models: tuple[str, ...]
    default_model: str
    created_at_ms: int
    timeout_seconds: int | None = None
    disabled_tools: tuple[str, ...] = field(default=())
