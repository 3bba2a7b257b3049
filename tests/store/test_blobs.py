"""What every blob store must do, run against each of them."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.errors import Unavailable
from app.store import local
from app.store.blobs import CHUNK_BYTES, BlobMissing, Blobs, Stored, file_behind, new_location
from app.store.local import LocalBlobs
from app.store.places import open_blobs
from app.store.threads import Workers
from tests import azure, objects

pytestmark = pytest.mark.anyio

DIGEST = bytes(range(32))


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


@pytest.fixture(
    params=[
        "file",
        pytest.param("s3", marks=pytest.mark.component("seaweedfs")),
        pytest.param("az", marks=pytest.mark.component("azurite")),
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def blobs(
    tmp_path: Path, workers: Workers, kind: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Blobs]:
    """A blob store; a test that leaves something in it has failed."""
    for name, value in (objects.CREDENTIALS | azure.CREDENTIALS).items():
        monkeypatch.setenv(name, value)
    opened = open_blobs(blob_url(kind, tmp_path), workers)
    yield opened
    left = [stored.location async for stored in opened.stored()]
    assert left == []


def blob_url(kind: str, tmp_path: Path) -> str:
    if kind == "s3":
        return objects.object_server().blob_url()
    if kind == "az":
        return azure.azure_server().blob_url()
    return f"file://{tmp_path / 'blobs'}"


async def publish(blobs: Blobs, tmp_path: Path, data: bytes) -> str:
    staged = tmp_path / "staged"
    staged.write_bytes(data)
    location = new_location(hashlib.sha256(data).digest())
    await blobs.publish(staged, location)
    staged.unlink(missing_ok=True)
    return location


async def read(blobs: Blobs, location: str, start: int, stop: int) -> list[bytes]:
    async with blobs.open(location, start, stop) as chunks:
        return [chunk async for chunk in chunks]


async def test_what_is_published_can_be_read_in_ranges(blobs: Blobs, tmp_path: Path) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 10)
    location = await publish(blobs, tmp_path, data)
    chunks = await read(blobs, location, 0, len(data))
    assert b"".join(chunks) == data
    assert max(map(len, chunks)) <= CHUNK_BYTES
    assert b"".join(await read(blobs, location, 5, CHUNK_BYTES + 9)) == data[5 : CHUNK_BYTES + 9]
    assert await read(blobs, location, 7, 7) == []
    await blobs.delete(location)


async def test_size_is_none_where_nothing_lies(blobs: Blobs, tmp_path: Path) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    assert await blobs.size(location) == 5
    await blobs.delete(location)
    await blobs.delete(location)
    assert await blobs.size(location) is None
    with pytest.raises(BlobMissing):
        await read(blobs, location, 0, 1)


async def test_bytes_that_end_too_early_are_an_error(blobs: Blobs, tmp_path: Path) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    with pytest.raises(Unavailable, match="too early"):
        await read(blobs, location, 0, 6)
    await blobs.delete(location)


async def test_chunks_tell_the_file_that_they_come_from(workers: Workers, tmp_path: Path) -> None:
    files = LocalBlobs(tmp_path / "blobs", workers)
    location = await publish(files, tmp_path, bytes(CHUNK_BYTES) + b"12345")
    async with files.open(location, 1, CHUNK_BYTES + 4) as chunks:
        file = file_behind(chunks)
        assert file is not None
        assert (file.start, file.stop) == (1, CHUNK_BYTES + 4)
        await anext(chunks)
        rest = file_behind(chunks)
        assert rest is not None
        assert os.pread(rest.fileno(), rest.stop - rest.start, rest.start) == b"234"
    with pytest.raises(ValueError, match="closed"):
        file_behind(chunks)


async def test_listing_tells_location_size_and_time(blobs: Blobs, tmp_path: Path) -> None:
    locations = {await publish(blobs, tmp_path, bytes(n)) for n in (1, 2)}
    listed = [stored async for stored in blobs.stored()]
    assert {stored.location for stored in listed} == locations
    assert {stored.size for stored in listed} == {1, 2}
    assert all(stored.modified_at is not None for stored in listed)
    for location in locations:
        await blobs.delete(location)


async def test_many_bodies_come_and_go(blobs: Blobs, tmp_path: Path) -> None:
    kept = {await publish(blobs, tmp_path, b"%d" % number): number for number in range(50)}
    assert {stored.location async for stored in blobs.stored()} == set(kept)
    for location, number in kept.items():
        expected = b"%d" % number
        assert await read(blobs, location, 0, len(expected)) == [expected]
        await blobs.delete(location)


async def test_two_publishers_of_one_digest_are_independent(blobs: Blobs, tmp_path: Path) -> None:
    data = os.urandom(CHUNK_BYTES)
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
    one, other = await asyncio.gather(*(publish(blobs, folder, data) for folder in folders))
    await blobs.delete(one)
    assert await read(blobs, other, 0, len(data)) == [data]
    await blobs.delete(other)


async def test_an_empty_body_is_a_body(blobs: Blobs, tmp_path: Path) -> None:
    location = await publish(blobs, tmp_path, b"")
    assert await blobs.size(location) == 0
    assert await read(blobs, location, 0, 0) == []
    await blobs.delete(location)
    with pytest.raises(BlobMissing):
        await read(blobs, location, 0, 0)


async def test_a_reader_that_goes_away_leaves_the_rest_unread(blobs: Blobs, tmp_path: Path) -> None:
    data = os.urandom(8 * CHUNK_BYTES)
    location = await publish(blobs, tmp_path, data)
    async with blobs.open(location, 0, len(data)) as chunks:
        assert await anext(chunks) == data[:CHUNK_BYTES]
        assert await anext(chunks) == data[CHUNK_BYTES : 2 * CHUNK_BYTES]
    with pytest.raises(ValueError, match="closed"):
        await anext(chunks)
    await blobs.delete(location)


async def test_what_is_no_location_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    for location in ("", "../x", "a" * 64, "A" * 64 + "-" + "0" * 16):
        with pytest.raises(ValueError, match="not a location"):
            await blobs.publish(tmp_path / "staged", location)
        with pytest.raises(ValueError, match="not a location"):
            await read(blobs, location, 0, 1)
        for call in (blobs.size, blobs.delete):
            with pytest.raises(ValueError, match="not a location"):
                await call(location)


async def test_a_local_path_is_where_the_bytes_lie_and_a_link_where_they_can_be_fetched(
    blobs: Blobs, kind: str, tmp_path: Path
) -> None:
    location = await publish(blobs, tmp_path, b"here")
    path = blobs.local_path(location)
    link = await blobs.link(location, media_type="a/b", disposition="inline", seconds=60)
    assert (path is not None, link is not None) == (kind == "file", kind == "s3")
    if path is not None:
        assert path.read_bytes() == b"here"
    await blobs.delete(location)


async def test_nothing_unfinished_is_left_by_what_was_published(
    blobs: Blobs, tmp_path: Path
) -> None:
    location = await publish(blobs, tmp_path, b"whole")
    assert await blobs.abort_unfinished(0) == 0
    assert await blobs.size(location) == 5
    await blobs.delete(location)


async def test_a_probe_leaves_nothing(blobs: Blobs) -> None:
    await blobs.probe()
    assert [stored async for stored in blobs.stored()] == []


def test_a_location_is_never_given_twice() -> None:
    assert len({new_location(DIGEST) for _ in range(1000)}) == 1000


@pytest.mark.parametrize("location", ["", "../../etc/passwd", "a" * 64, "A" * 64 + "-" + "0" * 16])
async def test_local_what_is_no_location_never_becomes_a_path(
    tmp_path: Path, workers: Workers, location: str
) -> None:
    blobs = LocalBlobs(tmp_path, workers)
    for call in (blobs.size, blobs.delete):
        with pytest.raises(ValueError, match="not a location"):
            await call(location)


async def test_local_folders_and_files_are_private(tmp_path: Path, workers: Workers) -> None:
    blobs = LocalBlobs(tmp_path / "blobs", workers)
    location = await publish(blobs, tmp_path, b"x")
    folder = tmp_path / "blobs" / location[:2]
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, folder.parent)] == ["0o700"] * 2


async def test_local_another_file_system_means_a_copy(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_device(self: Path, target: Path) -> Path:
        raise OSError(errno.EXDEV, "another device")

    monkeypatch.setattr(Path, "rename", other_device)
    blobs = LocalBlobs(tmp_path / "blobs", workers)
    location = await publish(blobs, tmp_path, b"copied")
    assert await read(blobs, location, 0, 6) == [b"copied"]
    path = tmp_path / "blobs" / location[:2] / location
    assert oct(path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("step", ["rename", "folder"])
async def test_local_a_failed_publish_leaves_nothing(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    blobs = LocalBlobs(tmp_path / "blobs", workers)
    await blobs.delete(await publish(blobs, tmp_path, b"the folder is there"))
    if step == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr("app.store.local.sync_folder", fail)
    with pytest.raises(Unavailable):
        await publish(blobs, tmp_path, b"x")
    assert [stored async for stored in blobs.stored()] == []


async def test_local_files_with_other_names_are_left_alone(
    tmp_path: Path, workers: Workers
) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "notes.txt").touch()
    (tmp_path / "lost+found").mkdir()
    blobs = LocalBlobs(tmp_path, workers)
    assert [stored async for stored in blobs.stored()] == []


async def test_local_a_file_that_goes_while_listed_is_not_there(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(entry: os.DirEntry[str]) -> Stored | None:
        Path(entry.path).unlink()
        return stored_of(entry)

    stored_of = local._stored
    blobs = LocalBlobs(tmp_path / "blobs", workers)
    await publish(blobs, tmp_path, b"x")
    monkeypatch.setattr(local, "_stored", gone)
    assert [stored async for stored in blobs.stored()] == []
