"""A zip archive, written while its entries are read: nothing of it exists before it is sent.

The standard library's `zipfile` writes to a sink that cannot seek, so every entry is stored with
its digest behind it. Nothing is compressed: what agents produce is mostly compressed already, and
a client that knows the length shows how far a download is. The length follows from names and
sizes alone; `archive_length` and the writer are held against each other by tests.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import IO, Protocol

from zlib_ng import zlib_ng

from app.harness.blocking import run_blocking
from app.http.streams import Piece
from app.store.blobs import FileSpan, file_behind
from app.store.disk import disk_border
from app.store.threads import settle

# The sum of every entry's bytes is most of an archive's cost, and `zipfile` has no other way to be
# told how to make it: the same sum at sixteen times the speed, under the name where it looks.
zipfile.crc32 = zlib_ng.crc32  # type: ignore[attr-defined]

PIECE_BYTES = 256 * 1024
"""What is collected before it is sent on: many small entries leave in one piece."""

FILE_BYTES = 1024 * 1024
"""From here on an entry is given as a file: less is copied sooner than that is arranged."""

STRETCH_BYTES = 64 * 1024 * 1024
"""Of a file, given at once: its sum is never farther ahead of a slow client than what the system's
page cache holds, so that a disk reads it once."""

SUM_BYTES = 256 * 1024
"""Read at once to be added up."""

BATCH_BYTES = 1024 * 1024
BATCH_ENTRIES = 256
"""Small bodies that are fetched at once: thousands of small files cost few questions."""

_LOCAL_BYTES = 30
_CENTRAL_BYTES = 46
_END_BYTES = 22
_END64_BYTES = 56 + 20
_DESCRIPTOR_BYTES = 16
_DESCRIPTOR64_BYTES = 24
_EXTRA64_LOCAL_BYTES = 20
_MOST_ENTRIES = 0xFFFF

_REGULAR_FILE = 0o100644 << 16
_FIRST_DATE = 315532800  # 1980-01-01, the first day of a zip
_LAST_DATE = 4354819198  # 2107-12-31, the last one
_TIMESTAMP = struct.Struct("<HHBl")
_TIMESTAMP_TAG = 0x5455
_TIMESTAMP_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of an archive: `name` in it, `size` in bytes, `modified_at` in unix seconds.

    `key` tells the sources which bytes are meant.
    """

    name: str
    size: int
    modified_at: int
    key: str


