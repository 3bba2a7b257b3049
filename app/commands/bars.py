"""What a terminal shows of `consignee send`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

from app import logs


class Bars(Progress):
    """A bar for each file, on standard error. Nothing else is printed while they are there."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
        )
        self._rows = [self.add_task(logs.printable(str(file)), total=None) for file in files]

    def follow(self, number: int, sent: int, size: int) -> None:
        """`sent` of `size` bytes of the file with this number are on their way."""
        self.update(self._rows[number], completed=sent, total=size)
