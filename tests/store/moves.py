"""What the tests of copies and backups share: stores with something of everything, and rows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from app.settings import Settings
from app.store import ContentStore, migrate
from app.store.record_copies import TABLES
from app.store.records import Finding
from app.store.responses import Begun
from app.store.snapshots import open_snapshot
from tests import backends
from tests.objects import object_server
from tests.store.events import deliver
from tests.store.servers import opened
from tests.store.sessions import add_artifact, add_input, add_upload, begin, finish, key_of
from tests.store.stores import INLINE_BYTES, LARGE, get, put

T = TypeVar("T")

Ends = Literal["sqlite+files", "sqlite+s3", "postgres+files", "postgres+s3"]
Rows = dict[str, list[tuple[Any, ...]]]

LARGE_TOO = LARGE[::-1]


class Watching:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}
        self.done: dict[str, int] = {}
        self.faults: list[Finding] = []
        self._step = ""

    def begin(self, step: str, total: int) -> None:
        self._step = step
        self.steps[step] = total
        self.done[step] = 0

    def advance(self, count: int) -> None:
        self.done[self._step] += count

    def fault(self, finding: Finding) -> None:
        self.faults.append(finding)


def settings_on(ends: Ends, data_dir: Path, **changes: Any) -> Settings:
    """Settings of a store on these back ends, whatever the other tests run on; it is migrated."""
    database, _, bodies = ends.partition("+")
    given: dict[str, Any] = {"inline_bytes": INLINE_BYTES, "io_threads": 4, **changes}
    if database == "postgres":
        given.setdefault("database_url", backends.new_database(f"moved_{secrets.token_hex(8)}"))
    else:
        given.setdefault("database_url", f"sqlite:///{data_dir / 'consignee.db'}")
    if bodies == "s3":
        given.setdefault("blob_url", object_server().blob_url())
    settings = Settings(data_dir=data_dir, **given)
    migrate(settings)
    return settings


def in_store(settings: Settings, work: Callable[[ContentStore], Awaitable[T]]) -> T:
    """Do `work` in the store of `settings`, from outside of any loop."""

    async def run() -> T:
        async with opened(settings) as store:
            return await work(store)

    return asyncio.run(run())


async def fill(store: ContentStore) -> dict[str, bytes]:
    """Something of everything; the references of scope `a` that last, with their bytes."""
    bodies = [b"", b"small", LARGE, LARGE_TOO, b"small"]
    kept = {(await put(store, body)).ref: body for body in bodies}
    foreign = await put(store, b"of another scope", scope="b")
    gone = await put(store, LARGE + b"gone")
    first = next(iter(kept))
    await deliver(store, gone.ref, first, event_id="evt_1")
    await deliver(store, foreign.ref, event_id="evt_\u20ac", scope="b")
    await store.events.settle("a", "evt_1", "done", b'{"ok": true}')
    for reference in (gone, await put(store, LARGE_TOO + b"gone")):
        await store.remove("a", reference.ref)
    await store.sweep()
    await _fill_sessions(store)
    return kept


async def _fill_sessions(store: ContentStore) -> None:
    await add_upload(store, b"upload")
    dropped = await add_upload(store, LARGE + b"dropped")
    await store.files.delete_upload("a", dropped.id)
    begun = await begin(store, idempotency=key_of())
    await add_input(store, begun, LARGE)
    for number, text in enumerate(["\u00e9", "Z", "a", "\U0001f600", "{}"]):
        await store.responses.append_events(begun.response.id, [(number, text)])
        await add_artifact(store, begun.session, text.encode(), path=f"{text[:1]}.txt")
    await add_artifact(store, begun.session, LARGE_TOO, path="a.txt")
    await finish(store, begun)
    await begin(store, previous_response_id=begun.response.id)


async def rows_of(settings: Settings) -> Rows:
    """Every row of every table that is copied, in the order of its keys."""
    async with open_snapshot(settings) as snapshot:
        return {
            table.name: [
                row async for row in snapshot.rows(*table.columns, by=[*table.primary_key.columns])
            ]
            for table in TABLES
        }


async def findings(store: ContentStore) -> list[Finding]:
    return [finding async for finding in store.verify()]


async def resolved(store: ContentStore, references: dict[str, bytes]) -> bool:
    """Whether every one of `references` still gives its bytes."""
    return [await get(store, ref) for ref in references] == [*references.values()]


class Hand:
    """Does things to a store that change every kind of row, as numbers decide."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: ContentStore
        self.references: dict[str, bytes] = {}
        self._ended: list[Begun] = []
        self._running: list[Begun] = []

    async def do_all(self, deeds: Sequence[int]) -> None:
        """Do them in a store that is closed at the end: then nothing is under way any more."""
        async with opened(self._settings) as self._store:
            for deed in deeds:
                await self._do(deed)

    async def _do(self, deed: int) -> None:
        deeds = (
            self._upload,
            self._remove,
            self._deliver,
            self._task,
            self._end_task,
            self._delete_session,
            self._file,
            self._sweep,
        )
        await deeds[deed % len(deeds)](deed)

    async def _upload(self, deed: int) -> None:
        data = (b"", b"small", LARGE, LARGE_TOO, b"%d" % deed, LARGE * 2 + b"%d" % deed)[deed % 6]
        self.references[(await put(self._store, data)).ref] = data

    async def _remove(self, deed: int) -> None:
        if self.references:
            ref = [*self.references][deed % len(self.references)]
            del self.references[ref]
            await self._store.remove("a", ref)

    async def _deliver(self, deed: int) -> None:
        refs = [*self.references][: deed % 3]
        await deliver(self._store, *refs, event_id=f"evt_{deed}_{secrets.token_hex(4)}")

    async def _task(self, deed: int) -> None:
        """A task in a new session, or in one that has no other."""
        previous = self._ended.pop().response.id if self._ended else None
        begun = await begin(self._store, previous_response_id=previous)
        self._running.append(begun)
        await self._store.responses.append_events(begun.response.id, [(1, f"event {deed}")])
        await add_artifact(self._store, begun.session, LARGE + b"%d" % deed, path=f"{deed % 2}.txt")

    async def _end_task(self, deed: int) -> None:
        if self._running:
            begun = self._running.pop(deed % len(self._running))
            await finish(self._store, begun)
            self._ended.append(begun)

    async def _delete_session(self, deed: int) -> None:
        if self._ended:
            begun = self._ended.pop(deed % len(self._ended))
            await self._store.sessions.delete("a", begun.session.id)

    async def _file(self, deed: int) -> None:
        record = await add_upload(self._store, b"%d" % deed if deed % 2 else LARGE_TOO)
        if deed % 3 == 0:
            await self._store.files.delete_upload("a", record.id)

    async def _sweep(self, deed: int) -> None:
        del deed
        await self._store.sweep()
