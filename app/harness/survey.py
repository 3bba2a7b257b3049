"""What lies in a workspace at one moment, and what of it cannot be an artifact.

Looking happens in a worker thread, a batch at a time. Whatever cannot be an artifact — links,
devices, names that cannot be shown — is reported with its reason and left alone.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import time_ns

from app.harness.blocking import run_blocking
from app.harness.layout import Layout
from app.harness.tree import MAX_PATH_BYTES, Entry, NotPlain, Signature, walk
from app.logs import printable

BATCH = 1000
"""Entries that one turn of a worker thread looks at: a cancellation waits for one turn."""

MAX_ENTRIES = 200_000
"""Files that are looked at in one workspace; each costs about 300 bytes of memory."""

MAX_REPORTED = 50
"""Files that could not be collected and are named; of further ones only the number is told."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Something in the workspace that cannot be an artifact; both parts are safe to show."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Survey:
    """What lies in a workspace: plain files by path, and what is in between, with its reason."""

    files: dict[str, Entry]
    faults: tuple[Unreadable, ...]
    taken_ns: int


async def survey(layout: Layout) -> Survey:
    """Look at everything that lies in a workspace, in a thread, a batch at a time."""
    taken_ns = time_ns()
    entries: list[Entry] = []
    walking = _walk_files(layout)
    try:
        while batch := await run_blocking(_next_batch, walking):
            entries += batch
            if len(entries) >= MAX_ENTRIES:
                reason = f"it holds more than {MAX_ENTRIES} files; not all were looked at"
                entries.append(_fault(".", reason))
                break
    finally:
        walking.close()
    return _judged(entries, taken_ns)


def _walk_files(layout: Layout) -> Generator[Entry, None, None]:
    try:
        with layout.opened_files() as files:
            yield from walk(files)
    except OSError as error:
        yield _fault(".", f"it cannot be read: {reason_of(error)}")


def _next_batch(walking: Iterator[Entry]) -> list[Entry]:
    return list(islice(walking, BATCH))


def _fault(path: str, reason: str) -> Entry:
    return Entry(path, Signature(0, 0, 0, 0), 0, reason)


def _judged(entries: Iterable[Entry], taken_ns: int) -> Survey:
    """Tell plain files from faults; of hard links only those that lie in here with every name."""
    entries = list(entries)
    names = Counter(entry.signature.inode for entry in entries if entry.fault is None)
    files = {}
    faults = []
    for entry in entries:
        fault = entry.fault
        if fault is None and entry.names > names[entry.signature.inode]:
            fault = "it is a hard link to a file outside"
        if fault is None:
            files[entry.path] = entry
        else:
            faults.append(Unreadable(shown(entry.path), fault))
    return Survey(files, tuple(faults), taken_ns)


def bounded(reports: Sequence[Unreadable]) -> Iterator[Unreadable]:
    """The first MAX_REPORTED of `reports`, and how many more there are."""
    yield from reports[:MAX_REPORTED]
    if len(reports) > MAX_REPORTED:
        yield Unreadable(".", f"{len(reports) - MAX_REPORTED} more could not be collected")


def shown(path: str) -> str:
    """`path` as it may stand in a message: one line, bounded, nothing that is not text."""
    return printable(path[:MAX_PATH_BYTES])


def reason_of(error: NotPlain | OSError) -> str:
    """Why something could not be read, without a path."""
    if isinstance(error, NotPlain):
        return str(error)
    return os.strerror(error.errno) if error.errno else "unknown reason"
