"""What the millionth reference costs beside the thousandth: confirming one, and resolving one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine

from app.settings import load_settings
from app.store.content import ContentStore
from app.store.migrations import migrate
from app.store.tables import blobs, content_refs
from tests.benchmarks.table import Row

SMALL = 1_000
LARGE = int(os.environ.get("BENCH_REFERENCES", "1000000"))
ROUNDS = 5
UPLOADS = 1_600
CONNECTIONS = 16
BODY_BYTES = 4096


def measure(folder: Path) -> list[Row]:
    """Both rows."""
    upload = Row("confirm a reference through the store, 16 at once", "µs each")
    resolve = Row("resolve a reference", "µs, median of one")
    for name, count in (("at a thousand", SMALL), ("at a million", LARGE)):
        data = folder / f"references-{count}"
        _fill(data, count)
        asyncio.run(_measure(data, name, upload, resolve))
    for row in (upload, resolve):
        ratio = row.median("at a million") / row.median("at a thousand")
        row.judge("the millionth, of the thousandth", ratio, most=1.3)
    return [upload, resolve]


def _fill(data: Path, count: int) -> None:
    settings = load_settings(data_dir=data)
    migrate(settings)
    engine = create_engine(f"sqlite:///{data / 'consignee.db'}")
    with engine.begin() as connection:
        for rows in _rows(count):
            connection.execute(blobs.insert(), [blob for blob, _ in rows])
            connection.execute(content_refs.insert(), [reference for _, reference in rows])
    engine.dispose()


def _rows(count: int) -> Iterator[list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Made-up rows with small bodies: what counts here is their number."""
    for start in range(0, count, 10_000):
        yield [_row(number) for number in range(start + 1, min(start + 10_000, count) + 1)]


def _row(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    digest = os.urandom(32)
    blob = {"id": number, "digest": digest, "size": 16, "data": digest[:16], "created_at": 1}
    reference = {
        "ref": f"ref_{digest.hex()}", "scope": "bench", "blob_id": number,
        "principal": "bench", "created_at": 1,
    }  # fmt: skip
    return blob, reference


async def _measure(data: Path, name: str, upload: Row, resolve: Row) -> None:
    store = await ContentStore.start(load_settings(data_dir=data))
    try:
        refs: list[str] = []
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for batch in await asyncio.gather(*(_uploads(store) for _ in range(CONNECTIONS))):
                refs += batch
            upload.add(name, (time.perf_counter() - started) / UPLOADS * 1e6)
        refs += [listed.ref for listed in await store.references("bench", limit=2_000)]
        for _ in range(ROUNDS):
            resolve.add(name, await _resolve(store, random.sample(refs, 500)))
    finally:
        await store.close()


async def _uploads(store: ContentStore) -> list[str]:
    return [await _upload(store) for _ in range(UPLOADS // CONNECTIONS)]


async def _upload(store: ContentStore) -> str:
    content = os.urandom(BODY_BYTES)

    async def body() -> AsyncIterator[bytes]:
        yield content

    digest = hashlib.sha256(content).hexdigest()
    reference = await store.receive(
        body(), scope="bench", principal="bench", size=BODY_BYTES, sha256=digest
    )
    return reference.ref


async def _resolve(store: ContentStore, refs: list[str]) -> float:
    spans = []
    for ref in refs:
        started = time.perf_counter()
        await store.resolve("bench", ref)
        spans.append(time.perf_counter() - started)
    return statistics.median(spans) * 1e6


def missing() -> str | None:
    """Why this cannot be measured here."""
    return None
