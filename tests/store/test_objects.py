"""Bodies in a bucket, with a real S3 server: what a file on this machine does not need."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import obstore
import psutil
import pytest
from obstore.store import S3Store

from app.errors import Exhausted, Refusal, Unavailable
from app.settings import GIB, MIB
from app.store.blobs import CHUNK_BYTES, BlobDamaged, BlobMissing, new_location
from app.store.buckets import Patience, S3Signer, connect, parse_bucket
from app.store.objects import (
    FETCH_BYTES,
    MOST_PARTS,
    PART_BYTES,
    ObjectBlobs,
    part_bytes,
)
from app.store.threads import Workers
from app.store.unfinished import Unfinished, UnfinishedUploads
from tests.faults import Fault, FaultProxy
from tests.objects import CREDENTIALS, ObjectServer, object_server
from tests.store.bodies import left, opened, publish, read
from tests.store.stores import LARGE, get, new_store, put

pytestmark = [pytest.mark.anyio, pytest.mark.component("seaweedfs")]

PATIENCE = Patience(request_seconds=2, retry_seconds=1)
PARTS = 2 * PART_BYTES + 1
"""Bytes of a body that goes up in three parts."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> ObjectServer:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return object_server()


@pytest.fixture
def patience() -> Patience:
    return PATIENCE


async def read_into(
    got: bytearray, blobs: ObjectBlobs, location: str, stop: int, between: Callable[[], object]
) -> None:
    """Read from the start, and do something after each chunk."""
    async with blobs.open(location, 0, stop) as chunks:
        async for chunk in chunks:
            got += chunk
            between()


async def unfinished(blobs: ObjectBlobs) -> list[Unfinished]:
    assert blobs._unfinished is not None
    return [upload async for upload in blobs._unfinished.listed()]


# Publishing


def test_parts_stay_small_and_few() -> None:
    assert part_bytes(0) == part_bytes(MOST_PARTS * PART_BYTES) == PART_BYTES
    for size in (MOST_PARTS * PART_BYTES + 1, 5000 * GIB):
        assert part_bytes(size) * MOST_PARTS >= size
        assert part_bytes(size) % MIB == 0


@pytest.mark.parametrize(
    ("size", "step"),
    [(1000, "PUT "), (PARTS, "uploads="), (PARTS, "partNumber=2"), (PARTS, "?uploadId=")],
    ids=["small", "begin", "part", "completion"],
)
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.SLOW])
async def test_a_publish_outlasts_a_fault_that_passes(
    blobs: ObjectBlobs,
    faulty: ObjectBlobs,
    proxy: FaultProxy,
    tmp_path: Path,
    size: int,
    step: str,
    fault: Fault,
) -> None:
    proxy.times(2, fault, where=step)
    data = os.urandom(size)
    location = await publish(faulty, tmp_path, data)
    assert await read(blobs, location, 0, size) == data
    assert await unfinished(blobs) == []


STEPS = {
    "begin": ("POST ", "uploads="),
    "part": ("PUT ", "partNumber=2"),
    "completion": ("POST ", "uploadId="),
}


def break_step(proxy: FaultProxy, step: str, fault: Fault) -> None:
    method, mark = STEPS[step]
    proxy.rules.append(
        lambda line: fault if line.startswith(method) and mark in line else None,
    )


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (Fault.ERROR, Unavailable),
        (Fault.BUSY, Unavailable),
        (Fault.FULL, Exhausted),
        (Fault.RESET, Unavailable),
        (Fault.HANG, Unavailable),
    ],
)
async def test_a_publish_that_fails_leaves_nothing(
    blobs: ObjectBlobs,
    server: ObjectServer,
    url: str,
    workers: Workers,
    proxy: FaultProxy,
    tmp_path: Path,
    step: str,
    fault: Fault,
    expected: type[Refusal],
) -> None:
    break_step(proxy, step, fault)
    prefix = urlsplit(url).path.strip("/")
    impatient = Patience(0.5 if fault is Fault.HANG else 5, retry_seconds=0.2)
    faulty = opened(server.blob_url(prefix, address=proxy.address), workers, impatient)
    with pytest.raises(expected):
        await publish(faulty, tmp_path, os.urandom(PARTS))
    assert await left(blobs) == []
    assert await unfinished(blobs) == []


