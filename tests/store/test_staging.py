"""Bodies on their way in, and whose they are."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.errors import Exhausted
from app.store.staging import (
    ALIGNMENT,
    BUFFER_BYTES,
    CACHED_BYTES,
    HASH_ON_LOOP_BYTES,
    Sealed,
    Staged,
    StagedFile,
    Staging,
)
from app.store.threads import Workers
from tests.store.stores import sha256

pytestmark = pytest.mark.anyio


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


@pytest.fixture
def staging(tmp_path: Path) -> Staging:
    return Staging(tmp_path / "staging")


def owners(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "staging").glob("*/"))


@pytest.mark.parametrize("size", [0, 10, 11, 2 * BUFFER_BYTES])
async def test_a_body_is_a_file_only_when_it_is_large(
    tmp_path: Path, workers: Workers, size: int
) -> None:
    file = StagedFile(tmp_path / "body")
    body = Staged(lambda: file, workers, inline_bytes=10)
    await body.write(bytes(size))
    sealed = await body.seal()
    assert (sealed.size, sealed.digest.hex()) == (size, sha256(bytes(size)))
    assert (sealed.data is None, file.path.exists()) == (size > 10, size > 10)
    for _ in range(2):
        await body.discard()
    assert list(tmp_path.iterdir()) == []


async def test_a_long_body_that_fits_a_row_is_hashed_in_a_thread(workers: Workers) -> None:
    size = HASH_ON_LOOP_BYTES + 1
    body = Staged(lambda: pytest.fail("a file"), workers, inline_bytes=size)
    await body.write(bytes(size))
    sealed = await body.seal()
    assert sealed.digest.hex() == sha256(bytes(size))


async def test_a_step_that_failed_is_told_to_the_writer_and_then_discarded(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "no space")

    body = Staged(lambda: StagedFile(tmp_path / "body"), workers, inline_bytes=0)
    monkeypatch.setattr(os, "write", full)
    await body.write(bytes(BUFFER_BYTES))
    with pytest.raises(Exhausted):
        await body.write(bytes(BUFFER_BYTES))
    await body.discard()
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    file = StagedFile(tmp_path / "body")
    file.write(bytearray(b"0123456789"))
    file.seal()
    assert file.path.read_bytes() == b"0123456789"


class Writes:
    """Sees every write, and whether it passes the page cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct: list[bool] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: memoryview) -> int:
        self.direct.append(bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT))
        return self._answer(descriptor, data)

    def _answer(self, descriptor: int, data: memoryview) -> int:
        return self._write(descriptor, data)


