"""Files that stay where they are: opened, stamped, hashed step by step, and read from anywhere.

Nothing here imports more than the hashing needs, so that a command can have it begin before it
imports what the sending needs.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from app.sender.errors import SourceError

CHUNK_BYTES: Final = 1024 * 1024
"""What is read and handed on at once."""

HASHED_AT_ONCE: Final = 8 * CHUNK_BYTES
"""What one step hashes: long enough to be cheap, short enough to cancel."""

BUFFER_BYTES: Final = 4 * CHUNK_BYTES
"""What is hashed in one go: between two, a thread may wait for one that holds the interpreter."""

TURN_SECONDS: Final = 0.0001
"""How long a thread may keep the interpreter while another has a head start."""

PATIENCE_MS: Final = 20
"""How long a thread waits for a socket: one that takes no more than that is waited for outside."""

TICK_NS: Final = 1_000_000_000
"""The coarsest clock of a file system that is in use: two writings within it may look like one."""

_NOT_BY_THE_KERNEL: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class SharedFile:
    """An open file for readers in several threads.

    The lock keeps a close from giving the descriptor away while a reader still uses it: the
    next file of this process would get the same number, and its bytes would be sent.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()

    def piece_at(self, start: int, most: int) -> bytes:
        """Up to `most` bytes from `start`; b"" at the end. Raises SourceError."""
        with self._readable() as descriptor:
            return os.pread(descriptor, most, start)

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill `buffer` from `start`; gives the number of bytes. Raises SourceError."""
        with self._readable() as descriptor:
            return os.preadv(descriptor, [buffer], start)

    def send_to(self, connection: int, start: int, most: int) -> int:
        """Have the kernel send up to `most` bytes from `start` into a socket that does not block.

        Gives their number, 0 at the end of the file. Raises SourceError, BlockingIOError when the
        socket takes nothing now, and OSError for what is wrong with the socket.
        """
        with self._descriptor() as descriptor:
            try:
                return os.sendfile(connection, descriptor, start, most)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise unreadable(error) from None
                if error.errno not in _NOT_BY_THE_KERNEL:
                    raise
        return os.write(connection, self.piece_at(start, min(most, CHUNK_BYTES)))

    @contextmanager
    def _descriptor(self) -> Iterator[int]:
        with self._lock:
            if self._file.closed:
                raise SourceError("closed", "The source was closed while it was being read.")
            yield self._file.fileno()

    @contextmanager
    def _readable(self) -> Iterator[int]:
        with self._descriptor() as descriptor:
            try:
                yield descriptor
            except OSError as error:
                raise unreadable(error) from None

    def stamp(self) -> Stamp:
        """Its stamp now. Raises SourceError."""
        with self._readable() as descriptor:
            now, found = time.time_ns(), os.fstat(descriptor)
        return Stamp(found.st_size, found.st_mtime_ns, found.st_ctime_ns, now)

    def write(self, data: bytes | bytearray) -> None:
        """Append all of `data`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Close it once no reader is in it. Legal twice."""
        with self._lock:
            self._file.close()


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file system notes of a file's content: it changes with every writing.

    `taken_ns` is when it was read; times as the file system gives them, in nanoseconds.
    """

    size: int
    modified_ns: int
    changed_ns: int
    taken_ns: int

    @property
    def is_settled(self) -> bool:
        """Whether a later writing must show: one in the same tick of its clock would not."""
        return self.taken_ns - self.changed_ns > TICK_NS

    def shows_writing(self, later: Stamp) -> bool:
        """Whether the content was written to between the two."""
        return (self.size, self.modified_ns) != (later.size, later.modified_ns)

    def shows_nothing(self, later: Stamp) -> bool:
        """Whether nothing at all happened to the file between the two."""
        return not self.shows_writing(later) and self.changed_ns == later.changed_ns


