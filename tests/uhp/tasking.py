"""The task surface on a real store, with harnesses that do what a test tells them to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.harness.base import (
    Harness,
    HarnessDescription,
    HarnessEvent,
    Task,
    TextDelta,
)
from app.harness.echo import EchoHarness
from app.harness.registry import ConfiguredHarness
from app.harness.workspace import Workspaces
from app.store import ContentStore, migrate
from app.uhp.application import UhpApplication
from app.uhp.engine import Engine
from app.uhp.previews import Previews
from app.uhp.routes import all_routes
from app.uhp.services import Services
from tests.http.messages import Sent
from tests.uhp.calling import application_of, call, services_on, settings_for
from tests.uhp.schema import validate

HARNESS = "chrn_puppet"
OTHER_HARNESS = "chrn_other"


class Puppet:
    """A fake harness: it says what it is told, writes what it is told, and ends as it is told."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.stubborn: asyncio.Event | None = None
        self._told: asyncio.Queue[HarnessEvent | Exception | None] = asyncio.Queue()

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        self.tasks.append(task)
        self.started.set()
        try:
            while (told := await self._told.get()) is not None:
                if isinstance(told, Exception):
                    raise told
                yield told
        except asyncio.CancelledError:
            self.cancelled.set()
            if self.stubborn is not None:
                await self.stubborn.wait()
            raise

    def say(self, text: str) -> None:
        self._told.put_nowait(TextDelta(text))

    def tell(self, event: HarnessEvent | Exception) -> None:
        self._told.put_nowait(event)

    def end(self) -> None:
        self._told.put_nowait(None)

    def write(self, path: str, data: bytes) -> None:
        """Leave a file in the workspace of the newest task."""
        target = self.tasks[-1].workspace / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


async def at_once(_: float) -> None:
    """Instead of the pauses of the echo harness."""
    await asyncio.sleep(0)


def quick_echo() -> EchoHarness:
    """The echo harness without its pauses."""
    return EchoHarness(at_once)


def configured(
    harness: Harness, harness_id: str = HARNESS, *, is_available: Callable[[], bool] = lambda: True
) -> ConfiguredHarness:
    """A harness as the configuration would have it."""
    description = HarnessDescription(
        id=harness_id,
        name=harness_id,
        base="echo",
        models=("default", "other"),
        default_model="default",
        created_at_ms=1_700_000_000_000,
        timeout_seconds=3600,
    )
    return ConfiguredHarness(description, harness, is_available)


@dataclass(frozen=True, slots=True)
class Desk:
    """One process: its routes, its engine, its store."""

    app: UhpApplication
    services: Services
    engine: Engine
    store: ContentStore

    async def call(self, method: str, target: str, body: Any = None, **more: Any) -> Sent:
        """One request; `body` is sent as JSON."""
        chunks = () if body is None else (json.dumps(body).encode(),)
        return await call(self.app, method, target, *chunks, **more)

    async def run(self, prompt: Any = "hello", **more: Any) -> dict[str, Any]:
        """A task to its end; the response."""
        sent = await self.call("POST", "/v1/responses", {"input": prompt, **more})
        assert sent.status == 200, sent.body
        validate("Response", sent.json)
        response: dict[str, Any] = sent.json
        return response

    async def background(self, prompt: str = "hello", **more: Any) -> dict[str, Any]:
        """A task that goes on; the response as it begins."""
        return await self.run(prompt, background=True, **more)

    async def read(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response as it stands."""
        sent = await self.call("GET", f"/v1/responses/{response['id']}")
        assert sent.status == 200, sent.body
        validate("Response", sent.json)
        current: dict[str, Any] = sent.json
        return current

    async def finished(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response once its task has ended."""
        if (run := self.engine._runs.get(response["id"])) is not None:
            await run.finished.wait()
        return await self.read(response)

    async def files(self, response: dict[str, Any]) -> list[dict[str, Any]]:
        """What the session has."""
        sent = await self.call("GET", f"/v1/sessions/{session_of(response)}/files")
        found: list[dict[str, Any]] = sent.json["files"]
        return found


def session_of(response: dict[str, Any]) -> str:
    session_id: str = response["metadata"]["session_id"]
    return session_id


def text_of(response: dict[str, Any]) -> str:
    """What the assistant said."""
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def events_of(sent: Sent) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the schema and its own frame."""
    assert sent.status == 200, sent.body
    assert sent.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    events = []
    for frame in sent.body.decode("ascii").split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        lines = dict(line.split(": ", 1) for line in frame.split("\n"))
        event = json.loads(lines["data"])
        assert (lines["id"], lines["event"]) == (str(event["sequence_number"]), event["type"])
        validate("Event", event)
        events.append(event)
    return events


@asynccontextmanager
async def desk_in(
    data_dir: Path, *harnesses: ConfiguredHarness, started: bool = True, **changes: Any
) -> AsyncIterator[Desk]:
    """A process on the store in `data_dir`; several may share one."""
    settings = settings_for(data_dir, public_url="https://files.example", **changes)
    migrate(settings)
    async with AsyncExitStack() as opened:
        store = await ContentStore.start(settings)
        opened.push_async_callback(store.close)
        workspaces = Workspaces.of(settings)
        await workspaces.start()
        engine = Engine(settings, store, workspaces)
        previews = Previews(settings, store.sessions.exists)
        opened.push_async_callback(previews.close)
        services = replace(
            services_on(settings, store),
            harnesses={each.description.id: each for each in harnesses},
            workspaces=workspaces,
            engine=engine,
            previews=previews,
        )
        if started:
            await engine.start()
        opened.push_async_callback(engine.close)
        yield Desk(application_of(all_routes(services), settings), services, engine, store)
