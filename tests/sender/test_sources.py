"""Sources: read once or never, bounded, checked, and closed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.sender import files, threads
from app.sender import spool as spools
from app.sender.budget import Budget
from app.sender.errors import BudgetExceeded, SendError, SourceError
from app.sender.files import CHUNK_BYTES
from app.sender.sources import Snapshot, Source
from app.sender.spool import MEMORY_BYTES
from tests.sender.watching import Leaks

pytestmark = pytest.mark.anyio

LARGE = os.urandom(MEMORY_BYTES + CHUNK_BYTES + 17)
LIMIT = 1 << 30


class Tap:
    """A stream that counts how often it is opened, read from and closed."""

    def __init__(self, *pieces: object, fails: Exception | None = None) -> None:
        self.pieces = pieces
        self.fails = fails
        self.opened = self.read = self.ended = self.closed = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.reading = asyncio.Event()

    def open(self) -> AsyncIterator[bytes]:
        self.opened += 1
        return self._stream()

    async def load(self) -> bytes:
        return b"".join([piece async for piece in self.open()])

    async def close(self) -> None:
        self.closed += 1

    async def _stream(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.pieces:
                self.reading.set()
                await self.goes_on.wait()
                self.read += 1
                yield piece  # type: ignore[misc]
            if self.fails:
                raise self.fails
        finally:
            self.ended += 1


async def taken(source: Source, max_bytes: int = LIMIT, seconds: float = 60) -> Snapshot:
    return await source.snapshot(max_bytes=max_bytes, budget=Budget(seconds))


async def octets(snapshot: Snapshot) -> bytes:
    return b"".join([piece async for piece in snapshot.read()])


async def read_until_error(snapshot: Snapshot) -> tuple[bytes, str | None]:
    read = bytearray()
    try:
        async for piece in snapshot.read():
            read += piece
    except SourceError as error:
        return bytes(read), error.code
    return bytes(read), None


async def code_of(work: Awaitable[object]) -> str:
    with pytest.raises(SendError) as caught:
        await work
    return caught.value.code


def every_kind(data: bytes, folder: Path) -> dict[str, Source]:
    path = folder / "body"
    path.write_bytes(data)
    third = len(data) // 3
    return {
        "memory": Source.memory(data),
        "file": Source.file(path),
        "file in place": Source.file(str(path), in_place=True),
        "stream": Source.stream(Tap(data[:third], b"", data[third:]).open),
        "lazy": Source.lazy(Tap(data).load),
    }


KINDS = ["memory", "file", "file in place", "stream", "lazy"]


@pytest.mark.requirement("AHP-S36", "AHP-S38")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"", b"abc", LARGE], ids=["empty", "small", "large"])
async def test_ahp_s36_a_snapshot_has_the_real_size_and_digest(
    kind: str, data: bytes, tmp_path: Path
) -> None:
    async with every_kind(data, tmp_path)[kind] as source:
        snapshot = await taken(source)
        assert snapshot.size == len(data)
        assert snapshot.sha256 == hashlib.sha256(data).hexdigest()
        assert await octets(snapshot) == data


@pytest.mark.requirement("AHP-S36")
@pytest.mark.parametrize("kind", KINDS)
async def test_ahp_s36_readers_at_once_all_get_every_octet(kind: str, tmp_path: Path) -> None:
    async with every_kind(LARGE, tmp_path)[kind] as source:
        snapshots = await asyncio.gather(*[taken(source) for _ in range(5)])
        assert all(snapshot is snapshots[0] for snapshot in snapshots)
        assert await asyncio.gather(*[octets(each) for each in snapshots]) == [LARGE] * 5


@pytest.mark.requirement("AHP-S36")
@pytest.mark.parametrize("of", [Source.stream, Source.lazy])
async def test_ahp_s36_a_source_is_read_once_for_all(of: Callable[..., Source]) -> None:
    tap = Tap(b"ab", b"c")
    source = of(tap.open if of == Source.stream else tap.load, tap.close)
    for _ in range(3):
        await asyncio.gather(*[taken(source) for _ in range(4)])
    assert (tap.opened, tap.read, tap.ended, tap.closed) == (1, 2, 1, 0)
    await source.aclose()
    assert tap.closed == 1


@pytest.mark.requirement("AHP-S35")
async def test_ahp_s35_making_a_source_reads_nothing(tmp_path: Path) -> None:
    tap = Tap(b"abc")
    sources = [
        Source.stream(tap.open, tap.close),
        Source.lazy(tap.load, tap.close),
        Source.file(tmp_path / "is not there"),
        Source.file(tmp_path / "is not there", in_place=True),
    ]
    for source in sources:
        await source.aclose()
        await source.aclose()
    assert (tap.opened, tap.read) == (0, 0)
    assert tap.closed == 2


@pytest.mark.requirement("AHP-S38")
@pytest.mark.parametrize("kind", ["memory", "file", "stream", "lazy"])
async def test_ahp_s38_expectations_are_checked_against_the_bytes(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "body"
    path.write_bytes(b"abc")
    digest = hashlib.sha256(b"abc").hexdigest()

    def source(size: int | None = None, sha256: str | None = None) -> Source:
        match kind:
            case "memory":
                return Source.memory(b"abc", size=size, sha256=sha256)
            case "file":
                return Source.file(path, size=size, sha256=sha256)
            case "stream":
                return Source.stream(Tap(b"abc").open, size=size, sha256=sha256)
            case _:
                return Source.lazy(Tap(b"abc").load, size=size, sha256=sha256)

    async with source(3, digest) as right:
        assert (await taken(right)).size == 3
    async with source(size=4) as longer:
        assert await code_of(taken(longer)) == "size_mismatch"
    for wrong in (digest.upper(), digest + "\r\n", "0" * 64):
        async with source(sha256=wrong) as other:
            assert await code_of(taken(other)) == "digest_mismatch"


@pytest.mark.requirement("AHP-S08", "AHP-S42")
@pytest.mark.parametrize("kind", KINDS)
async def test_ahp_s42_more_than_the_limit_is_an_error_and_never_cut(
    kind: str, tmp_path: Path
) -> None:
    async with every_kind(LARGE, tmp_path)[kind] as source:
        assert await code_of(taken(source, max_bytes=len(LARGE) - 1)) == "too_large"
    async with every_kind(LARGE, tmp_path)[kind] as source:
        snapshot = await taken(source, max_bytes=len(LARGE))
        assert await code_of(taken(source, max_bytes=len(LARGE) - 1)) == "too_large"
        assert snapshot.size == len(LARGE)


@pytest.mark.requirement("AHP-S42")
async def test_ahp_s42_an_endless_stream_ends_at_the_limit() -> None:
    read = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b"x" * 1000

    async with Source.stream(endless) as source:
        assert await code_of(taken(source, max_bytes=10_500)) == "too_large"
    assert len(read) == 11


@pytest.mark.requirement("AHP-S42")
async def test_ahp_s42_only_the_beginning_is_kept_in_memory() -> None:
    spool = spools.Spool()
    files = []
    for piece in (b"x" * MEMORY_BYTES, b"y"):
        await spool.write(piece)
        files.append(spool._file)
    assert files[0] is None
    assert files[1] is not None
    assert not spool._memory
    assert await octets(spool) == b"x" * MEMORY_BYTES + b"y"
    spool.close()
    spool.close()


@pytest.mark.requirement("AHP-S41")
async def test_ahp_s41_what_the_host_changes_later_is_not_sent(tmp_path: Path) -> None:
    data = bytearray(b"before")
    path = tmp_path / "body"
    path.write_bytes(b"before")
    async with Source.memory(data) as memory, Source.file(path) as file:  # type: ignore[arg-type]
        kept = await taken(file)
        data[:] = b"after!"
        path.write_bytes(b"after!")
        assert await octets(await taken(memory)) == b"before"
        assert await octets(kept) == b"before"


@pytest.mark.requirement("AHP-S36", "AHP-S41")
@pytest.mark.parametrize("change", ["first", "last", "shorter", "longer"])
async def test_a_file_in_place_that_changes_is_never_read_whole(
    change: str, tmp_path: Path
) -> None:
    """Its last piece is kept back, so that no receiver can have confirmed other bytes."""
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    async with Source.file(path, in_place=True) as source:
        snapshot = await taken(source)
        changed = {
            "first": bytes([LARGE[0] ^ 1]) + LARGE[1:],
            "last": LARGE[:-1] + bytes([LARGE[-1] ^ 1]),
            "shorter": LARGE[:-1],
            "longer": LARGE + b"more",
        }[change]
        path.write_bytes(changed)
        if change == "longer":  # what was hashed is still there, and only that is read
            assert await octets(snapshot) == LARGE
        else:
            read, code = await read_until_error(snapshot)
            assert code == "changed"
            assert len(read) < len(LARGE)


@pytest.mark.requirement("AHP-S36", "AHP-S41")
async def test_a_file_at_rest_is_told_to_have_changed_by_its_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not hashed again: that would cost as much as the sending."""
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    monkeypatch.setattr("app.sender.files.TICK_NS", -1)
    async with Source.file(path, in_place=True) as source:
        snapshot = await taken(source)
        assert await octets(snapshot) == LARGE
        path.write_bytes(LARGE[:1] + LARGE[:-1])
        os.utime(path, ns=(0, 0))
        read, code = await read_until_error(snapshot)
        assert code == "changed"
        assert len(read) < len(LARGE)


