"""Bodies on their way in, and the folders that own them.

    staging/
      .guard            locked while an owner folder is made or a dead one is taken away
      .place            what tells this folder from those of other machines: 16 hex
      <owner>/          one for each living process, 16 hex
        .lock           locked for the life of that process
        <body>          32 hex

A folder whose `.lock` nobody holds belongs to a process that is gone.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.settings import KIB, MIB
from app.store.disk import PRIVATE_FILE, PRIVATE_FOLDER, disk_border, make_folder
from app.store.threads import Workers, settle

BUFFER_BYTES = MIB
"""Hashed and written at once: large enough that a thread's cost vanishes, small enough to hold
two for every running upload."""

CACHED_BYTES = 8 * MIB
"""What follows so many bytes of a body goes past the page cache: keeping it there costs more than
hashing it, drives out what others read, and would let the disk fall behind. What most bodies have
is read again soon, and stays."""

ALIGNMENT = 4096
"""What disks ask of a write past the page cache: its place, its length, its memory."""

HASH_ON_LOOP_BYTES = 256 * KIB
"""Hashing more than this (about 0.2 ms) leaves the event loop."""

_OWNER = re.compile(r"[0-9a-f]{16}")
_GUARD = ".guard"
_LOCK = ".lock"
_PLACE = ".place"


class StagedFile:
    """One file of a body on its way in. Its steps block; `discard` is legal in every state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._written = 0
        self._written_back = 0
        self._is_direct = False
        self._takes_direct = hasattr(os, "O_DIRECT")

    def write(self, buffer: bytes | bytearray | memoryview) -> None:
        """Append `buffer`; the first call creates the file."""
        with disk_border():
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, PRIVATE_FILE)
            with memoryview(buffer) as rest:
                self._write_all(self._descriptor, rest)
            self._write_back(self._descriptor)

    def _write_all(self, descriptor: int, rest: memoryview) -> None:
        while rest:
            self._choose_way(descriptor, len(rest))
            try:
                count = os.write(descriptor, rest)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._takes_direct = False  # not here, or not from this memory
                continue
            self._written += count
            rest = rest[count:]

    def _choose_way(self, descriptor: int, length: int) -> None:
        """Pass the page cache or not: the tail of a body cannot, being no whole block."""
        is_direct = (
            self._takes_direct
            and self._written >= CACHED_BYTES
            and (self._written | length) % ALIGNMENT == 0
        )
        if is_direct != self._is_direct:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
            except OSError:  # this file system has no other way than through the cache
                self._takes_direct = False
                return
            self._is_direct = is_direct

    def _write_back(self, descriptor: int) -> None:
        """Where there is no way past the page cache, keep it from growing with the body."""
        length = self._written - self._written_back
        if not self._is_direct and length >= CACHED_BYTES and hasattr(os, "posix_fadvise"):
            # The advice starts the writing of dirty pages and drops clean ones: those before are
            # written by now, and their memory is what the next pages get.
            start = max(0, self._written_back - 2 * CACHED_BYTES)
            os.posix_fadvise(descriptor, start, self._written - start, os.POSIX_FADV_DONTNEED)
            self._written_back = self._written

    def seal(self) -> None:
        """Make what was written durable and close the file."""
        with disk_border():
            if self._descriptor is not None:
                os.fsync(self._descriptor)
                self._close()

    def discard(self) -> None:
        """Leave nothing behind."""
        with disk_border():
            self._close()
            self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class Staging:
    """The staging folder of one process. Every method blocks."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._owner = root / secrets.token_hex(8)
        self._place = ""
        self._lock: int | None = None

    @property
    def owner(self) -> str:
        """The name of this process among all that share the database, while it lives."""
        return f"{self._place}-{self._owner.name}"

    def is_alive(self, owner: str) -> bool | None:
        """Whether the process of that name still runs; None for one of another machine."""
        place, _, name = owner.partition("-")
        if place != self._place or _OWNER.fullmatch(name) is None:
            return None
        with disk_border(), self._guarded():
            return not _is_dead(self._root / name)

    def open(self) -> None:
        """Take a folder for this process, after those of dead ones are gone."""
        with disk_border():
            make_folder(self._root)
            with self._guarded():
                self._place = _place(self._root / _PLACE)
                self._take_away_dead()
                self._owner.mkdir(mode=PRIVATE_FOLDER)
                self._lock = _lock(self._owner / _LOCK, os.O_CREAT)

    def new_file(self) -> StagedFile:
        """A file that does not exist yet; nothing is touched before it is written."""
        return StagedFile(self._owner / secrets.token_hex(16))

    def folder(self, name: str) -> Path:
        """A folder of this process for something else, which goes with it as its bodies do."""
        path = self._owner / name
        with disk_border():
            path.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        return path

    def sweep(self, *, dry_run: bool = False) -> int:
        """Take away the folders of processes that are gone; how many there were."""
        with disk_border(), self._guarded():
            return self._take_away_dead(dry_run=dry_run)

    def probe(self) -> None:
        """Write a file and take it away again."""
        file = self.new_file()
        try:
            file.write(bytearray(1))
            file.seal()
        finally:
            file.discard()

    def close(self) -> None:
        """Give the folder up, with everything in it. Legal twice, and before `open`."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        with disk_border():
            try:
                shutil.rmtree(self._owner, ignore_errors=True)
            finally:
                os.close(lock)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        guard = _lock(self._root / _GUARD, os.O_CREAT, wait=True)
        try:
            yield
        finally:
            os.close(guard)

    def _take_away_dead(self, *, dry_run: bool = False) -> int:
        folders = [entry for entry in self._root.iterdir() if _OWNER.fullmatch(entry.name)]
        dead = [folder for folder in folders if folder != self._owner and _is_dead(folder)]
        for folder in dead:
            if not dry_run:
                shutil.rmtree(folder)
        return len(dead)