def _passes_the_cache(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.write(descriptor, mmap.mmap(-1, ALIGNMENT)) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(descriptor)


async def _received(workers: Workers, path: Path, body: bytes) -> Sealed:
    staged = Staged(lambda: StagedFile(path), workers, inline_bytes=0, expected=len(body))
    try:
        await staged.write(body)
        return await staged.seal()
    except Exhausted:
        await staged.discard()
        raise


BODY = random.randbytes(CACHED_BYTES + 3 * BUFFER_BYTES + 5)


async def test_a_huge_body_passes_the_page_cache_but_for_its_beginning_and_its_end(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = _passes_the_cache(tmp_path)
    writes = Writes(monkeypatch)
    sealed = await _received(workers, tmp_path / "body", BODY)
    assert sealed.digest.hex() == sha256(BODY)
    assert (tmp_path / "body").read_bytes() == BODY
    assert writes.direct == [False] * 8 + [passes] * 3 + [False]


async def test_a_file_system_with_no_way_past_the_cache(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, *argument: int) -> int:
        if argument and argument[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, *argument)

    control = fcntl.fcntl
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    writes = Writes(monkeypatch)
    assert (await _received(workers, tmp_path / "body", BODY)).digest.hex() == sha256(BODY)
    assert (tmp_path / "body").read_bytes() == BODY
    assert writes.direct == [False] * 12


async def test_a_disk_that_asks_for_more_than_whole_blocks(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(Writes):
        def _answer(self, descriptor: int, data: memoryview) -> int:
            if self.direct[-1]:
                raise OSError(errno.EINVAL, "Invalid argument")
            return super()._answer(descriptor, data)

    passes = _passes_the_cache(tmp_path)
    writes = Refused(monkeypatch)
    assert (await _received(workers, tmp_path / "body", BODY)).digest.hex() == sha256(BODY)
    assert (tmp_path / "body").read_bytes() == BODY
    assert writes.direct.count(True) == int(passes)


async def test_a_short_write_past_the_cache_is_continued(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(Writes):
        def _answer(self, descriptor: int, data: memoryview) -> int:
            return super()._answer(descriptor, data[: 2 * ALIGNMENT] if self.direct[-1] else data)

    Short(monkeypatch)
    assert (await _received(workers, tmp_path / "body", BODY)).digest.hex() == sha256(BODY)
    assert (tmp_path / "body").read_bytes() == BODY


async def test_another_fault_past_the_cache_is_told(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Writes):
        def _answer(self, descriptor: int, data: memoryview) -> int:
            if len(self.direct) > 9:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super()._answer(descriptor, data)

    Full(monkeypatch)
    with pytest.raises(Exhausted):
        await _received(workers, tmp_path / "body", BODY)
    assert list(tmp_path.iterdir()) == []


def test_folders_and_files_are_private(tmp_path: Path, staging: Staging) -> None:
    staging.open()
    file = staging.new_file()
    file.write(bytearray(b"x"))
    owner = file.path.parent
    modes = [oct(path.stat().st_mode & 0o777) for path in (owner.parent, owner, file.path)]
    file.discard()
    staging.close()
    assert modes == ["0o700", "0o700", "0o600"]


def test_sealing_or_discarding_what_was_never_written_is_fine(staging: Staging) -> None:
    file = staging.new_file()
    file.seal()
    file.discard()
    assert not file.path.exists()


def test_the_folder_of_a_living_process_is_never_taken(tmp_path: Path, staging: Staging) -> None:
    staging.open()
    other = Staging(tmp_path / "staging")
    other.open()
    assert other.sweep() == 0
    assert len(owners(tmp_path)) == 2
    other.close()
    other.close()
    staging.close()
    assert owners(tmp_path) == []


@pytest.mark.requirement("B09")
@pytest.mark.parametrize("half_made", [False, True])
def test_the_folder_of_a_dead_process_goes_at_the_next_start(
    tmp_path: Path, staging: Staging, half_made: bool
) -> None:
    dead = tmp_path / "staging" / ("0" * 16)
    dead.mkdir(parents=True)
    (dead / "body").write_bytes(b"half")
    if not half_made:
        (dead / ".lock").touch()
    stranger = tmp_path / "staging" / "not ours"
    stranger.mkdir()
    staging.open()
    assert not dead.exists()
    assert stranger.exists()
    staging.close()


def test_a_sweep_takes_the_dead_and_a_rehearsal_counts_them(
    tmp_path: Path, staging: Staging
) -> None:
    staging.open()
    (tmp_path / "staging" / ("1" * 16)).mkdir()
    assert (staging.sweep(dry_run=True), staging.sweep(), staging.sweep()) == (1, 1, 0)
    staging.close()


def test_a_probe_leaves_nothing(tmp_path: Path, staging: Staging) -> None:
    staging.open()
    staging.probe()
    assert [path.name for path in owners(tmp_path)[0].iterdir()] == [".lock"]
    staging.close()


def test_who_is_alive_is_known_on_this_machine_alone(tmp_path: Path, staging: Staging) -> None:
    staging.open()
    other, elsewhere = Staging(tmp_path / "staging"), Staging(tmp_path / "elsewhere")
    other.open()
    elsewhere.open()
    assert staging.is_alive(staging.owner)
    assert staging.is_alive(other.owner)
    assert staging.is_alive(elsewhere.owner) is None
    assert staging.is_alive("") is None
    place = staging.owner.partition("-")[0]
    assert staging.is_alive(f"{place}-../../etc") is None
    assert staging.is_alive(f"{place}-{'0' * 16}") is False
    gone = other.owner
    other.close()
    assert staging.is_alive(gone) is False
    staging.close()
    again = Staging(tmp_path / "staging")
    again.open()
    assert again.owner.partition("-")[0] == place
    again.close()
    elsewhere.close()


def test_a_folder_for_something_else_goes_with_its_process(
    tmp_path: Path, staging: Staging
) -> None:
    staging.open()
    folder = staging.folder("figures")
    assert folder == staging.folder("figures")
    assert folder.stat().st_mode & 0o777 == 0o700
    other = Staging(tmp_path / "staging")
    other.open()
    assert other.sweep() == 0
    staging.close()
    assert not folder.exists()
    other.close()


def test_a_place_that_cannot_be_read_gets_another_name(tmp_path: Path, staging: Staging) -> None:
    (tmp_path / "staging").mkdir()
    place = tmp_path / "staging" / ".place"
    place.write_bytes(b"\xff torn")
    staging.open()
    assert staging.owner.startswith(place.read_text() + "-")
    staging.close()
