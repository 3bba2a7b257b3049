"""ContentStore as the layers above see it."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
from anyio import CancelScope, move_on_after
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, insert, select, text

from app.errors import Conflict, Malformed, NotFound, TooLarge, Unavailable
from app.store import ContentStore, StoreError, Usage, catalogue, migrate
from app.store import content as content_module
from app.store.blobs import Blobs
from app.store.commits import Row, Write
from app.store.databases import open_database
from app.store.staging import BUFFER_BYTES
from app.store.tables import blobs, content_refs
from app.store.threads import Workers
from tests import backends
from tests.store.stores import (
    INLINE_BYTES,
    LARGE,
    SMALL,
    count,
    counted,
    database,
    get,
    new_sqlite_store,
    new_store,
    published,
    put,
    sha256,
    sqlite_settings,
    staged,
    store_settings,
    stored_files,
    stream,
)

pytestmark = pytest.mark.anyio

SIZES = [0, 1, INLINE_BYTES, INLINE_BYTES + 1, BUFFER_BYTES, BUFFER_BYTES + 1, 3 * BUFFER_BYTES + 7]


@pytest.mark.requirement("AHP-R19", "AHP-R25", "AHP-R26", "B10")
@pytest.mark.parametrize("size", SIZES)
async def test_what_was_received_is_what_is_kept(store: ContentStore, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    reference = await put(store, data)
    assert (reference.size, reference.sha256) == (size, sha256(data))
    assert (reference.scope, reference.principal, reference.expires_at) == ("a", "alice", None)
    assert await store.resolve("a", reference.ref) == reference
    assert await get(store, reference.ref) == data


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pieces=st.lists(st.binary(max_size=INLINE_BYTES), max_size=8))
async def test_any_cutting_into_pieces_gives_the_same_bytes(
    store: ContentStore, pieces: list[bytes]
) -> None:
    async def body() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    data = b"".join(pieces)
    reference = await store.receive(
        body(), scope="a", principal="p", size=len(data), sha256=sha256(data)
    )
    assert await get(store, reference.ref) == data


@pytest.mark.requirement("AHP-R24")
async def test_references_are_opaque_unique_and_begin_with_a_letter(store: ContentStore) -> None:
    references = await asyncio.gather(*(put(store, SMALL) for _ in range(300)))
    refs = [reference.ref for reference in references]
    assert len(set(refs)) == len(refs)
    assert all(re.fullmatch(r"ref_[A-Za-z0-9_-]{32}", ref) for ref in refs)
    assert not any(sha256(SMALL)[:8] in ref for ref in refs)


@pytest.mark.requirement("AHP-R17", "AHP-R23", "AHP-R28")
@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("difference", [-1, 1])
async def test_another_length_than_declared_leaves_nothing(
    store: ContentStore, tmp_path: Path, data: bytes, difference: int
) -> None:
    with pytest.raises(Malformed) as refusal:
        await put(store, data, size=len(data) + difference)
    assert refusal.value.code == "length_mismatch"
    assert (stored_files(tmp_path), count(tmp_path, "blobs")) == ([], 0)


@pytest.mark.requirement("AHP-R17")
async def test_nothing_is_read_after_an_excess(store: ContentStore) -> None:
    async def endless() -> AsyncGenerator[bytes, None]:
        yield b"abc"
        yield b"d"
        pytest.fail("read on after the excess")

    async with aclosing(endless()) as body:
        with pytest.raises(Malformed, match="more bytes than the 3"):
            await store.receive(body, scope="a", principal="p", size=3, sha256=sha256(b"abc"))


@pytest.mark.requirement("AHP-R18", "B08")
async def test_a_digest_is_never_believed(store: ContentStore, tmp_path: Path) -> None:
    for claimed in ("0" * 64, sha256(b"abd")):
        with pytest.raises(Malformed) as refusal:
            await put(store, b"abc", sha256=claimed)
        assert refusal.value.code == "digest_mismatch"
    assert await store.usage() == Usage(0, 0, 0)
    assert stored_files(tmp_path) == []
    assert await get(store, (await put(store, b"abd")).ref) == b"abd"


async def test_a_wrong_digest_of_a_large_body_leaves_no_file(
    store: ContentStore, tmp_path: Path
) -> None:
    with pytest.raises(Malformed):
        await put(store, LARGE, sha256=sha256(SMALL))
    assert stored_files(tmp_path) == []


@pytest.mark.parametrize(
    "declared", [{"size": -1}, {"sha256": "0" * 63}, {"sha256": "A" * 64}], ids=repr
)
async def test_what_no_caller_may_declare_is_a_value_error(
    store: ContentStore, declared: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="size must not be negative"):
        await put(store, SMALL, **declared)


@pytest.mark.requirement("AHP-R07", "AHP-R32")
async def test_a_declared_size_over_the_limit_is_refused_before_reading(tmp_path: Path) -> None:
    async def unread() -> AsyncGenerator[bytes, None]:
        reads.append("read")
        yield b""

    reads: list[str] = []
    store = await new_store(tmp_path, max_upload_bytes=10)
    async with aclosing(unread()) as body:
        with pytest.raises(TooLarge) as refusal:
            await store.receive(body, scope="a", principal="p", size=11, sha256="0" * 64)
    await store.close()
    assert (refusal.value.limit, reads) == (10, [])


@pytest.mark.parametrize("name", ["scope", "principal"])
@pytest.mark.parametrize("value", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
async def test_text_that_a_database_cannot_hold_hurts_only_its_own_upload(
    store: ContentStore, name: str, value: str
) -> None:
    owner = {"scope": "a", "principal": "p", name: value}
    with pytest.raises(Malformed) as refusal:
        await store.receive(stream(SMALL), size=5, sha256=sha256(SMALL), **owner)
    assert refusal.value.code == f"{name}_invalid"
    assert await store.references("\ud800") == []


@pytest.mark.requirement("AHP-R36", "AHP-R12")
async def test_unknown_foreign_removed_and_expired_look_the_same(tmp_path: Path) -> None:
    store = await new_store(tmp_path, retention=timedelta(hours=1))
    foreign, removed, expired = [await put(store, SMALL) for _ in range(3)]
    await store.remove("a", removed.ref)
    with database(tmp_path) as rows:
        rows.execute("update content_refs set expires_at = 1 where ref = ?", (expired.ref,))
    answers = set()
    asked = [
        ("b", foreign.ref), ("a", removed.ref), ("a", expired.ref), ("a", "ref_" + "x" * 32),
        ("a", "no reference"), ("\ud800", foreign.ref),
    ]  # fmt: skip
    for scope, ref in asked:
        for call in (store.resolve, store.remove, partial(get, store)):
            with pytest.raises(NotFound) as refusal:
                await (call(ref, scope) if isinstance(call, partial) else call(scope, ref))
            answers.add((refusal.value.code, refusal.value.message))
    await store.close()
    assert len(answers) == 1


@pytest.mark.parametrize("data", [SMALL, LARGE, b""], ids=["small", "large", "empty"])
@pytest.mark.parametrize("bounds", [(0, None), (1, 3), (2, 2), (3, 1), (0, 10**9), (10**9, None)])
async def test_a_range_is_cut_as_a_slice_is(
    store: ContentStore, data: bytes, bounds: tuple[int, int | None]
) -> None:
    start, stop = bounds
    reference = await put(store, data)
    assert await get(store, reference.ref, start=start, stop=stop) == data[start:stop]


async def test_a_content_says_whose_it_is_and_is_over_when_left(store: ContentStore) -> None:
    reference = await put(store, LARGE)
    async with store.open("a", reference.ref) as content:
        assert content.reference == reference
    with pytest.raises(ValueError, match="closed"):
        await anext(content)


@pytest.mark.parametrize("bounds", [{"start": -1}, {"stop": -1}], ids=repr)
async def test_a_negative_bound_is_a_value_error(
    store: ContentStore, bounds: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="negative"):
        store.open("a", "ref", **bounds)


async def test_references_are_paged_in_the_order_of_confirmation(store: ContentStore) -> None:
    refs = [(await put(store, bytes([n]))).ref for n in range(5)]
    await put(store, SMALL, scope="b")
    first = await store.references("a", limit=3)
    rest = await store.references("a", after=first[-1].position, limit=3)
    assert [listed.ref for listed in first + rest] == refs


@pytest.mark.requirement("B74")
async def test_equal_bytes_are_kept_once_and_until_the_last_reference_ends(
    store: ContentStore, tmp_path: Path
) -> None:
    ours, theirs = await put(store, LARGE), await put(store, LARGE, scope="b")
    assert await counted(store) == Usage(1, len(LARGE), 2)
    await store.remove("a", ours.ref)
    await store.sweep()
    assert await get(store, theirs.ref, scope="b") == LARGE
    await store.remove("b", theirs.ref)
    await store.sweep()
    assert await counted(store) == Usage(0, 0, 0)
    assert published(tmp_path) == []


@pytest.mark.requirement("B74")
async def test_the_second_copy_takes_the_same_steps_as_the_first(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    kind = type(store._blobs)
    for name in ("publish", "size"):
        original = getattr(kind, name)

        def step(self: Blobs, *args: object, name: str = name, call: object = original) -> object:
            steps.append(name)
            return call(self, *args)  # type: ignore[operator]  # one wrapper for two signatures

        monkeypatch.setattr(kind, name, step)
    await put(store, LARGE)
    first, steps[:] = list(steps), []
    await put(store, LARGE, scope="b")
    assert first == steps == ["publish", "size"]


async def test_a_lost_file_is_healed_by_the_next_upload_of_its_bytes(
    store: ContentStore, tmp_path: Path
) -> None:
    first = await put(store, LARGE)
    published(tmp_path)[0].unlink()
    with pytest.raises(Unavailable):
        await get(store, first.ref)
    second = await put(store, LARGE, scope="b")
    assert await get(store, first.ref) == await get(store, second.ref, scope="b") == LARGE


async def test_a_lost_file_is_healed_by_bytes_that_go_into_the_row(tmp_path: Path) -> None:
    store = await new_store(tmp_path)
    first = await put(store, LARGE)
    await store.close()
    published(tmp_path)[0].unlink()
    store = await new_store(tmp_path, inline_bytes=len(LARGE))
    await put(store, LARGE)
    assert await get(store, first.ref) == LARGE
    await store.close()


async def test_bytes_already_in_a_row_stay_there(tmp_path: Path) -> None:
    store = await new_store(tmp_path, inline_bytes=len(LARGE))
    first = await put(store, LARGE)
    await store.close()
    store = await new_store(tmp_path)
    second = await put(store, LARGE)
    await store.close()
    assert published(tmp_path) == []
    store = await new_store(tmp_path)
    assert await get(store, first.ref) == await get(store, second.ref) == LARGE
    await store.close()


@pytest.mark.parametrize("first", [False, True], ids=["its own", "all that heal"])
async def test_an_upload_whose_bytes_vanish_is_not_confirmed(
    store: ContentStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    async def lost_again(blob: Row, gone: str) -> str:
        return gone

    async def nothing(self: Blobs, location: str) -> None:
        return None

    kept = int(first and bool(await put(store, LARGE)))
    monkeypatch.setattr(type(store._blobs), "size", nothing)
    monkeypatch.setattr(store._catalogue, "repoint", lost_again)
    with pytest.raises(Unavailable, match="gone"):
        await put(store, LARGE)
    assert count(tmp_path, "content_refs") == kept


@pytest.mark.requirement("AHP-R23", "B09")
@pytest.mark.parametrize("size", [100, 3 * BUFFER_BYTES])
async def test_a_sender_that_breaks_off_leaves_nothing(
    store: ContentStore, tmp_path: Path, size: int
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield bytes(size)
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        await store.receive(broken(), scope="a", principal="p", size=size + 1, sha256=sha256(SMALL))
    assert (stored_files(tmp_path), count(tmp_path, "blobs")) == ([], 0)


async def _waits(size: int, reached: asyncio.Event) -> AsyncIterator[bytes]:
    yield bytes(size)
    reached.set()
    await asyncio.Event().wait()


@pytest.mark.requirement("B09")
@pytest.mark.parametrize("size", [100, BUFFER_BYTES, 3 * BUFFER_BYTES])
async def test_cancelled_in_the_middle_of_the_body_it_leaves_nothing(
    store: ContentStore, tmp_path: Path, size: int
) -> None:
    reached = asyncio.Event()
    task = asyncio.create_task(
        store.receive(
            _waits(size, reached), scope="a", principal="p", size=size + 1, sha256="0" * 64
        )
    )
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stored_files(tmp_path) == []


COMMIT = backends.COMMIT.replace(":", ".")
POINTS = [
    "app.store.staging.StagedFile.write",
    "app.store.staging.StagedFile.seal",
    backends.PUBLISH.replace(":", "."),
    COMMIT,
    backends.CONFIRM.replace(":", "."),
]


class Pause:
    """Holds a step in its thread until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.threads: set[str] = set()
        owner, _, name = point.rpartition(".")
        module, _, cls = owner.rpartition(".")
        target = getattr(__import__(module, fromlist=[cls]), cls)
        original = getattr(target, name)

        def held(*args: object) -> object:
            self.threads.add(threading.current_thread().name)
            self.reached.set()
            assert self.go.wait(10)
            return original(*args)

        async def held_on_the_loop(*args: object) -> object:
            self.reached.set()
            assert await asyncio.to_thread(self.go.wait, 10)
            return await original(*args)

        is_async = inspect.iscoroutinefunction(original)
        monkeypatch.setattr(target, name, held_on_the_loop if is_async else held)


