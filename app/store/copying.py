"""One store into another, whatever the back ends of the two are.

First bodies, in short readings; then, out of one snapshot of the source, every record, and what
bodies came meanwhile. Numbers, references, times and locations stay what they are, so that no
cursor and no order changes. A copy that ended somehow goes on when it is begun again.

The target says in `writers` what it is a copy of and how far its numbers went: a copy never
touches a store that somebody uses.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Table, delete, func, insert, select, text

from app.settings import Settings, SettingsError
from app.store.blobs import Blobs
from app.store.body_copies import BodyCopier, CopyReport, Observer
from app.store.buckets import Patience
from app.store.catalogue import Place
from app.store.database import Database, database_url
from app.store.databases import open_database
from app.store.migrations import require_current_schema
from app.store.places import open_blobs
from app.store.record_copies import NUMBERED, TABLES, RecordCopier, written
from app.store.records import StoreError
from app.store.snapshots import Snapshot, open_snapshot
from app.store.staging import Staging
from app.store.tables import blobs, writers
from app.store.threads import Workers

PAGE: Final = 200
"""Bodies that are looked at in one short reading."""

UNDER_WAY, COMPLETE = 0, 1

_MARK = "copy of "
_NUMBER = "copied "
_NEVER = 2**62
"""When a mark was written: no sweep takes it for an old one."""


@dataclass(frozen=True, slots=True)
class _Side:
    settings: Settings
    database: Database
    blobs: Blobs


async def copy_store(source: Settings, target: Settings, observer: Observer) -> CopyReport:
    """Make the store of `target` a copy of the one of `source`, which may be live.

    What the source confirms after the snapshot is not in the copy: one more brings it. `observer`
    is told how it gets on. Raises SettingsError, StoreError for a target that is not migrated or
    holds something else, Exhausted, Unavailable.
    """
    if _place(source) == _place(target):
        raise SettingsError("--to: names the database that is to be copied")
    async with AsyncExitStack() as opened:
        workers = Workers(source.io_threads)
        opened.callback(workers.close)
        origin = await opened.enter_async_context(_opened(source, workers, "the source"))
        goal = await opened.enter_async_context(_opened(target, workers, "--to"))
        staging = Staging(target.staging_dir)
        opened.callback(staging.close)
        await workers.run(staging.open)
        return await _Copy(origin, goal, staging, workers, observer).run()


class _Copy:
    def __init__(
        self,
        source: _Side,
        target: _Side,
        staging: Staging,
        workers: Workers,
        observer: Observer,
    ) -> None:
        self._source = source
        self._target = target
        self._workers = workers
        self._observer = observer
        self._report = CopyReport()
        is_one = source.settings.blobs == target.settings.blobs
        self._bodies = BodyCopier(
            None if is_one else source.blobs,
            target.blobs,
            staging,
            workers,
            self._is_current,
            observer,
            self._report,
        )

    async def run(self) -> CopyReport:
        mark = _MARK + _identity(self._source.settings)
        await written(self._target.database, lambda connection: _admit(connection, mark))
        await self._bring_bodies()
        async with open_snapshot(self._source.settings) as moment:
            await self._bring_records(moment)
            numbers = await moment.read(_numbers)
        await written(self._target.database, lambda connection: _end(connection, mark, numbers))
        return self._report

    async def _bring_bodies(self) -> None:
        self._observer.begin("bodies", await self._source.database.read(_bytes_of_bodies))
        after = 0
        while page := await self._source.database.read(_places(after)):
            after = max(page)
            await self._bodies.bring(page.values(), ahead=True)

    async def _bring_records(self, moment: Snapshot) -> None:
        copier = RecordCopier(
            moment,
            self._target.database,
            self._bodies,
            self._workers,
            self._observer,
            self._report,
        )
        async with open_snapshot(self._target.settings) as held:
            for table in reversed(TABLES):
                if await held.read(_has_rows(table)):
                    await copier.remove(table, held)
        for table in TABLES:
            async with open_snapshot(self._target.settings) as held:
                await copier.bring(table, held)

    async def _is_current(self, place: Place) -> bool:
        """Whether the source still has a record of a body at this place."""
        statement = select(blobs.c.location).where(blobs.c.digest == place.digest)
        row = await self._source.database.read(
            lambda connection: connection.execute(statement).first()
        )
        return row is not None and row.location == place.location


@asynccontextmanager
async def _opened(settings: Settings, workers: Workers, name: str) -> AsyncIterator[_Side]:
    try:
        await workers.run(require_current_schema, settings)
    except StoreError as error:
        raise StoreError(f"{name}: {error}") from None
    patience = Patience(settings.blob_request_seconds, settings.blob_retry_seconds)
    opened = open_blobs(settings.blobs, workers, patience)
    database = open_database(settings, workers)
    try:
        yield _Side(settings, database, opened)
    finally:
        await database.close()


def _place(settings: Settings) -> str:
    """The database without what may change while it stays the same one."""
    url = database_url(settings)
    return url.set(username=None, password=None, query={}).render_as_string()


def _identity(settings: Settings) -> str:
    return hashlib.sha256(f"{_place(settings)}\n{settings.blobs}".encode()).hexdigest()[:32]


def _admit(connection: Connection, mark: str) -> None:
    """Take the target for this copy. Raises StoreError when it holds anything else."""
    marks = _marks(connection)
    copies = [name for name in marks if name.startswith(_MARK)]
    if not copies and any(_has_rows(table)(connection) for table in TABLES):
        raise StoreError("--to: the store has records of its own; copy into one that is empty")
    if copies not in ([], [mark]):
        raise StoreError("--to: the store is a copy of another one; copy into one that is empty")
    if marks.get(mark) == COMPLETE and _is_used(connection, marks):
        raise StoreError(
            "--to: the store has been used since it was copied, and a copy would undo that; "
            "copy into one that is empty"
        )
    _set_marks(connection, {mark: UNDER_WAY})


def _is_used(connection: Connection, marks: Mapping[str, int]) -> bool:
    now = _numbers(connection)
    return any(now[name] > marks.get(_NUMBER + name, 0) for name in now)


def _end(connection: Connection, mark: str, numbers: Mapping[str, int]) -> None:
    """Let numbers go on where those of the source are, and say that the copy is complete."""
    for table in NUMBERED:
        _go_on(connection, table, numbers[table.name])
    reached = _numbers(connection)
    _set_marks(connection, {mark: COMPLETE} | {_NUMBER + name: reached[name] for name in reached})


def _marks(connection: Connection) -> dict[str, int]:
    statement = select(writers.c.writer, writers.c.batch).where(writers.c.written_at == _NEVER)
    return {row.writer: row.batch for row in connection.execute(statement)}


def _set_marks(connection: Connection, marks: Mapping[str, int]) -> None:
    connection.execute(delete(writers).where(writers.c.writer.in_(marks)))
    connection.execute(
        insert(writers),
        [{"writer": name, "batch": batch, "written_at": _NEVER} for name, batch in marks.items()],
    )


def _numbers(connection: Connection) -> dict[str, int]:
    """The last number that each table has given, also to a row that is gone."""
    return {table.name: _last_number(connection, table) for table in NUMBERED}


def _last_number(connection: Connection, table: Table) -> int:
    highest = connection.execute(select(func.coalesce(func.max(table.c.id), 0))).scalar_one()
    if connection.dialect.name == "postgresql":
        counted = text(f"SELECT last_value, is_called FROM {_sequence(connection, table)}")  # noqa: S608 - of the schema
        last, is_called = connection.execute(counted).one()
        return max(int(highest), int(last) if is_called else 0)
    counted = text("SELECT seq FROM sqlite_sequence WHERE name = :name")
    last = connection.execute(counted, {"name": table.name}).scalar()
    return max(int(highest), int(last or 0))


def _go_on(connection: Connection, table: Table, last: int) -> None:
    """Have the next row of a table get a number behind `last`."""
    if connection.dialect.name == "postgresql":
        values = {"name": _sequence(connection, table), "last": max(last, 1), "given": last > 0}
        connection.execute(text("SELECT setval(CAST(:name AS text), :last, :given)"), values)
    elif table.dialect_options["sqlite"]["autoincrement"]:
        values = {"name": table.name, "last": last}
        connection.execute(text("DELETE FROM sqlite_sequence WHERE name = :name"), values)
        connection.execute(text("INSERT INTO sqlite_sequence VALUES (:name, :last)"), values)


def _sequence(connection: Connection, table: Table) -> str:
    found = text("SELECT pg_get_serial_sequence(:name, 'id')")
    return str(connection.execute(found, {"name": table.name}).scalar_one())


def _bytes_of_bodies(connection: Connection) -> int:
    total = select(func.coalesce(func.sum(blobs.c.size), 0)).where(blobs.c.location.is_not(None))
    return int(connection.execute(total).scalar_one())


def _places(after: int) -> Callable[[Connection], dict[int, Place]]:
    """Bodies that do not lie in their rows, by number, behind a number."""
    statement = (
        select(blobs.c.id, blobs.c.digest, blobs.c.size, blobs.c.location)
        .where(blobs.c.id > after, blobs.c.location.is_not(None))
        .order_by(blobs.c.id)
        .limit(PAGE)
    )
    return lambda connection: {
        row.id: Place(row.digest, row.size, row.location, None)
        for row in connection.execute(statement)
    }


def _has_rows(table: Table) -> Callable[[Connection], bool]:
    statement: Any = select(next(iter(table.columns))).limit(1)
    return lambda connection: connection.execute(statement).first() is not None
