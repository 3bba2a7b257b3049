"""Where bodies lie that are too large for a row of the database."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from app.settings import MIB

CHUNK_BYTES = MIB
"""Read at once: one trip to a thread for so many bytes, and no more memory per download."""


class BlobMissing(Exception):
    """Nothing lies at the location."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One body in the blob store; `modified_at` in unix seconds, None where that is unknown."""

    location: str
    size: int
    modified_at: float | None


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

        Raises BlobMissing on entry, Unavailable when they end too early.
        """
        ...

    async def delete(self, location: str) -> None:
        """Take the bytes away; nothing lying there is fine."""
        ...

    def local_path(self, location: str) -> Path | None:
        """The file at a location, where the store has files on this machine."""
        ...

    def stored(self) -> AsyncIterator[Stored]:
        """Everything that lies here, in no order."""
        ...

    async def probe(self) -> None:
        """Raise unless something can be written."""
        ...


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
