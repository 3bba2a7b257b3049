"""Bodies in Azure Blob Storage, with a real server of it: where it is not as S3 is."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import httpx
import obstore
import pytest

from app.errors import Exhausted, Refusal, Unavailable
from app.store.blobs import BlobDamaged, new_location
from app.store.buckets import Patience
from app.store.objects import FETCH_BYTES, PART_BYTES, ObjectBlobs
from app.store.threads import Workers
from tests.azure import ACCOUNT, CONTAINER, CREDENTIALS, AzureServer, azure_server
from tests.faults import Fault, FaultProxy
from tests.store.bodies import left, opened, publish, read
from tests.store.stores import LARGE, get, new_store, put

pytestmark = [pytest.mark.anyio, pytest.mark.component("azurite")]

PATIENCE = Patience(request_seconds=5, retry_seconds=1)
PARTS = 2 * PART_BYTES + 1
"""Bytes of a body that goes up in three parts."""

STEPS = {"part": "comp=block&", "completion": "comp=blocklist", "deletion": "comp=batch"}
"""What the requests of each step have in their line; a deletion is a batch of one."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> AzureServer:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return azure_server()


@pytest.fixture
def patience() -> Patience:
    return PATIENCE


async def lease(blobs: ObjectBlobs, location: str) -> None:
    """Have somebody else hold an object for ever: nobody without the lease deletes it."""
    url = await obstore.sign_async(blobs._store, "PUT", location, timedelta(seconds=60))
    headers = {"x-ms-lease-action": "acquire", "x-ms-lease-duration": "-1"}
    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.put(f"{url}&comp=lease", headers=headers)).raise_for_status()


async def test_a_body_in_parts_comes_back_whole_and_in_ranges(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    data = os.urandom(PARTS)
    location = await publish(faulty, tmp_path, data)
    assert sum(STEPS["part"] in line for line in proxy.seen) == 3
    assert await blobs.size(location) == PARTS
    assert await read(blobs, location, 0, PARTS) == data
    for start in (PART_BYTES - 5, FETCH_BYTES - 5):
        assert await read(blobs, location, start, start + 10) == data[start : start + 10]


# Not 5: there Azurite, unlike the service, answers 206 with the range "5-4".
@pytest.mark.parametrize("start", [0, 6, 9])
async def test_a_range_past_the_end_ends_too_early(
    blobs: ObjectBlobs, tmp_path: Path, start: int
) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    with pytest.raises(Unavailable, match="too early"):
        await read(blobs, location, start, 10)


async def test_damaged_bytes_are_seen(blobs: ObjectBlobs, tmp_path: Path) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    obstore.put(blobs._store, location, b"12346")
    with pytest.raises(BlobDamaged):
        await read(blobs, location, 0, 5)


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        ("part", Fault.RESET),
        ("part", Fault.LOST),
        ("completion", Fault.BUSY),
        ("completion", Fault.RESET),
        ("deletion", Fault.BUSY),
        ("deletion", Fault.RESET),
        ("deletion", Fault.LOST),
    ],
)
async def test_a_fault_that_passes_is_not_noticed(
    blobs: ObjectBlobs,
    faulty: ObjectBlobs,
    proxy: FaultProxy,
    tmp_path: Path,
    step: str,
    fault: Fault,
) -> None:
    proxy.times(1, fault, where=STEPS[step])
    data = os.urandom(PARTS)
    location = await publish(faulty, tmp_path, data)
    assert await read(blobs, location, 0, PARTS) == data
    await faulty.delete(location)
    assert proxy.arrived.is_set()
    assert await blobs.size(location) is None


async def test_a_publish_whose_answer_is_lost_is_whole_or_nothing(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.times(1, Fault.LOST, where=STEPS["completion"])
    data = os.urandom(PARTS)
    try:
        location = await publish(faulty, tmp_path, data)
    except Unavailable:
        assert await left(blobs) == []
    else:
        assert await read(blobs, location, 0, PARTS) == data


@pytest.mark.parametrize(
    ("step", "fault", "expected"),
    [("part", Fault.FULL, Exhausted), ("completion", Fault.BUSY, Unavailable)],
)
async def test_a_publish_that_fails_leaves_nothing(
    blobs: ObjectBlobs,
    faulty: ObjectBlobs,
    proxy: FaultProxy,
    tmp_path: Path,
    step: str,
    fault: Fault,
    expected: type[Refusal],
) -> None:
    proxy.always(fault, where=STEPS[step])
    with pytest.raises(expected):
        await publish(faulty, tmp_path, os.urandom(PARTS))
    assert await left(blobs) == []


async def test_blocks_that_nobody_commits_are_no_body(
    blobs: ObjectBlobs, faulty: ObjectBlobs, proxy: FaultProxy, tmp_path: Path
) -> None:
    """What a process leaves that dies in the middle of an upload; the service takes it away."""
    body = tmp_path / "body"
    body.write_bytes(os.urandom(PARTS))
    location = new_location(bytes(32))
    proxy.always(Fault.HANG, where=STEPS["completion"])
    upload = obstore.put_async(faulty._store, location, body, chunk_size=PART_BYTES)
    task = asyncio.ensure_future(upload)
    await proxy.arrived.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert await left(blobs) == []
    assert await blobs.size(location) is None
    assert await blobs.abort_unfinished(0) == 0
    await blobs.delete(location)


@pytest.mark.parametrize("name", CREDENTIALS)
async def test_wrong_credentials_are_unavailable(
    url: str, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "d3Jvbmc=")
    blobs = opened(url, workers, PATIENCE)
    location = new_location(bytes(32))
    for call in (blobs.probe(), blobs.size(location), publish(blobs, tmp_path, b"x"), left(blobs)):
        with pytest.raises(Unavailable) as refused:
            await call
        assert refused.value.code == "storage_unavailable"


async def test_a_container_that_is_not_there_is_unavailable(
    url: str, workers: Workers, tmp_path: Path
) -> None:
    blobs = opened(url.replace(CONTAINER, "nothing"), workers, PATIENCE)
    for call in (blobs.probe(), publish(blobs, tmp_path, b"x"), left(blobs)):
        with pytest.raises(Unavailable):
            await call


async def test_account_and_endpoint_of_the_url_win_over_the_environment(
    url: str, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    blobs = opened(f"{url}&account_name={ACCOUNT}", workers, PATIENCE)
    await blobs.probe()
    assert await left(blobs) == []


async def test_a_deletion_that_is_refused_in_the_batch_is_no_success(
    blobs: ObjectBlobs, tmp_path: Path
) -> None:
    location = await publish(blobs, tmp_path, b"12345")
    await lease(blobs, location)
    with pytest.raises(Unavailable):
        await blobs.delete(location)
    assert await left(blobs) == [location]


async def test_the_store_keeps_and_sweeps_its_bodies(
    tmp_path: Path, url: str, blobs: ObjectBlobs
) -> None:
    await publish(blobs, tmp_path, b"nobody's")
    # The server tells whole seconds, rounded down: what is nobody's is old enough at once.
    store = await new_store(tmp_path / "data", blob_url=url, orphan_age_seconds=1e-9)
    await store.probe()
    kept = await put(store, LARGE)
    assert (await store.sweep()).orphans == 1
    assert len(await left(blobs)) == 1
    assert await get(store, kept.ref, start=5, stop=500) == LARGE[5:500]
    assert [finding async for finding in store.verify()] == []
    await store.remove("a", kept.ref)
    await store.sweep()
    assert await left(blobs) == []
    await store.close()