class Sources(Protocol):
    """Where the bytes of the entries come from."""

    def open(self, entry: Entry) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of one entry, in chunks."""
        ...

    async def small(self, entries: Sequence[Entry]) -> Mapping[str, bytes]:
        """The bytes, by key, of those `entries` that are cheap to have all at once; maybe none."""
        ...


class EntryChanged(Exception):
    """An entry gave another number of bytes than its size says."""


def archive_length(entries: Sequence[Entry]) -> int:
    """The length in bytes of the archive of `entries`."""
    offset = central = 0
    for entry in entries:
        central += _central_bytes(entry, offset)
        offset += _entry_bytes(entry)
    limit = zipfile.ZIP64_LIMIT
    is_large = len(entries) > _MOST_ENTRIES or offset > limit or central > limit
    return offset + central + _END_BYTES + (_END64_BYTES if is_large else 0)


def _entry_bytes(entry: Entry) -> int:
    is_large = _is_large(entry)
    return (
        _LOCAL_BYTES
        + len(entry.name.encode())
        + len(_timestamp(entry))
        + (_EXTRA64_LOCAL_BYTES if is_large else 0)
        + entry.size
        + (_DESCRIPTOR64_BYTES if is_large else _DESCRIPTOR_BYTES)
    )


def _central_bytes(entry: Entry, offset: int) -> int:
    wide = 2 * (entry.size > zipfile.ZIP64_LIMIT) + (offset > zipfile.ZIP64_LIMIT)
    extra = len(_timestamp(entry)) + (4 + 8 * wide if wide else 0)
    return _CENTRAL_BYTES + len(entry.name.encode()) + extra


def _is_large(entry: Entry) -> bool:
    """Whether `zipfile` gives the entry 64-bit sizes: it leaves room for data that grows."""
    return entry.size * 1.05 > zipfile.ZIP64_LIMIT


async def archive_pieces(
    entries: Sequence[Entry], sources: Sources, *, takes_files: bool = False
) -> AsyncGenerator[Piece, None]:
    """The archive of `entries`, in their order. No more than one source is open at a time.

    With `takes_files` long entries that lie in files are given as those: a file is good until the
    next piece is asked for. Raises EntryChanged and what the sources raise; what was given up to
    then is no archive.
    """
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as archive:
        for batch in _batches(entries):
            small = await sources.small(batch) if len(batch) > 1 else {}
            for entry in batch:
                if entry.key in small:
                    _write_small(archive, entry, small[entry.key])
                else:
                    written = _write(archive, sink, entry, sources, takes_files)
                    async with aclosing(written) as pieces:
                        async for piece in pieces:
                            yield piece
                if sink.size >= PIECE_BYTES:
                    for piece in sink.take():
                        yield piece
        await run_blocking(archive.close)
    for piece in sink.take():
        yield piece


def _write_small(archive: zipfile.ZipFile, entry: Entry, content: bytes) -> None:
    if len(content) != entry.size:
        raise EntryChanged
    with archive.open(_info(entry), "w") as target:
        target.write(content)


async def _write(
    archive: zipfile.ZipFile, sink: _Sink, entry: Entry, sources: Sources, takes_files: bool
) -> AsyncGenerator[Piece, None]:
    async with sources.open(entry) as chunks:
        file = file_behind(chunks) if takes_files and entry.size >= FILE_BYTES else None
        with archive.open(_info(entry), "w") as target:
            written = (
                _copy(target, sink, entry, chunks)
                if file is None
                else _pass_over(target, sink, entry, file)
            )
            async with aclosing(written) as pieces:
                async for piece in pieces:
                    yield piece


async def _copy(
    target: IO[bytes], sink: _Sink, entry: Entry, chunks: AsyncIterator[bytes]
) -> AsyncGenerator[Piece, None]:
    written = 0
    async for chunk in chunks:
        written += target.write(chunk)
        if written > entry.size:
            raise EntryChanged
        if sink.size >= PIECE_BYTES:
            for piece in sink.take():
                yield piece
    if written < entry.size:
        raise EntryChanged


async def _pass_over(
    target: IO[bytes], sink: _Sink, entry: Entry, file: FileSpan
) -> AsyncGenerator[Piece, None]:
    """The entry as its file. Its sum stands behind it, and is made while somebody sends it."""
    if len(file) != entry.size:
        raise EntryChanged
    for piece in sink.take():
        yield piece
    with sink.passed_over():
        for start in range(file.start, file.stop, STRETCH_BYTES):
            stretch = replace(file, start=start, stop=min(start + STRETCH_BYTES, file.stop))
            async with _added_up(target, stretch):
                yield stretch


@asynccontextmanager
async def _added_up(target: IO[bytes], file: FileSpan) -> AsyncGenerator[None, None]:
    """Have the bytes of `file` added up while the block does something else with them."""
    ended = threading.Event()
    adding = asyncio.ensure_future(run_blocking(_add_up, target, file, ended))
    try:
        yield
        await asyncio.wait((adding,))
    finally:
        ended.set()
        await settle(adding)  # the file is closed behind this
    adding.result()


def _add_up(target: IO[bytes], file: FileSpan, ended: threading.Event) -> None:
    """Have `zipfile` see what is in a file, through memory that stays in the processor's cache."""
    space = memoryview(bytearray(SUM_BYTES))
    offset = file.start
    while offset < file.stop and not ended.is_set():
        with disk_border():
            count = os.preadv(file.fileno(), [space[: file.stop - offset]], offset)
        if not count:
            raise EntryChanged
        target.write(space[:count])
        offset += count


def _batches(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        if batch and (size + entry.size > BATCH_BYTES or len(batch) >= BATCH_ENTRIES):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += entry.size
    if batch:
        yield batch


def _info(entry: Entry) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(entry.name, _date(entry.modified_at))
    info.create_system = 3
    info.external_attr = _REGULAR_FILE
    info.file_size = entry.size
    info.extra = _timestamp(entry)
    return info


def _date(seconds: int) -> tuple[int, int, int, int, int, int]:
    """The date that a zip can hold nearest to `seconds`, in UTC."""
    moment = time.gmtime(min(max(seconds, _FIRST_DATE), _LAST_DATE))
    return (
        moment.tm_year,
        moment.tm_mon,
        moment.tm_mday,
        moment.tm_hour,
        moment.tm_min,
        moment.tm_sec,
    )


def _timestamp(entry: Entry) -> bytes:
    """The extended timestamp: seconds since 1970, where the date above has no time zone."""
    if not 0 <= entry.modified_at <= _TIMESTAMP_MOST:
        return b""
    return _TIMESTAMP.pack(_TIMESTAMP_TAG, 5, 1, entry.modified_at)


class _Sink:
    """What `zipfile` writes to: it can only be appended to."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._keeps = True
        self.size = 0

    def write(self, data: bytes) -> int:
        if self._keeps:
            self._pieces.append(bytes(data))
            self.size += len(data)
        return len(data)

    @contextmanager
    def passed_over(self) -> Iterator[None]:
        """What is written in the block comes to the reader in another way."""
        self._keeps = False
        try:
            yield
        finally:
            self._keeps = True

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """What is left can still be taken."""

    def take(self) -> list[bytes]:
        """What was written: small pieces joined, large ones as they are, for a copy costs time."""
        pieces, self._pieces, self.size = self._pieces, [], 0
        taken: list[bytes] = []
        for is_large, group in groupby(pieces, lambda piece: len(piece) >= PIECE_BYTES):
            together = list(group)
            taken += together if is_large else [b"".join(together)]
        return taken
