"""The folder that a session's tasks work in: made ready, compared, collected, destroyed.

What an agent leaves there is hostile: everything is read through `tree`, which follows nothing.
An artifact is a regular file that is new or has other content than before the task. Whatever
else is there — links, devices, names that cannot be shown — is reported and left alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mimetypes
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from app.harness.base import InputFile
from app.harness.blocking import run_blocking
from app.harness.filling import Filling, OpenStored
from app.harness.layout import Layout, opened_path
from app.harness.processes import kill_strays
from app.harness.survey import (
    MAX_ENTRIES,
    Survey,
    Unreadable,
    bounded,
    reason_of,
    shown,
    survey,
)
from app.harness.tree import (
    GONE_PREFIX,
    Entry,
    NotPlain,
    Signature,
    gone_name,
    open_file,
    remove_tree,
)
from app.settings import Settings
from app.store.disk import disk_border
from app.store.files import FileRecord

__all__ = ["ChangedWhileRead", "Found", "Unreadable", "Workspace", "Workspaces", "media_type_of"]

CHUNK = 1024 * 1024
"""Bytes that are read from a file at a time."""

# A file can change twice within one tick of the kernel's clock and look the same. One that
# changed so shortly before the survey is compared by content (the tick is at most 10 ms).
_TICK_NS = 50_000_000

_DESTROY_ATTEMPTS = 50
_DESTROY_PAUSE_SECONDS = 0.1

_UNKNOWN_TYPE = "application/octet-stream"
_CODING_TYPES = {
    "gzip": "application/gzip",
    "bzip2": "application/x-bzip2",
    "xz": "application/x-xz",
    "br": "application/x-brotli",
    "compress": "application/x-compress",
}

# Not the system's own table: the same path has the same type on every machine.
_TYPES = mimetypes.MimeTypes()
_TYPES.add_type("text/markdown", ".md")

Kept = TypeVar("Kept")
log = logging.getLogger("consignee.harness")


class ChangedWhileRead(Exception):
    """A file changed while it was read; what was read of it is no version of it."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a file lies, and what may not have changed when it is opened."""

    layout: Layout
    path: str
    names: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is new or changed. `media_type` is a guess from the path; `size` in bytes."""

    path: str
    media_type: str
    size: int
    origin: Origin = field(repr=False)

    async def read(
        self, keep: Callable[[AsyncIterator[bytes]], Awaitable[Kept]]
    ) -> Kept | Unreadable:
        """Hand the bytes to `keep`, once more if the file changed meanwhile; what that returned.

        `keep` must keep nothing when the iterator raises. Its own errors pass through, but an
        OSError counts as one of the file.
        """
        for _ in range(2):
            try:
                async with self.opened() as content:
                    return await keep(content)
            except ChangedWhileRead:
                continue
            except (NotPlain, OSError) as error:
                return Unreadable(shown(self.path), f"it cannot be read: {reason_of(error)}")
        return Unreadable(shown(self.path), "it changes while it is read")

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes in pieces of CHUNK.

        The iterator raises ChangedWhileRead for a file that was not left alone, and so does
        entering, which raises NotPlain or OSError, too, when it is not what it was any more.
        """
        reading = _Reading(self.origin)
        try:
            await run_blocking(reading.open)
            yield reading.content()
        finally:
            reading.close()


class _Reading:
    """One file, open for reading; closing is legal in every state."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._file = -1

    def open(self) -> None:
        """Open the file and read its first piece: for most files that is all of it."""
        origin = self._origin
        with origin.layout.opened_files() as files:
            self._file = open_file(files, origin.path)
        status = os.fstat(self._file)
        if status.st_nlink > origin.names:
            raise NotPlain("it has a further name outside")
        if status.st_size > origin.max_bytes:
            raise NotPlain(f"it is larger than {origin.max_bytes} bytes")
        self._before = Signature.of(status)
        self._left = status.st_size
        self._first = self._read()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    async def content(self) -> AsyncIterator[bytes]:
        if self._first:
            yield self._first
        while self._left:
            yield await run_blocking(self._read)

    def _read(self) -> bytes:
        # One byte more than there should be: a file that grows is seen, and never read for ever.
        piece = os.read(self._file, min(CHUNK, self._left + 1))
        self._left -= len(piece)
        is_cut = not piece and self._left > 0
        is_over = self._left <= 0
        if is_cut or (is_over and Signature.of(os.fstat(self._file)) != self._before):
            raise ChangedWhileRead
        return piece


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder that is ready for one task; `inputs` are the files that came with it."""

    layout: Layout
    inputs: tuple[InputFile, ...]
    _before: Survey = field(repr=False)
    _digests: dict[str, str] = field(repr=False)
    _max_file_bytes: int = field(repr=False)
    _max_files: int = field(repr=False)

    @property
    def path(self) -> Path:
        """The folder that the harness works in."""
        return self.layout.files

    async def collect(self) -> AsyncGenerator[Found | Unreadable, None]:
        """What the task made or changed, by path; then what it left that cannot be taken.

        The harness must have ended: a workspace is collected while nothing writes to it. All of
        the listing happens before the first file is yielded.
        """
        after = await survey(self.layout)
        reports = list(after.faults)
        found = 0
        for path, entry in sorted(after.files.items()):
            if not await self._is_changed(path, entry):
                continue
            size = entry.signature.size
            if size > self._max_file_bytes:
                reason = f"it is larger than {self._max_file_bytes} bytes"
                reports.append(Unreadable(shown(path), reason))
                continue
            found += 1
            if found <= self._max_files:
                origin = Origin(self.layout, path, entry.names, self._max_file_bytes)
                yield Found(path, media_type_of(path), size, origin)
        if found > self._max_files:
            reason = f"{found - self._max_files} files over the limit of {self._max_files} a task"
            reports.append(Unreadable(".", reason))
        for report in bounded(reports):
            yield report

    async def _is_changed(self, path: str, entry: Entry) -> bool:
        before = self._before.files.get(path)
        if before is None:
            return True
        was_settled = self._before.taken_ns - before.signature.changed_ns > _TICK_NS
        if entry.signature == before.signature and was_settled:
            return False
        if entry.signature.size != before.signature.size or path not in self._digests:
            # Without a digest of before, an equal signature is all that there is to go by.
            return entry.signature != before.signature
        return await run_blocking(_digest, self.layout, path) != self._digests[path]


