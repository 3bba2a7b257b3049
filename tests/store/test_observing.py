"""Who observes a store hears of everything that it asks of its database and its blob store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from app.errors import NotFound, Unavailable
from app.store import ContentStore, migrate
from app.store.blobs import BlobMissing
from app.store.observing import ObservedBlobs, ObservedDatabase
from tests import backends
from tests.store.stores import LARGE, SMALL, get, put, store_settings

pytestmark = pytest.mark.anyio

Told = tuple[str, str, str | None]


class Ears:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.told: list[Told] = []

    def operation(self, engine: str, name: str, seconds: float, failure: str | None) -> None:
        assert seconds >= 0
        self.told.append((engine, name, failure))

    def forget(self) -> None:
        self.told = []


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
async def store(tmp_path: Path, ears: Ears) -> AsyncIterator[ContentStore]:
    settings = store_settings(tmp_path / "data")
    migrate(settings)
    opened = await ContentStore.start(settings, ears)
    yield opened
    await opened.close()


async def test_an_upload_and_a_download_are_told_of(store: ContentStore, ears: Ears) -> None:
    reference = await put(store, LARGE)
    for step in (("blobs", "publish"), ("database", "commit"), ("database", "write")):
        assert (*step, None) in ears.told
    ears.forget()
    assert await get(store, reference.ref) == LARGE
    assert ears.told == [("database", "read", None), ("blobs", "open", None)]


async def test_a_small_body_never_gets_to_the_blob_store(store: ContentStore, ears: Ears) -> None:
    await put(store, SMALL)
    assert {engine for engine, *_ in ears.told} == {"database"}


async def test_what_sweeps_and_probes_do_is_told_of(store: ContentStore, ears: Ears) -> None:
    reference = await put(store, LARGE)
    await store.remove("a", reference.ref)
    await store.sweep()
    await store.probe()
    assert ("blobs", "delete", None) in ears.told
    assert ("blobs", "probe", None) in ears.told
    assert [one async for one in store._blobs.stored()] == []


async def test_an_answer_is_no_failure(store: ContentStore, ears: Ears) -> None:
    with pytest.raises(NotFound):
        await store.resolve("a", "ref_" + "x" * 32)
    assert ears.told == [("database", "read", None)]


async def test_bytes_that_are_gone_are_an_answer_of_the_blob_store(
    store: ContentStore, ears: Ears
) -> None:
    with pytest.raises(BlobMissing):
        async with store._blobs.open("0" * 64 + "-" + "0" * 16, 0, 1):
            pytest.fail("nothing lies there")
    assert ears.told == [("blobs", "open", None)]


async def test_where_a_body_lies_is_asked_past_the_observer(
    store: ContentStore, ears: Ears
) -> None:
    location = "0" * 64 + "-" + "0" * 16
    path = store._blobs.local_path(location)
    assert path is None if backends.IN_OBJECTS else location in str(path)
    link = await store._blobs.link(location, media_type="a/b", disposition="inline", seconds=1)
    assert (link is not None) == backends.IN_OBJECTS
    assert ears.told == [("blobs", "link", None)]


async def test_a_store_without_an_observer_is_not_wrapped(tmp_path: Path) -> None:
    settings = store_settings(tmp_path / "data")
    migrate(settings)
    store = await ContentStore.start(settings)
    assert not isinstance(store._blobs, ObservedBlobs)
    assert not isinstance(store._database, ObservedDatabase)
    await store.close()


class Failing:
    """A database whose every answer is the error that it was given."""

    parallel = 1

    def __init__(self, error: Exception) -> None:
        self.error = error

    def write(self, work: Any, *, alone: bool) -> asyncio.Future[Any]:
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(self.error)
        return failed

    async def read(self, query: Any) -> Any:
        raise self.error

    async def close(self) -> None:
        """There is nothing to close."""


def _nothing(_: Connection) -> None:
    """A transaction that does nothing."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OperationalError("select", {}, Exception("gone")), "storage_unavailable"),
        (OSError("unreachable"), "storage_unavailable"),
        (Unavailable("database_busy", "Busy."), "database_busy"),
        (LookupError("a fault of ours"), None),
    ],
)
async def test_a_failed_write_is_told_with_its_code(
    ears: Ears, error: Exception, code: str | None
) -> None:
    database = ObservedDatabase(Failing(error), ears)
    with pytest.raises(type(error)):
        await database.write(_nothing, alone=True)
    await asyncio.sleep(0)
    assert ears.told == [("database", "write", code)]
    assert database.parallel == 1
    await database.close()


async def test_a_failed_read_is_told_with_its_code(ears: Ears) -> None:
    database = ObservedDatabase(Failing(Unavailable("database_busy", "Busy.")), ears)
    with pytest.raises(Unavailable):
        await database.read(_nothing)
    assert ears.told == [("database", "read", "database_busy")]


async def test_a_write_that_is_cancelled_is_no_failure_of_the_database(ears: Ears) -> None:
    running: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    class Slow(Failing):
        def write(self, work: Any, *, alone: bool) -> asyncio.Future[Any]:
            return running

    written = ObservedDatabase(Slow(OSError()), ears).write(_nothing, alone=False)
    written.cancel()
    await asyncio.sleep(0)
    assert ears.told == [("database", "write", None)]
