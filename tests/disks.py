"""A disk so small that a test can fill it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.components import require_component

DISK = 16 * 1024 * 1024


@contextmanager
def mounted_disk(folder: Path) -> Iterator[Path]:
    """A file system of DISK bytes at `folder`, which is made, until the block ends."""
    folder.mkdir()
    options = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(options, capture_output=True).returncode == 0
    require_component("tmpfs", present=mounted, why="it needs root and the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, leave: int = 0) -> Path:
    """Take all the room but `leave` bytes, with a file that gives it back when it goes."""
    filler = disk / "filler"
    free = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)
    return filler