@pytest.mark.parametrize(("size", "step"), [(1000, "PUT "), (PARTS, "uploadId=")])
async def test_a_publish_whose_answer_is_lost_is_whole_or_nothing(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path, size: int, step: str
) -> None:
    proxy.times(1, Fault.LOST, where=step)
    data = os.urandom(size)
    try:
        location = await publish(faulty, tmp_path, data)
    except Unavailable:
        assert await left(blobs) == []
    else:
        assert await read(blobs, location, 0, size) == data
    assert await unfinished(blobs) == []


async def test_a_publish_that_is_lost_every_time_leaves_nothing(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    """The object is there, and nobody was told so: it goes again."""
    proxy.always(Fault.LOST, where="PUT ")
    with pytest.raises(Unavailable):
        await publish(faulty, tmp_path, b"here it is")
    assert await left(blobs) == []


async def test_what_cannot_be_cleared_up_is_told_and_left_for_the_sweep(
    blobs: ObjectBlobs,
    faulty: ObjectBlobs,
    proxy: FaultProxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy.always(Fault.LOST, where="PUT ")
    proxy.always(Fault.ERROR, where="DELETE ")
    with pytest.raises(Unavailable):
        await publish(faulty, tmp_path, b"here it is")
    assert len(await left(blobs)) == 1
    assert "left for the sweep" in caplog.text


@asynccontextmanager
async def cancelled_in_part_two(
    proxy: FaultProxy, upload: Awaitable[object]
) -> AsyncIterator[None]:
    """An upload that is cancelled while its second part is on its way."""
    proxy.always(Fault.HANG, where="partNumber=2")
    task = asyncio.ensure_future(upload)
    await proxy.arrived.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    proxy.heal()
    yield


async def test_a_cancelled_publish_leaves_nothing(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    async with cancelled_in_part_two(proxy, publish(faulty, tmp_path, os.urandom(PARTS))):
        assert await unfinished(blobs) == []
        assert await left(blobs) == []


async def test_a_staged_file_that_is_gone_is_an_error(blobs: ObjectBlobs, tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await blobs.publish(tmp_path / "nothing", new_location(bytes(32)))
    assert await left(blobs) == []


async def test_eight_publishers_and_eight_readers_at_once(
    blobs: ObjectBlobs, tmp_path: Path
) -> None:
    bodies = [os.urandom(MIB + number) for number in range(16)]
    locations = await asyncio.gather(*(publish(blobs, tmp_path, body) for body in bodies))
    both = zip(locations, bodies, strict=True)
    found = await asyncio.gather(*(read(blobs, where, 0, len(body)) for where, body in both))
    assert found == bodies


# Unfinished uploads


async def dead_upload(proxy: FaultProxy, faulty: ObjectBlobs, tmp_path: Path, key: str) -> None:
    """What a process leaves that dies in the middle of an upload."""
    body = tmp_path / "body"
    body.write_bytes(os.urandom(PARTS))
    upload = obstore.put_async(faulty._store, key, body, chunk_size=PART_BYTES, max_concurrency=1)
    async with cancelled_in_part_two(proxy, upload):
        pass


async def test_the_upload_of_a_dead_process_goes_by_its_age(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    location = new_location(bytes(32))
    await dead_upload(proxy, faulty, tmp_path, location)
    assert [upload.key for upload in await unfinished(blobs)] == [location]
    assert await blobs.abort_unfinished(3600) == 0
    assert await blobs.abort_unfinished(-10) == 1
    assert await unfinished(blobs) == []


async def test_an_upload_of_somebody_else_stays(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    await dead_upload(proxy, faulty, tmp_path, "backup.tar")
    assert await blobs.abort_unfinished(-10) == 0
    assert [upload.key for upload in await unfinished(blobs)] == ["backup.tar"]


async def test_a_sweep_aborts_what_is_a_day_old(
    tmp_path: Path, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    async def abort(self: ObjectBlobs, seconds: float) -> int:
        asked.append(seconds)
        return 0

    monkeypatch.setattr(ObjectBlobs, "abort_unfinished", abort)
    store = await new_store(tmp_path, blob_url=server.blob_url())
    await store.sweep()
    await store.sweep(dry_run=True)
    await store.close()
    assert asked == [86400]


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET])
async def test_a_listing_of_uploads_that_fails_is_unavailable(
    faulty: ObjectBlobs, proxy: FaultProxy, fault: Fault
) -> None:
    proxy.always(fault)
    with pytest.raises(Unavailable):
        await faulty.abort_unfinished(0)


def upload_xml(name: str, initiated: str) -> str:
    return (
        f"<Upload><Key>x/{name}</Key><UploadId>{name}</UploadId>"
        f"<Initiated>{initiated}</Initiated></Upload>"
    )


PAGES = [
    upload_xml("one", "2026-01-02T03:04:05.000Z")
    + "<IsTruncated>true</IsTruncated><NextKeyMarker>x/one</NextKeyMarker>"
    + "<NextUploadIdMarker>1</NextUploadIdMarker>",
    upload_xml("two", "whenever")
    + upload_xml("three", "2026-01-02T03:04:05")
    + "<IsTruncated>false</IsTruncated>",
]


class Answering:
    """A store that gives prepared answers, one to each request, and keeps what it was asked."""

    def __init__(self, *answers: tuple[int, bytes]) -> None:
        self.asked: list[httpx.Request] = []
        self._answers = iter(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        status, body = next(self._answers)
        return httpx.Response(status, content=body)


def answered(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, *answers: tuple[int, bytes]
) -> tuple[UnfinishedUploads, Answering]:
    answering = Answering(*answers)
    monkeypatch.setattr(
        "app.store.unfinished._client",
        lambda: httpx.AsyncClient(transport=httpx.MockTransport(answering)),
    )
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = parse_bucket("s3://depot/x?endpoint=https://s3.example.com&region=eu-west-1")
    return UnfinishedUploads(S3Signer(bucket, PATIENCE, workers), "x"), answering


async def test_uploads_are_listed_page_by_page_with_their_age_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, workers: Workers
) -> None:
    pages = [(200, f"<Result>{page}</Result>".encode()) for page in PAGES]
    uploads, answering = answered(monkeypatch, workers, *pages)
    found = [upload async for upload in uploads.listed()]
    assert [(upload.key, upload.upload_id) for upload in found] == [
        ("one", "one"),
        ("two", "two"),
        ("three", "three"),
    ]
    assert [upload.begun for upload in found] == [1767323045.0, None, None]
    second = answering.asked[1].url.params
    assert (second["key-marker"], second["upload-id-marker"]) == ("x/one", "1")
    assert (second["prefix"], second["max-uploads"]) == ("x/", "1000")
    assert answering.asked[0].url.path == "/depot"


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_store_that_lists_no_uploads_has_none(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, status: int
) -> None:
    uploads, _ = answered(monkeypatch, workers, (status, b""))
    assert [upload async for upload in uploads.listed()] == []


@pytest.mark.parametrize("answer", [(403, b""), (200, b"<not xml")])
async def test_a_listing_that_is_refused_or_no_listing_is_unavailable(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, answer: tuple[int, bytes]
) -> None:
    uploads, _ = answered(monkeypatch, workers, answer)
    with pytest.raises(Unavailable):
        [upload async for upload in uploads.listed()]


# Reading


@pytest.mark.parametrize(
    "fault", [Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.CUT, Fault.SLOW, Fault.LOST]
)
async def test_a_read_outlasts_a_fault_that_passes(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    data = os.urandom(3 * FETCH_BYTES + 5)
    location = await publish(blobs, tmp_path, data)
    proxy.times(2, fault, where="GET ")
    assert await read(faulty, location, 0, len(data)) == data


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.CUT, Fault.HANG])
async def test_a_read_that_fails_is_unavailable(
    blobs: ObjectBlobs,
    server: ObjectServer,
    url: str,
    workers: Workers,
    proxy: FaultProxy,
    tmp_path: Path,
    fault: Fault,
) -> None:
    location = await publish(blobs, tmp_path, b"0123456789")
    proxy.always(fault, where="GET ")
    impatient = Patience(request_seconds=0.3, retry_seconds=0.2)
    prefix = urlsplit(url).path.strip("/")
    faulty = opened(server.blob_url(prefix, address=proxy.address), workers, impatient)
    with pytest.raises(Unavailable):
        await read(faulty, location, 0, 10)


async def test_a_fault_in_the_middle_of_a_body_never_looks_like_its_end(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    data = os.urandom(6 * FETCH_BYTES)
    location = await publish(blobs, tmp_path, data)
    got = bytearray()
    with pytest.raises(Unavailable):
        await read_into(got, faulty, location, len(data), lambda: proxy.always(Fault.ERROR))
    assert 0 < len(got) < len(data)
    assert data.startswith(got)


async def test_a_body_that_goes_while_it_is_read_ends_too_early(
    blobs: ObjectBlobs, tmp_path: Path
) -> None:
    data = os.urandom(6 * FETCH_BYTES)
    location = await publish(blobs, tmp_path, data)
    with pytest.raises(Unavailable, match="too early"):
        await read_into(
            bytearray(),
            blobs,
            location,
            len(data),
            lambda: obstore.delete(blobs._store, location),
        )


@pytest.mark.parametrize("stop", [6, 3 * FETCH_BYTES])
@pytest.mark.parametrize("start", [0, 3, 5, 9])
async def test_a_range_past_the_end_ends_too_early(
    blobs: ObjectBlobs, tmp_path: Path, start: int, stop: int
) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    if start < stop:
        with pytest.raises(Unavailable, match="too early"):
            await read(blobs, location, start, stop)
    else:
        assert await read(blobs, location, start, stop) == b""


@pytest.mark.parametrize("size", [FETCH_BYTES, FETCH_BYTES + 1, 2 * FETCH_BYTES])
async def test_a_body_that_ends_behind_the_first_range_ends_too_early(
    blobs: ObjectBlobs, tmp_path: Path, size: int
) -> None:
    location = await publish(blobs, tmp_path, bytes(size))
    with pytest.raises(Unavailable, match="too early"):
        await read(blobs, location, 0, 3 * FETCH_BYTES)


@pytest.mark.parametrize("size", [10, 3 * FETCH_BYTES])
async def test_damaged_bytes_are_seen_before_the_last_of_them_goes_out(
    blobs: ObjectBlobs, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    location = await publish(blobs, tmp_path, data)
    damaged = data[:-1] + bytes([data[-1] ^ 1])
    obstore.put(blobs._store, location, damaged)
    got = bytearray()
    with pytest.raises(BlobDamaged) as found:
        await read_into(got, blobs, location, size, lambda: None)
    assert len(got) < size
    assert (found.value.sha256, found.value.size) == (hashlib.sha256(damaged).hexdigest(), size)
    assert await read(blobs, location, 0, size - 1) == data[:-1]


async def test_chunks_are_small_however_much_is_fetched(blobs: ObjectBlobs, tmp_path: Path) -> None:
    data = os.urandom(2 * FETCH_BYTES + 5)
    location = await publish(blobs, tmp_path, data)
    async with blobs.open(location, 1, len(data)) as chunks:
        sizes = [len(chunk) async for chunk in chunks]
    assert max(sizes) == CHUNK_BYTES
    assert sum(sizes) == len(data) - 1


# Memory


async def resident_growth(work: Awaitable[object]) -> int:
    """How far the memory of this process rises while `work` is under way, in bytes."""
    process = psutil.Process()
    before = peak = process.memory_info().rss
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=0.01)
        peak = max(peak, process.memory_info().rss)
    await task
    return peak - before


async def read_through(blobs: ObjectBlobs, location: str, size: int) -> None:
    async with blobs.open(location, 0, size) as chunks:
        assert sum([len(chunk) async for chunk in chunks]) == size


async def test_200_mib_go_up_and_come_down_in_flat_memory(
    server: ObjectServer, url: str, workers: Workers, tmp_path: Path
) -> None:
    blobs = opened(url, workers, Patience())
    size = 200 * MIB
    staged = tmp_path / "staged"
    with staged.open("wb") as file:
        file.truncate(size)
    with staged.open("rb") as file:
        location = new_location(hashlib.file_digest(file, "sha256").digest())
    up = await resident_growth(blobs.publish(staged, location))
    down = await resident_growth(read_through(blobs, location, size))
    assert up < 64 * MIB
    assert down < 64 * MIB
    await blobs.delete(location)


# Everything else


CALLS: dict[str, Callable[[ObjectBlobs, str], Awaitable[object]]] = {
    "size": lambda blobs, location: blobs.size(location),
    "delete": lambda blobs, location: blobs.delete(location),
    "probe": lambda blobs, _: blobs.probe(),
    "stored": lambda blobs, _: left(blobs),
    "open nothing": lambda blobs, location: read(blobs, location, 1, 1),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.BUSY, Fault.RESET, Fault.HANG])
async def test_a_fault_that_stays_is_unavailable(
    server: ObjectServer, proxy: FaultProxy, workers: Workers, call: str, fault: Fault
) -> None:
    impatient = Patience(request_seconds=0.3, retry_seconds=0.2)
    faulty = opened(server.blob_url(address=proxy.address), workers, impatient)
    proxy.always(fault)
    with pytest.raises(Unavailable) as refused:
        await CALLS[call](faulty, new_location(bytes(32)))
    assert refused.value.code == "storage_unavailable"


@pytest.mark.parametrize("call", CALLS)
async def test_a_fault_that_passes_is_not_noticed(
    faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path, call: str
) -> None:
    location = await publish(faulty, tmp_path, b"12345")
    proxy.times(2, Fault.BUSY)
    await CALLS[call](faulty, location)


async def test_a_probe_does_not_wait_for_long(
    server: ObjectServer,
    proxy: FaultProxy,
    workers: Workers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.store.objects.PROBE_SECONDS", 0.2)
    patient = Patience(request_seconds=170, retry_seconds=170)
    faulty = opened(server.blob_url(address=proxy.address), workers, patient)
    proxy.always(Fault.HANG)
    with pytest.raises(Unavailable):
        await faulty.probe()


async def test_a_delete_whose_answer_is_lost_has_deleted(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    proxy.times(1, Fault.LOST, where="DELETE ")
    await faulty.delete(location)
    assert await blobs.size(location) is None
    with pytest.raises(BlobMissing):
        await read(blobs, location, 0, 5)


async def test_a_listing_goes_on_behind_a_page_and_leaves_other_objects_out(
    blobs: ObjectBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.objects.LISTED_AT_ONCE", 2)
    obstore.put(blobs._store, "notes.txt", b"")
    published = {await publish(blobs, tmp_path, bytes([number])) for number in range(5)}
    assert set(await left(blobs)) == published


@pytest.mark.parametrize(
    ("name", "value"), [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "wrong")]
)
async def test_wrong_credentials_are_unavailable(
    server: ObjectServer,
    workers: Workers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    monkeypatch.setenv(name, value)
    blobs = opened(server.blob_url(), workers, PATIENCE)
    location = new_location(bytes(32))
    for call in (blobs.probe(), blobs.size(location), publish(blobs, tmp_path, b"x")):
        with pytest.raises(Unavailable) as refused:
            await call
        assert refused.value.code == "storage_unavailable"
    with pytest.raises(Unavailable):
        await blobs.abort_unfinished(0)


async def test_a_bucket_that_is_not_there_is_unavailable(
    faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.always(Fault.MISSING)
    for call in (faulty.probe(), publish(faulty, tmp_path, b"x"), left(faulty)):
        with pytest.raises(Unavailable):
            await call


async def test_the_endpoint_of_the_url_wins_over_the_environment(
    server: ObjectServer, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    blobs = opened(server.blob_url(), workers, PATIENCE)
    await blobs.probe()
    assert await blobs.abort_unfinished(0) == 0


async def test_bytes_go_up_with_their_checksum_unless_told_not_to(
    server: ObjectServer, workers: Workers
) -> None:
    with_checksum, without = (
        connect(parse_bucket(server.blob_url() + option), PATIENCE)
        for option in ("", "&checksum=none")
    )
    assert isinstance(with_checksum, S3Store)
    assert isinstance(without, S3Store)
    assert with_checksum.config.get("checksum_algorithm") == "sha256"
    assert "checksum_algorithm" not in without.config


# Links


async def test_a_link_gives_the_bytes_with_the_headers_it_was_made_for(
    blobs: ObjectBlobs, tmp_path: Path
) -> None:
    data = os.urandom(1000)
    location = await publish(blobs, tmp_path, data)
    disposition = "attachment; filename=\"a b+c.txt\"; filename*=UTF-8''a%20b%2Bc%E2%82%AC.txt"
    url = await blobs.link(
        location, media_type="text/plain; charset=utf-8", disposition=disposition, seconds=60
    )
    assert url is not None
    assert parse_qs(urlsplit(url).query)["X-Amz-Expires"] == ["60"]
    async with httpx.AsyncClient(trust_env=False) as client:
        whole = await client.get(url)
        part = await client.get(url, headers={"Range": "bytes=10-19"})
        bent = await client.get(url.replace("text%2Fplain", "text%2Fhtml"))
    assert whole.content == data
    assert whole.headers["content-type"] == "text/plain; charset=utf-8"
    assert whole.headers["content-disposition"] == disposition
    assert whole.headers["cache-control"] == "private, no-transform"
    assert (part.status_code, part.content) == (206, data[10:20])
    assert bent.status_code == 403


async def test_a_link_that_cannot_be_made_is_unavailable(
    blobs: ObjectBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_credentials(*_: object) -> str:
        raise obstore.exceptions.GenericError("no instance profile")

    monkeypatch.setattr(obstore, "sign_async", no_credentials)
    with pytest.raises(Unavailable):
        await blobs.link(new_location(bytes(32)), media_type="a/b", disposition="inline", seconds=1)


# The whole store


async def test_the_store_keeps_large_bodies_in_the_bucket_and_small_ones_in_rows(
    tmp_path: Path, url: str, blobs: ObjectBlobs
) -> None:
    store = await new_store(tmp_path, blob_url=url)
    large, small = await put(store, LARGE), await put(store, b"small")
    assert len(await left(blobs)) == 1
    assert await get(store, large.ref) == LARGE
    assert await get(store, small.ref) == b"small"
    assert await get(store, large.ref, start=5, stop=500) == LARGE[5:500]
    assert [finding async for finding in store.verify()] == []
    await store.remove("a", large.ref)
    await store.sweep()
    assert await left(blobs) == []
    await store.close()


@pytest.mark.parametrize(
    ("damage", "kind"),
    [(None, "missing"), (b"x" * len(LARGE), "wrong_digest"), (b"short", "wrong_size")],
)
async def test_fsck_tells_what_became_of_an_object(
    tmp_path: Path, url: str, blobs: ObjectBlobs, damage: bytes | None, kind: str
) -> None:
    store = await new_store(tmp_path, blob_url=url)
    await put(store, LARGE)
    [location] = await left(blobs)
    if damage is None:
        await blobs.delete(location)
    else:
        obstore.put(blobs._store, location, damage)
    findings = [finding async for finding in store.verify()]
    assert [finding.kind for finding in findings] == [kind]
    await store.close()


async def test_orphans_in_the_bucket_go_by_their_age(
    tmp_path: Path, url: str, blobs: ObjectBlobs
) -> None:
    await publish(blobs, tmp_path, b"nobody's")
    store = await new_store(tmp_path / "young", blob_url=url)
    assert (await store.sweep()).orphans == 0
    await store.close()
    assert len(await left(blobs)) == 1
    # The server tells whole seconds, rounded down: this one is old enough at once.
    store = await new_store(tmp_path / "old", blob_url=url, orphan_age_seconds=1e-9)
    assert (await store.sweep()).orphans == 1
    await store.close()
    assert await left(blobs) == []


async def test_an_upload_that_the_bucket_refuses_leaves_nothing_and_can_be_sent_again(
    tmp_path: Path, server: ObjectServer, blobs: ObjectBlobs, url: str, proxy: FaultProxy
) -> None:
    prefix = urlsplit(url).path.strip("/")
    store = await new_store(
        tmp_path,
        blob_url=server.blob_url(prefix, address=proxy.address),
        blob_request_seconds=1,
        blob_retry_seconds=0.1,
    )
    proxy.always(Fault.BUSY)
    with pytest.raises(Unavailable):
        await put(store, LARGE)
    with pytest.raises(Unavailable) as refused:
        await store.probe()
    assert refused.value.code == "not_ready"
    proxy.heal()
    await store.probe()
    assert await get(store, (await put(store, LARGE)).ref) == LARGE
    assert len(await left(blobs)) == 1
    await store.close()


async def test_a_link_is_made_for_large_bodies_and_only_when_configured(
    tmp_path: Path, url: str
) -> None:
    for redirect in (True, False):
        store = await new_store(tmp_path / str(redirect), blob_url=url, redirect_downloads=redirect)
        digests = [(await put(store, data)).sha256 for data in (LARGE, b"small")]
        links = [await store.link(digest, "a/b", "inline") for digest in [*digests, "0" * 64]]
        assert [link is not None for link in links] == [redirect, False, False]
        await store.close()
