"""Bodies in an object store, as its tests put them there and look at them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.store.blobs import new_location
from app.store.buckets import Patience
from app.store.objects import ObjectBlobs
from app.store.places import open_blobs
from app.store.threads import Workers


def opened(url: str, workers: Workers, patience: Patience) -> ObjectBlobs:
    blobs = open_blobs(url, workers, patience)
    assert isinstance(blobs, ObjectBlobs)
    return blobs


async def publish(blobs: ObjectBlobs, tmp_path: Path, data: bytes) -> str:
    staged = tmp_path / hashlib.sha256(data).hexdigest()
    staged.write_bytes(data)
    location = new_location(hashlib.sha256(data).digest())
    await blobs.publish(staged, location)
    return location


async def read(blobs: ObjectBlobs, location: str, start: int, stop: int) -> bytes:
    async with blobs.open(location, start, stop) as chunks:
        return b"".join([chunk async for chunk in chunks])


async def left(blobs: ObjectBlobs) -> list[str]:
    return [stored.location async for stored in blobs.stored()]
