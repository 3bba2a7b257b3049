"""A consistent copy of a live embedded store (SQLite and files), and the way back.

BACKUP/
  backup.json     what it is; there only when everything else is
  consignee.db    the database of one moment
  blobs/          every body that it names, as in the store
  secret.key      the key that seals cursors, where the store made it itself

A body is never changed and lies there before a row names it, so most are taken before the database
is. What came since is taken while no commit runs: then nobody can condemn it. That is the only time
when uploads wait, and there is little left to do in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy.exc import DBAPIError

from app import __version__
from app.errors import Unavailable
from app.settings import MIB, Settings, SettingsError
from app.store.blobs import CHUNK_BYTES, is_location
from app.store.body_copies import Observer
from app.store.content import ContentStore
from app.store.database import is_postgres
from app.store.database_errors import refusal_of
from app.store.disk import PRIVATE_FILE, make_folder, sync_folder
from app.store.migrations import migrate, schema_state
from app.store.records import StoreError
from app.store.sqlite import database_file

FORMAT: Final = 1

MANIFEST: Final = "backup.json"
DATABASE: Final = "consignee.db"
BODIES: Final = "blobs"
KEY: Final = "secret.key"

PAGE: Final = 500
"""Bodies that are looked up at once."""

FEW_BODIES: Final = 1000
FEW_BYTES: Final = 64 * MIB
"""When no more than so many bodies came in the meantime, or bytes had to be copied of them, the
rest is done while no commit runs: well within `database_timeout_seconds`."""

ROUNDS: Final = 50
"""A store in which more than that comes again and again has a disk for the backup that is slower
than its uploads."""

_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
_OTHER_TOOLS = (
    "this is for a store on SQLite and files; use pg_dump (or a base backup) for PostgreSQL and "
    "the bucket's own versioning or replication for bodies in it, the database first"
)
_SCHEMA = """
PRAGMA held.journal_mode = MEMORY;
PRAGMA held.synchronous = OFF;
CREATE TABLE held.bodies (location TEXT PRIMARY KEY, linked INTEGER NOT NULL) WITHOUT ROWID;
"""
_NEXT = """
SELECT location, size FROM main.blobs AS named WHERE location > ?
AND NOT EXISTS (SELECT 1 FROM held.bodies WHERE bodies.location = named.location)
ORDER BY location LIMIT ?
"""
_SUPERFLUOUS = """
SELECT location FROM held.bodies
WHERE NOT EXISTS (SELECT 1 FROM main.blobs WHERE blobs.location = bodies.location)
"""
_BODIES = "SELECT count(*), coalesce(sum(size), 0) FROM main.blobs WHERE location IS NOT NULL"


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of an embedded store lie; no `key` where the configuration names one."""

    database: Path
    bodies: Path
    key: Path | None

    def body(self, location: str) -> Path:
        """The file of a body, as `local` has it."""
        if not is_location(location):
            raise ValueError("not a location of a store")
        return self.bodies / location[:2] / location


