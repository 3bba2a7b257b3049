"""What the tests of harnesses share: a task in a workspace of its own, and running it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from app.harness.base import HarnessEvent, Task, TextDelta
from app.harness.layout import Layout
from app.harness.workspace import Workspaces
from app.store.files import FileRecord

SESSION = "hsess_1"


class Running(Protocol):
    def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]: ...


def a_task(folder: Path, prompt: str = "", **fields: Any) -> Task:
    """A task in a fresh workspace below `folder`."""
    layout = Layout.of_session(folder, SESSION)
    layout.make()
    values = {"response_id": "resp_1", "session_id": SESSION, "model": "default"} | fields
    return Task(prompt=prompt, workspace=layout.files, **values)


async def events_of(harness: Running, task: Task) -> list[HarnessEvent]:
    async with aclosing(harness.run(task)) as events:
        return [event async for event in events]


async def run_until_error(
    harness: Running, task: Task
) -> tuple[list[HarnessEvent], Exception | None]:
    """What it said, and what it raised at the end."""
    said: list[HarnessEvent] = []
    try:
        async with aclosing(harness.run(task)) as events:
            async for event in events:
                said.append(event)  # noqa: PERF401 - what came before an error counts
    except Exception as error:
        return said, error
    return said, None


def text_of(events: list[HarnessEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


class Stored:
    """Stored files, in memory."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def add(self, path: str, body: bytes, *, media_type: str = "text/plain") -> FileRecord:
        number = len(self._bodies) + 1
        record = FileRecord(
            id=f"file_{number}",
            scope="a",
            principal="a",
            filename=path.rsplit("/", 1)[-1],
            path=path,
            media_type=media_type,
            size=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
            created_at=0,
            container_id=None,
            session_id=None,
            response_id=None,
            kind="upload",
            purpose=None,
            current=True,
            expires_at=None,
            position=number,
        )
        self._bodies[record.id] = body
        return record

    def open(self, record: FileRecord) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        return self._opened(self._bodies[record.id])

    @asynccontextmanager
    async def _opened(self, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        yield pieces_of(body)


async def pieces_of(body: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def workspaces_in(
    folder: Path, *, max_file_bytes: int = 10_000_000, max_files: int = 1000
) -> Workspaces:
    return Workspaces(folder, max_file_bytes=max_file_bytes, max_files=max_files)
