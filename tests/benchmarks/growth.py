"""What the millionth reference costs beside the thousandth: confirming one, and resolving one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from app.settings import load_settings
from app.store.content import ContentStore
from app.store.migrations import migrate
from app.store.tables import blobs, content_refs
from tests.benchmarks import peers
from tests.benchmarks.small import RUNS, load
from tests.benchmarks.table import Row

SMALL = 1_000
LARGE = int(os.environ.get("BENCH_REFERENCES", "1000000"))


def measure(folder: Path) -> list[Row]:
    """Both rows."""
    upload = Row("4 KiB uploads over HTTP, 16 connections", "requests/s")
    resolve = Row("resolve a reference", "µs, median of 500")
    stores = {"at a thousand": folder / "few", "at a million": folder / "many"}
    for place, count in zip(stores.values(), (SMALL, LARGE), strict=True):
        place.mkdir()
        fill(place / "data", count)
    for _ in range(RUNS):
        for name, place in stores.items():
            with peers.consignee(place) as ours:
                upload.add(name, load(ours.upload_endpoint, peers.TOKEN))
            resolve.add(name, asyncio.run(_resolve(place / "data")))
    slower = upload.median("at a thousand") / upload.median("at a million")
    upload.judge("times slower at a million", slower, most=1.3)
    slower = resolve.median("at a million") / resolve.median("at a thousand")
    resolve.judge("times slower at a million", slower, most=1.3)
    return [upload, resolve]


def fill(data: Path, count: int) -> None:
    settings = load_settings(data_dir=data)
    migrate(settings)
    engine = create_engine(f"sqlite:///{data / 'consignee.db'}")
    with engine.begin() as connection:
        for rows in rows_of(count):
            connection.execute(blobs.insert(), [blob for blob, _ in rows])
            connection.execute(content_refs.insert(), [reference for _, reference in rows])
    engine.dispose()


def rows_of(count: int) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Made-up rows with small bodies: what counts here is their number."""
    for start in range(0, count, 10_000):
        yield [_row(number) for number in range(start + 1, min(start + 10_000, count) + 1)]


def _row(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    digest = os.urandom(32)
    blob = {"id": number, "digest": digest, "size": 16, "data": digest[:16], "created_at": 1}
    reference = {
        "ref": f"ref_{digest.hex()[:32]}", "scope": "bench", "blob_id": number,
        "principal": "bench", "created_at": 1,
    }  # fmt: skip
    return blob, reference


async def _resolve(data: Path) -> float:
    store = await ContentStore.start(load_settings(data_dir=data))
    try:
        refs = [listed.ref for listed in await store.references("bench", limit=SMALL)]
        spans = []
        for ref in random.sample(refs, 500):
            started = time.perf_counter()
            await store.resolve("bench", ref)
            spans.append(time.perf_counter() - started)
    finally:
        await store.close()
    return statistics.median(spans) * 1e6


def missing() -> str | None:
    """Why this cannot be measured here."""
    return None if shutil.which("wrk") else "wrk is not installed"