@dataclass(frozen=True, slots=True)
class BackupReport:
    """What is in a backup: `bodies` in files with their `bytes`, of which `linked` take no room.

    `missing` are those that the store itself has lost.
    """

    references: int
    bodies: int
    bytes: int
    linked: int
    missing: int


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What came back, and how many bodies fsck found `damaged`."""

    bodies: int
    bytes: int
    damaged: int


def embedded(settings: Settings) -> Places:
    """Where an embedded store lies. Raises SettingsError for any other."""
    if is_postgres(settings) or not settings.blobs.startswith("file:///"):
        raise SettingsError(_OTHER_TOOLS)
    key = settings.secret_key if settings.secret_key_file is None else None
    bodies = Path(settings.blobs.removeprefix("file://"))
    return Places(database_file(settings), bodies, key)


def back_up(settings: Settings, folder: Path, observer: Observer) -> BackupReport:
    """Copy the store of `settings`, which may be live, to a new `folder`. Blocks.

    The folder is there when it is complete and durable, and not before. Bodies are hard links where
    that is possible. Raises SettingsError, StoreError, Exhausted, Unavailable, OSError.
    """
    store = embedded(settings)
    if schema_state(settings) in ("missing", "ahead"):
        raise StoreError("There is no database of this version to back up; see data_dir.")
    with _becoming(folder) as partial:
        copy = Places(partial / DATABASE, partial / BODIES, partial / KEY)
        make_folder(copy.bodies)
        with _sqlite_border(), closing(_Taking(store, copy, settings, observer)) as taking:
            report = taking.take()
        if store.key is not None and store.key.exists():
            copy_file(store.key, partial / KEY)
        _write_manifest(partial, report)
        return report


class _Taking:
    """One backup of a live store."""

    def __init__(self, store: Places, copy: Places, settings: Settings, observer: Observer) -> None:
        self._store = store
        self._copy = copy
        self._observer = observer
        self._patience = settings.database_timeout_seconds
        self._folders: set[Path] = set()
        self._copied_bytes = 0
        self._held = copy.database.with_name(".held")
        self._reading = self._connect()
        self._reading.execute("ATTACH ? AS held", (str(self._held),))
        self._reading.executescript(_SCHEMA)

    def _connect(self) -> sqlite3.Connection:
        uri = f"file:{quote(str(self._store.database))}?mode=rw"
        return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=self._patience)

    def close(self) -> None:
        """Let go of the database."""
        self._reading.close()
        self._held.unlink(missing_ok=True)

    def take(self) -> BackupReport:
        """Bodies, the moment, what came since, and the database of that moment."""
        self._observer.begin("bodies", self._row(_BODIES)[1])
        self._take_most()
        missing = self._take_rest()
        self._drop_superfluous()
        bodies, size = self._row(_BODIES)
        (references,) = self._row("SELECT count(*) FROM main.content_refs")
        (linked,) = self._row("SELECT coalesce(sum(linked), 0) FROM held.bodies")
        self._take_database()
        for made in self._folders:
            sync_folder(made)
        return BackupReport(references, bodies - missing, size, linked, missing)

    def _take_most(self) -> None:
        for _ in range(ROUNDS):
            before = self._copied_bytes
            taken, _ = self._take_bodies()
            if taken <= FEW_BODIES and self._copied_bytes - before <= FEW_BYTES:
                return
        raise Unavailable(
            "database_busy", "Bodies arrive faster than they can be copied; try again later."
        )

    def _take_rest(self) -> int:
        """Begin the moment that the backup is of; how many bodies are missing in the store."""
        with closing(self._connect()) as holding:
            holding.execute("BEGIN IMMEDIATE")
            self._reading.execute("BEGIN")
            _, missing = self._take_bodies()
            return missing

    def _take_bodies(self) -> tuple[int, int]:
        """Take every body that is named and not held: how many were there, and how many not."""
        after, taken, missing = "", 0, 0
        while page := self._ask(_NEXT, (after, PAGE)):
            after = page[-1][0]
            kept = [body for location, size in page for body in self._take_body(location, size)]
            self._reading.executemany("INSERT INTO held.bodies VALUES (?, ?)", kept)
            taken, missing = taken + len(kept), missing + len(page) - len(kept)
        return taken, missing

    def _take_body(self, location: str, size: int) -> Iterator[tuple[str, bool]]:
        """Link or copy one body; nothing comes of it when a sweep has taken it, or it is lost."""
        source, target = self._store.body(location), self._copy.body(location)
        self._make_folder(target.parent)
        try:
            is_linked = _link(source, target)
            if not is_linked:
                copy_file(source, target)
        except FileNotFoundError:
            return
        self._copied_bytes += 0 if is_linked else size
        self._observer.advance(size)
        yield location, is_linked

    def _make_folder(self, folder: Path) -> None:
        if folder not in self._folders:
            make_folder(folder)
            self._folders |= {folder, folder.parent}

    def _drop_superfluous(self) -> None:
        """Bodies that went between the first look and the moment."""
        for (location,) in self._ask(_SUPERFLUOUS):
            self._copy.body(location).unlink()
            self._reading.execute("DELETE FROM held.bodies WHERE location = ?", (location,))

    def _take_database(self) -> None:
        _create(self._copy.database)
        with closing(sqlite3.connect(self._copy.database, isolation_level=None)) as copy:
            self._reading.backup(copy, name="main")
            copy.execute("PRAGMA journal_mode = DELETE").close()
        _sync(self._copy.database)

    def _ask(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        return self._reading.execute(query, values).fetchall()

    def _row(self, query: str) -> Any:
        return self._reading.execute(query).fetchone()


async def restore(settings: Settings, folder: Path, observer: Observer) -> RestoreReport:
    """Bring a backup back as the store of `settings`, which has nothing yet, and check all of it.

    The database gets its name last: until then there is no store. A damaged body is told to the
    `observer`, and everything else is there. Raises SettingsError, StoreError, Exhausted,
    Unavailable, OSError.
    """
    store = embedded(settings)
    manifest = _read_manifest(folder)
    _require_nothing(settings, store)
    draft = store.database.with_name(f"{store.database.name}.restoring")
    make_folder(draft.parent)
    _bring_database(folder / DATABASE, draft, manifest["database_sha256"])
    drafted = settings.model_copy(update={"database_url": f"sqlite:///{draft}"})
    migrate(drafted)
    observer.begin("bodies", manifest["bytes"])
    bodies, size = _bring_bodies(folder / BODIES, store, observer)
    if store.key is not None and (folder / KEY).exists():
        copy_file(folder / KEY, store.key)
    damaged = await _damages(drafted, observer)
    _settle(draft, store.database)
    return RestoreReport(bodies, size, damaged)


def _require_nothing(settings: Settings, store: Places) -> None:
    """Raise StoreError unless the store has no file at all."""
    for folder in (settings.data_dir, store.bodies):
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        if any(entry.name != "lost+found" for entry in found):
            raise StoreError(
                f"{folder.name}: is not empty; restore into an empty data_dir (what a restore that "
                "was cut short has left can be removed)"
            )
    if store.database.exists():
        raise StoreError("database_url: there is a database; restore into an empty data_dir")


def _bring_database(source: Path, draft: Path, sha256: str) -> None:
    copy_file(source, draft)
    with draft.open("rb") as copy:
        found = hashlib.file_digest(copy, "sha256").hexdigest()
    if found != sha256:
        draft.unlink()
        raise StoreError("The database of the backup is damaged; use another backup.")


def _bring_bodies(source: Path, store: Places, observer: Observer) -> tuple[int, int]:
    count, total = 0, 0
    make_folder(store.bodies)
    for body in source.glob("*/*"):
        if is_location(body.name):
            target = store.body(body.name)
            make_folder(target.parent)
            size = copy_file(body, target)
            observer.advance(size)
            count, total = count + 1, total + size
    for folder in (store.bodies, *store.bodies.iterdir()):
        sync_folder(folder)
    return count, total


async def _damages(settings: Settings, observer: Observer) -> int:
    damaged = 0
    store = await ContentStore.start(settings)
    try:
        async for finding in store.verify():
            damaged += finding.kind != "orphan"
            observer.fault(finding)
    finally:
        await store.close()
    return damaged


def _settle(draft: Path, database: Path) -> None:
    """Give the database its name, with everything in this one file."""
    with _sqlite_border(), closing(sqlite3.connect(draft, isolation_level=None)) as opened:
        opened.execute("PRAGMA journal_mode = DELETE").close()
    _sync(draft)
    draft.rename(database)
    sync_folder(database.parent)


def _write_manifest(folder: Path, report: BackupReport) -> None:
    with (folder / DATABASE).open("rb") as database:
        sha256 = hashlib.file_digest(database, "sha256").hexdigest()
    manifest = {
        "format": FORMAT,
        "consignee": __version__,
        "created_at": int(time.time()),
        "database_sha256": sha256,
        **asdict(report),
    }
    _create(folder / MANIFEST)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(folder / MANIFEST)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder.name}: is no backup, or not a complete one") from None
    except ValueError:
        raise StoreError(f"{folder.name}: its {MANIFEST} is damaged; use another backup") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise StoreError(f"{folder.name}: is no backup that this version of consignee knows")
    return manifest


@contextmanager
def _becoming(folder: Path) -> Iterator[Path]:
    """A folder to fill that gets its name, durably, when the block ends well; else it goes.

    Raises StoreError when the name is taken, or somebody is at the same.
    """
    if folder.exists():
        raise StoreError(f"{folder.name}: is there; name a folder that is not")
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(mode=0o700, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(partial)
        yield partial
        os.fsync(lock)
        partial.rename(folder)
        sync_folder(folder.parent)
    except BlockingIOError:
        raise StoreError(f"{folder.name}: another process is making this backup") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    """Take away what an earlier process left that was killed."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _link(source: Path, target: Path) -> bool:
    """Give a file another name; False where it has to be copied instead."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def copy_file(source: Path, target: Path) -> int:
    """Copy to a new private file, durably but for its name; its bytes."""
    with source.open("rb") as original:
        _create(target)
        with target.open("wb") as copy:
            shutil.copyfileobj(original, copy, CHUNK_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
            return copy.tell()


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE))


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _sqlite_border() -> Iterator[None]:
    """Translate what SQLite itself raises, as the database's other borders do."""
    try:
        yield
    except sqlite3.Error as error:
        raise refusal_of(DBAPIError(None, None, error)) from error
