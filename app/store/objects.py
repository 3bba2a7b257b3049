"""Bodies as objects of a bucket: S3 and what speaks its protocol, Google Cloud Storage, Azure.

    PREFIX/<64 hex>-<16 hex>     digest and random suffix: the location
    PREFIX/probe                 written and deleted by every probe

An object is whole or not there, and durable once the store has said so. Bytes on their way in are
checked by S3 (every request carries the SHA-256 of what it sends); to the others `obstore` sends no
checksum, and TLS is what keeps them. Bytes of a whole body on their way out are checked by us.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError, GenericError

from app.errors import Exhausted, Refusal, Unavailable
from app.settings import MIB
from app.store.blobs import (
    CHUNK_BYTES,
    BlobDamaged,
    BlobMissing,
    Stored,
    digest_in,
    ends_too_early,
    is_location,
)
from app.store.buckets import Bucket, Patience, S3Signer, connect
from app.store.disk import disk_border
from app.store.threads import Workers, settle, uninterrupted
from app.store.unfinished import Unfinished, UnfinishedUploads

if TYPE_CHECKING:
    from obstore import Bytes

PART_BYTES = 5 * MIB
"""One part of an upload: the least that S3 takes, and so the least memory. Larger parts were no
faster."""

MOST_PARTS = 10_000
"""More S3 does not take: a body above 48 GiB goes in larger parts."""

PARTS_AT_ONCE = 2
"""Of one upload; with the one that is filled meanwhile, 15 MiB of memory."""

UPLOADS_AT_ONCE = 8
"""Of this process: no more than 120 MiB of memory. Others wait for their turn, on the disk."""

FETCH_BYTES = 8 * MIB
"""One ranged read. Each is tried again by itself, so no download depends on one long connection,
and a slow client keeps none open. Smaller ones cost the store more than the network."""

FETCHES_AHEAD = 1
"""Reads under way while a client takes what came before: no more than 16 MiB a download."""

LISTED_AT_ONCE = 1000
"""Objects in one answer of a listing: the most that the stores give."""

PROBE_SECONDS = 5
"""A store that takes longer to keep one byte is not ready, however patient uploads are."""

CLEARING_SECONDS = 10
"""How long a failed upload is cleared up after; what is left is for the sweep."""

_PROBE = "probe"
_NO_ROOM = ("status code: 507", "QuotaExceeded", "StorageFull")
_ANSWERED = "status code:"
_BEYOND = "status code: 416"

logger = logging.getLogger("consignee.store")


@contextmanager
def object_border() -> Iterator[None]:
    """Translate what `obstore` raises: Exhausted when there is no room, else Unavailable.

    Nothing of its text is passed on: it holds addresses.
    """
    try:
        yield
    except (BaseError, OSError) as error:  # a TimeoutError is an OSError, too
        if any(sign in str(error) for sign in _NO_ROOM):
            raise Exhausted from error
        raise Unavailable(
            "storage_unavailable", "The object store does not answer as it must; try again."
        ) from error


class ObjectBlobs:
    """Blobs in a bucket, below a prefix."""

    def __init__(self, bucket: Bucket, patience: Patience, workers: Workers) -> None:
        self._store = connect(bucket, patience)
        self._workers = workers
        self._turns = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._signer = S3Signer(bucket, patience, workers) if bucket.scheme == "s3" else None
        self._unfinished = UnfinishedUploads(self._signer, bucket.prefix) if self._signer else None

    def local_path(self, location: str) -> None:
        """See Blobs.local_path: there are no files here."""
        _require(location)

    async def publish(self, staged: Path, location: str) -> None:
        """See Blobs.publish. The staged file stays."""
        _require(location)
        size = await self._workers.run(_size_of, staged)
        async with self._turns:
            try:
                with object_border():
                    await obstore.put_async(
                        self._store,
                        location,
                        staged,
                        chunk_size=part_bytes(size),
                        max_concurrency=PARTS_AT_ONCE,
                    )
            except BaseException:
                await uninterrupted(self._withdraw(location))
                raise

    async def _withdraw(self, location: str) -> None:
        """Leave nothing of an upload that failed: it may be there in part, or whole after all."""
        try:
            async with asyncio.timeout(CLEARING_SECONDS):
                await self._abort(location, None)
                await self.delete(location)
        except (Refusal, TimeoutError) as failure:
            logger.warning("a failed upload is left for the sweep: %s", failure)

    async def size(self, location: str) -> int | None:
        """See Blobs.size."""
        _require(location)
        with object_border():
            try:
                return (await obstore.head_async(self._store, location))["size"]
            except FileNotFoundError:
                return None

    @asynccontextmanager
    async def open(
        self, location: str, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """See Blobs.open."""
        _require(location)
        if start >= stop:
            await self._require_there(location)
            yield _Nothing()
            return
        source = _Fetches(self, location, start, stop)
        try:
            await source.begin()
            yield _Chunks(source, self._workers, location)
        finally:
            await source.close()

    async def _require_there(self, location: str) -> None:
        if await self.size(location) is None:
            raise BlobMissing

    async def fetch(self, location: str, start: int, stop: int) -> tuple[Bytes, int]:
        """The bytes `[start, stop)` and the size of the whole object.

        Raises BlobMissing, Unavailable when they end too early.
        """
        with object_border():
            try:
                answer = await obstore.get_async(
                    self._store, location, options={"range": (start, stop)}
                )
                data, whole = await answer.bytes_async(), answer.meta["size"]
            except FileNotFoundError:
                raise BlobMissing from None
            except BaseError as error:
                if _BEYOND in str(error):
                    raise ends_too_early() from error
                raise
        if len(data) < stop - start:
            raise ends_too_early()
        return data, whole

    async def delete(self, location: str) -> None:
        """See Blobs.delete."""
        _require(location)
        await self._delete(location)

    async def _delete(self, key: str) -> None:
        with object_border():
            try:
                await self._delete_once(key)
            except GenericError as error:
                # The one request that the client does not repeat when its connection breaks.
                if _ANSWERED in str(error):
                    raise
                await self._delete_once(key)

    async def _delete_once(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, key)
        except FileNotFoundError:
            return  # some stores say so

    async def link(
        self, location: str, *, media_type: str, disposition: str, seconds: float
    ) -> str | None:
        """See Blobs.link. Only S3 lets a link say what headers the answer has."""
        _require(location)
        if self._signer is None:
            return None
        query = {
            "response-content-type": media_type,
            "response-content-disposition": disposition,
            "response-cache-control": "private, no-transform",
        }
        with object_border():
            return await self._signer.object_url("GET", location, query, seconds)

    async def stored(self) -> AsyncIterator[Stored]:
        """See Blobs.stored. Objects with other names are none of ours and stay."""
        with object_border():
            async for page in obstore.list(self._store, chunk_size=LISTED_AT_ONCE):
                for found in page:
                    if is_location(found["path"]):
                        modified = found["last_modified"].timestamp()
                        yield Stored(found["path"], found["size"], modified)

    async def abort_unfinished(self, seconds: float) -> int:
        """See Blobs.abort_unfinished."""
        return await self._abort("", time.time() - seconds)

    async def _abort(self, below: str, latest: float | None) -> int:
        """Abort uploads to keys that begin with `below` and that began until `latest`."""
        if self._unfinished is None:
            return 0
        aborted = 0
        with object_border():
            async for upload in self._unfinished.listed(below):
                if is_location(upload.key) and _began_until(upload, latest):
                    await self._unfinished.abort(upload)
                    aborted += 1
        return aborted

    async def probe(self) -> None:
        """See Blobs.probe."""
        with object_border():
            async with asyncio.timeout(PROBE_SECONDS):
                await obstore.put_async(self._store, _PROBE, b"\0")
                await self._delete(_PROBE)


class _Fetches:
    """The ranges of one body, asked for a little ahead of who reads them."""

    def __init__(self, blobs: ObjectBlobs, location: str, start: int, stop: int) -> None:
        self._blobs = blobs
        self._location = location
        self._start = start
        self._stop = stop
        self._waiting: deque[asyncio.Task[tuple[Bytes, int]]] = deque()
        self._first: Bytes | None = None
        self._closed = False
        self.whole = False
        """Whether these are all bytes of the body."""

    async def begin(self) -> None:
        """Fetch the first range: whether anything lies there is known from here on."""
        begun_at_zero, stop = self._start == 0, self._stop
        self._ask()
        self._first, size = await self._waiting[0]
        self._waiting.popleft()
        if size < stop:
            raise ends_too_early()
        self.whole = begun_at_zero and size == stop
        self._ask_ahead()

    async def next(self) -> Bytes | None:
        """The next range, None behind the last."""
        if self._first is not None:
            data, self._first = self._first, None
            return data
        if not self._waiting:
            return None
        try:
            data, _ = await self._waiting[0]
        except BlobMissing:
            raise ends_too_early() from None  # it went while it was read
        self._waiting.popleft()
        self._ask_ahead()
        return data

    @property
    def at_end(self) -> bool:
        """Whether the range that `next` gave last was the last."""
        return self._first is None and not self._waiting

    def require_open(self) -> None:
        """Refuse to be read any more once closed, also what has been fetched already."""
        if self._closed:
            raise ValueError("the content is closed")

    async def close(self) -> None:
        """End what is under way."""
        self._closed = True
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)
        self._waiting.clear()

    def _ask_ahead(self) -> None:
        while self._start < self._stop and len(self._waiting) < FETCHES_AHEAD:
            self._ask()

    def _ask(self) -> None:
        end = min(self._start + FETCH_BYTES, self._stop)
        fetch = self._blobs.fetch(self._location, self._start, end)
        self._waiting.append(asyncio.create_task(fetch))
        self._start = end


class _Chunks(AsyncIterator[bytes]):
    """What was fetched, in chunks; all bytes of a body are hashed before the last ones go out.

    A range is hashed while its chunks leave, the last one before they do.
    """

    def __init__(self, source: _Fetches, workers: Workers, location: str) -> None:
        self._source = source
        self._workers = workers
        self._expected = digest_in(location)
        self._hash = hashlib.sha256()
        self._hashing: asyncio.Future[None] | None = None
        self._size = 0
        self._range: Bytes | None = None
        self._position = 0

    async def __anext__(self) -> bytes:
        self._source.require_open()
        if self._range is None or self._position >= len(self._range):
            await self._advance()
        if self._range is None:
            raise StopAsyncIteration
        chunk = bytes(memoryview(self._range)[self._position : self._position + CHUNK_BYTES])
        self._position += len(chunk)
        return chunk

    async def _advance(self) -> None:
        self._position, self._range = 0, None
        fetched = await self._source.next()
        await self._finish_hashing()
        if fetched is not None and self._source.whole:
            self._hashing = self._workers.hash(self._hash.update, memoryview(fetched))
            self._size += len(fetched)
            if self._source.at_end:
                await self._finish_hashing()
                self._compare()
        self._range = fetched

    async def _finish_hashing(self) -> None:
        if self._hashing is not None:
            await settle(self._hashing)
            self._hashing.result()
            self._hashing = None

    def _compare(self) -> None:
        if (sha256 := self._hash.hexdigest()) != self._expected:
            logger.error("the bytes of %s are damaged in the object store", self._expected)
            raise BlobDamaged(sha256, self._size)


class _Nothing(AsyncIterator[bytes]):
    """No bytes at all."""

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


def part_bytes(size: int) -> int:
    """The size of the parts in which a body of `size` bytes goes up."""
    least = -(-size // MOST_PARTS)
    return max(PART_BYTES, -(-least // MIB) * MIB)


def _began_until(upload: Unfinished, latest: float | None) -> bool:
    """An unknown time is later than any; with no `latest` the time does not matter."""
    return latest is None or (upload.begun is not None and upload.begun <= latest)


def _require(location: str) -> None:
    if not is_location(location):
        raise ValueError("not a location of this store")


def _size_of(staged: Path) -> int:
    with disk_border():
        return staged.stat().st_size
