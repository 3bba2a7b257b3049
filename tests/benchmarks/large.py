"""Large uploads: one of 1 GiB beside its peers, and eight of 256 MiB at once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from tests.benchmarks import peers
from tests.benchmarks.table import Row

MIB = 1024 * 1024
RUNS = int(os.environ.get("BENCH_RUNS", "3"))


def measure(folder: Path) -> list[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        return [_one_gibibyte(folder, Path(memory)), _eight_at_once(folder, Path(memory))]


def _one_gibibyte(folder: Path, memory: Path) -> Row:
    row = Row("one upload of 1 GiB, durable", "MiB/s")
    body, digest = make_body(memory / "body", 1024 * MIB)
    with contextlib.ExitStack() as stack:
        bare = stack.enter_context(peers.bare(folder))
        dav = stack.enter_context(peers.nginx_dav(folder))
        ours = stack.enter_context(peers.consignee(folder))
        idle = peers.resident_bytes(ours.process.pid)
        for turn in range(RUNS):
            row.add("bare uvicorn application", _rate(body, lambda: upload(bare, body, digest)))
            row.add("nginx PUT, then fsync", _rate(body, partial(_dav, folder, dav, turn, body)))
            row.add("dd conv=fsync", _rate(body, lambda: _dd(folder, body)))
            with peak_memory(ours.process.pid) as peak:
                row.add(
                    "consignee", _rate(body, lambda: upload(ours.upload_endpoint, body, digest))
                )
            row.add("consignee's memory over idle, MiB", (peak[0] - idle) / MIB)
    slowest = min(row.median(name) for name in row.figures if not name.startswith("consignee"))
    row.judge("of the slowest of the three", row.median("consignee") / slowest, least=0.9)
    row.judge("memory over idle, MiB", row.median("consignee's memory over idle, MiB"), most=64)
    return row


def _eight_at_once(folder: Path, memory: Path) -> Row:
    row = Row("8 uploads of 256 MiB", "s")
    bodies = [make_body(memory / f"body{number}", 256 * MIB) for number in range(8)]
    with peers.consignee(folder) as ours:
        endpoint = ours.upload_endpoint
        idle = peers.resident_bytes(ours.process.pid)
        for _ in range(RUNS):
            started = time.perf_counter()
            for body, digest in bodies:
                upload(endpoint, body, digest)
            row.add("one after another", time.perf_counter() - started)
            with peak_memory(ours.process.pid) as peak, ThreadPoolExecutor(8) as pool:
                started = time.perf_counter()
                list(pool.map(lambda pair: upload(endpoint, *pair), bodies))
                row.add("at once", time.perf_counter() - started)
            row.add("memory over idle, MiB", (peak[0] - idle) / MIB)
    row.judge(
        "at once, of one after another",
        row.median("at once") / row.median("one after another"),
        most=1.0,
    )
    row.judge("memory over idle, MiB", row.median("memory over idle, MiB"), most=64)
    return row


def make_body(path: Path, size: int) -> tuple[Path, str]:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(size // MIB):
            piece = os.urandom(MIB)
            digest.update(piece)
            file.write(piece)
    return path, digest.hexdigest()


def _rate(body: Path, work: object) -> float:
    started = time.perf_counter()
    work()  # type: ignore[operator]
    return body.stat().st_size / MIB / (time.perf_counter() - started)


def nobody(count: int) -> None:
    """Is told how many octets have passed, and does nothing."""


def upload(url: str, body: Path, digest: str, passed: Callable[[int], object] = nobody) -> None:
    """Send a file with the AHP framing, straight from the page cache."""
    head = (
        f"Content-Type: application/octet-stream\r\nAHP-Content-SHA256: {digest}\r\n"
        f"Authorization: Bearer {peers.TOKEN}\r\n"
    )
    status = send(url, "POST", head, body, passed)
    if status != 201:
        raise RuntimeError(f"{url} answered {status}")


def send(
    url: str, method: str, head: str, body: Path, passed: Callable[[int], object] = nobody
) -> int:
    """One request whose body is a file, sent by the kernel; gives the status."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection, body.open("rb") as f:
        size = body.stat().st_size
        line = f"{method} {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        connection.sendall(f"{line}{head}Content-Length: {size}\r\n\r\n".encode())
        sent = 0
        while sent < size:
            count = os.sendfile(connection.fileno(), f.fileno(), sent, min(MIB, size - sent))
            sent += count
            passed(count)
        return int(connection.makefile("rb").readline().split()[1])


def _dav(folder: Path, url: str, turn: int, body: Path) -> None:
    status = send(f"{url}body{turn}", "PUT", "", body)
    if status not in (201, 204):
        raise RuntimeError(f"nginx answered {status}")
    stored = folder / "stored" / f"body{turn}"
    descriptor = os.open(stored, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _dd(folder: Path, body: Path) -> None:
    target = folder / "dd"
    target.unlink(missing_ok=True)
    arguments = ["dd", f"if={body}", f"of={target}", "bs=1M", "conv=fsync"]
    subprocess.run(arguments, check=True, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def peak_memory(pid: int) -> Iterator[list[int]]:
    """The largest resident memory of a process while the block runs."""
    peak = [peers.resident_bytes(pid)]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], peers.resident_bytes(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


def missing() -> str | None:
    """Why this cannot be measured here."""
    found = shutil.which("nginx") or Path("/usr/sbin/nginx").exists()
    return None if found else "nginx is not installed"