@pytest.mark.requirement("B09")
@pytest.mark.parametrize(
    ("point", "data"), [(COMMIT, SMALL), *((point, LARGE) for point in POINTS)]
)
@pytest.mark.parametrize("native", [True, False], ids=["task", "scope"])
async def test_cancelled_in_any_step_it_leaves_nothing(
    store: ContentStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    data: bytes,
    native: bool,
) -> None:
    pause = Pause(monkeypatch, point)
    scope = CancelScope()

    async def upload() -> None:
        with scope:
            await put(store, data)

    task = asyncio.create_task(upload())
    await asyncio.to_thread(pause.reached.wait)
    for _ in range(2):
        task.cancel() if native else scope.cancel()
        await asyncio.sleep(0.01)
    pause.go.set()
    await asyncio.wait([task])
    assert task.cancelled() if native else scope.cancelled_caught
    assert stored_files(tmp_path) == []
    assert (count(tmp_path, "content_refs"), count(tmp_path, "blobs")) == (0, 0)


async def test_a_cancelled_upload_that_cannot_be_undone_waits_for_the_sweep(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def busy(*_: object) -> NoReturn:
        raise Unavailable("database_busy", "The database is busy.")

    pause = Pause(monkeypatch, COMMIT)
    monkeypatch.setattr(store._catalogue, "forget", busy)
    task = asyncio.create_task(put(store, SMALL))
    await asyncio.to_thread(pause.reached.wait)
    task.cancel()
    pause.go.set()
    await asyncio.wait([task])
    assert task.cancelled()
    assert "left for the sweep" in caplog.text


async def test_clearing_up_that_fails_is_logged_and_left(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> NoReturn:
        raise Unavailable("storage_unavailable", "It does not work.")

    await put(store, LARGE)
    monkeypatch.setattr(type(store._blobs), "delete", fail)
    await put(store, LARGE)
    await store.close()
    assert "left for the sweep" in caplog.text


@pytest.mark.parametrize(
    ("point", "thread"),
    [
        ("app.store.staging.StagedFile.write", "consignee-write"),
        ("app.store.local.LocalBlobs._publish", "consignee-io"),
        ("app.store.sqlite.SqliteFile.commit", "consignee-commit"),
    ],
)
async def test_files_and_transactions_of_sqlite_leave_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, thread: str
) -> None:
    store = await new_sqlite_store(tmp_path, blob_url=None)
    pause = Pause(monkeypatch, point)
    pause.go.set()
    await put(store, LARGE)
    await store.close()
    assert pause.threads
    assert all(name.startswith(thread) for name in pause.threads)


async def test_a_time_limit_around_a_slow_sender_works(store: ContentStore, tmp_path: Path) -> None:
    with move_on_after(0.05) as scope:
        await store.receive(
            _waits(2 * BUFFER_BYTES, asyncio.Event()),
            scope="a", principal="p", size=10 * BUFFER_BYTES, sha256="0" * 64,
        )  # fmt: skip
    assert scope.cancelled_caught
    assert staged(tmp_path) == []


async def test_stage_takes_a_body_of_unknown_length_up_to_a_limit(
    store: ContentStore, tmp_path: Path
) -> None:
    async with store.stage(stream(LARGE), limit=len(LARGE)) as sealed:
        assert (sealed.size, sealed.digest.hex()) == (len(LARGE), sha256(LARGE))
        assert len(staged(tmp_path)) == 1
    assert stored_files(tmp_path) == []
    with pytest.raises(TooLarge):
        async with store.stage(stream(LARGE), limit=len(LARGE) - 1):
            pytest.fail("taken whole")


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
async def test_bind_keeps_a_staged_body_with_rows_of_the_caller(
    store: ContentStore, data: bytes
) -> None:
    async with store.stage(stream(data), size=len(data)) as sealed:

        def write(connection: Connection) -> str:
            row = {"ref": "ref_" + "x" * 32, "scope": "s", "principal": "p", "created_at": 1}
            blob_id = select(blobs.c.id).where(blobs.c.digest == sealed.digest).scalar_subquery()
            connection.execute(insert(content_refs).values(blob_id=blob_id, **row))
            return "written"

        assert await store.bind(sealed, write) == "written"
    assert await get(store, "ref_" + "x" * 32, scope="s") == data


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
async def test_a_refusal_of_the_caller_keeps_neither_row_nor_file(
    store: ContentStore, tmp_path: Path, data: bytes
) -> None:
    def refuse(connection: Connection) -> None:
        connection.execute(text("delete from content_refs"))
        raise Conflict("taken", "The name is taken.")

    kept = await put(store, b"kept")
    async with store.stage(stream(data)) as sealed:
        with pytest.raises(Conflict, match="taken"):
            await store.bind(sealed, refuse)
    assert await get(store, kept.ref) == b"kept"
    await store.sweep()
    assert (await store.usage()).blobs == 1
    assert stored_files(tmp_path) == []


async def test_a_count_that_takes_long_is_used_for_a_while(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_module, "CHEAP_COUNT_SECONDS", -1.0)
    monkeypatch.setattr(content_module, "COUNT_SHARE", 10**6)
    assert (await store.usage()).blobs == 0
    await put(store, SMALL)
    assert (await store.usage()).blobs == 0
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + 10**9)
    assert (await store.usage()).blobs == 1


