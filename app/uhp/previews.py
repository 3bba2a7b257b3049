"""Previews: a stored document as a PDF, made once and kept for as long as its session.

    previews/
      jobs/<random>/                          one conversion that runs
      <session id>/                           goes with the session
        <sha256>.<extension>.<sha256>.pdf     digest and format of the source, digest of the PDF

What a preview may be seen by is decided before anything here is asked: whoever may not have the
file never gets as far as its preview. Previews are kept by session, so that no time tells one
scope that another one has the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiofiles

from app import telemetry
from app.errors import Unavailable
from app.store.threads import uninterrupted
from app.uhp.converter import ConversionLimits, Converter
from app.uhp.preview_formats import (
    Format,
    NotConvertible,
    format_of,
    is_pdf,
    looks_like_pdf,
    recognized,
)

if TYPE_CHECKING:
    from app.http.downloads import Representation
    from app.settings import Settings

FAILURES_KEPT = 1000
FAILURE_SECONDS = 600.0
"""How long a file that did not convert is not tried again: long enough that asking again costs
nothing, short enough that a converter that was repaired gets its chance."""

JOB_SLACK_SECONDS = 300.0
"""A job's folder that is older than any job, by so much, is of a process that is gone."""

_KEPT = re.compile(r"(?P<key>[0-9a-f]{64}\.[a-z]+)\.(?P<digest>[0-9a-f]{64})\.pdf")
_SESSION = re.compile(r"hsess_[A-Za-z0-9]{1,64}")

log = logging.getLogger("consignee.previews")


@dataclass(frozen=True, slots=True)
class Kept:
    """A finished preview: a file of `size` bytes with this `sha256` (64 lowercase hex)."""

    path: Path
    size: int
    sha256: str


Place = tuple[str, str]
"""A session, and the key of a preview in it."""


class Interrupted(Exception):
    """The conversion was ended, not by who waits for it: with its session, or with the server."""


class _Flight:
    """One conversion that runs, and how many wait for it."""

    def __init__(self, place: Place, work: Coroutine[Any, Any, Kept]) -> None:
        self.place = place
        self.task = asyncio.create_task(work)
        self.waiting = 0


