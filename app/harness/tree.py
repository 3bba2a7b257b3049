"""Folders that hostile programs write into: walked, read, written and removed without following.

Every step goes from an open folder to an entry of it and never through a link (openat and
O_NOFOLLOW), so a folder that is swapped for a link at any moment is an error, not a way out.
Nothing but folders and regular files is ever opened. Only one or two descriptors are open at a
time, however deep a tree is. Everything here blocks.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MAX_PATH_BYTES = 1024
"""The longest path of an artifact in UTF-8; it bounds the depth of a walk, too."""

GONE_PREFIX = ".gone-"
"""How folders are named that are being removed; whoever finds one may go on with it."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that took the place of a file must not wait for its writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DRAFT = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotPlain(Exception):
    """An entry is not what may be read; the message says why, for the report."""


@dataclass(frozen=True, slots=True)
class Signature:
    """What changes with a file's content; the kernel alone sets `changed_ns` (ctime)."""

    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Signature:
        """The signature in `status`."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a walk; `fault` says why it cannot be an artifact."""

    path: str
    signature: Signature
    names: int
    fault: str | None = None


def fault_of_path(path: str) -> str | None:
    """Why `path` cannot be the path of an artifact; None when it can.

    Taken are relative paths in UTF-8 of at most MAX_PATH_BYTES bytes with "/" between their
    parts, none of them empty, "." or "..", and no control characters.
    """
    try:
        length = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        return "its name is not UTF-8"
    if length > MAX_PATH_BYTES:
        return f"its path is longer than {MAX_PATH_BYTES} bytes"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "its path is not relative and plain"
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in path):
        return "its name holds control characters"
    return None


@contextmanager
def opened_folder(root: int, parts: Sequence[str] = ()) -> Iterator[int]:
    """The descriptor of the folder `parts` below the open folder `root`.

    Raises OSError when a part is missing or anything but a folder.
    """
    descriptor = os.open(".", _FOLDER, dir_fd=root)
    try:
        for part in parts:
            descriptor = _step(descriptor, part)
        yield descriptor
    finally:
        os.close(descriptor)


def _step(folder: int, name: str) -> int:
    deeper = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return deeper


def open_file(root: int, path: str) -> int:
    """A descriptor of the regular file at `path` below the open folder `root`.

    Raises NotPlain for anything else, OSError when it is missing or may not be read.
    """
    *parts, name = path.split("/")
    with opened_folder(root, parts) as folder:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise NotPlain("it is not a regular file")
    return descriptor


def walk(root: int) -> Iterator[Entry]:
    """Every regular file below the open folder `root`, and what cannot be one, in no set order.

    Links, FIFOs, sockets and devices are entries with a fault; a folder is one only where it
    cannot be entered. What disappears meanwhile is not there.
    """
    device = os.fstat(root).st_dev
    waiting: list[str] = [""]
    while waiting:
        place = waiting.pop()
        try:
            found = _entries(root, place)
        except FileNotFoundError:
            continue
        except OSError as error:
            yield Entry(place, Signature(0, 0, 0, 0), 0, f"it cannot be read: {_reason(error)}")
            continue
        for name, status in found:
            path = f"{place}/{name}" if place else name
            fault = fault_of_path(path) or _fault_of_kind(status, device)
            if fault is None and stat.S_ISDIR(status.st_mode):
                waiting.append(path)
            else:
                yield Entry(path, Signature.of(status), status.st_nlink, fault)


def _entries(root: int, place: str) -> list[tuple[str, os.stat_result]]:
    found = []
    with opened_folder(root, place.split("/") if place else ()) as folder, os.scandir(folder) as it:
        for entry in it:
            with suppress(FileNotFoundError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def _fault_of_kind(status: os.stat_result, device: int) -> str | None:
    if stat.S_ISLNK(status.st_mode):
        return "it is a link"
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return "it is not a regular file"
    if status.st_dev != device:
        return "it lies on another file system"
    return None


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else "unknown reason"


class Draft:
    """A file that appears under its path only when it is whole.

    Folders on the way are made; what stands in their way and is no folder is removed. Nothing is
    ever written through a link. `discard` is legal in every state, after `keep` it does nothing.
    """

    def __init__(self, path: str) -> None:
        *self._parts, self._name = path.split("/")
        self._draft = f".{secrets.token_hex(8)}.part"
        self._folder: int | None = None
        self._file: int | None = None

    def open(self, root: int) -> None:
        """Begin the file below the open folder `root`. Raises OSError."""
        self._folder = _made_folder(root, self._parts)
        self._file = os.open(self._draft, _DRAFT, 0o600, dir_fd=self._folder)

    def write(self, data: bytes) -> None:
        """Append all of `data`. Raises OSError."""
        rest = memoryview(data)
        while rest and self._file is not None:
            rest = rest[os.write(self._file, rest) :]

    def keep(self) -> None:
        """Give the file its name, in place of what had it. Raises OSError, for a folder, too."""
        os.rename(self._draft, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._close()

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._folder is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._draft, dir_fd=self._folder)
        self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._folder = None


def _made_folder(root: int, parts: Sequence[str]) -> int:
    descriptor = os.open(".", _FOLDER, dir_fd=root)
    for part in parts:
        try:
            descriptor = _made_step(descriptor, part)
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _made_step(folder: int, name: str) -> int:
    for _ in range(2):
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
        try:
            return _step(folder, name)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            os.unlink(name, dir_fd=folder)
    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))


def gone_name() -> str:
    """A fresh name for a folder that is to be removed."""
    return f"{GONE_PREFIX}{secrets.token_hex(16)}"


def remove_tree(parent: int, name: str) -> list[str]:
    """Remove the folder `name` of the open folder `parent`; what of it is still there.

    Something still there means that a program still writes into it: try again. Folders inside
    are first moved up beside each other, so depth costs neither descriptors nor stack.
    """
    waiting = [name]
    emptied = []
    while waiting:
        folder = waiting.pop()
        waiting += _emptied(parent, folder)
        emptied.append(folder)
    return [folder for folder in emptied if not _is_removed(parent, folder)]


def _emptied(parent: int, name: str) -> list[str]:
    """Empty the folder `name`; its folders move up, to the names that are returned."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        _make_accessible(parent, name)
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except NotADirectoryError:
        os.unlink(name, dir_fd=parent)
        return []
    except FileNotFoundError:
        return []
    try:
        os.fchmod(folder, 0o700)
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
        moved = [_removed_or_moved(folder, each, parent) for each in names]
    finally:
        os.close(folder)
    return [up for up in moved if up is not None]


def _removed_or_moved(folder: int, entry: str, parent: int) -> str | None:
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(entry, dir_fd=folder)
            return None
        up = gone_name()
        # Moving a folder rewrites its "..": that needs the right to write into it.
        _make_accessible(folder, entry)
        os.rename(entry, up, src_dir_fd=folder, dst_dir_fd=parent)
        return up
    return None


def _make_accessible(parent: int, name: str) -> None:
    # chmod by name would follow a link; a descriptor that only names the folder cannot.
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)  # noqa: PTH101 - not a path of ours
    finally:
        os.close(descriptor)


def _is_removed(parent: int, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True