async def test_a_store_without_tables_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="consignee migrate"):
        await ContentStore.start(sqlite_settings(tmp_path))
    assert stored_files(tmp_path) == []


@pytest.mark.parametrize("url", ["ftp://bucket", "file://relative", "/folder"])
async def test_a_blob_store_of_another_kind_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(StoreError, match="blob_url"):
        await new_store(tmp_path, blob_url=url)


async def test_a_closed_store_takes_nothing_more(tmp_path: Path) -> None:
    store = await new_store(tmp_path)
    await store.close()
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await put(store, SMALL)
    assert list((tmp_path / "staging").glob("*/")) == []


@pytest.mark.requirement("B04")
async def test_the_working_directory_never_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    settings = store_settings(Path("data"))
    store = await new_store(settings.data_dir)
    monkeypatch.chdir(tmp_path / "two")
    large, small = await put(store, LARGE), await put(store, SMALL)
    await store.close()
    store = await ContentStore.start(settings)
    assert await get(store, large.ref) == LARGE
    assert await get(store, small.ref) == SMALL
    await store.close()
    assert list((tmp_path / "two").iterdir()) == []


async def test_a_clock_that_goes_backwards_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await new_store(tmp_path, retention=timedelta(hours=1))
    first = await put(store, LARGE)
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() - 10**6)
    second = await put(store, SMALL)
    report = await store.sweep()
    assert (report.expired, report.blobs, report.orphans) == (0, 0, 0)
    assert [listed.ref for listed in await store.references("a")] == [first.ref, second.ref]
    assert await get(store, first.ref) == LARGE
    await store.close()


