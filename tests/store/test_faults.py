"""Disks that are full or broken, databases that are locked, and nothing that leaks."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sqlalchemy import Connection

from app.errors import Exhausted, Refusal, Unavailable
from app.store import ContentStore, Usage
from app.store.disk import refusal_of
from app.store.sqlite import SqliteFile
from app.store.staging import BUFFER_BYTES
from tests.backends import IN_OBJECTS
from tests.disks import fill, mounted_disk
from tests.store.stores import (
    LARGE,
    SMALL,
    count,
    get,
    new_sqlite_store,
    new_store,
    published,
    put,
    sha256,
    sqlite_rows,
    staged,
    stored_files,
)

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB of its own."""
    with mounted_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.mark.component("tmpfs")
@pytest.mark.requirement("B73")
async def test_a_full_disk_of_files_takes_no_part_and_loses_nothing(small_disk: Path) -> None:
    store = await new_store(small_disk, blob_url=None)
    first = await put(store, bytes(10 * MIB))
    for _ in range(2):
        with pytest.raises(Exhausted):
            await put(store, bytes([1]) * 10 * MIB)
    assert len(list((small_disk / "blobs").rglob("*-*"))) == 1
    assert staged(small_disk) == []
    assert await store.usage() == Usage(1, 10 * MIB, 1)
    second = await put(store, bytes([2]) * MIB)
    assert await get(store, first.ref) == bytes(10 * MIB)
    assert await get(store, second.ref) == bytes([2]) * MIB
    await store.close()