class Previews:
    """Makes and keeps previews. `session_exists` tells whose sessions are gone."""

    def __init__(
        self,
        settings: Settings,
        session_exists: Callable[[str], Awaitable[bool]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = settings.previews_dir
        self._wait_seconds = settings.preview_wait_seconds
        self._cache_bytes = int(settings.preview_cache_bytes)
        self._limits = ConversionLimits(
            seconds=settings.preview_timeout_seconds,
            memory_bytes=int(settings.preview_memory_bytes),
            source_bytes=int(settings.max_preview_source_bytes),
            output_bytes=int(settings.max_preview_bytes),
        )
        self._converter = Converter(_command(settings.preview_command), self._limits)
        self._session_exists = session_exists
        self._clock = clock
        self._slots = asyncio.Semaphore(settings.preview_jobs)
        self._joinable: dict[Place, _Flight] = {}
        self._flights: set[_Flight] = set()
        self._failures: OrderedDict[Place, tuple[float, NotConvertible]] = OrderedDict()

    @property
    def available(self) -> bool:
        """Whether there is a converter now."""
        return self._converter.command() is not None

    async def kept(self, session_id: str, source: Representation) -> Kept | None:
        """The finished preview of a file, None when it would have to be made."""
        wanted = format_of(source.filename, source.media_type)
        return await asyncio.to_thread(self._find, session_id, _key(source, wanted))

    async def make(self, session_id: str, source: Representation) -> Kept:
        """The preview of a file of a session, made if need be.

        Several that ask for one at the same time share one conversion, which ends with the last
        of them that goes. Raises NotConvertible, Interrupted, and Unavailable when its turn does
        not come.
        """
        wanted = format_of(source.filename, source.media_type)
        place = (session_id, _key(source, wanted))
        self._refuse_known(place)
        found = await asyncio.to_thread(self._find, *place)
        return found or await self._shared(place, partial(self._convert, place, source, wanted))

    async def forget(self, session_id: str) -> None:
        """Take away the previews of a session that is gone, and end what is made for it."""
        await _ended(f.task for f in self._flights if f.place[0] == session_id)
        for place in [place for place in self._failures if place[0] == session_id]:
            del self._failures[place]
        await asyncio.to_thread(shutil.rmtree, self._folder(session_id), ignore_errors=True)

    async def sweep(self) -> None:
        """Take away the previews of sessions that are gone, and what dead processes left."""
        for name in await asyncio.to_thread(self._sessions):
            if not await self._session_exists(name):
                await self.forget(name)
        await asyncio.to_thread(self._tidy)

    async def close(self) -> None:
        """End every conversion that runs."""
        await _ended(flight.task for flight in self._flights)

    async def _shared(self, place: Place, work: Callable[[], Coroutine[Any, Any, Kept]]) -> Kept:
        flight = self._joinable.get(place) or self._launched(_Flight(place, work()))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            # Either whoever waits is cancelled, or what it waits for.
            if flight.task.cancelled() and not _is_cancelled():
                raise Interrupted from None
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._close_to_others(flight)
                flight.task.cancel()

    def _launched(self, flight: _Flight) -> _Flight:
        self._joinable[flight.place] = flight
        self._flights.add(flight)
        flight.task.add_done_callback(partial(self._landed, flight))
        return flight

    def _landed(self, flight: _Flight, task: asyncio.Task[Kept]) -> None:
        self._flights.discard(flight)
        self._close_to_others(flight)
        if not task.cancelled():
            self._note_failure(flight.place, task.exception())

    def _close_to_others(self, flight: _Flight) -> None:
        if self._joinable.get(flight.place) is flight:
            del self._joinable[flight.place]

    def _note_failure(self, place: Place, failure: BaseException | None) -> None:
        if isinstance(failure, NotConvertible) and failure.lasting:
            self._failures[place] = (self._clock() + FAILURE_SECONDS, failure)
            while len(self._failures) > FAILURES_KEPT:
                self._failures.popitem(last=False)

    def _refuse_known(self, place: Place) -> None:
        until, failure = self._failures.get(place, (0.0, None))
        if failure is None:
            return
        if self._clock() < until:
            raise NotConvertible(failure.reason, failure.message)
        del self._failures[place]

    async def _convert(self, place: Place, source: Representation, wanted: Format | None) -> Kept:
        if source.size > self._limits.source_bytes:
            limit = self._limits.source_bytes
            raise NotConvertible(
                "too_large", f"Files of more than {limit} bytes are not converted."
            )
        async with self._turn():
            folder = self._root / "jobs" / secrets.token_hex(16)
            try:
                with telemetry.span("preview"):
                    return await self._job(folder, place, source, wanted)
            finally:
                await uninterrupted(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _job(
        self,
        folder: Path,
        place: Place,
        source: Representation,
        wanted: Format | None,
    ) -> Kept:
        received = folder / "received"
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True)
        await _copy(source, received)
        checked = await uninterrupted(asyncio.to_thread(_checked, received, wanted))
        made = await self._converter.convert(folder, *checked)
        return await uninterrupted(asyncio.to_thread(self._keep, place, made))

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._slots.acquire()
        except TimeoutError:
            raise Unavailable(
                "preview_busy", "Too many previews are being made; try again.", retry_after=10
            ) from None
        try:
            yield
        finally:
            self._slots.release()

    def _folder(self, session_id: str) -> Path:
        """The only place where a session's folder is named; ids of any other form are refused."""
        if not _SESSION.fullmatch(session_id):
            raise ValueError("not the id of a session")
        return self._root / session_id

    def _find(self, session_id: str, key: str) -> Kept | None:
        for path in _entries(self._folder(session_id)):
            match = _KEPT.fullmatch(path.name)
            if match is not None and match["key"] == key:
                with _gone_is_none():
                    path.touch()
                    return Kept(path, path.stat().st_size, match["digest"])
        return None

    def _keep(self, place: Place, made: Path) -> Kept:
        session_id, key = place
        with made.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        folder = self._folder(session_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.chmod(0o600)
        path = made.rename(folder / f"{key}.{digest}.pdf")
        self._make_room(besides=path)
        return Kept(path, path.stat().st_size, digest)

    def _make_room(self, *, besides: Path) -> None:
        """Remove what was used least recently until the rest fits; never what was just made."""
        found = []
        for path in (p for name in self._sessions() for p in _entries(self._root / name)):
            with _gone_is_none():
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._cache_bytes:
                return
            if path != besides:
                path.unlink(missing_ok=True)
                total -= size

    def _sessions(self) -> list[str]:
        return [path.name for path in _entries(self._root) if _SESSION.fullmatch(path.name)]

    def _tidy(self) -> None:
        oldest = time.time() - self._limits.seconds - JOB_SLACK_SECONDS
        for job in _entries(self._root / "jobs"):
            with _gone_is_none():
                if job.stat().st_mtime < oldest:
                    shutil.rmtree(job, ignore_errors=True)


async def check_pdf(source: Representation) -> None:
    """Raise NotConvertible unless the file that is called a PDF begins like one."""
    async with source.open(0, min(source.size, 8)) as chunks:
        head = b"".join([chunk async for chunk in chunks])
    if not looks_like_pdf(head):
        raise NotConvertible("content_mismatch", "The content of this file is not a PDF.")


def is_pdf_source(source: Representation) -> bool:
    """Whether a file claims to be a PDF, and so is its own preview."""
    return is_pdf(format_of(source.filename, source.media_type))


def has_previews(source: Representation) -> bool:
    """Whether a file may have a preview, as far as name and type tell."""
    known = format_of(source.filename, source.media_type) is not None
    return known or source.media_type.startswith("application/octet-stream")


async def _ended(tasks: Iterable[asyncio.Task[Kept]]) -> None:
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _command(setting: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    return (setting,) if isinstance(setting, str) else setting


def _key(source: Representation, wanted: Format | None) -> str:
    extension = wanted.extension if wanted is not None else ".unknown"
    return source.sha256 + extension


async def _copy(source: Representation, target: Path) -> None:
    async with source.open(0, source.size) as chunks, aiofiles.open(target, "xb") as file:
        async for chunk in chunks:
            await uninterrupted(file.write(chunk))


def _checked(received: Path, wanted: Format | None) -> tuple[Path, Format]:
    """The source under its fixed name, once its content is what it claims to be."""
    settled = wanted or recognized(received)
    if settled is None:
        raise NotConvertible("unsupported_format", "There are no previews of this kind of file.")
    settled.check(received)
    return received.rename(received.with_name("input" + settled.extension)), settled


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


@contextmanager
def _gone_is_none() -> Iterator[None]:
    """What another process takes away meanwhile is simply not there."""
    try:
        yield
    except FileNotFoundError:
        return