async def test_no_more_than_two_buffers_are_taken_from_the_sender_at_once(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While nothing can be written, the sender is made to wait."""
    taken = 0
    piece, size = 64 * 1024, 8 * BUFFER_BYTES

    async def body() -> AsyncIterator[bytes]:
        nonlocal taken
        while taken < size:
            taken += piece
            yield bytes(piece)

    pause = Pause(monkeypatch, "app.store.staging.StagedFile.write")
    upload = asyncio.create_task(
        store.receive(body(), scope="a", principal="p", size=size, sha256=sha256(bytes(size)))
    )
    await asyncio.to_thread(pause.reached.wait)
    for _ in range(200):
        await asyncio.sleep(0)
    held = taken
    pause.go.set()
    assert (await upload).size == size
    assert held <= 2 * BUFFER_BYTES


async def test_a_collection_in_the_same_batch_spares_a_blob_that_is_being_bound(
    tmp_path: Path,
) -> None:
    """Deleting the last file that has some bytes, while they are stored again."""
    settings = store_settings(tmp_path)
    migrate(settings)
    workers = Workers(1)
    opened = open_database(settings, workers)
    blob = {"digest": b"d" * 32, "size": 1, "location": None, "data": b"x", "created_at": 1}

    def bound(connection: Connection) -> str:
        row = {"ref": "ref_bound", "scope": "s", "principal": "p", "created_at": 1}
        blob_id = select(blobs.c.id).where(blobs.c.digest == b"d" * 32).scalar_subquery()
        connection.execute(insert(content_refs).values(blob_id=blob_id, **row))
        return "bound"

    def collected(connection: Connection) -> int:
        return catalogue._collect(connection, [b"d" * 32], 1).blobs

    first, second = [Write(blob=blob)], [Write(work=collected), Write(blob, work=bound)]
    await opened.write(lambda connection: catalogue._apply(connection, first), alone=True)
    outcomes = await opened.write(
        lambda connection: catalogue._apply(connection, second), alone=True
    )
    await opened.close()
    workers.close()
    assert outcomes == [0, ("bound", None)]
