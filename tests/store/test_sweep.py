"""gc and fsck: what goes, what stays, what is reported."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import obstore
import pytest

from app.errors import Unavailable
from app.store import ContentStore, Finding, SweepReport, Usage
from app.store import sweep as sweep_module
from app.store.blobs import Blobs, Stored
from app.store.sweep import _age
from tests.store.stores import (
    LARGE,
    SMALL,
    count,
    database,
    get,
    make_old,
    new_store,
    published,
    put,
    sha256,
    stored_files,
)

pytestmark = pytest.mark.anyio


async def orphan(store: ContentStore, tmp_path: Path) -> Path:
    """A published file whose row is gone, as if its process had died before the commit."""
    before = set(published(tmp_path))
    reference = await put(store, LARGE[::-1])
    with database(tmp_path) as rows:
        rows.execute("delete from content_refs where ref = ?", (reference.ref,))
        rows.execute("delete from blobs where digest = ?", (bytes.fromhex(reference.sha256),))
    (path,) = set(published(tmp_path)) - before
    return path


@pytest.mark.requirement("AHP-R44")
async def test_nothing_goes_that_is_referred_to(store: ContentStore, tmp_path: Path) -> None:
    references = [await put(store, data) for data in (SMALL, LARGE, b"")]
    make_old(tmp_path)
    assert await store.sweep() == SweepReport()
    assert [await get(store, r.ref) for r in references] == [SMALL, LARGE, b""]


async def test_what_has_expired_goes_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "PAGE", 2)
    store = await new_store(tmp_path, retention=timedelta(hours=1))
    for n in range(3):
        await put(store, LARGE + bytes([n]))
    await put(store, SMALL)
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + 3601)
    size = 3 * (len(LARGE) + 1) + len(SMALL)
    assert await store.sweep(dry_run=True) == SweepReport(dry_run=True, expired=4)
    assert await store.sweep() == SweepReport(expired=4, blobs=4, bytes=size)
    await store.close()
    assert published(tmp_path) == []


async def test_a_rehearsal_changes_nothing(store: ContentStore, tmp_path: Path) -> None:
    removed = await put(store, LARGE)
    await store.remove("a", removed.ref)
    await orphan(store, tmp_path)
    make_old(tmp_path)
    expected = SweepReport(dry_run=True, blobs=1, bytes=len(LARGE), orphans=1)
    for _ in range(2):
        assert await store.sweep(dry_run=True) == expected
    assert len(published(tmp_path)) == 2
    assert await store.sweep() == SweepReport(blobs=1, bytes=len(LARGE), orphans=1)
    assert published(tmp_path) == []


@pytest.mark.requirement("AHP-R44")
async def test_an_orphan_goes_by_age_and_not_before(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "PAGE", 1)
    kept = await put(store, LARGE)
    path = await orphan(store, tmp_path)
    assert await store.sweep() == SweepReport()
    make_old(tmp_path)
    assert await store.sweep() == SweepReport(orphans=1)
    assert not path.exists()
    assert await get(store, kept.ref) == LARGE


async def test_an_orphan_from_the_future_stays_and_is_reported(
    store: ContentStore, tmp_path: Path
) -> None:
    path = await orphan(store, tmp_path)
    make_old(tmp_path, -timedelta(days=10))
    assert await store.sweep(dry_run=True) == SweepReport(dry_run=True, kept=1)
    assert await store.sweep() == SweepReport(kept=1)
    assert path.exists()
    findings = [finding async for finding in store.verify()]
    assert [(f.kind, f.location) for f in findings] == [("orphan", path.name)]


def test_an_unknown_age_is_no_age() -> None:
    assert _age(Stored("location", 1, None)) is None


async def test_a_sweep_that_died_before_unlinking_is_finished_by_the_next(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(*_: object) -> NoReturn:
        raise Unavailable("storage_unavailable", "Not now.")

    await store.remove("a", (await put(store, LARGE)).ref)
    with monkeypatch.context() as patched:
        patched.setattr(type(store._blobs), "delete", dies)
        with pytest.raises(Unavailable):
            await store.sweep()
    assert (count(tmp_path, "blobs"), len(published(tmp_path))) == (0, 1)
    again = await put(store, LARGE)
    await store.sweep()
    assert len(published(tmp_path)) == 1
    assert await get(store, again.ref) == LARGE


async def test_bytes_that_come_back_after_a_crash_go_again(
    store: ContentStore, tmp_path: Path
) -> None:
    await store.remove("a", (await put(store, LARGE)).ref)
    (path,) = published(tmp_path)
    await store.sweep()
    path.write_bytes(LARGE)
    make_old(tmp_path)
    assert await store.sweep() == SweepReport(orphans=1)
    assert published(tmp_path) == []


async def test_a_location_that_a_sweep_took_is_not_accepted_by_a_commit(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = store._catalogue.add

    async def overtaken(*args: object) -> str | None:
        make_old(tmp_path)
        assert (await store.sweep()).orphans == 1
        return await add(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(store._catalogue, "add", overtaken)
    with pytest.raises(Unavailable, match="send it again"):
        await put(store, LARGE)
    assert await store.usage() == Usage(0, 0, 0)
    assert stored_files(tmp_path) == []


async def test_nor_by_a_healing(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await put(store, LARGE)
    published(tmp_path)[0].unlink()
    repoint = store._catalogue.repoint

    async def overtaken(*args: object) -> str | None:
        make_old(tmp_path)
        assert (await store.sweep()).orphans == 1
        return await repoint(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(store._catalogue, "repoint", overtaken)
    with pytest.raises(Unavailable, match="send it again"):
        await put(store, LARGE)
    monkeypatch.undo()
    again = await put(store, LARGE)
    assert await get(store, first.ref) == await get(store, again.ref) == LARGE


async def test_verdicts_are_forgotten_after_a_week(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.remove("a", (await put(store, LARGE)).ref)
    await store.sweep()
    assert count(tmp_path, "condemned") == 1
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + 8 * 86400)
    await store.sweep()
    assert count(tmp_path, "condemned") == 0


async def test_a_reader_keeps_its_bytes_while_they_are_swept(store: ContentStore) -> None:
    reference = await put(store, LARGE)
    async with store.open("a", reference.ref) as content:
        await store.remove("a", reference.ref)
        await store.sweep()
        assert b"".join([chunk async for chunk in content]) == LARGE


async def test_bytes_taken_between_look_up_and_opening_are_not_found(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await put(store, LARGE)
    find_place = store._catalogue.find_place

    async def swept(scope: str, ref: str) -> object:
        found = await find_place(scope, ref)
        await store.remove(scope, ref)
        await store.sweep()
        return found

    monkeypatch.setattr(store._catalogue, "find_place", swept)
    with pytest.raises(Exception, match="no such content"):
        await get(store, reference.ref)


async def findings(store: ContentStore) -> list[Finding]:
    return [finding async for finding in store.verify()]


async def test_fsck_finds_nothing_wrong_in_a_sound_store(
    store: ContentStore, tmp_path: Path
) -> None:
    for n in range(20):
        await put(store, bytes([n]))
    await put(store, LARGE)
    await orphan(store, tmp_path)
    assert await findings(store) == []


@pytest.mark.parametrize(
    ("kind", "data"),
    [("missing", None), ("wrong_size", LARGE[1:]), ("wrong_digest", LARGE[::-1])],
)
async def test_fsck_finds_a_file_that_is_not_what_is_recorded(
    store: ContentStore, tmp_path: Path, kind: str, data: bytes | None
) -> None:
    await put(store, LARGE)
    await put(store, LARGE, scope="b")
    (path,) = published(tmp_path)
    path.unlink() if data is None else path.write_bytes(data)
    (finding,) = await findings(store)
    assert (finding.kind, finding.sha256, finding.location, finding.references) == (
        kind, sha256(LARGE), path.name, 2
    )  # fmt: skip
    assert str(tmp_path) not in finding.detail


@pytest.mark.parametrize(("kind", "data"), [("wrong_size", b"x"), ("wrong_digest", b"SMALL")])
async def test_fsck_finds_a_row_that_is_not_what_is_recorded(
    store: ContentStore, tmp_path: Path, kind: str, data: bytes
) -> None:
    await put(store, SMALL)
    with database(tmp_path) as rows:
        rows.execute("update blobs set data = ?", (data,))
    (finding,) = await findings(store)
    assert (finding.kind, finding.sha256, finding.location) == (kind, sha256(SMALL), None)


async def test_fsck_finds_what_cannot_be_read(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> NoReturn:
        raise OSError(5, "input/output error")

    await put(store, LARGE)
    monkeypatch.setattr(os, "pread", broken)
    monkeypatch.setattr(obstore, "get_async", broken)
    assert [finding.kind for finding in await findings(store)] == ["unreadable"]


async def test_fsck_finds_references_without_bytes(store: ContentStore, tmp_path: Path) -> None:
    await put(store, SMALL)
    with database(tmp_path) as rows:
        rows.execute("delete from blobs")
    (finding,) = await findings(store)
    assert (finding.kind, finding.sha256, finding.references) == (
        "dangling_reference", None, 1
    )  # fmt: skip


async def test_fsck_finds_old_orphans(store: ContentStore, tmp_path: Path) -> None:
    path = await orphan(store, tmp_path)
    make_old(tmp_path)
    assert await findings(store) == [
        Finding("orphan", "no record names these bytes", None, path.name)
    ]


async def test_fsck_says_nothing_of_what_is_swept_meanwhile(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await put(store, LARGE)
    kind = type(store._blobs)
    size = kind.size

    async def swept(self: Blobs, location: str) -> int | None:
        monkeypatch.undo()
        await store.remove("a", reference.ref)
        await store.sweep()
        return await size(self, location)

    monkeypatch.setattr(kind, "size", swept)
    assert await findings(store) == []


@pytest.mark.requirement("B74", "B76")
async def test_uploads_and_sweeps_of_equal_bytes_leave_no_dangling_reference(
    tmp_path: Path,
) -> None:
    """Two stores, as two processes have them, over one place."""
    stores = [await new_store(tmp_path) for _ in range(2)]
    bodies = [LARGE, LARGE[::-1], SMALL]
    stop = asyncio.Event()

    async def upload_and_remove(store: ContentStore, data: bytes, rounds: int) -> None:
        for _ in range(rounds):
            reference = await put(store, data)
            assert await get(store, reference.ref) == data
            await store.remove("a", reference.ref)

    async def sweep(store: ContentStore) -> None:
        while not stop.is_set():
            await store.sweep()

    sweeps = [asyncio.create_task(sweep(store)) for store in stores]
    uploads = [upload_and_remove(s, data, 40) for s in stores for data in bodies for _ in range(3)]
    await asyncio.gather(*uploads)
    stop.set()
    await asyncio.gather(*sweeps)
    await stores[0].sweep()
    assert await findings(stores[0]) == []
    for store in stores:
        await store.close()
    assert (count(tmp_path, "content_refs"), count(tmp_path, "blobs")) == (0, 0)
    assert stored_files(tmp_path) == []
