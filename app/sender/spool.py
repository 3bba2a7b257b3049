"""Where the bytes of a snapshot lie. Every kind is read by any number of readers at once.

    Bytes         in memory, as they were given
    Spool         written once: in memory while they are few, then in a file without a name
    SteadyFile    somebody's file, read in place; each reader proves that it is what was hashed

Every step on a disk leaves the event loop, and none takes more than CHUNK_BYTES into memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from app.sender.errors import SourceError
from app.sender.threads import in_thread

CHUNK_BYTES: Final = 1024 * 1024
"""What is read, hashed and handed on at once."""

TICK_NS: Final = 1_000_000_000
"""The coarsest clock of a file system that is in use: two writings within it may look like one."""

MEMORY_BYTES: Final = 1024 * 1024
"""What one spool keeps in memory before it goes to a file."""


class Snapshot(Protocol):
    """Bytes that do not change, with their size in bytes and their SHA-256 (64 lowercase hex)."""

    @property
    def size(self) -> int: ...

    @property
    def sha256(self) -> str: ...

    def read(self) -> AsyncGenerator[bytes, None]:
        """All bytes from the first on. Raises SourceError when they can no longer be had."""
        ...


class Bytes:
    """A snapshot in memory: bytes cannot change, so they are kept and not copied."""

    def __init__(self, data: bytes, sha256: str) -> None:
        self._data = data
        self.size = len(data)
        self.sha256 = sha256

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All bytes, in pieces."""
        for start in range(0, self.size, CHUNK_BYTES):
            yield self._data[start : start + CHUNK_BYTES]


class SharedFile:
    """An open file for readers in several threads.

    The lock keeps a close from giving the descriptor away while a reader still uses it: the
    next file of this process would get the same number, and its bytes would be sent.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()

    def piece_at(self, start: int, most: int) -> bytes:
        """Up to `most` bytes from `start`; b"" at the end. Raises SourceError."""
        with self._descriptor() as descriptor:
            return os.pread(descriptor, most, start)

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill `buffer` from `start`; gives the number of bytes. Raises SourceError."""
        with self._descriptor() as descriptor:
            return os.preadv(descriptor, [buffer], start)

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        with self._lock:
            if self._file.closed:
                raise SourceError("closed", "The source was closed while it was being read.")
            try:
                yield self._file.fileno()
            except OSError as error:
                raise unreadable(error) from None

    def stamp(self) -> Stamp:
        """Its stamp now. Raises SourceError."""
        with self._descriptor() as descriptor:
            now, found = time.time_ns(), os.fstat(descriptor)
        return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, now)

    def write(self, data: bytes | bytearray) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close it once no reader is in it. Legal twice."""
        with self._lock:
            self._file.close()


class Spool:
    """Takes bytes as they come, counts and hashes them, and gives them back."""

    def __init__(self) -> None:
        self.size = 0
        self._digest = hashlib.sha256()
        self._memory = bytearray()
        self._file: SharedFile | None = None

    @property
    def sha256(self) -> str:
        """The digest of what has been written so far."""
        return self._digest.hexdigest()

    async def write(self, chunk: bytes) -> None:
        """Keep `chunk`. Raises SourceError when there is no room for it."""
        try:
            await in_thread(self._keep, chunk)
        except OSError:
            raise SourceError(
                "no_room", "There is no room to keep a snapshot of the bytes; free some."
            ) from None

    def _keep(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self.size += len(chunk)
        if self._file is None and self.size > MEMORY_BYTES:
            file = tempfile.TemporaryFile(prefix="consignee-", buffering=0)  # noqa: SIM115 - kept
            self._file = SharedFile(file)
            self._file.write(self._memory)
            self._memory = bytearray()
        if self._file is None:
            self._memory += chunk
        else:
            self._file.write(chunk)

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All bytes, in pieces."""
        if self._file is None:
            yield bytes(self._memory)
            return
        for start in range(0, self.size, CHUNK_BYTES):
            yield await in_thread(self._file.piece_at, start, CHUNK_BYTES)

    def close(self) -> None:
        """Give up the file. Legal twice."""
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file system notes of a file's content: it changes with every writing.

    `taken_ns` is when it was read; times as the file system gives them, in nanoseconds.
    """

    size: int
    modified_ns: int
    changed_ns: int
    taken_ns: int

    @property
    def is_settled(self) -> bool:
        """Whether a later writing must show: one in the same tick of its clock would not."""
        return self.taken_ns - self.changed_ns > TICK_NS

    def shows_writing(self, later: Stamp) -> bool:
        """Whether the content was written to between the two."""
        return (self.size, self.modified_ns) != (later.size, later.modified_ns)

    def shows_nothing(self, later: Stamp) -> bool:
        """Whether nothing at all happened to the file between the two."""
        return not self.shows_writing(later) and self.changed_ns == later.changed_ns


class SteadyFile:
    """A file that stays where it is, and is read anew by each reader.

    Nothing keeps its owner from changing it. So each reader keeps the last piece back until the
    file's stamp is still the one that it had before it was hashed, or, where that stamp was too
    fresh to tell, until all that was read has `sha256` again: bytes that are not the snapshot
    are never sent whole.
    """

    def __init__(self, file: SharedFile, size: int, sha256: str, stamp: Stamp) -> None:
        self._file = file
        self._stamp = stamp
        self.size = size
        self.sha256 = sha256

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All bytes, in pieces. Raises SourceError before the last one when they have changed."""
        digest = None if self._stamp.is_settled else hashlib.sha256()
        for start in range(0, self.size, CHUNK_BYTES):
            most = min(CHUNK_BYTES, self.size - start)
            piece = await in_thread(self._piece, start, most, digest)
            last = start + most == self.size
            if len(piece) < most or (last and await in_thread(self._has_changed, digest)):
                raise SourceError("changed", "The file changed before it was sent; send it again.")
            yield piece

    def _piece(self, start: int, most: int, digest: Any) -> bytes:
        piece = self._file.piece_at(start, most)
        if digest is not None:
            digest.update(piece)
        return piece

    def _has_changed(self, digest: Any) -> bool:
        if digest is not None:
            return bool(digest.hexdigest() != self.sha256)
        now = self._file.stamp()
        if self._stamp.shows_nothing(now):
            return False
        return self._stamp.shows_writing(now) or self._digest() != self.sha256

    def _digest(self) -> str:
        """Of what is there now: it may only have been renamed or removed, or its times set."""
        digest = hashlib.sha256()
        for start in range(0, self.size, CHUNK_BYTES):
            digest.update(self._file.piece_at(start, min(CHUNK_BYTES, self.size - start)))
        return digest.hexdigest()


def unreadable(error: OSError) -> SourceError:
    """What to tell of a file that cannot be read, without its path."""
    reason = error.strerror or "input/output error"
    return SourceError("unreadable", f"The source cannot be read: {reason}.")
