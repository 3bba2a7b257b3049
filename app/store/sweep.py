"""What goes, and what is wrong: gc and fsck.

No lock keeps a sweep and an upload apart. A location's bytes are only taken away after a committed
transaction has put it into `condemned`, in which no blob's row named it; and no commit accepts a
location that is condemned. So a reference is either there, and its blob stays, or its upload is
refused and can be sent again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from app import audit
from app.errors import Unavailable
from app.store.blobs import BlobDamaged, BlobMissing, Blobs, Stored, digest_of
from app.store.catalogue import Catalogue, Place
from app.store.events import Events
from app.store.records import Finding, FindingKind, SweepReport
from app.store.staging import Staging
from app.store.threads import Workers

PAGE = 200
"""Rows or locations in one transaction: short enough that an upload behind it hardly waits."""

VERIFY_PAGE = 16
"""Blobs read at once, with the bytes in their rows: at most this many times `inline_bytes`."""

VERDICT_SECONDS = 7 * 86400
"""How long a verdict stays on record after it was carried out: far longer than any upload could
hold on to a location."""

UNFINISHED_SECONDS = 86400
"""How old an upload to an object store must be to count as left behind: a large one to a slow
store may take hours, and another worker may be at it."""


class Sweeper:
    """Carries out gc and fsck over one store; any number of them may run at once."""

    def __init__(
        self,
        catalogue: Catalogue,
        events: Events,
        blobs: Blobs,
        staging: Staging,
        workers: Workers,
        *,
        orphan_age_seconds: float,
    ) -> None:
        self._catalogue = catalogue
        self._events = events
        self._blobs = blobs
        self._staging = staging
        self._workers = workers
        self._orphan_age = orphan_age_seconds

    async def sweep(self) -> SweepReport:
        """Remove what is over; what an earlier sweep left undone is done as well."""
        report = SweepReport(
            staging=await self._workers.run(self._staging.sweep),
            expired=await _all_of(self._catalogue.expire),
            events=await _all_of(self._events.expire),
        )
        report = await self._collect(report)
        report = await self._condemn_orphans(report)
        await self.execute()
        await self._catalogue.purge(VERDICT_SECONDS)
        await self._blobs.abort_unfinished(max(self._orphan_age, UNFINISHED_SECONDS))
        if report.blobs or report.orphans:
            facts = {"bodies": report.blobs, "bytes": report.bytes, "orphans": report.orphans}
            audit.record("body.remove", **facts)
        return report

    async def rehearse(self) -> SweepReport:
        """What a sweep would do. Blobs of what is over count only once that has ended."""
        report = SweepReport(
            dry_run=True,
            staging=await self._workers.run(lambda: self._staging.sweep(dry_run=True)),
            expired=await self._catalogue.expired(),
            events=await self._events.expired(),
        )
        async for places in self._unreferenced():
            report = _with_blobs(report, len(places), sum(place.size for place in places))
        async for page, kept in self._orphans():
            orphans = await self._catalogue.unnamed(page)
            unclear = await self._catalogue.unnamed(kept)
            report = _with_orphans(report, len(orphans), len(unclear))
        return report

    async def execute(self) -> None:
        """Take away the bytes of every condemned location, and record it."""
        while locations := await self._catalogue.condemned(PAGE):
            for location in locations:
                await self._blobs.delete(location)
            await self._catalogue.removed(locations)

    async def _collect(self, report: SweepReport) -> SweepReport:
        async for page in self._unreferenced():
            gone = await self._catalogue.collect([place.digest for place in page])
            report = _with_blobs(report, gone.blobs, gone.bytes)
        return report

    async def _unreferenced(self) -> AsyncIterator[list[Place]]:
        after = b""
        while page := await self._catalogue.unreferenced(after, PAGE):
            after = page[-1].digest
            yield page

    async def _condemn_orphans(self, report: SweepReport) -> SweepReport:
        async for page, kept in self._orphans():
            suspects = await self._catalogue.unnamed(page)
            orphans = await self._catalogue.condemn(suspects) if suspects else ()
            unclear = await self._catalogue.unnamed(kept)
            report = _with_orphans(report, len(orphans), len(unclear))
        return report

    async def _orphans(self) -> AsyncIterator[tuple[list[str], list[str]]]:
        """Pages of locations that are old enough, and of those whose age is unknown or future."""
        page: list[str] = []
        kept: list[str] = []
        async for stored in self._blobs.stored():
            age = _age(stored)
            if age is None:
                kept.append(stored.location)
            elif age >= self._orphan_age:
                page.append(stored.location)
            if len(page) + len(kept) >= PAGE:
                yield page, kept
                page, kept = [], []
        if page or kept:
            yield page, kept

    async def verify(self) -> AsyncIterator[Finding]:
        """Every fault of what is stored, one after another; nothing is changed."""
        after = 0
        while page := await self._catalogue.places(after, VERIFY_PAGE):
            after = page[-1][0]
            for _, place in page:
                finding = await self._examine(place)
                if finding is not None:
                    yield finding
        if count := await self._catalogue.dangling():
            yield Finding("dangling_reference", "no bytes are recorded", None, None, count)
        async for finding in self._unnamed():
            yield finding

    async def _examine(self, place: Place) -> Finding | None:
        fault = await self._fault(place)
        if fault is None:
            return None
        now = await self._catalogue.place(place.digest)
        if now is None or now.location != place.location:
            return None  # swept or moved while it was read
        kind, detail = fault
        references = await self._catalogue.referrers(place.digest)
        return Finding(kind, detail, place.digest.hex(), place.location, references)

    async def _fault(self, place: Place) -> tuple[FindingKind, str] | None:
        try:
            sha256, size = await digest_of(self._chunks(place))
        except BlobDamaged as damaged:
            sha256, size = damaged.sha256, damaged.size
        except BlobMissing:
            return "missing", "nothing lies at the recorded location"
        except Unavailable:
            return "unreadable", "the stored bytes cannot be read whole"
        if size != place.size:
            return "wrong_size", f"{size} bytes lie there, {place.size} are recorded"
        if sha256 != place.digest.hex():
            return "wrong_digest", f"the stored bytes have SHA-256 {sha256}"
        return None

    async def _chunks(self, place: Place) -> AsyncIterator[bytes]:
        if place.location is None:
            yield place.data or b""
            return
        size = await self._blobs.size(place.location)
        if size is None:
            raise BlobMissing
        async with self._blobs.open(place.location, 0, size) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _unnamed(self) -> AsyncIterator[Finding]:
        async for page, kept in self._orphans():
            for location in await self._catalogue.unnamed(page + kept):
                yield Finding("orphan", "no record names these bytes", None, location)


async def _all_of(end: Callable[[int], Awaitable[int]]) -> int:
    """Do `end`, which ends at most as many as it is told, until nothing is left; how many went."""
    total = 0
    while ended := await end(PAGE):
        total += ended
    return total


def _age(stored: Stored) -> float | None:
    """Seconds since the bytes came; None where that is unknown or in the future."""
    if stored.modified_at is None:
        return None
    age = time.time() - stored.modified_at
    return age if age >= 0 else None


def _with_blobs(report: SweepReport, blobs: int, size: int) -> SweepReport:
    return replace(report, blobs=report.blobs + blobs, bytes=report.bytes + size)


def _with_orphans(report: SweepReport, orphans: int, kept: int) -> SweepReport:
    return replace(report, orphans=report.orphans + orphans, kept=report.kept + kept)