@dataclass(frozen=True, slots=True)
class FileRange:
    """`size` bytes of `file` from `start` on, which nobody has read yet."""

    file: SharedFile
    start: int
    size: int

    def send_to(self, connection: int, done: int, stopped: threading.Event) -> int:
        """Send what follows the first `done` bytes; gives how many are done then.

        Goes on while the socket takes more within PATIENCE_MS, until `stopped`. Raises SourceError
        where the file has become shorter, and OSError for what is wrong with the socket.
        """
        taking = select.poll()
        taking.register(connection, select.POLLOUT)
        while done < self.size and taking.poll(PATIENCE_MS) and not stopped.is_set():
            most = min(CHUNK_BYTES, self.size - done)
            with suppress(BlockingIOError):
                count = self.file.send_to(connection, self.start + done, most)
                if not count:
                    raise changed()
                done += count
        return done


class FileReading:
    """A regular file on its way to a snapshot, used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.size = 0
        self._path = path
        self._digest = hashlib.sha256()
        self._file: SharedFile | None = None
        self._stamp: Stamp | None = None
        self._buffer = memoryview(b"")
        self._closed = False

    @property
    def hashed(self) -> tuple[SharedFile, int, str, Stamp]:
        """The file, its size and SHA-256, and its stamp of before: once no step is left."""
        if self._file is None or self._stamp is None:
            raise RuntimeError("the file was not read yet")
        return self._file, self.size, self._digest.hexdigest(), self._stamp

    def step(self, max_bytes: int) -> bool:
        """Hash the next HASHED_AT_ONCE bytes; whether there may be more.

        The first step opens the file. Raises SourceError, also when there are over `max_bytes`.
        """
        if self._closed:
            raise SourceError("closed", "The source is closed; make a new one.")
        if self._file is None:
            self._file = open_regular(self._path)
        if self._stamp is None:
            self._stamp = self._file.stamp()
        if not self._buffer:
            self._buffer = memoryview(bytearray(BUFFER_BYTES))
        count = self._hash_some(self._file)
        require_within(self.size, max_bytes)
        if count == HASHED_AT_ONCE:
            return True
        self._buffer = memoryview(b"")
        return False

    def _hash_some(self, file: SharedFile) -> int:
        done = 0
        while done < HASHED_AT_ONCE and (count := file.read_into(self._buffer, self.size)):
            self._digest.update(self._buffer[:count])
            self.size += count
            done += count
        return done

    def close(self) -> None:
        """Close the file. Legal twice, and when it was never opened."""
        self._closed = True
        if self._file is not None:
            self._file.close()


class HeadStart:
    """While the block runs a thread hashes `readings`, one after another, as far as it gets.

    After the block it has ended, and whoever has the readings next goes on with them. What goes
    wrong is not told here: the same step goes wrong again there. Meanwhile the interpreter changes
    threads more often: a thread that imports would have the hashing wait for most of the time.
    """

    def __init__(self, readings: Sequence[FileReading], max_bytes: int) -> None:
        self._readings = readings
        self._max_bytes = max_bytes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="head-start")
        self._interval = sys.getswitchinterval()

    def __enter__(self) -> Self:
        sys.setswitchinterval(TURN_SECONDS)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)

    def _read(self) -> None:
        for reading in self._readings:
            with suppress(SourceError):
                while not self._stopped.is_set() and reading.step(self._max_bytes):
                    pass


def open_regular(path: Path) -> SharedFile:
    """The file at `path`. Raises SourceError unless it is a regular file."""
    try:
        # Without O_NONBLOCK a pipe would hold the thread until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return SharedFile(_regular(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise unreadable(error) from None


def _regular(descriptor: int) -> Any:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb", buffering=0)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise SourceError("not_a_file", "The source is not a regular file; send its contents.")


def require_within(size: int, max_bytes: int) -> None:
    """Raise SourceError for more than may be sent (AHP-S42)."""
    if size > max_bytes:
        raise SourceError(
            "too_large",
            f"The source has more than {max_bytes} bytes, which is all that may be sent of it.",
        )


def changed() -> SourceError:
    """What to tell of a file that is not what was hashed."""
    return SourceError("changed", "The file changed before it was sent; send it again.")


def unreadable(error: OSError) -> SourceError:
    """What to tell of a file that cannot be read, without its path."""
    reason = error.strerror or "input/output error"
    return SourceError("unreadable", f"The source cannot be read: {reason}.")
