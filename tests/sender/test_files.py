"""Files that stay where they are: hashed step by step, with a head start, sent by the kernel."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.sender import files
from app.sender.errors import SourceError
from app.sender.files import (
    CHUNK_BYTES,
    HASHED_AT_ONCE,
    FileRange,
    FileReading,
    HeadStart,
    SharedFile,
    open_regular,
)
from tests.sender.watching import Leaks

LARGE = os.urandom(2 * HASHED_AT_ONCE + 17)
LIMIT = 1 << 30


@pytest.fixture
def body(tmp_path: Path) -> Path:
    path = tmp_path / "body"
    path.write_bytes(LARGE)
    return path


@contextmanager
def line() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection; the near one does not block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setblocking(False)
        yield near, far


def finish(reading: FileReading, max_bytes: int = LIMIT) -> int:
    """Take all steps that are left; gives their number."""
    steps = 1
    while reading.step(max_bytes):
        steps += 1
    return steps


@pytest.mark.parametrize("size", [0, 1, HASHED_AT_ONCE, 2 * HASHED_AT_ONCE + 17])
def test_a_reading_gives_the_size_and_digest_of_its_file(size: int, body: Path) -> None:
    body.write_bytes(LARGE[:size])
    reading = FileReading(body)
    finish(reading)
    file, found, sha256, stamp = reading.hashed
    assert (found, stamp.size) == (size, size)
    assert sha256 == hashlib.sha256(LARGE[:size]).hexdigest()
    assert file.piece_at(0, 5) == LARGE[: min(size, 5)]
    reading.close()


def test_a_reading_that_was_not_made_gives_nothing(body: Path) -> None:
    reading = FileReading(body)
    with pytest.raises(RuntimeError):
        _ = reading.hashed
    reading.close()
    reading.close()
    with pytest.raises(SourceError, match="closed"):
        reading.step(LIMIT)


@pytest.mark.anyio
async def test_a_head_start_goes_on_where_it_ended(body: Path) -> None:
    """Wherever that is: the block here is over at once, or after the end of the file."""
    for waits in (False, True):
        reading = FileReading(body)
        with Leaks() as leaks, HeadStart([reading], LIMIT) as start:
            if waits:
                start._thread.join()
                assert reading.size == len(LARGE)
        assert leaks.threads() == 0
        finish(reading)
        assert reading.hashed[1:3] == (len(LARGE), hashlib.sha256(LARGE).hexdigest())
        reading.close()


def test_a_head_start_is_for_the_next_file_too_when_one_fails(body: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"abc")
    readings = [FileReading(tmp_path / "missing"), FileReading(body), FileReading(small)]
    with HeadStart(readings, len(LARGE) - 1) as start:
        start._thread.join()
    assert readings[2].size == 3
    with pytest.raises(SourceError, match="No such file"):
        readings[0].step(LIMIT)
    with pytest.raises(SourceError, match="more than"):
        readings[1].step(len(LARGE) - 1)
    for reading in readings:
        reading.close()


def test_a_head_start_leaves_the_interpreter_as_it_was(body: Path) -> None:
    before = sys.getswitchinterval()
    reading = FileReading(body)
    with pytest.raises(ValueError, match="refused"), HeadStart([reading], LIMIT):
        raise ValueError("refused")
    assert sys.getswitchinterval() == before
    assert "head-start" not in {thread.name for thread in threading.enumerate()}
    reading.close()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["folder", "pipe", "missing"])
async def test_what_is_no_regular_file_is_not_left_open(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "it"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    with Leaks() as leaks:
        for _ in range(3):
            with pytest.raises(SourceError):
                open_regular(path)
        assert leaks.descriptors() == 0


def test_a_range_goes_as_far_as_the_socket_takes_it(
    body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE_MS", 1)
    file = open_regular(body)
    part = FileRange(file, 5, len(LARGE) - 7)
    with line() as (near, far):
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        done = part.send_to(near.fileno(), 0, threading.Event())
        assert 0 < done < part.size
        assert part.send_to(near.fileno(), done, threading.Event()) >= done
        received = bytearray()
        while done < part.size or len(received) < part.size:
            received += far.recv(1 << 20)
            done = part.send_to(near.fileno(), done, threading.Event())
        assert bytes(received) == LARGE[5:-2]
    file.close()


def test_a_range_that_is_stopped_sends_nothing(body: Path) -> None:
    stopped = threading.Event()
    stopped.set()
    file = open_regular(body)
    with line() as (near, far):
        assert FileRange(file, 0, 100).send_to(near.fileno(), 10, stopped) == 10
        near.shutdown(socket.SHUT_WR)
        assert far.recv(1) == b""
    file.close()


def test_a_socket_that_takes_nothing_in_the_end_is_asked_again(
    body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be full although it was said to take more."""
    real, refusals = os.sendfile, [1, 1]

    def full(*arguments: int) -> int:
        if refusals:
            refusals.pop()
            raise BlockingIOError
        return real(*arguments)

    monkeypatch.setattr(os, "sendfile", full)
    file = open_regular(body)
    with line() as (near, far):
        assert FileRange(file, 0, 100).send_to(near.fileno(), 0, threading.Event()) == 100
        assert far.recv(1000) == LARGE[:100]
    file.close()


@pytest.mark.requirement("AHP-S41")
def test_a_range_of_a_file_that_shrank_has_changed(body: Path) -> None:
    file = open_regular(body)
    part = FileRange(file, 0, len(LARGE))
    os.truncate(body, 100)
    with line() as (near, far), pytest.raises(SourceError) as caught:
        part.send_to(near.fileno(), 0, threading.Event())
    assert caught.value.code == "changed"
    del far
    file.close()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_what_the_kernel_does_not_send_is_read(
    number: int, body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sendfile", failing(number))
    file = open_regular(body)
    with line() as (near, far):
        assert FileRange(file, 3, 100).send_to(near.fileno(), 0, threading.Event()) == 100
        assert far.recv(1000) == LARGE[3:103]
    file.close()


def test_a_disk_that_fails_is_told_from_a_connection_that_does(
    body: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_regular(body)
    with line() as (near, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        far.close()
        with pytest.raises(ConnectionError):
            file.send_to(near.fileno(), 0, CHUNK_BYTES)
        monkeypatch.setattr(os, "sendfile", failing(errno.EIO))
        with pytest.raises(SourceError) as caught:
            file.send_to(near.fileno(), 0, CHUNK_BYTES)
    assert caught.value.code == "unreadable"
    file.close()


def test_nothing_is_sent_of_a_closed_file(body: Path) -> None:
    file: SharedFile = open_regular(body)
    file.close()
    with line() as (near, _), pytest.raises(SourceError, match="closed"):
        file.send_to(near.fileno(), 0, 1)


def failing(number: int) -> object:
    def fail(*_: int) -> int:
        raise OSError(number, os.strerror(number))

    return fail