def _digest(layout: Layout, path: str) -> str | None:
    """SHA-256 of a file as 64 lowercase hex; None when it cannot be read."""
    with (
        suppress(OSError, NotPlain),
        layout.opened_files() as files,
        os.fdopen(open_file(files, path), "rb") as file,
    ):
        return hashlib.file_digest(file, "sha256").hexdigest()
    return None


def media_type_of(path: str) -> str:
    """A guess from the extension; what is packed has the type of its packing."""
    guessed, coding = _TYPES.guess_type(path)
    if coding is not None:
        return _CODING_TYPES.get(coding, _UNKNOWN_TYPE)
    return guessed or _UNKNOWN_TYPE


@dataclass(frozen=True, slots=True)
class Turn:
    """The task that a workspace is made ready for, and the one before it in its session."""

    response_id: str
    before: str | None


class Workspaces:
    """The workspaces of this machine, below `folder`.

    Where a session has none here, or the task before worked elsewhere, it is made anew from the
    session's current artifacts. Errors of the disk become Exhausted or Unavailable.
    """

    def __init__(self, folder: Path, *, max_file_bytes: int, max_files: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._max_files = max_files

    @classmethod
    def of(cls, settings: Settings) -> Workspaces:
        """The workspaces that `settings` describe."""
        return cls(
            settings.data_dir / "workspaces",
            max_file_bytes=settings.max_upload_bytes,
            max_files=settings.max_session_files or MAX_ENTRIES,
        )

    async def start(self) -> None:
        """Make the folder, and finish the removals that an earlier process did not."""
        with disk_border():
            await run_blocking(self._make)
            for name in await run_blocking(os.listdir, self._folder):
                if name.startswith(GONE_PREFIX):
                    await run_blocking(self._remove, name, ())

    def _make(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    async def session_ids(self) -> list[str]:
        """The sessions that have a workspace here; for sweeping those that are gone."""
        with disk_border():
            names = await run_blocking(os.listdir, self._folder)
        return sorted(name for name in names if not name.startswith(GONE_PREFIX))

    async def prepare(
        self,
        session_id: str,
        current: Sequence[FileRecord],
        inputs: Sequence[FileRecord],
        open_stored: OpenStored,
        turn: Turn | None = None,
    ) -> Workspace:
        """Make the session's workspace ready for a task that comes with `inputs`.

        `current` are the session's current artifacts, oldest first. Those that this workspace
        has not seen are written; what an agent has deleted since it saw them stays deleted. A
        workspace that was not the one of the task before `turn` is destroyed first. Raises
        NotFound for what is no session id, Exhausted, Unavailable.
        """
        filling = Filling(Layout.of_session(self._folder, session_id), open_stored)
        with disk_border():
            if turn is not None:
                await self._take_turn(session_id, filling.layout, turn)
            await run_blocking(filling.layout.make)
            await filling.take_in_artifacts(current)
            placed = [await filling.take_in_input(record) for record in inputs]
            before = await survey(filling.layout)
        digests = {record.path: record.sha256 for record in current}
        digests |= {file.path: file.sha256 for file in placed}
        return Workspace(
            filling.layout, tuple(placed), before, digests, self._max_file_bytes, self._max_files
        )

    async def _take_turn(self, session_id: str, layout: Layout, turn: Turn) -> None:
        """Give up a workspace that a task elsewhere has left behind, and note the new task."""
        is_there = await run_blocking(layout.root.exists)
        if is_there and await run_blocking(layout.read_newest) != turn.before:
            log.info("a workspace is made anew: the task before worked elsewhere")
            await self.destroy(session_id)
        await run_blocking(layout.make)
        await run_blocking(layout.write_newest, turn.response_id)

    async def destroy(self, session_id: str) -> None:
        """Remove the session's workspace and end what still runs in it; legal twice.

        From the first moment it is not there under its name any more. What cannot be removed is
        logged and left for the next start. Raises NotFound for what is no session id.
        """
        layout = Layout.of_session(self._folder, session_id)
        left: list[str] = []
        for _ in range(_DESTROY_ATTEMPTS):
            killed = await run_blocking(kill_strays, layout.task_file)
            left = await run_blocking(self._remove, session_id, left)
            if not left and not killed:
                return
            # What was killed may have begun something that was not there yet to be seen.
            await asyncio.sleep(_DESTROY_PAUSE_SECONDS if left else 0)
        log.warning("A workspace cannot be removed: something still writes into it.")

    def _remove(self, name: str, left: Iterable[str]) -> list[str]:
        """Take the folder `name` away, and remove it with `left`; what is still there."""
        try:
            with opened_path(self._folder) as base:
                gone = _taken_away(base, name)
                return [rest for each in (*left, *gone) for rest in remove_tree(base, each)]
        except OSError as error:
            log.warning("A workspace cannot be removed: %s", reason_of(error))
            return []


def _taken_away(base: int, name: str) -> list[str]:
    gone = gone_name()
    try:
        os.rename(name, gone, src_dir_fd=base, dst_dir_fd=base)
    except FileNotFoundError:
        return []
    return [gone]
