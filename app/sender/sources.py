"""What is to be sent, owned: bytes in memory, a file, a stream, or something that loads them.

A source reads nothing until its first snapshot (AHP-S35), is read once for everybody (AHP-S36),
and is closed by whoever made it, used or not (AHP-S39):

    async with Source.file(path) as source:
        snapshot = await source.snapshot(max_bytes=limit, budget=budget)
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from app.sender.budget import Budget
from app.sender.errors import SendError, SourceError
from app.sender.files import (
    CHUNK_BYTES,
    HASHED_AT_ONCE,
    FileReading,
    SharedFile,
    open_regular,
    require_within,
)
from app.sender.spool import Bytes, Snapshot, Spool, SteadyFile
from app.sender.threads import ended, in_thread

__all__ = ["Snapshot", "Source"]

Close = Callable[[], Awaitable[None] | None]
Make = Callable[["Kept", int], Awaitable[Snapshot]]


class Kept:
    """What a snapshot needs closed when its source is."""

    def __init__(self) -> None:
        self._open: list[Spool | SharedFile] = []

    def spool(self) -> Spool:
        """A fresh spool."""
        spool = Spool()
        self._open.append(spool)
        return spool

    def file(self, path: Path) -> SharedFile:
        """The file at `path`, opened. Raises SourceError unless it is a regular file."""
        file = open_regular(path)
        self._open.append(file)
        return file

    def close(self) -> None:
        """Close all of it. Legal twice."""
        for each in self._open:
            each.close()


class Source:
    """Bytes for one attachment. `size` and `sha256` are expectations that are checked (AHP-S38)."""

    def __init__(
        self,
        make: Make,
        *,
        close: Close | None = None,
        size: int | None = None,
        sha256: str | None = None,
    ) -> None:
        self._make = make
        self._close = close
        self._size = size
        self._sha256 = sha256
        self._kept = Kept()
        self._making: asyncio.Task[Snapshot] | None = None
        self._waiting = 0
        self._closed = False

    @classmethod
    def memory(cls, data: bytes, *, size: int | None = None, sha256: str | None = None) -> Source:
        """Bytes that are there already. What can change is copied at once (AHP-S41)."""
        owned = bytes(data)

        async def make(kept: Kept, max_bytes: int) -> Snapshot:
            del kept
            return await _hashed(owned, max_bytes)

        return cls(make, size=size, sha256=sha256)

    @classmethod
    def file(
        cls,
        path: str | os.PathLike[str],
        *,
        in_place: bool = False,
        size: int | None = None,
        sha256: str | None = None,
    ) -> Source:
        """A regular file, opened and copied at the first snapshot.

        `in_place` spares the copy: the file is hashed where it is and read again by each upload,
        which fails when it has changed meanwhile.
        """
        where = Path(path)

        async def copy(kept: Kept, max_bytes: int) -> Snapshot:
            file = await in_thread(kept.file, where)
            return await _spooled(kept.spool(), _pieces(file), max_bytes)

        if in_place:
            return cls.reading(FileReading(where), size=size, sha256=sha256)
        return cls(copy, size=size, sha256=sha256)

    @classmethod
    def reading(
        cls, reading: FileReading, *, size: int | None = None, sha256: str | None = None
    ) -> Source:
        """A file in place, which a reader of nobody else's may have begun to hash."""

        async def stay(kept: Kept, max_bytes: int) -> Snapshot:
            del kept  # `reading` holds what there is to close
            while await in_thread(reading.step, max_bytes):
                pass
            return SteadyFile(*reading.hashed)

        return cls(stay, close=reading.close, size=size, sha256=sha256)

    @classmethod
    def stream(
        cls,
        open: Callable[[], AsyncIterator[bytes]],  # noqa: A002 - what it does
        close: Close | None = None,
        *,
        size: int | None = None,
        sha256: str | None = None,
    ) -> Source:
        """Pieces as they come from `open()`, which is called once, at the first snapshot."""

        async def make(kept: Kept, max_bytes: int) -> Snapshot:
            return await _spooled(kept.spool(), open(), max_bytes)

        return cls(make, close=close, size=size, sha256=sha256)

    @classmethod
    def lazy(
        cls,
        load: Callable[[], Awaitable[bytes]],
        close: Close | None = None,
        *,
        size: int | None = None,
        sha256: str | None = None,
    ) -> Source:
        """What `load()` gives; it is called once, at the first snapshot."""

        async def make(kept: Kept, max_bytes: int) -> Snapshot:
            del kept
            return await _hashed(_require_bytes(await load()), max_bytes)

        return cls(make, close=close, size=size, sha256=sha256)

    async def snapshot(self, *, max_bytes: int, budget: Budget) -> Snapshot:
        """The bytes, read once: callers at the same time, and later ones, share the result.

        The first caller's `max_bytes` bounds the reading, everybody's the result; `budget` bounds
        the caller's wait, and the reading ends with the last caller that waits. What went wrong
        once is what every later caller gets. Raises SourceError, BudgetExceeded.
        """
        if self._closed:
            raise SourceError("closed", "The source is closed; make a new one.")
        if self._making is None:
            self._making = asyncio.create_task(self._made(max_bytes))
        await self._wait(self._making, budget)
        snapshot = _result_of(self._making)
        require_within(snapshot.size, max_bytes)
        return snapshot

    async def aclose(self) -> None:
        """End what runs, and give up everything that is held. Legal twice, and when unused."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._making is not None:
                await ended(self._making)
        finally:
            self._kept.close()
            await _called(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _wait(self, making: asyncio.Task[Snapshot], budget: Budget) -> None:
        self._waiting += 1
        try:
            async with budget.limit():
                await asyncio.wait((making,))
        finally:
            self._waiting -= 1
            if not self._waiting and not making.done():
                await ended(making)

    async def _made(self, max_bytes: int) -> Snapshot:
        try:
            snapshot = await self._make(self._kept, max_bytes)
        except SendError:
            raise
        except Exception as error:
            raise SourceError(
                "failed", f"The source failed with {type(error).__name__}; see its own log."
            ) from error
        self._check(snapshot)
        return snapshot

    def _check(self, snapshot: Snapshot) -> None:
        if self._size is not None and snapshot.size != self._size:
            raise SourceError(
                "size_mismatch",
                f"The source has {snapshot.size} bytes where {self._size} were expected.",
            )
        if self._sha256 is not None and snapshot.sha256 != self._sha256:
            raise SourceError(
                "digest_mismatch", "The source's SHA-256 is not the one that was expected."
            )


async def _hashed(data: bytes, max_bytes: int) -> Snapshot:
    require_within(len(data), max_bytes)
    digest = hashlib.sha256()
    view = memoryview(data)
    for start in range(0, len(data), HASHED_AT_ONCE):
        await in_thread(digest.update, view[start : start + HASHED_AT_ONCE])
    return Bytes(data, digest.hexdigest())


async def _spooled(spool: Spool, pieces: AsyncIterator[bytes], max_bytes: int) -> Snapshot:
    try:
        async for piece in pieces:
            require_within(spool.size + len(_require_bytes(piece)), max_bytes)
            await spool.write(piece)
    finally:
        await _called(getattr(pieces, "aclose", None))
    return spool


async def _pieces(file: SharedFile) -> AsyncIterator[bytes]:
    start = 0
    while piece := await in_thread(file.piece_at, start, CHUNK_BYTES):
        yield piece
        start += len(piece)


def _require_bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise SourceError("not_bytes", f"The source gave {type(value).__name__}, not bytes.")
    return value


def _result_of(making: asyncio.Task[Snapshot]) -> Snapshot:
    if making.cancelled():
        raise SourceError("abandoned", "Reading the source was given up; make a new one.")
    return making.result()


async def _called(close: Callable[[], Any] | None) -> None:
    if close is not None and inspect.isawaitable(closing := close()):
        await closing
