"""Where bodies lie that are too large for a row of the database."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.errors import Unavailable
from app.settings import MIB

_LOCATION = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}")

CHUNK_BYTES = MIB
"""Read at once: one trip to a thread for so many bytes, and no more memory per download."""


class BlobMissing(Exception):
    """Nothing lies at the location."""


def ends_too_early() -> Unavailable:
    """What to raise where a body has fewer bytes than its record says."""
    return Unavailable("storage_unavailable", "The stored body ends too early.")


class BlobDamaged(Unavailable):
    """All bytes of a location were read, and they are not those that its name tells.

    `sha256` (64 lowercase hex) and `size` (bytes) are those of what was read.
    """

    def __init__(self, sha256: str, size: int) -> None:
        super().__init__("storage_unavailable", "The stored body is damaged.")
        self.sha256 = sha256
        self.size = size


@dataclass(frozen=True, slots=True)
class Stored:
    """One body in the blob store; `modified_at` in unix seconds, None where that is unknown."""

    location: str
    size: int
    modified_at: float | None


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The bytes `[start, stop)` of a file of this machine, open while its chunks are."""

    descriptor: int
    start: int
    stop: int

    def fileno(self) -> int:
        """The descriptor, as whoever takes files asks for it."""
        return self.descriptor

    def __len__(self) -> int:
        return self.stop - self.start


def file_behind(chunks: AsyncIterator[bytes]) -> FileSpan | None:
    """Where `chunks` come from, if that is a file: what is still to come of them lies there."""
    file: FileSpan | None = getattr(chunks, "file", None)
    return file


class Blobs(Protocol):
    """Bodies by location. A location is used once: nothing is ever written to it again.

    Every method raises Exhausted or Unavailable when the store behind it does not do as told.
    """

    async def publish(self, staged: Path, location: str) -> None:
        """Move a durable staged file to a new location, durably; or raise and leave nothing there.

        The staged file may be gone afterwards, or still be there for its owner to discard.
        """
        ...

    async def size(self, location: str) -> int | None:
        """The bytes that lie at a location; None when nothing does."""
        ...

    def open(
        self, location: str, start: int, stop: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes `[start, stop)` in chunks of at most CHUNK_BYTES.

        Raises BlobMissing on entry, Unavailable when they end too early. Where bytes come over a
        network, BlobDamaged before the last chunk of a whole body that is not what it must be;
        where they come from a file, `file_behind` tells which.
        """
        ...

    async def delete(self, location: str) -> None:
        """Take the bytes away; nothing lying there is fine."""
        ...

    def local_path(self, location: str) -> Path | None:
        """The file at a location, where the store has files on this machine."""
        ...

    async def link(
        self, location: str, *, media_type: str, disposition: str, seconds: float
    ) -> str | None:
        """A URL under which anybody gets the bytes for so many `seconds`, with these headers.

        None where the store has no such thing.
        """
        ...

    def stored(self) -> AsyncIterator[Stored]:
        """Everything that lies here, in no order."""
        ...

    async def abort_unfinished(self, seconds: float) -> int:
        """Take away what was published in part only and began `seconds` ago or earlier: how many.

        What began at an unknown time, or in the future, stays.
        """
        ...

    async def probe(self) -> None:
        """Raise unless something can be written."""
        ...


def is_location(name: str) -> bool:
    """Whether something in a store can be one of ours; what is not is left alone."""
    return _LOCATION.fullmatch(name) is not None


def digest_in(location: str) -> str:
    """The SHA-256 (64 lowercase hex) of what lies at a location, or is to lie there."""
    return location[:64]


def new_location(digest: bytes) -> str:
    """A location that was never used: the digest says what lies there, the suffix is random."""
    return f"{digest.hex()}-{secrets.token_hex(8)}"


async def digest_of(chunks: AsyncIterator[bytes]) -> tuple[str, int]:
    """SHA-256 (64 lowercase hex) and length of a stream of bytes."""
    digest, size = hashlib.sha256(), 0
    async for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size
