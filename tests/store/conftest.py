from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from app.store import ContentStore
from app.store.buckets import Patience
from app.store.objects import ObjectBlobs
from app.store.threads import Workers
from tests.azure import AzureServer
from tests.faults import FaultProxy, fault_proxy
from tests.objects import ObjectServer
from tests.store.bodies import opened
from tests.store.stores import new_store

BlobServer = ObjectServer | AzureServer
"""What a module with tests of an object store has as its `server`, beside its `patience`."""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[ContentStore]:
    opened = await new_store(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    pool = Workers(4)
    yield pool
    pool.close()


@pytest.fixture
def url(server: BlobServer) -> str:
    return server.blob_url()


@pytest.fixture
def blobs(url: str, workers: Workers, patience: Patience) -> ObjectBlobs:
    return opened(url, workers, patience)


@pytest.fixture
async def proxy(server: BlobServer) -> AsyncIterator[FaultProxy]:
    async with fault_proxy(server.address) as running:
        yield running


@pytest.fixture
def faulty(
    url: str, server: BlobServer, proxy: FaultProxy, workers: Workers, patience: Patience
) -> ObjectBlobs:
    """The same prefix as `blobs`, by way of the proxy."""
    prefix = urlsplit(url).path.strip("/")
    return opened(server.blob_url(prefix, address=proxy.address), workers, patience)
