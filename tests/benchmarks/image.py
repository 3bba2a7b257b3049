"""The image: its size, and how long a container of it takes until it answers."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic

from tests.benchmarks.table import Row
from tests.e2e.images import (
    DATA,
    Podman,
    base_image,
    build,
    podman_is_missing,
    served,
    volume,
)
from tests.e2e.processes import running_server

RUNS = int(os.environ.get("BENCH_RUNS", "3"))
MB = 1e6

# Without it the image refuses to listen beyond loopback.
PROTECTED = {"CONSIGNEE_PUBLIC_URL": "https://uploads.example.com"}


def measure(folder: Path) -> list[Row]:
    """All rows."""
    podman = Podman(folder)
    image = build(podman)
    return [_size(podman, image), _start(podman, image)]


def missing() -> str | None:
    """Why this cannot be measured here."""
    return podman_is_missing()


def _size(podman: Podman, image: str) -> Row:
    row = Row("size of the image, not compressed", "MB")
    whole, base = (podman.inspect(name)["Size"] / MB for name in (image, base_image(podman)))
    row.add("all of it", whole)
    row.add("its base, a bare Debian with Python", base)
    row.add("what Consignee adds", whole - base)
    return row


def _start(podman: Podman, image: str) -> Row:
    """With nothing stored yet, and with what the container before it has left."""
    row = Row("from start to ready", "s")
    for _ in range(RUNS):
        with volume(podman) as name:
            for which in ("container, new volume", "container, volume in use"):
                with served(podman, image, f"{name}:{DATA}", environment=PROTECTED) as container:
                    row.add(which, container.start_seconds)
        row.add("process, from the sources", _process_seconds())
    return row


def _process_seconds() -> float:
    began = monotonic()
    with running_server():
        return monotonic() - began
