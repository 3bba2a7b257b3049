"""The archive format: read back by three programs, of exactly the length that was told before."""

from __future__ import annotations

import asyncio
import io
import os
import random
import shutil
import subprocess
import time
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zlib_ng import zlib_ng

from app.http.streams import Piece
from app.store.blobs import FileSpan
from app.uhp.zips import (
    FILE_BYTES,
    STRETCH_BYTES,
    Entry,
    EntryChanged,
    Sources,
    archive_length,
    archive_pieces,
)
from tests.components import require_component

pytestmark = pytest.mark.anyio

GIB = 2**30
ZEROS = bytes(2**22)
SECONDS = 1_786_400_000


class Kept:
    """Sources that are in memory, or as many zeros as an entry's size says."""

    def __init__(self, contents: Mapping[str, bytes], *, small: bool = False) -> None:
        self._contents = contents
        self._small = small
        self.questions: list[int] = []
        self.open_now = 0
        self.most_open = 0

    @asynccontextmanager
    async def open(self, entry: Entry) -> AsyncIterator[AsyncIterator[bytes]]:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            yield self._chunks(entry)
        finally:
            self.open_now -= 1

    async def _chunks(self, entry: Entry) -> AsyncIterator[bytes]:
        if entry.key in self._contents:
            yield self._contents[entry.key]
            return
        left = entry.size
        while left > 0:
            yield ZEROS[:left]
            left -= len(ZEROS)

    async def small(self, entries: Sequence[Entry]) -> Mapping[str, bytes]:
        self.questions.append(len(entries))
        wanted = {entry.key for entry in entries}
        return {k: v for k, v in self._contents.items() if k in wanted} if self._small else {}


def entry(name: str, content: bytes, modified_at: int = SECONDS) -> Entry:
    return Entry(name, len(content), modified_at, name)


async def chunks_of(entries: Sequence[Entry], sources: Sources) -> AsyncGenerator[bytes, None]:
    """The archive for a server that takes no files: all of it comes through memory."""
    async with aclosing(archive_pieces(entries, sources)) as pieces:
        async for piece in pieces:
            assert isinstance(piece, bytes)
            yield piece


async def written(entries: Sequence[Entry], sources: Kept) -> bytes:
    return b"".join([chunk async for chunk in chunks_of(entries, sources)])


async def archive_of(contents: Mapping[str, bytes], *, small: bool = False) -> bytes:
    sources = Kept(contents, small=small)
    return await written([entry(*item) for item in contents.items()], sources)


CONTENTS = {
    "report.md": b"# Report\n",
    "empty": b"",
    "data/\u00fcber/\u62a5\u544a.bin": bytes(range(256)) * 4000,
    "data/b": b"b",
}


