"""The border to the operating system's files: its errors, and what makes a change durable."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.errors import Exhausted, Refusal, Unavailable

PRIVATE_FOLDER = 0o700
PRIVATE_FILE = 0o600

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def refusal_of(error: OSError) -> Refusal:
    """What an error of the operating system means for the one who asked."""
    if error.errno in _NO_ROOM:
        return Exhausted()
    return Unavailable(
        "storage_unavailable", "The store cannot be read or written at the moment; try again."
    )


@contextmanager
def disk_border() -> Iterator[None]:
    """Translate every OSError inside: Exhausted when there is no room, else Unavailable."""
    try:
        yield
    except OSError as error:
        raise refusal_of(error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder`, private to this user, and make its name durable; it may exist."""
    if not folder.is_dir():
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        sync_folder(folder.parent)
