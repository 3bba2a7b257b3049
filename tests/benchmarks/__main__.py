"""Measure everything, or the named parts, and print the table."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from tests.benchmarks import (
    events,
    files,
    growth,
    image,
    large,
    objects,
    sending,
    service,
    small,
    soak,
)

PARTS: dict[str, ModuleType] = {
    "small": small,
    "large": large,
    "growth": growth,
    "files": files,
    "service": service,
    "objects": objects,
    "events": events,
    "sending": sending,
    "image": image,
}

ON_REQUEST: dict[str, ModuleType] = {"soak": soak}
"""What takes its time by itself, and so is measured only when it is named."""


def main(names: list[str]) -> None:
    """Run the parts in order; a part that cannot run here says why."""
    print(f"{os.cpu_count()} cores; medians of the runs, smallest and largest in brackets")
    for name in names or list(PARTS):
        part = (PARTS | ON_REQUEST)[name]
        missing: Callable[[], str | None] = part.missing
        if (why := missing()) is not None:
            print(f"\n{name}: not measured: {why}")
            continue
        with tempfile.TemporaryDirectory(prefix="consignee-bench-", dir=_disk()) as folder:
            for row in part.measure(Path(folder)):
                print(row.show(), flush=True)


def _disk() -> str | None:
    """Where the data folders go: a real disk, which /tmp may not be."""
    return os.environ.get("BENCH_DISK")


if __name__ == "__main__":
    main(sys.argv[1:])
