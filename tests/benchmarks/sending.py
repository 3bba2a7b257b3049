"""The sending side: `consignee send` beside curl, and one source for eight receivers."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from app.sender.authorization import Credentials
from app.sender.config import UploadConfiguration
from app.sender.sources import Source
from app.sender.transfer import Sender
from tests.benchmarks import peers
from tests.benchmarks.large import make_body, upload
from tests.benchmarks.table import Row

MIB: Final = 1024 * 1024
RUNS: Final = int(os.environ.get("BENCH_RUNS", "3"))
RECEIVERS: Final = 8


def measure(folder: Path) -> list[Row]:
    """Both rows, against one receiver that stores durably."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, peers.consignee(folder) as server:
        endpoint = server.upload_endpoint
        return [_one_gibibyte(endpoint, Path(memory)), _fan_out(endpoint, Path(memory))]


def _one_gibibyte(endpoint: str, memory: Path) -> Row:
    row = Row("consignee send of 1 GiB", "MiB/s")
    body, digest = make_body(memory / "body", 1024 * MIB)
    send = [sys.executable, "-m", "app.cli", "send", str(body), "--endpoint", endpoint]
    ours = [*send, "--token-env", "BENCH_TOKEN", "--allow-loopback-http"]
    for _ in range(RUNS):
        row.add("curl -T with a known digest", _rate(_curl(endpoint, body, digest), 1024)[0])
        rate, peak = _rate(ours, 1024)
        row.add("consignee send", rate)
        row.add("consignee send, peak memory in MiB", peak / MIB)
    body.unlink()
    ratio = row.median("consignee send") / row.median("curl -T with a known digest")
    row.judge("of curl", ratio, least=0.8)
    row.judge("memory, MiB", row.median("consignee send, peak memory in MiB"), most=100)
    return row


def _curl(endpoint: str, body: Path, digest: str) -> list[str]:
    headers = (
        "Content-Type: application/octet-stream",
        f"AHP-Content-SHA256: {digest}",
        f"Authorization: Bearer {peers.TOKEN}",
    )
    options = [option for header in headers for option in ("-H", header)]
    return ["curl", "-sS", "-f", "-X", "POST", "-T", str(body), *options, endpoint]


def _rate(command: list[str], size_mib: int) -> tuple[float, int]:
    """MiB a second from the process's start to its end, and its largest resident memory."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], _resident(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    took = time.perf_counter() - started
    ended.set()
    watcher.join()
    if status != 0:
        raise RuntimeError(f"{command[0]} ended with {status}")
    return size_mib / took, peak[0]


def _resident(pid: int) -> int:
    try:
        return peers.resident_bytes(pid)
    except (OSError, IndexError):  # it has just ended
        return 0


def _fan_out(endpoint: str, memory: Path) -> Row:
    row = Row("one source of 256 MiB to 8 receivers", "s")
    body, digest = make_body(memory / "body", 256 * MIB)
    for _ in range(RUNS):
        row.add("8 plain transfers of the same bytes at once", _plain(endpoint, body, digest))
        seconds, read = asyncio.run(_shared(endpoint, body))
        row.add("one source, one snapshot, 8 uploads", seconds)
        row.add("times that the source was read", read)
    ratio = row.median("one source, one snapshot, 8 uploads")
    ratio /= row.median("8 plain transfers of the same bytes at once")
    row.judge("of the plain transfers", ratio, most=1.3)
    times = row.median("times that the source was read")
    row.judge("times that the source was read", times, most=1)
    return row


def _plain(endpoint: str, body: Path, digest: str) -> float:
    """Seconds that bare sockets take, which are told the digest."""
    started = time.perf_counter()
    with ThreadPoolExecutor(RECEIVERS) as pool:
        list(pool.map(lambda _: upload(endpoint, body, digest), range(RECEIVERS)))
    return time.perf_counter() - started


async def _shared(endpoint: str, body: Path) -> tuple[float, float]:
    """Seconds from the first byte read to the last receipt, and how often the source was read."""
    auth = {"type": "bearer", "tokenEnv": "BENCH_TOKEN"}
    mapping = {"endpoint": endpoint, "timeoutMs": 600_000, "maxBytes": 1024 * MIB, "auth": auth}
    configuration = UploadConfiguration.parse(mapping, allow_loopback_http=True)
    opened = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal opened
        opened += 1
        with body.open("rb") as file:
            while piece := file.read(MIB):
                yield piece

    started = time.perf_counter()
    async with Sender(Credentials()) as sender, Source.stream(pieces) as source:
        await asyncio.gather(*[sender.upload(source, configuration) for _ in range(RECEIVERS)])
    return time.perf_counter() - started, float(opened)


def missing() -> str | None:
    """Why this cannot be measured here."""
    return None if shutil.which("curl") else "curl is not installed"
