"""Stores on a PostgreSQL server, and other processes that work on the same one."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from app.settings import Settings
from app.store import ContentStore
from tests import backends
from tests.store.stores import INLINE_BYTES

T = TypeVar("T")


def server_settings(data_dir: Path, url: str, **changes: Any) -> Settings:
    """Settings of a store on a server."""
    given: dict[str, Any] = {"inline_bytes": INLINE_BYTES, "io_threads": 4, **changes}
    return Settings(data_dir=data_dir, database_url=url, **given)


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[ContentStore]:
    """The store of `settings`, closed at the end."""
    store = await ContentStore.start(settings)
    try:
        yield store
    finally:
        await store.close()


@contextmanager
def other_processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that have nothing of this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        yield pool


def in_a_store(settings: Settings, deed: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """What a process of `other_processes` does: `deed` on a store of its own."""

    async def run() -> T:
        async with opened(settings) as store:
            return await deed(store, *arguments)

    return asyncio.run(run())


@contextmanager
def fresh_database(name: str) -> Iterator[str]:
    """A database with every table, dropped at the end; its URL."""
    url = backends.new_database(name)
    try:
        yield url
    finally:
        backends.cluster().execute(f"drop database {name} with (force)")