@pytest.mark.parametrize("small", [True, False])
async def test_every_entry_is_there_in_order(small: bool) -> None:
    octets = await archive_of(CONTENTS, small=small)
    with zipfile.ZipFile(io.BytesIO(octets)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == CONTENTS
        assert archive.namelist() == list(CONTENTS)
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert {oct(info.external_attr >> 16) for info in archive.infolist()} == {"0o100644"}
    assert octets == await archive_of(CONTENTS, small=small)


@pytest.mark.requirement("B64")
async def test_nothing_to_pack_is_a_valid_archive() -> None:
    octets = await archive_of({})
    assert len(octets) == archive_length([]) == 22
    assert zipfile.ZipFile(io.BytesIO(octets)).namelist() == []


@pytest.mark.component("unzip")
async def test_unzip_reads_it(tmp_path: Path) -> None:
    require_component("unzip", present=shutil.which("unzip") is not None, why="Debian unzip")
    path = tmp_path / "a.zip"
    path.write_bytes(await archive_of(CONTENTS))
    tested = subprocess.run(["unzip", "-t", path], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert "No errors detected" in tested.stdout


SEVEN_ZIP = shutil.which("7zz") or shutil.which("7z")


@pytest.mark.component("7-Zip")
async def test_seven_zip_reads_it(tmp_path: Path) -> None:
    require_component("7-Zip", present=SEVEN_ZIP is not None, why="Debian 7zip")
    path = tmp_path / "a.zip"
    path.write_bytes(await archive_of(CONTENTS))
    tested = subprocess.run([str(SEVEN_ZIP), "t", path], capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert "Everything is Ok" in tested.stdout


async def _spread(entries: Sequence[Entry], path: Path) -> int:
    """Write an archive of zeros to a file with holes; how long it is."""
    length = 0
    with path.open("wb") as file:
        async for chunk in chunks_of(entries, Kept({"last": b"0123456789"})):
            if chunk == ZEROS[: len(chunk)]:
                file.seek(len(chunk), io.SEEK_CUR)
            else:
                file.write(chunk)
            length += len(chunk)
    return length


@pytest.mark.requirement("B61")
async def test_an_entry_beyond_four_gib_and_a_small_one_behind_it(tmp_path: Path) -> None:
    entries = [
        Entry("big", int(4.1 * GIB), SECONDS, "big"),
        Entry("last", 10, SECONDS, "last"),
    ]
    path = tmp_path / "big.zip"
    assert await _spread(entries, path) == archive_length(entries) == path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        big, last = archive.infolist()
        assert (big.file_size, last.header_offset > 4 * GIB) == (int(4.1 * GIB), True)
        assert archive.read("last") == b"0123456789"
    if SEVEN_ZIP is not None:
        tested = subprocess.run([SEVEN_ZIP, "t", path], capture_output=True, text=True)
        assert tested.returncode == 0, tested.stdout


@pytest.mark.requirement("B61")
@pytest.mark.parametrize(
    "sizes",
    [
        [500_000_000] * 9 + [10],
        [2**31 - 1, 1],
        [2**31, 1],
        [2**31 - 200, 1, 1],
        [2**32 - 1, 1],
        [int((2**31 - 1) / 1.05), int((2**31 - 1) / 1.05) + 1],
    ],
)
def test_the_length_of_large_archives_is_what_the_library_writes(sizes: list[int]) -> None:
    entries = [Entry(f"f{i}", size, SECONDS, f"f{i}") for i, size in enumerate(sizes)]
    assert archive_length(entries) == _measured(entries)


class _Counter(io.RawIOBase):
    """A sink that counts, and is told of data that nobody writes."""

    def __init__(self) -> None:
        self.position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: object) -> int:
        assert isinstance(data, bytes | bytearray | memoryview)
        self.position += len(data)
        return len(data)


def _measured(entries: Sequence[Entry]) -> int:
    """What `zipfile` itself writes for entries of these sizes, less their bytes."""
    counter = _Counter()
    with zipfile.ZipFile(counter, "w") as archive:
        for one in entries:
            info = zipfile.ZipInfo(one.name, (2026, 1, 1, 0, 0, 0))
            info.file_size = one.size
            info.extra = bytes(9)
            with archive.open(info, "w"):
                counter.position += one.size
            info.file_size = info.compress_size = one.size
    return counter.position


@pytest.mark.requirement("B61")
async def test_more_entries_than_two_bytes_can_count() -> None:
    entries = [Entry(f"f/{i}", 0, SECONDS, str(i)) for i in range(65_536)]
    sources = Kept({one.key: b"" for one in entries}, small=True)
    octets = b"".join([chunk async for chunk in chunks_of(entries, _Whole(sources))])
    assert len(octets) == archive_length(entries)
    with zipfile.ZipFile(io.BytesIO(octets)) as archive:
        assert len(archive.namelist()) == 65_536


class _Whole:
    """Sources whose small bodies are all empty: 65,536 look-ups would be the slow part."""

    def __init__(self, kept: Kept) -> None:
        self.open = kept.open

    async def small(self, entries: Sequence[Entry]) -> Mapping[str, bytes]:
        return dict.fromkeys([one.key for one in entries], b"")


_names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


@given(
    contents=st.dictionaries(_names.map(lambda n: n.replace("/", "_")), st.binary(max_size=400)),
    moments=st.lists(st.integers(-(2**40), 2**40), min_size=1),
    small=st.booleans(),
)
@settings(max_examples=60)
async def test_any_archive_has_the_length_that_was_told(
    contents: dict[str, bytes], moments: list[int], small: bool
) -> None:
    entries = [
        entry(name, content, moments[index % len(moments)])
        for index, (name, content) in enumerate(contents.items())
    ]
    octets = await written(entries, Kept(contents, small=small))
    assert len(octets) == archive_length(entries)
    with zipfile.ZipFile(io.BytesIO(octets)) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == len(contents)


@pytest.mark.parametrize(
    ("seconds", "date"),
    [
        (SECONDS, time.gmtime(SECONDS)[:5]),
        (0, (1980, 1, 1, 0, 0)),
        (-5, (1980, 1, 1, 0, 0)),
        (2**31, time.gmtime(2**31)[:5]),
        (2**40, (2107, 12, 31, 23, 59)),
    ],
)
async def test_any_time_has_a_date(seconds: int, date: tuple[int, ...]) -> None:
    octets = await written([entry("a", b"a", seconds)], Kept({"a": b"a"}))
    (info,) = zipfile.ZipFile(io.BytesIO(octets)).infolist()
    assert info.date_time[:5] == date
    exact = (
        b"UT\x05\x00\x01" + seconds.to_bytes(4, "little", signed=True) if _fits(seconds) else b""
    )
    assert info.extra == exact


def _fits(seconds: int) -> bool:
    return 0 <= seconds < 2**31


async def _collect(octets: bytearray, chunks: AsyncIterator[bytes]) -> None:
    async for chunk in chunks:
        octets += chunk


@pytest.mark.requirement("B62")
@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("content", [b"", b"abc", b"abcdefg"])
async def test_a_source_of_another_size_ends_no_archive(content: bytes, small: bool) -> None:
    entries = [Entry("a", 5, SECONDS, "a"), Entry("b", 1, SECONDS, "b")]
    sources = Kept({"a": content, "b": b"b"}, small=small)
    octets = bytearray()
    with pytest.raises(EntryChanged):
        await _collect(octets, chunks_of(entries, sources))
    assert b"PK\x05\x06" not in octets
    assert sources.open_now == 0


@pytest.mark.requirement("B63")
async def test_one_source_is_open_at_a_time_and_small_ones_are_fetched_together() -> None:
    contents = {str(i): bytes(100) for i in range(600)} | {"big": bytes(2**21)}
    sources = Kept(contents)
    await written([entry(*item) for item in contents.items()], sources)
    assert sources.most_open == 1
    assert sources.questions == [256, 256, 88]


async def test_the_first_piece_leaves_before_the_last_is_read() -> None:
    sources = Kept({})
    chunks = chunks_of([Entry("a", GIB, SECONDS, "a")], sources)
    first = await anext(chunks)
    assert len(first) < 2**23
    assert sources.open_now == 1
    await chunks.aclose()
    assert sources.open_now == 0


class Filed:
    """Sources that are files, read as a server does that sends them itself."""

    def __init__(self, folder: Path, contents: Mapping[str, bytes]) -> None:
        self._folder = folder
        self.open_now = 0
        for key, content in contents.items():
            (folder / key).write_bytes(content)

    @asynccontextmanager
    async def open(self, entry: Entry) -> AsyncIterator[AsyncIterator[bytes]]:
        with (self._folder / entry.key).open("rb") as source:
            self.open_now += 1
            yield FromFile(source)
            self.open_now -= 1

    async def small(self, entries: Sequence[Entry]) -> Mapping[str, bytes]:
        del entries
        return {}


class FromFile(AsyncIterator[bytes]):
    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.file = FileSpan(source.fileno(), 0, os.fstat(source.fileno()).st_size)

    async def __anext__(self) -> bytes:
        if chunk := self._source.read(FILE_BYTES):
            return chunk
        raise StopAsyncIteration


MIXED = {
    "first": random.Random(1).randbytes(FILE_BYTES + 1),
    "short": b"short",
    "exact": bytes(FILE_BYTES),
    "last": random.Random(2).randbytes(STRETCH_BYTES + 3 * FILE_BYTES),
}


async def test_files_are_handed_over_and_the_archive_is_the_same(tmp_path: Path) -> None:
    entries, sources = [entry(*item) for item in MIXED.items()], Filed(tmp_path, MIXED)
    octets, handed = bytearray(), []
    async for piece in archive_pieces(entries, sources, takes_files=True):
        if isinstance(piece, FileSpan):
            handed.append(len(piece))
            octets += os.pread(piece.fileno(), len(piece), piece.start)
        else:
            octets += piece
    assert handed == [FILE_BYTES + 1, FILE_BYTES, STRETCH_BYTES, 3 * FILE_BYTES]
    assert octets == await written(entries, Kept(MIXED))
    assert len(octets) == archive_length(entries)


@pytest.mark.requirement("B62")
@pytest.mark.parametrize("change", [-1, 1])
async def test_a_file_of_another_size_ends_no_archive(tmp_path: Path, change: int) -> None:
    sources = Filed(tmp_path, {"a": bytes(2 * FILE_BYTES)})
    changed = [Entry("a", 2 * FILE_BYTES + change, SECONDS, "a")]
    with pytest.raises(EntryChanged):
        await _all(archive_pieces(changed, sources, takes_files=True))


@pytest.mark.requirement("B62")
async def test_a_file_that_shrinks_while_it_is_sent_ends_no_archive(tmp_path: Path) -> None:
    sources = Filed(tmp_path, {"a": bytes(2**26)})
    pieces = archive_pieces([Entry("a", 2**26, SECONDS, "a")], sources, takes_files=True)
    assert isinstance(await anext(pieces), bytes)
    os.truncate(tmp_path / "a", 0)
    assert isinstance(await anext(pieces), FileSpan)
    with pytest.raises(EntryChanged):
        await anext(pieces)


async def test_an_archive_is_given_up_while_a_file_is_added_up(tmp_path: Path) -> None:
    """It may be large: nobody reads it to its end for nothing."""
    sources = Filed(tmp_path, {"a": b""})
    os.truncate(tmp_path / "a", 2**40)
    pieces = archive_pieces([Entry("a", 2**40, SECONDS, "a")], sources, takes_files=True)
    await anext(pieces)
    assert len(await anext(pieces)) == STRETCH_BYTES
    async with asyncio.timeout(10):
        await pieces.aclose()


async def _all(pieces: AsyncIterator[Piece]) -> None:
    async for _ in pieces:
        pass


def test_the_sum_of_an_entry_is_made_by_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def crc32(data: bytes, value: int = 0) -> int:
        seen.append(data)
        return zlib_ng.crc32(data, value)

    assert vars(zipfile)["crc32"] is zlib_ng.crc32
    monkeypatch.setattr(zipfile, "crc32", crc32)
    with zipfile.ZipFile(io.BytesIO(), "w") as archive, archive.open("a", "w") as entry:
        entry.write(b"octets")
    assert seen == [b"octets"]