@pytest.mark.component("tmpfs")
@pytest.mark.requirement("B73")
async def test_room_for_the_body_but_not_for_the_commit_of_sqlite(small_disk: Path) -> None:
    store = await new_sqlite_store(small_disk, inline_bytes=MIB)
    kept = await put(store, SMALL)
    filler = fill(small_disk, leave=64 * 1024)
    with pytest.raises(Exhausted):
        await put(store, os.urandom(MIB // 2))
    assert await get(store, kept.ref) == SMALL
    filler.unlink()
    again = await put(store, LARGE)
    assert await get(store, again.ref) == LARGE
    assert await store.usage() == Usage(2, len(SMALL) + len(LARGE), 2)
    await store.close()


@pytest.mark.component("tmpfs")
@pytest.mark.requirement("B73")
async def test_a_file_that_was_published_goes_when_the_commit_of_sqlite_finds_no_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await new_sqlite_store(small_disk)
    await put(store, SMALL)
    commit = SqliteFile.commit

    def full(file: SqliteFile, work: Callable[[Connection], Any]) -> Any:
        filler = fill(small_disk)
        try:
            return commit(file, work)
        finally:
            filler.unlink()

    with monkeypatch.context() as patched:
        patched.setattr(SqliteFile, "commit", full)
        with pytest.raises(Exhausted):
            await put(store, LARGE, scope="s" * 100_000)
    assert stored_files(small_disk) == []
    assert await get(store, (await put(store, LARGE)).ref) == LARGE
    await store.close()


@pytest.mark.component("tmpfs")
@pytest.mark.requirement("B73")
async def test_probe_sees_a_full_disk_below_sqlite_and_its_end(small_disk: Path) -> None:
    store = await new_sqlite_store(small_disk)
    await store.probe()
    filler = fill(small_disk)
    with pytest.raises(Unavailable) as refusal:
        await store.probe()
    assert refusal.value.code == "not_ready"
    filler.unlink()
    await store.probe()
    await store.close()


STEPS = [
    ("os.open", "os.open"),
    ("os.write", "os.write"),
    ("fsync", "os.fsync"),
]
if not IN_OBJECTS:  # there, a body goes no further on the disk than staging
    STEPS += [
        ("mkdir", "pathlib.Path.mkdir"),
        ("rename", "pathlib.Path.rename"),
        ("folder fsync", "app.store.local.sync_folder"),
    ]
CODES = [
    (errno.ENOSPC, Exhausted), (errno.EDQUOT, Exhausted), (errno.EACCES, Unavailable),
    (errno.EROFS, Unavailable), (errno.EIO, Unavailable), (errno.EMFILE, Unavailable),
]  # fmt: skip


@pytest.mark.requirement("B73")
@pytest.mark.parametrize("target", [target for _, target in STEPS], ids=[name for name, _ in STEPS])
@pytest.mark.parametrize(("code", "expected"), CODES, ids=[errno.errorcode[c] for c, _ in CODES])
async def test_an_error_at_any_step_is_a_refusal_and_leaves_nothing(
    store: ContentStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    code: int,
    expected: type[Refusal],
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code), str(tmp_path))

    with monkeypatch.context() as patched:
        patched.setattr(target, fail)
        with pytest.raises(expected) as refusal:
            await put(store, LARGE)
    assert str(tmp_path) not in refusal.value.message
    assert (stored_files(tmp_path), count(tmp_path, "content_refs")) == ([], 0)
    assert await get(store, (await put(store, LARGE)).ref) == LARGE


def test_too_large_for_the_file_system_is_no_room() -> None:
    assert isinstance(refusal_of(OSError(errno.EFBIG, "too large")), Exhausted)


@pytest.mark.parametrize("commits", [False, True])
async def test_a_verdict_without_room_looks_at_the_rows(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    """No room to condemn what was published: it goes only where no row names it."""
    add = store._catalogue.add

    async def full(*args: Any) -> NoReturn:
        if commits:
            await add(*args)
        raise Exhausted

    monkeypatch.setattr(store._catalogue, "add", full)
    monkeypatch.setattr(store._catalogue, "condemn", full if not commits else _exhausted)
    with pytest.raises(Exhausted):
        await put(store, LARGE)
    assert len(published(tmp_path)) == int(commits)
    assert staged(tmp_path) == []


async def _exhausted(_: object) -> NoReturn:
    raise Exhausted


async def test_what_cannot_be_condemned_stays_for_the_sweep(
    store: ContentStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def busy(*_: object) -> NoReturn:
        raise Unavailable("database_busy", "The database is busy.")

    monkeypatch.setattr(store._catalogue, "add", busy)
    monkeypatch.setattr(store._catalogue, "condemn", busy)
    with pytest.raises(Unavailable):
        await put(store, LARGE)
    await store.close()
    assert "stays for the sweep" in caplog.text
    assert len(published(tmp_path)) == 1


_HOLD = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("begin immediate")
print("locked", flush=True)
time.sleep(3)
connection.execute("commit")
"""


@pytest.mark.requirement("B76")
async def test_an_sqlite_file_locked_for_three_seconds_by_another_process_only_waits(
    tmp_path: Path,
) -> None:
    store = await new_sqlite_store(tmp_path)
    kept = await put(store, SMALL)
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "consignee.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        waiting = asyncio.gather(*(put(store, bytes([n])) for n in range(64)))
        assert await get(store, kept.ref) == SMALL
        references = await waiting
        assert other.wait() == 0
    assert [await get(store, r.ref) for r in references] == [bytes([n]) for n in range(64)]
    await store.close()


@pytest.mark.requirement("B76")
async def test_many_uploads_deletions_and_listings_at_once_never_fail(tmp_path: Path) -> None:
    stores = [await new_store(tmp_path) for _ in range(2)]

    async def upload(store: ContentStore, n: int) -> None:
        for data in (bytes([n]), LARGE + bytes([n])):
            reference = await put(store, data)
            await store.references("a")
            if n % 4 == 0:
                await store.remove("a", reference.ref)

    await asyncio.gather(*(upload(store, n) for store in stores for n in range(64)))
    usage = await stores[0].usage()
    for store in stores:
        await store.close()
    assert usage.references == 2 * 2 * 48


@pytest.mark.requirement("B76")
async def test_an_sqlite_lock_beyond_the_limit_leaves_nothing(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path, database_timeout_seconds=0.2)
    with sqlite_rows(tmp_path) as other:
        other.execute("begin immediate")
        for data in (SMALL, LARGE):
            with pytest.raises(Unavailable) as refusal:
                await put(store, data)
            assert refusal.value.code == "database_busy"
    assert await get(store, (await put(store, LARGE)).ref) == LARGE
    await store.close()


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def _broken(size: int) -> AsyncIterator[bytes]:
    yield bytes(size)
    raise ConnectionResetError


async def _abort(store: ContentStore) -> None:
    for size in (10, 2 * BUFFER_BYTES):
        with pytest.raises(ConnectionResetError):
            await store.receive(
                _broken(size), scope="a", principal="p", size=size + 1, sha256=sha256(b"")
            )


async def _cancel(store: ContentStore) -> None:
    tasks = [asyncio.create_task(put(store, data)) for data in (SMALL, LARGE)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _leave_unread(store: ContentStore) -> None:
    reference = await put(store, LARGE * 100)
    async with store.open("a", reference.ref) as content:
        await anext(content)


@pytest.mark.requirement("B09")
@pytest.mark.parametrize("round_", [_abort, _cancel, _leave_unread])
async def test_descriptors_and_staging_stay_at_the_baseline(
    store: ContentStore, tmp_path: Path, round_: Callable[[ContentStore], Any]
) -> None:
    for _ in range(5):
        await asyncio.gather(*(round_(store) for _ in range(8)))
    baseline = descriptors()
    for _ in range(20):
        await round_(store)
    assert descriptors() <= baseline
    assert staged(tmp_path) == []


async def test_starting_and_closing_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    async def once() -> None:
        store = await new_store(tmp_path)
        await put(store, LARGE)
        await store.close()

    await once()
    baseline = (threading.active_count(), descriptors())
    for _ in range(10):
        await once()
    assert threading.active_count() == baseline[0]
    assert descriptors() <= baseline[1]


async def test_a_store_that_cannot_start_leaves_no_thread_and_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> NoReturn:
        raise Unavailable("storage_unavailable", "Not now.")

    await (await new_store(tmp_path)).close()
    monkeypatch.setattr("app.store.staging.Staging._take_away_dead", fail)
    baseline = (threading.active_count(), descriptors())
    for _ in range(3):
        with pytest.raises(Unavailable):
            await new_store(tmp_path)
    assert (threading.active_count(), descriptors()) == baseline


async def test_a_store_whose_disk_broke_still_closes(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, LARGE)
    with monkeypatch.context() as patched:
        patched.setattr(type(store._blobs), "probe", _no_disk)
        with pytest.raises(Unavailable) as refusal:
            await store.probe()
    assert refusal.value.code == "not_ready"


async def _no_disk(_: object) -> NoReturn:
    raise Unavailable("storage_unavailable", "The disk is gone.")
