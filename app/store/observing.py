"""Watching what the store asks of its database and of its blob store: how long, and what fails.

What is observed stays as it is: these are wrappers around it, and there are none where nobody
observes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, TypeVar

from sqlalchemy import Connection

from app import telemetry
from app.errors import Exhausted, Refusal, Unavailable
from app.store.blobs import Blobs, Stored
from app.store.database import Database
from app.store.database_errors import DATABASE_ERRORS, refusal_of

T = TypeVar("T")

Engine = Literal["database", "blobs"]


class Observer(Protocol):
    """Who wants to know."""

    def operation(self, engine: Engine, name: str, seconds: float, failure: str | None) -> None:
        """An operation has ended; `failure` is the code of what kept it from being done."""
        ...


class observed:  # noqa: N801 - a context manager that reads as a verb
    """Tell of the block. A refusal that is an answer, such as NotFound, is no failure."""

    __slots__ = ("_began", "_engine", "_name", "_observer", "_span")

    def __init__(self, observer: Observer, engine: Engine, name: str) -> None:
        self._observer = observer
        self._engine: Engine = engine
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        self._span = telemetry.span(f"{self._engine} {self._name}")
        self._span.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        failure = error.code if isinstance(error, Unavailable | Exhausted) else None
        seconds = time.perf_counter() - self._began
        self._observer.operation(self._engine, self._name, seconds, failure)


class ObservedDatabase:
    """See Database. A `read` includes its wait for a connection."""

    def __init__(self, database: Database, observer: Observer) -> None:
        self._database = database
        self._observer = observer

    @property
    def parallel(self) -> int:
        """See Database."""
        return self._database.parallel

    def write(self, work: Callable[[Connection], T], *, alone: bool) -> asyncio.Future[T]:
        """See Database."""
        running = self._database.write(work, alone=alone)
        running.add_done_callback(partial(self._written, time.perf_counter()))
        return running

    async def read(self, query: Callable[[Connection], T]) -> T:
        """See Database."""
        with observed(self._observer, "database", "read"):
            return await self._database.read(query)

    async def close(self) -> None:
        """See Database."""
        await self._database.close()

    def _written(self, began: float, written: asyncio.Future[T]) -> None:
        seconds = time.perf_counter() - began
        error = None if written.cancelled() else written.exception()
        self._observer.operation("database", "write", seconds, _code_of(error))


def _code_of(error: BaseException | None) -> str | None:
    if isinstance(error, Refusal):
        return error.code
    return refusal_of(error).code if isinstance(error, DATABASE_ERRORS) else None


class ObservedBlobs:
    """See Blobs. Of an `open`, the time until the first byte can be read."""

    def __init__(self, blobs: Blobs, observer: Observer) -> None:
        self._blobs = blobs
        self._observer = observer

    async def publish(self, staged: Path, location: str) -> None:
        """See Blobs."""
        with observed(self._observer, "blobs", "publish"):
            await self._blobs.publish(staged, location)

    async def size(self, location: str) -> int | None:
        """See Blobs."""
        with observed(self._observer, "blobs", "size"):
            return await self._blobs.size(location)

    @asynccontextmanager
    async def open(
        self, location: str, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """See Blobs."""
        async with AsyncExitStack() as opened:
            with observed(self._observer, "blobs", "open"):
                opening = self._blobs.open(location, start, stop)
                chunks = await opened.enter_async_context(opening)
            yield chunks

    async def delete(self, location: str) -> None:
        """See Blobs."""
        with observed(self._observer, "blobs", "delete"):
            await self._blobs.delete(location)

    def local_path(self, location: str) -> Path | None:
        """See Blobs."""
        return self._blobs.local_path(location)

    async def link(
        self, location: str, *, media_type: str, disposition: str, seconds: float
    ) -> str | None:
        """See Blobs."""
        with observed(self._observer, "blobs", "link"):
            return await self._blobs.link(
                location, media_type=media_type, disposition=disposition, seconds=seconds
            )

    def stored(self) -> AsyncIterator[Stored]:
        """See Blobs."""
        return self._blobs.stored()

    async def abort_unfinished(self, seconds: float) -> int:
        """See Blobs."""
        return await self._blobs.abort_unfinished(seconds)

    async def probe(self) -> None:
        """See Blobs."""
        with observed(self._observer, "blobs", "probe"):
            await self._blobs.probe()