@pytest.mark.requirement("AHP-S41")
@pytest.mark.parametrize("is_same", [True, False])
async def test_a_file_at_rest_that_shows_no_writing_is_hashed_again(
    is_same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its times can be set back by anybody, but not the time at which that was done."""
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    os.utime(path, ns=(10**18, 10**18))
    monkeypatch.setattr("app.sender.files.TICK_NS", -1)
    async with Source.file(path, in_place=True) as source:
        snapshot = await taken(source)
        path.write_bytes(LARGE if is_same else LARGE[1:] + LARGE[:1])
        os.utime(path, ns=(10**18, 10**18))
        path.chmod(0o600)
        monkeypatch.setattr("app.sender.files.Stamp.shows_nothing", lambda *_: False)
        if is_same:
            assert await octets(snapshot) == LARGE
        else:
            assert (await read_until_error(snapshot))[1] == "changed"


@pytest.mark.parametrize("tick", [10**18, -1])
async def test_a_file_that_was_removed_is_still_read_in_place(
    tick: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.sender.files.TICK_NS", tick)
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    async with Source.file(path, in_place=True) as source:
        snapshot = await taken(source)
        path.unlink()
        assert await octets(snapshot) == LARGE


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(
    ("kind", "code"), [("missing", "unreadable"), ("folder", "unreadable"), ("pipe", "not_a_file")]
)
async def test_what_is_no_regular_file_is_refused_without_its_path(
    kind: str, code: str, in_place: bool, tmp_path: Path
) -> None:
    path = tmp_path / "hidden-name"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    async with Source.file(path, in_place=in_place) as source:
        with pytest.raises(SourceError) as caught:
            await taken(source)
    assert caught.value.code == code
    assert "hidden-name" not in str(caught.value)


async def test_a_file_that_cannot_be_read_any_more_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "body"
    path.write_bytes(b"abc")
    with path.open("wb") as file:  # not readable
        shared = files.SharedFile(file)
        with pytest.raises(SourceError, match="cannot be read"):
            shared.piece_at(0, 3)


@pytest.mark.parametrize("of", [Source.stream, Source.lazy])
async def test_what_is_not_bytes_is_refused(of: Callable[..., Source]) -> None:
    async def load() -> object:
        return "text"

    tap = Tap("text")
    async with of(tap.open if of == Source.stream else load) as source:
        assert await code_of(taken(source)) == "not_bytes"


@pytest.mark.requirement("AHP-S36")
async def test_a_failure_is_the_same_for_all_who_share_it() -> None:
    tap = Tap(b"abc", fails=RuntimeError("a secret of the host"))
    async with Source.stream(tap.open, tap.close) as source:
        failures = await asyncio.gather(*[taken(source) for _ in range(3)], return_exceptions=True)
        failures.append((await asyncio.gather(taken(source), return_exceptions=True))[0])
    assert {getattr(each, "code", None) for each in failures} == {"failed"}
    assert not any("secret" in str(each) for each in failures)
    assert (tap.opened, tap.ended, tap.closed) == (1, 1, 1)


async def test_a_snapshot_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> object:
        raise OSError(28, "No space left on device", "/a/path")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    async with Source.stream(Tap(LARGE).open) as source:
        with pytest.raises(SourceError) as caught:
            await taken(source)
    assert caught.value.code == "no_room"
    assert "/a/path" not in str(caught.value)


@pytest.mark.requirement("AHP-S36")
async def test_the_budget_bounds_the_snapshot() -> None:
    tap = Tap(b"abc")
    tap.goes_on.clear()
    async with Source.stream(tap.open, tap.close) as source:
        with pytest.raises(BudgetExceeded):
            await taken(source, seconds=0.01)
        assert (tap.read, tap.ended) == (0, 1)
        assert await code_of(taken(source)) == "abandoned"
    assert tap.closed == 1


@pytest.mark.requirement("AHP-S36")
async def test_one_whose_time_is_over_leaves_the_snapshot_to_the_others() -> None:
    tap = Tap(b"abc")
    tap.goes_on.clear()
    async with Source.stream(tap.open) as source:
        patient = asyncio.create_task(taken(source))
        await tap.reading.wait()
        with pytest.raises(BudgetExceeded):
            await taken(source, seconds=0.01)
        tap.goes_on.set()
        assert await octets(await patient) == b"abc"
    assert tap.opened == 1


@pytest.mark.requirement("AHP-S32", "AHP-S40")
async def test_ahp_s40_reading_ends_with_the_last_who_waits() -> None:
    tap = Tap(b"abc")
    tap.goes_on.clear()
    with Leaks() as leaks:
        source = Source.stream(tap.open)
        waiting = [asyncio.create_task(taken(source)) for _ in range(2)]
        await tap.reading.wait()
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
        assert tap.ended == 0
        waiting[1].cancel()
        await asyncio.wait(waiting)
        assert tap.ended == 1
        assert not leaks.tasks()
    await source.aclose()


@pytest.mark.requirement("AHP-S39", "AHP-S40")
async def test_ahp_s39_closing_ends_what_runs() -> None:
    tap = Tap(b"abc")
    tap.goes_on.clear()
    source = Source.stream(tap.open, tap.close)
    waiting = asyncio.create_task(taken(source))
    await tap.reading.wait()
    await source.aclose()
    assert await code_of(waiting) == "abandoned"
    assert (tap.ended, tap.closed) == (1, 1)
    assert await code_of(taken(source)) == "closed"


@pytest.mark.requirement("AHP-S39")
async def test_ahp_s39_a_plain_close_is_called_as_well() -> None:
    closed = []
    async with Source.lazy(Tap(b"abc").load, lambda: closed.append(1)) as source:
        await taken(source)
    assert closed == [1]


@pytest.mark.requirement("AHP-S39")
async def test_ahp_s39_no_descriptor_and_no_file_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spools"))
    (tmp_path / "spools").mkdir()
    with Leaks() as leaks:
        for kind in KINDS:
            async with every_kind(LARGE, tmp_path)[kind] as source:
                snapshot = await taken(source)
                assert await anext(snapshot.read())
                assert list((tmp_path / "spools").iterdir()) == []  # it never has a name
        assert leaks.descriptors() == 0


@pytest.mark.parametrize("kind", ["file", "file in place"])
async def test_a_reader_of_a_closed_source_is_told(kind: str, tmp_path: Path) -> None:
    source = every_kind(LARGE, tmp_path)[kind]
    reading = (await taken(source)).read()
    await anext(reading)
    await source.aclose()
    with pytest.raises(SourceError, match="closed"):
        await anext(reading)


async def test_hashing_leaves_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: set[int] = set()
    real = os.pread

    def seen(*arguments: int) -> bytes:
        used.add(threading.get_ident())
        return real(*arguments)

    monkeypatch.setattr(os, "pread", seen)
    async with every_kind(LARGE, tmp_path)["file"] as source:
        await octets(await taken(source))
    assert used
    assert threading.get_ident() not in used


@pytest.mark.requirement("AHP-S40")
async def test_ahp_s40_a_cancelled_caller_outlasts_its_step() -> None:
    """However often it is cancelled: nothing goes on in a thread behind its back."""
    begun, finish, ended = threading.Event(), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        finish.wait(60)
        ended.set()

    task = asyncio.create_task(threads.in_thread(step))
    await asyncio.get_running_loop().run_in_executor(None, begun.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    finish.set()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert ended.is_set()


async def test_a_step_that_fails_after_its_caller_was_cancelled_is_not_complained_of() -> None:
    finish = threading.Event()

    def step() -> None:
        finish.wait(60)
        raise ValueError("late")

    task = asyncio.create_task(threads.in_thread(step))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ending_a_task_outlasts_a_cancellation_of_the_one_who_ends_it() -> None:
    goes_on, cancelled = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            await goes_on.wait()
            raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    ending = asyncio.create_task(threads.ended(task))
    await cancelled.wait()
    ending.cancel()
    await asyncio.sleep(0)
    assert not ending.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert task.cancelled()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(0, 200), st.integers(1, 50))
def test_any_pieces_give_their_sum_or_nothing(
    pieces: list[bytes], max_bytes: int, chunk: int
) -> None:
    data = b"".join(pieces)

    async def pass_through() -> bytes | None:
        async with Source.stream(Tap(*pieces).open) as source:
            if len(data) > max_bytes:
                assert await code_of(taken(source, max_bytes=max_bytes)) == "too_large"
                return None
            snapshot = await taken(source, max_bytes=max_bytes)
            assert snapshot.sha256 == hashlib.sha256(data).hexdigest()
            return await octets(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spools, "MEMORY_BYTES", 16)
        patch.setattr(spools, "CHUNK_BYTES", chunk)
        result = asyncio.run(pass_through())
    assert result == (data if len(data) <= max_bytes else None)