def _place(path: Path) -> str:
    """What names this staging folder, made on first use; whoever calls holds the guard."""
    with suppress(FileNotFoundError):
        if _OWNER.fullmatch(name := path.read_text(encoding="ascii", errors="replace")):
            return name
    name = secrets.token_hex(8)
    path.touch(mode=PRIVATE_FILE)
    path.write_text(name, encoding="ascii")
    return name


def _is_dead(folder: Path) -> bool:
    try:
        lock = _lock(folder / _LOCK, 0)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True  # its process died while making it: whoever makes one holds the guard
    os.close(lock)
    return True


def _lock(path: Path, create: int, *, wait: bool = False) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | create, PRIVATE_FILE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@dataclass(frozen=True, slots=True)
class Sealed:
    """A whole body, counted and hashed: in memory (`data`), or durable in `file`."""

    size: int
    digest: bytes
    data: bytes | None
    file: StagedFile | None


class Sink(Protocol):
    """What takes bytes in through memory of its own: first give space, then say how much is used.

    Space that was given is good until the next call of either method.
    """

    def space(self) -> memoryview:
        """Where the next bytes go; never empty."""
        ...

    async def filled(self, count: int) -> None:
        """So many bytes have been written to the front of the space that was given last."""
        ...


async def copy_into(sink: Sink, chunk: bytes | memoryview) -> None:
    """Have `sink` take in what lies elsewhere."""
    rest = memoryview(chunk)
    while rest:
        space = sink.space()
        count = min(len(space), len(rest))
        space[:count] = rest[:count]
        rest = rest[count:]
        await sink.filled(count)


class Staged:
    """One body on its way in: in memory while it is small, in a file from then on.

    While one buffer is hashed and written in two threads, the other is filled: there are two, and
    they change places, for a body's worth of fresh memory costs more than hashing it.
    `expected` is the size in bytes, where it is known. It is a Sink.
    """

    def __init__(
        self,
        new_file: Callable[[], StagedFile],
        workers: Workers,
        *,
        inline_bytes: int,
        expected: int | None = None,
    ) -> None:
        self.size = 0
        self._new_file = new_file
        self._workers = workers
        self._inline_bytes = inline_bytes
        self._flush_at = _first_flush(inline_bytes, expected)
        self._buffer: mmap.mmap | None = None
        self._filled = 0
        self._other: mmap.mmap | None = None
        self._hash = hashlib.sha256()
        self._file: StagedFile | None = None
        self._steps: tuple[asyncio.Future[None], ...] = ()

    def space(self) -> memoryview:
        """The free part of the buffer that is being filled."""
        if self._buffer is None:
            # Memory that begins with a page, as writing past the page cache needs it.
            self._buffer = mmap.mmap(-1, self._flush_at, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._buffer)[self._filled : self._flush_at]

    async def filled(self, count: int) -> None:
        """Take in `count` bytes of the space; waits when both buffers are full."""
        self._filled += count
        self.size += count
        if self._filled == self._flush_at:
            await self._flush()

    async def write(self, chunk: bytes | memoryview) -> None:
        """Take in `chunk`; waits when both buffers are full."""
        await copy_into(self, chunk)

    async def seal(self) -> Sealed:
        """End the body; what is in a file is durable from here on."""
        if self._file is None and self.size <= self._inline_bytes:
            return await self._seal_in_memory()
        await self._flush()
        await self._finish_steps()
        assert self._file is not None
        await self._workers.run(self._file.seal)
        return Sealed(self.size, self._hash.digest(), None, self._file)

    async def discard(self) -> None:
        """Leave nothing behind. Legal in every state, and twice."""
        with suppress(Exception):  # raised to the writer already, or to nobody: it is discarded
            await self._finish_steps()
        self._buffer = self._other = None
        if self._file is not None:
            await self._workers.run(self._file.discard)

    @property
    def in_memory(self) -> bool:
        """Whether there is no file to discard."""
        return self._file is None

    async def _seal_in_memory(self) -> Sealed:
        content = self._buffer[: self._filled] if self._buffer is not None else b""
        if self.size > HASH_ON_LOOP_BYTES:
            await settle(self._workers.hash(self._hash.update, memoryview(content)))
        else:
            self._hash.update(content)
        return Sealed(self.size, self._hash.digest(), content, None)

    async def _flush(self) -> None:
        await self._finish_steps()
        if self._file is None:
            self._file = self._new_file()
        filled = memoryview(self._buffer or b"")[: self._filled]
        self._buffer, self._other, self._filled = self._other, self._buffer, 0
        self._flush_at = BUFFER_BYTES
        self._steps = (
            self._workers.hash(self._hash.update, filled),
            self._workers.write(self._file.write, filled),
        )

    async def _finish_steps(self) -> None:
        if self._steps:
            await settle(*self._steps)
            steps, self._steps = self._steps, ()
            for step in steps:
                step.result()


def _first_flush(inline_bytes: int, expected: int | None) -> int:
    if expected is not None and expected > inline_bytes:
        return BUFFER_BYTES
    return (inline_bytes // BUFFER_BYTES + 1) * BUFFER_BYTES
