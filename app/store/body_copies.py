"""Bodies on their way from one blob store to another, under the same locations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from app.errors import Unavailable
from app.store.blobs import BlobDamaged, BlobMissing, Blobs
from app.store.catalogue import Place
from app.store.records import Finding, FindingKind
from app.store.staging import Sealed, Staged, Staging
from app.store.threads import Workers, uninterrupted

AT_ONCE: Final = 4
"""Bodies that are copied at once: two buffers of 1 MiB each, and what their stores hold of them."""

ASKED_AT_ONCE: Final = 16
"""Bodies that the target is asked for at once."""


class Observer(Protocol):
    """Is told how a copy gets on."""

    def begin(self, step: str, total: int) -> None:
        """What is copied now, and how many bytes (of bodies) or rows there are of it."""
        ...

    def advance(self, count: int) -> None:
        """So many more of them are done."""
        ...

    def fault(self, finding: Finding) -> None:
        """The source itself is damaged here."""
        ...


@dataclass(slots=True)
class CopyReport:
    """What one copy did.

    `bodies` and their `bytes` came over, `present` were there. `inserted`, `updated`, `removed` and
    `unchanged` count rows, `faults` bodies that the source itself has no longer whole, `swept`
    those that went from a live source meanwhile: one more copy takes their rows away as well.
    """

    bodies: int = 0
    bytes: int = 0
    present: int = 0
    inserted: int = 0
    updated: int = 0
    removed: int = 0
    unchanged: int = 0
    faults: int = 0
    swept: int = 0


class _Faulty(Exception):
    """A body that the source does not have as it must be."""

    def __init__(self, kind: FindingKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: FindingKind = kind
        self.detail = detail


class BodyCopier:
    """Has bodies at the target, each verified by its digest on the way and by its size there.

    `is_current` says whether a record of the source still names a place. Without a `source` the two
    stores are one, and everything has to be there.
    """

    def __init__(
        self,
        source: Blobs | None,
        target: Blobs,
        staging: Staging,
        workers: Workers,
        is_current: Callable[[Place], Awaitable[bool]],
        observer: Observer,
        report: CopyReport,
    ) -> None:
        self._source = source
        self._target = target
        self._staging = staging
        self._workers = workers
        self._is_current = is_current
        self._observer = observer
        self._report = report
        self._reported: set[bytes] = set()
        self._questions = asyncio.Semaphore(ASKED_AT_ONCE)
        self._copies = asyncio.Semaphore(AT_ONCE)

    async def bring(self, places: Iterable[Place], *, ahead: bool = False) -> None:
        """Have all of `places` at the target; `ahead` of the moment that the copy is of.

        Raises Exhausted, Unavailable: when the target does not take them.
        """
        steps = [asyncio.create_task(self._bring(place, ahead=ahead)) for place in places]
        try:
            await asyncio.gather(*steps)
        finally:
            for step in steps:
                step.cancel()
            await asyncio.gather(*steps, return_exceptions=True)

    async def _bring(self, place: Place, *, ahead: bool) -> None:
        assert place.location is not None
        async with self._questions:
            is_there = await self._target.size(place.location) == place.size
        if not is_there:
            await self._copy_or_report(place, place.location, ahead=ahead)
        if ahead:
            self._report.present += is_there
            self._observer.advance(place.size)

    async def take_away(self, location: str) -> None:
        """Remove what no record of the target names any more."""
        if self._source is not None:
            await self._target.delete(location)

    async def _copy_or_report(self, place: Place, location: str, *, ahead: bool) -> None:
        try:
            async with self._copies:
                await self._copy(place, location)
        except _Faulty as faulty:
            if await self._is_current(place):
                self.report(place, faulty.kind, faulty.detail)
            elif not ahead:
                self._report.swept += 1

    def report(self, place: Place, kind: FindingKind, detail: str) -> None:
        """Tell, once, of a body that the source does not have whole."""
        if place.digest not in self._reported:
            self._reported.add(place.digest)
            self._report.faults += 1
            self._observer.fault(Finding(kind, detail, place.digest.hex(), place.location))

    async def _copy(self, place: Place, location: str) -> None:
        async with self._staged(place, location) as sealed:
            assert sealed.file is not None
            await self._target.publish(sealed.file.path, location)
        if await self._target.size(location) != place.size:
            raise Unavailable("storage_unavailable", "The target did not keep a body whole.")
        self._report.bodies += 1
        self._report.bytes += place.size

    @asynccontextmanager
    async def _staged(self, place: Place, location: str) -> AsyncIterator[Sealed]:
        staged = Staged(self._staging.new_file, self._workers, inline_bytes=0, expected=place.size)
        try:
            await self._fill(staged, place, location)
            sealed = await staged.seal()
            if sealed.digest != place.digest:
                raise _wrong_digest(sealed.digest.hex())
            yield sealed
        finally:
            await uninterrupted(staged.discard())

    async def _fill(self, staged: Staged, place: Place, location: str) -> None:
        async with aclosing(self._readable(place, location)) as chunks:
            async for chunk in chunks:
                await staged.write(chunk)

    async def _readable(self, place: Place, location: str) -> AsyncGenerator[bytes]:
        """What the source holds; what it cannot give is its own fault, which ends no copy."""
        try:
            async for chunk in self._chunks(place, location):
                yield chunk
        except BlobMissing:
            raise _Faulty("missing", "nothing lies at the recorded location") from None
        except BlobDamaged as damaged:
            raise _wrong_digest(damaged.sha256) from None
        except Unavailable:
            raise _Faulty("unreadable", "the stored bytes cannot be read whole") from None

    async def _chunks(self, place: Place, location: str) -> AsyncIterator[bytes]:
        size = await self._source.size(location) if self._source is not None else None
        if self._source is None or size is None:
            raise BlobMissing
        if size != place.size:
            detail = f"{size} bytes lie there, {place.size} are recorded"
            raise _Faulty("wrong_size", detail)
        async with self._source.open(location, 0, size) as chunks:
            async for chunk in chunks:
                yield chunk


def _wrong_digest(sha256: str) -> _Faulty:
    return _Faulty("wrong_digest", f"the stored bytes have SHA-256 {sha256}")
