"""Where the bytes of a snapshot lie. Every kind is read by any number of readers at once.

    Bytes         in memory, as they were given
    Spool         written once: in memory while they are few, then in a file without a name
    SteadyFile    somebody's file, read in place; each reader proves that it is what was hashed

Every step on a disk leaves the event loop, and none takes more than CHUNK_BYTES into memory.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol

from app.sender.errors import SourceError
from app.sender.files import CHUNK_BYTES, FileRange, SharedFile, Stamp, changed
from app.sender.threads import in_thread

RANGE_BYTES: Final = 4 * CHUNK_BYTES
"""What the kernel is given to send at once: progress is told after each."""

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

    async def parts(self) -> AsyncGenerator[FileRange | bytes, None]:
        """As `read`, in ranges that the kernel may send where the bytes lie in a file."""
        if self._file is None:
            yield bytes(self._memory)
            return
        for start in range(0, self.size, RANGE_BYTES):
            yield FileRange(self._file, start, min(RANGE_BYTES, self.size - start))

    def close(self) -> None:
        """Give up the file. Legal twice."""
        if self._file is not None:
            self._file.close()


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

    @property
    def is_settled(self) -> bool:
        """Whether its stamp tells of every writing, so that nobody has to hash it again."""
        return self._stamp.is_settled

    async def read(self) -> AsyncGenerator[bytes, None]:
        """All bytes, in pieces. Raises SourceError before the last one when they have changed."""
        digest = None if self.is_settled else hashlib.sha256()
        for start in range(0, self.size, CHUNK_BYTES):
            yield await self._read_piece(start, digest)

    async def parts(self) -> AsyncGenerator[FileRange | bytes, None]:
        """As `read`, for a settled file: ranges that the kernel may send, and the last piece.

        The network takes the bytes of a range when it comes to them, perhaps after the last piece
        was read. So who had them confirmed asks `require_unchanged` afterwards.
        """
        last = max(0, self.size - 1) // CHUNK_BYTES * CHUNK_BYTES
        for start in range(0, last, RANGE_BYTES):
            yield FileRange(self._file, start, min(RANGE_BYTES, last - start))
        if self.size:
            yield await self._read_piece(last, None)

    async def require_unchanged(self) -> None:
        """Raise SourceError when the file is not what was hashed any more."""
        if await in_thread(self._has_changed, None):
            raise changed()

    async def _read_piece(self, start: int, digest: Any) -> bytes:
        most = min(CHUNK_BYTES, self.size - start)
        piece = await in_thread(self._piece, start, most, digest)
        last = start + most == self.size
        if len(piece) < most or (last and await in_thread(self._has_changed, digest)):
            raise changed()
        return piece

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
