"""Bodies as files on this machine.

blobs/
  ab/                       the first two hex digits of the digest
    ab<62 hex>-<16 hex>     digest and random suffix: the location
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from app.store.blobs import CHUNK_BYTES, BlobMissing, FileSpan, Stored, ends_too_early, is_location
from app.store.disk import (
    PRIVATE_FILE,
    disk_border,
    make_folder,
    sync_folder,
)
from app.store.threads import Workers

_PREFIX = re.compile(r"[0-9a-f]{2}")


class LocalBlobs:
    """Blobs in a folder of this machine, by rename from staging on the same file system."""

    def __init__(self, root: Path, workers: Workers) -> None:
        self._root = root
        self._workers = workers

    def _path(self, location: str) -> Path:
        """The only place where a path is built; what does not look like a location is refused."""
        if not is_location(location):
            raise ValueError("not a location of this store")
        return self._root / location[:2] / location

    def local_path(self, location: str) -> Path:
        """The file at a location, for a server on this machine that sends it itself."""
        return self._path(location)

    async def link(
        self, location: str, *, media_type: str, disposition: str, seconds: float
    ) -> str | None:
        """See Blobs.link: a file of this machine has no URL."""
        del location, media_type, disposition, seconds
        return None

    async def abort_unfinished(self, seconds: float) -> int:
        """See Blobs.abort_unfinished: what is here in part lies in staging."""
        del seconds
        return 0

    async def publish(self, staged: Path, location: str) -> None:
        """See Blobs.publish."""
        await self._workers.run(self._publish, staged, self._path(location))

    def _publish(self, staged: Path, path: Path) -> None:
        with disk_border():
            make_folder(self._root)
            make_folder(path.parent)
            try:
                os.utime(staged)  # its age as an orphan counts from here
                _move(staged, path)
                sync_folder(path.parent)
            except OSError:
                with suppress(OSError):
                    path.unlink(missing_ok=True)
                raise

    async def size(self, location: str) -> int | None:
        """See Blobs.size."""
        return await self._workers.run(self._size, self._path(location))

    def _size(self, path: Path) -> int | None:
        with disk_border():
            try:
                return path.stat().st_size
            except FileNotFoundError:
                return None

    @asynccontextmanager
    async def open(
        self, location: str, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """See Blobs.open."""
        file = _ReadFile(self._path(location))
        try:
            await self._workers.run(file.open, stop)
            yield _Chunks(file, self._workers, start, stop)
        finally:
            file.close()

    async def delete(self, location: str) -> None:
        """See Blobs.delete."""
        await self._workers.run(self._delete, self._path(location))

    def _delete(self, path: Path) -> None:
        with disk_border():
            path.unlink(missing_ok=True)

    async def stored(self) -> AsyncIterator[Stored]:
        """See Blobs.stored. Files with other names are none of ours and stay."""
        for prefix in await self._workers.run(self._prefixes):
            for stored in await self._workers.run(self._in_prefix, prefix):
                yield stored

    def _prefixes(self) -> list[Path]:
        with disk_border():
            try:
                return [entry for entry in self._root.iterdir() if _PREFIX.fullmatch(entry.name)]
            except FileNotFoundError:
                return []

    def _in_prefix(self, prefix: Path) -> list[Stored]:
        with disk_border(), os.scandir(prefix) as entries:
            found = [_stored(entry) for entry in entries if is_location(entry.name)]
        return [stored for stored in found if stored is not None]

    async def probe(self) -> None:
        """See Blobs.probe."""
        await self._workers.run(self._probe)

    def _probe(self) -> None:
        with disk_border():
            make_folder(self._root)
            path = self._root / f".probe-{secrets.token_hex(8)}"
            try:
                path.write_bytes(b"\0")
            finally:
                path.unlink(missing_ok=True)


class _ReadFile:
    """A file open for reading. Opening and reading block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self, least: int) -> None:
        """Raises Unavailable for a file of fewer than `least` bytes."""
        with disk_border():
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise BlobMissing from None
            if os.fstat(self._descriptor).st_size < least:
                raise ends_too_early()

    @property
    def descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError("the content is closed")
        return self._descriptor

    def read(self, length: int, offset: int) -> bytes:
        with disk_border():
            chunk = os.pread(self.descriptor, length, offset)
        if not chunk:
            raise ends_too_early()
        return chunk

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class _Chunks:
    """The rest of a range of an open file."""

    def __init__(self, file: _ReadFile, workers: Workers, start: int, stop: int) -> None:
        self._file = file
        self._workers = workers
        self._start = start
        self._stop = stop

    @property
    def file(self) -> FileSpan:
        """See file_behind."""
        return FileSpan(self._file.descriptor, self._start, self._stop)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._start >= self._stop:
            raise StopAsyncIteration
        length = min(CHUNK_BYTES, self._stop - self._start)
        chunk = await self._workers.run(self._file.read, length, self._start)
        self._start += len(chunk)
        return chunk


def _stored(entry: os.DirEntry[str]) -> Stored | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None  # taken away meanwhile
    return Stored(entry.name, status.st_size, status.st_mtime)


def _move(staged: Path, path: Path) -> None:
    try:
        staged.rename(path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        _copy(staged, path)


def _copy(staged: Path, path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    target = os.open(path, flags, PRIVATE_FILE)
    with os.fdopen(target, "wb") as copy, staged.open("rb") as original:
        shutil.copyfileobj(original, copy, CHUNK_BYTES)
        copy.flush()
        os.fsync(target)
