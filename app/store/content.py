"""ContentStore: bytes that were confirmed, for the scope that owns them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
)
from typing import Any, Protocol, TypeVar, runtime_checkable

from sqlalchemy import Connection

from app import telemetry
from app.errors import Exhausted, Malformed, NotFound, Refusal, TooLarge, Unavailable
from app.settings import Settings
from app.store.accounts import Accounts
from app.store.blobs import (
    CHUNK_BYTES,
    BlobMissing,
    Blobs,
    FileSpan,
    file_behind,
    new_location,
)
from app.store.buckets import Patience
from app.store.budgets import RequestBudgets
from app.store.catalogue import Catalogue, Place, not_found
from app.store.commits import Row
from app.store.database import Database, nothing
from app.store.databases import open_database
from app.store.events import Events
from app.store.files import Files, file_not_found, quota_of
from app.store.migrations import require_current_schema
from app.store.observing import ObservedBlobs, ObservedDatabase, Observer
from app.store.places import open_blobs
from app.store.records import Finding, Listed, Reference, SweepReport, Usage
from app.store.responses import Responses
from app.store.sessions import Sessions
from app.store.staging import HASH_ON_LOOP_BYTES, Sealed, Sink, Staged, Staging
from app.store.sweep import Sweeper
from app.store.text import is_text, require_text
from app.store.threads import Workers, uninterrupted

T = TypeVar("T")

logger = logging.getLogger("consignee.store")

_REF = re.compile(r"ref_[A-Za-z0-9_-]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

HEALING_ATTEMPTS = 3
"""How often a commit looks for bytes that really are there: another upload may heal first."""

RELEASED_AT_ONCE = 500
"""Bodies that are looked at in one transaction, so that no upload waits for long behind it."""

CHEAP_COUNT_SECONDS = 0.05
"""Counting that takes no longer than this is never put off."""

COUNT_SHARE = 10
"""A count that took long is used for this many times as long."""


@runtime_checkable
class Pourable(Protocol):
    """A body that can arrive in memory of its receiver, without a copy of its own on the way."""

    async def pour(self, sink: Sink) -> None:
        """All of the body, once, instead of iterating over it."""
        ...


class Content(AsyncIterator[bytes]):
    """A range of a stored body, read in pieces of at most 1 MiB off the event loop."""

    def __init__(self, reference: Reference, chunks: AsyncIterator[bytes]) -> None:
        self.reference = reference
        self._chunks = chunks

    @property
    def file(self) -> FileSpan | None:
        """See file_behind."""
        return file_behind(self._chunks)

    async def __anext__(self) -> bytes:
        return await anext(self._chunks)


class ContentStore:
    """What the layers above talk to, and the Python API of an embedding application.

    One for each process and event loop; any number of processes may share one place.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        workers: Workers,
        database: Database,
        staging: Staging,
        blobs: Blobs,
        observer: Observer | None = None,
    ) -> None:
        self._settings = settings
        self._small_bytes = min(int(settings.inline_bytes), HASH_ON_LOOP_BYTES)
        self._workers = workers
        self._database = database
        self._staging = staging
        self._blobs = blobs
        self._catalogue = Catalogue(database, observer)
        self.events = Events(self._catalogue, self._open_kept, settings.event_retention)
        self._sweeper = Sweeper(
            self._catalogue,
            self.events,
            blobs,
            staging,
            workers,
            orphan_age_seconds=settings.orphan_age_seconds,
        )
        self.files = Files(
            self._catalogue,
            self.bind,
            self._open_body,
            blobs.local_path,
            self._release_later,
            quota_of(settings),
        )
        self.sessions = Sessions(self._catalogue, self._release_later)
        self.responses = Responses(self._catalogue)
        self.budgets = RequestBudgets(self._catalogue)
        self.accounts = Accounts(self._catalogue)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False
        self._counted: tuple[float, Usage] | None = None

    @classmethod
    async def start(
        cls,
        settings: Settings,
        observer: Observer | None = None,
        *,
        meanwhile: Callable[[], None] = nothing,
    ) -> ContentStore:
        """Open the store that `settings` describe, `observer` told of all it does. No migration.

        `meanwhile` is called, in any thread, where a transaction begins to wait for the disk.

        Raises StoreError when the schema is missing, behind or newer than this code, and
        Unavailable when the database does not answer.
        """
        async with AsyncExitStack() as undo:
            workers = Workers(settings.io_threads)
            undo.callback(workers.close)
            patience = Patience(settings.blob_request_seconds, settings.blob_retry_seconds)
            blobs = open_blobs(settings.blobs, workers, patience)
            await workers.run(require_current_schema, settings)
            database = open_database(settings, workers, meanwhile)
            undo.push_async_callback(database.close)
            staging = Staging(settings.staging_dir)
            undo.callback(staging.close)
            await workers.run(staging.open)
            undo.pop_all()
            if observer is not None:
                database = ObservedDatabase(database, observer)
                blobs = ObservedBlobs(blobs, observer)
            return cls(
                settings,
                workers=workers,
                database=database,
                staging=staging,
                blobs=blobs,
                observer=observer,
            )

    async def close(self) -> None:
        """Wait for background work, then let go of everything. Legal twice."""
        if self._closed:
            return
        self._closed = True
        while self._background:
            await asyncio.wait(self._background)
        await self._catalogue.close()
        await self._workers.run(self._staging.close)
        self._workers.close()
        await self._database.close()

    async def receive(
        self, body: AsyncIterable[bytes], *, scope: str, principal: str, size: int, sha256: str
    ) -> Reference:
        """Take a body in, check it against `size` (bytes) and `sha256` (64 lowercase hex), keep it.

        Returns once bytes and rows are durable (AHP-R26). Raises Malformed (`length_mismatch`,
        `digest_mismatch`), TooLarge, Exhausted, Unavailable, and whatever `body` raises; then, and
        when cancelled, nothing of the body is left. Never reads on after an excess. A body that is
        Pourable is received without being copied.
        """
        require_text(scope=scope, principal=principal)
        if size < 0 or not _SHA256.fullmatch(sha256):
            raise ValueError("size must not be negative, sha256 must be 64 lowercase hex digits")
        if size > self._settings.max_upload_bytes:
            raise TooLarge(int(self._settings.max_upload_bytes))
        if size <= self._small_bytes:
            with telemetry.span("receive"):
                sealed = await _collect(body, size, sha256)
            return await self._confirm(sealed, self._new_reference(sealed, scope, principal))
        async with self.stage(body, size=size, sha256=sha256) as sealed:
            return await self._confirm(sealed, self._new_reference(sealed, scope, principal))

    @asynccontextmanager
    async def stage(
        self,
        body: AsyncIterable[bytes | memoryview],
        *,
        size: int | None = None,
        sha256: str | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[Sealed]:
        """A whole body in staging, durable, counted and hashed; discarded on exit.

        `size` and `sha256` are what it must be, where that was declared; `limit` is the most that
        is taken of a body whose size was not (bytes). `bind` keeps what was staged.
        """
        staged = Staged(
            self._staging.new_file,
            self._workers,
            inline_bytes=int(self._settings.inline_bytes),
            expected=size,
        )
        try:
            with telemetry.span("receive"):
                await _fill(staged, body, size=size, limit=limit)
                sealed = await staged.seal()
            _require_digest(sealed.digest, sha256)
            yield sealed
        finally:
            if not staged.in_memory:
                await uninterrupted(staged.discard())

    async def bind(self, sealed: Sealed, write: Callable[[Connection], T]) -> T:
        """Keep a staged body, together with the rows that `write` inserts: one transaction.

        Those rows must name `sealed.digest` in a column that refers to `blobs.digest`. `write` must
        do nothing but talk to the database; a Refusal that it raises keeps neither. Cancelled, it
        is either complete or nothing.
        """
        try:
            return await uninterrupted(self._bind(sealed, write))
        except Refusal:
            await uninterrupted(_logged(self._release(sealed.digest)))
            raise

    async def resolve(self, scope: str, ref: str) -> Reference:
        """The reference, or NotFound: the same for unknown, foreign, expired and removed."""
        _require_findable(scope, ref)
        return await self._catalogue.find(scope, ref)

    def open(
        self, scope: str, ref: str, *, start: int = 0, stop: int | None = None
    ) -> AbstractAsyncContextManager[Content]:
        """The bytes `[start, stop)` of a reference, cut to its size as a slice is.

        Raises NotFound on entry as `resolve` does, ValueError for a negative bound.
        """
        if start < 0 or (stop is not None and stop < 0):
            raise ValueError("start and stop must not be negative")
        return self._open(scope, ref, start, stop)

    async def link(self, sha256: str, media_type: str, disposition: str) -> str | None:
        """A URL where a client gets the bytes of a digest that a record of its own names.

        They come with these two headers. None where clients are not to be sent elsewhere, and for
        bytes that do not lie elsewhere.
        """
        if not self._settings.redirect_downloads:
            return None
        place = await self._catalogue.place(bytes.fromhex(sha256))
        if place is None or place.location is None:
            return None
        seconds = self._settings.redirect_seconds
        return await self._blobs.link(
            place.location, media_type=media_type, disposition=disposition, seconds=seconds
        )

    async def remove(self, scope: str, ref: str) -> None:
        """End a reference; NotFound as in `resolve`. Its bytes go with the last one, on a sweep."""
        _require_findable(scope, ref)
        await self._catalogue.remove(scope, ref)

    async def references(self, scope: str, *, after: int = 0, limit: int = 100) -> list[Listed]:
        """The live references of `scope` in order of confirmation, from behind position `after`."""
        if not is_text(scope):
            return []
        return await self._catalogue.page(scope, after, limit)

    @property
    def owner(self) -> str:
        """The name of this process among all that share the database, while it lives."""
        return self._staging.owner

    async def is_alive(self, owner: str) -> bool | None:
        """Whether the process of that name still runs; None where that cannot be known here."""
        return await self._workers.run(self._staging.is_alive, owner)

    async def probe(self) -> None:
        """Whether database, blob store and staging answer and can be written.

        Raises Unavailable (`not_ready`).
        """
        try:
            await self._catalogue.probe()
            await self._blobs.probe()
            await self._workers.run(self._staging.probe)
        except Refusal as refusal:
            raise Unavailable(
                "not_ready", f"The store is not ready: {refusal.message}"
            ) from refusal

    async def usage(self) -> Usage:
        """What is stored. A store that takes long to count is counted a tenth of the time."""
        if self._counted is not None and time.monotonic() < self._counted[0]:
            return self._counted[1]
        began = time.monotonic()
        usage = await self._catalogue.usage()
        took = time.monotonic() - began
        if took > CHEAP_COUNT_SECONDS:
            self._counted = (time.monotonic() + took * COUNT_SHARE, usage)
        return usage

    async def sweep(self, *, dry_run: bool = False) -> SweepReport:
        """Remove what has expired, what nothing refers to, orphans, and staging of the dead."""
        return await (self._sweeper.rehearse() if dry_run else self._sweeper.sweep())

    def verify(self) -> AsyncIterator[Finding]:
        """Re-hash everything and report every fault; changes nothing."""
        return self._sweeper.verify()

    def _new_reference(self, sealed: Sealed, scope: str, principal: str) -> Reference:
        now = int(time.time())
        retention = self._settings.retention
        return Reference(
            ref=f"ref_{secrets.token_urlsafe(24)}",
            size=sealed.size,
            sha256=sealed.digest.hex(),
            scope=scope,
            principal=principal,
            created_at=now,
            expires_at=None if retention is None else now + int(retention.total_seconds()),
        )

    async def _confirm(self, sealed: Sealed, reference: Reference) -> Reference:
        row = _reference_row(sealed, reference)
        try:
            if sealed.file is None:
                await self._keep(sealed, _blob_row(sealed, None), row)
            else:
                await uninterrupted(
                    self._publish(sealed, lambda blob: self._keep(sealed, blob, row))
                )
        except asyncio.CancelledError:
            await uninterrupted(_logged(self._forget(reference)))
            raise
        return reference

    async def _keep(self, sealed: Sealed, blob: Row, reference: Row) -> None:
        location = await self._catalogue.add(blob, reference)
        try:
            await self._ensure(sealed, blob, location)
        except Refusal:
            await self._catalogue.forget(reference["ref"])
            raise

    async def _bind(self, sealed: Sealed, write: Callable[[Connection], T]) -> T:
        async def keep(blob: Row) -> T:
            outcome, location = await self._catalogue.add_with(blob, write)
            await self._ensure(sealed, blob, location)
            return outcome

        if sealed.file is None:
            return await keep(_blob_row(sealed, None))
        return await self._publish(sealed, keep)

    async def _publish(self, sealed: Sealed, keep: Callable[[Row], Coroutine[Any, Any, T]]) -> T:
        """Move a staged file to a fresh location and `keep` it there, or leave nothing there."""
        assert sealed.file is not None
        location = new_location(sealed.digest)
        await self._blobs.publish(sealed.file.path, location)
        try:
            return await keep(_blob_row(sealed, location))
        except Unavailable:
            self._later(self._abandon(location))  # it may have to wait as long again
            raise
        except BaseException:
            await self._abandon(location)
            raise

    async def _ensure(self, sealed: Sealed, blob: Row, winner: str | None) -> None:
        """Make sure that the bytes lie where the row of their digest says (invariant 1).

        The row may be older than this upload and its file lost; then this upload's bytes take its
        place. Bytes that are not needed are taken away after the answer, whoever had them first.
        """
        for _ in range(HEALING_ATTEMPTS):
            if winner is None or await self._blobs.size(winner) == sealed.size:
                break
            logger.warning("the bytes of %s are gone from their place", sealed.digest.hex())
            if winner == blob["location"]:
                raise _gone()
            winner = await self._catalogue.repoint(blob, winner)
        else:
            raise _gone()
        if blob["location"] not in (None, winner):
            self._later(self._blobs.delete(blob["location"]))

    async def _abandon(self, location: str) -> None:
        """Take away what was published for a commit that failed, unless it did commit."""
        try:
            guilty = await self._catalogue.condemn([location])
        except Exhausted:
            # No room even for the verdict. The commit is known to be undone: nobody else can
            # name this location, and its bytes are what fills the disk.
            guilty = () if await self._catalogue.names(location) else (location,)
        except Refusal as refusal:
            logger.warning("a body without a record stays for the sweep: %s", refusal.message)
            return
        if guilty:
            await self._blobs.delete(location)

    async def _forget(self, reference: Reference) -> None:
        """Undo what a cancelled caller may have committed: it never learned the reference."""
        await self._catalogue.forget(reference.ref)
        await self._release(bytes.fromhex(reference.sha256))

    async def _release(self, *digests: bytes) -> None:
        """Take bodies away unless something refers to them."""
        for start in range(0, len(digests), RELEASED_AT_ONCE):
            await self._catalogue.collect(digests[start : start + RELEASED_AT_ONCE])
        await self._sweeper.execute()

    def _release_later(self, digests: Sequence[bytes]) -> None:
        """Take the bodies of what was deleted away, after the answer; a sweep would, too."""
        if digests:
            self._later(self._release(*digests))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(_logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @asynccontextmanager
    async def _open(
        self, scope: str, ref: str, start: int, stop: int | None
    ) -> AsyncIterator[Content]:
        _require_findable(scope, ref)
        async with AsyncExitStack() as opened:
            reference, chunks = await self._enter(opened, scope, ref, start, stop)
            yield Content(reference, chunks)

    @asynccontextmanager
    async def _open_kept(
        self, reference: Reference, start: int, stop: int | None
    ) -> AsyncIterator[Content]:
        """The bytes `[start, stop)` of a reference that was looked up, live or kept by an event."""
        async with self._open_body(reference.sha256, start, stop, gone=not_found) as chunks:
            yield Content(reference, chunks)

    @asynccontextmanager
    async def _open_body(
        self,
        sha256: str,
        start: int,
        stop: int | None,
        gone: Callable[[], NotFound] = file_not_found,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes `[start, stop)` of a digest that a record of the caller's names."""
        digest = bytes.fromhex(sha256)
        async with AsyncExitStack() as opened:
            for _ in range(2):
                place = await self._catalogue.place(digest)
                if place is None:
                    raise gone()  # its record went since the caller looked it up
                end = place.size if stop is None else min(stop, place.size)
                try:
                    chunks = await self._read(opened, place, min(start, end), end)
                except BlobMissing:
                    continue
                yield chunks
                return
            raise Unavailable(
                "storage_unavailable", "The stored body cannot be read at the moment."
            )

    async def _enter(
        self, opened: AsyncExitStack, scope: str, ref: str, start: int, stop: int | None
    ) -> tuple[Reference, AsyncIterator[bytes]]:
        # Twice: between the look-up and the opening, a sweep may have taken the bytes with the
        # reference (then it is not found now), or an upload may have moved them.
        for _ in range(2):
            reference, place = await self._catalogue.find_place(scope, ref)
            end = place.size if stop is None else min(stop, place.size)
            try:
                return reference, await self._read(opened, place, min(start, end), end)
            except BlobMissing:
                continue
        raise Unavailable("storage_unavailable", "The stored body cannot be read at the moment.")

    async def _read(
        self, opened: AsyncExitStack, place: Place, start: int, stop: int
    ) -> AsyncIterator[bytes]:
        if place.location is None:
            return _Pieces((place.data or b"")[start:stop])
        return await opened.enter_async_context(self._blobs.open(place.location, start, stop))


async def _fill(
    staged: Staged,
    body: AsyncIterable[bytes | memoryview],
    *,
    size: int | None,
    limit: int | None,
) -> None:
    bounded = _Bounded(staged, size, limit)
    if isinstance(body, Pourable):
        await body.pour(bounded)
    else:
        async for chunk in body:
            await bounded.write(chunk)
    if size is not None and staged.size < size:
        raise _length_mismatch("fewer", size)


class _Bounded:
    """A body in staging that is refused at the first octet over what it may have."""

    def __init__(self, staged: Staged, size: int | None, limit: int | None) -> None:
        self._staged = staged
        self._size = size
        self._limit = limit

    def space(self) -> memoryview:
        return self._staged.space()

    async def filled(self, count: int) -> None:
        self._check(count)
        await self._staged.filled(count)

    async def write(self, chunk: bytes | memoryview) -> None:
        self._check(len(chunk))
        await self._staged.write(chunk)

    def _check(self, more: int) -> None:
        total = self._staged.size + more
        if self._size is not None and total > self._size:
            raise _length_mismatch("more", self._size)
        if self._limit is not None and total > self._limit:
            raise TooLarge(self._limit)


async def _collect(body: AsyncIterable[bytes], size: int, sha256: str) -> Sealed:
    """A whole small body, checked as `stage` does; there is nothing of it to discard."""
    data = bytearray()
    async for chunk in body:
        data += chunk
        if len(data) > size:
            raise _length_mismatch("more", size)
    if len(data) < size:
        raise _length_mismatch("fewer", size)
    digest = hashlib.sha256(data).digest()
    _require_digest(digest, sha256)
    return Sealed(size, digest, bytes(data), None)


def _require_digest(digest: bytes, declared: str | None) -> None:
    if declared is not None and digest != bytes.fromhex(declared):
        raise Malformed("digest_mismatch", "The body does not have the SHA-256 that was declared.")


def _gone() -> Unavailable:
    return Unavailable("storage_unavailable", "The stored body is gone; send it again.")


def _length_mismatch(how: str, size: int) -> Malformed:
    return Malformed(
        "length_mismatch", f"The body has {how} bytes than the {size} that were declared."
    )


class _Pieces(AsyncIterator[bytes]):
    """Bytes in memory, in the pieces in which stored ones come."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._starts = iter(range(0, len(data), CHUNK_BYTES))

    async def __anext__(self) -> bytes:
        for start in self._starts:
            return self._data[start : start + CHUNK_BYTES]
        raise StopAsyncIteration


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Refusal as refusal:
        logger.warning("clearing up is left for the sweep: %s", refusal.message)


def _blob_row(sealed: Sealed, location: str | None) -> Row:
    return {
        "digest": sealed.digest,
        "size": sealed.size,
        "location": location,
        "created_at": int(time.time()),
        "data": sealed.data,
    }


def _reference_row(sealed: Sealed, reference: Reference) -> Row:
    return {
        "ref": reference.ref,
        "scope": reference.scope,
        "digest": sealed.digest,
        "principal": reference.principal,
        "created_at": reference.created_at,
        "expires_at": reference.expires_at,
    }


def _require_findable(scope: str, ref: str) -> None:
    if not _REF.fullmatch(ref) or not is_text(scope):
        raise not_found()
