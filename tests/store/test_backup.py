"""`back_up` and `restore`: a copy of a live store, and the way back."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import Unavailable
from app.settings import Settings, SettingsError
from app.store import ContentStore, StoreError, backup, migrate
from app.store.backup import back_up, restore
from app.store.sqlite import create_database_file
from app.uhp.cursors import load_key
from tests.store.moves import Hand, Watching, fill, findings, in_store, resolved, rows_of
from tests.store.servers import opened
from tests.store.stores import LARGE, get, put, sha256, sqlite_rows, sqlite_settings
from tests.store.test_migrations import _migrate_to

pytestmark = pytest.mark.anyio

REF = "ref_" + "A" * 32


def embedded(data_dir: Path, **changes: Any) -> Settings:
    """A migrated store on SQLite and files, with its key, whatever the other tests run on."""
    settings = sqlite_settings(data_dir, blob_url=None, **changes)
    migrate(settings)
    load_key(settings.secret_key)
    return settings


def restored(data_dir: Path, **changes: Any) -> Settings:
    """Where a backup comes back to."""
    return sqlite_settings(data_dir, blob_url=None, **changes)


def bodies_in(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "blobs").rglob("*") if path.is_file())


async def bring_back(folder: Path, data_dir: Path) -> Settings:
    """Restore a backup that has no fault."""
    target = restored(data_dir)
    watching = Watching()
    report = await restore(target, folder, watching)
    assert (report.damaged, watching.faults) == (0, [])
    assert watching.done == watching.steps
    return target


async def test_what_is_restored_is_what_was_there(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    async with opened(origin) as store:
        references = await fill(store)
    watching = Watching()
    async with opened(origin):
        report = back_up(origin, tmp_path / "backup", watching)
    files = bodies_in(tmp_path / "backup")
    assert (report.bodies, report.bytes) == (len(files), sum(f.stat().st_size for f in files))
    assert (report.linked, report.missing) == (len(files), 0)
    assert watching.done == watching.steps == {"bodies": report.bytes}
    target = await bring_back(tmp_path / "backup", tmp_path / "b")
    assert await rows_of(target) == await rows_of(origin)
    assert target.secret_key.read_bytes() == origin.secret_key.read_bytes()
    async with opened(target) as store:
        assert await resolved(store, references)
        assert await findings(store) == []


def test_a_backup_is_private_and_holds_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    (origin.data_dir / "previews").mkdir()
    in_store(origin, lambda store: put(store, LARGE))
    folder = tmp_path / "backup"
    back_up(origin, folder, Watching())
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    (body,) = bodies_in(folder)
    expected = ["backup.json", str(body.relative_to(folder)), "consignee.db", "secret.key"]
    assert found == expected
    modes = {stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert modes == {0o700, 0o600}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    manifest = json.loads((folder / "backup.json").read_bytes())
    assert (manifest["format"], manifest["references"], manifest["bodies"]) == (1, 1, 1)


def test_a_key_that_the_configuration_names_is_the_operator_s(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a", secret_key_file=tmp_path / "own.key")
    back_up(origin, tmp_path / "backup", Watching())
    assert not (tmp_path / "backup" / "secret.key").exists()
    target = restored(tmp_path / "b")
    asyncio.run(restore(target, tmp_path / "backup", Watching()))
    assert not target.secret_key.exists()


@pytest.mark.parametrize("error", [errno.EXDEV, errno.EPERM, errno.EMLINK])
async def test_where_no_link_can_be_the_body_is_copied(tmp_path: Path, error: int) -> None:
    origin = embedded(tmp_path / "a")
    async with opened(origin) as store:
        kept = await put(store, LARGE)
    with patch.object(Path, "hardlink_to", side_effect=OSError(error, "no link")):
        report = back_up(origin, tmp_path / "backup", Watching())
    assert (report.bodies, report.linked) == (1, 0)
    assert [body.stat().st_nlink for body in bodies_in(tmp_path / "backup")] == [1]
    async with opened(await bring_back(tmp_path / "backup", tmp_path / "b")) as store:
        assert await get(store, kept.ref) == LARGE


async def test_a_store_that_goes_on_does_not_change_its_backup(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    async with opened(origin) as store:
        kept = await put(store, LARGE)
        back_up(origin, tmp_path / "backup", Watching())
        await store.remove("a", kept.ref)
        assert (await store.sweep()).blobs == 1
    assert bodies_in(origin.data_dir) == []
    async with opened(await bring_back(tmp_path / "backup", tmp_path / "b")) as store:
        assert await get(store, kept.ref) == LARGE
    back_up(origin, tmp_path / "later", Watching())
    assert bodies_in(tmp_path / "later") == []


@given(st.lists(st.integers(0, 10_000), max_size=25))
@settings(max_examples=10, deadline=None, suppress_health_check=[*HealthCheck])
def test_whatever_was_done_it_comes_back(
    tmp_path_factory: pytest.TempPathFactory, deeds: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("backup")
    origin = embedded(folder / "a")

    async def run() -> None:
        hand = Hand(origin)
        await hand.do_all(deeds)
        with patch.object(backup, "PAGE", 2):
            back_up(origin, folder / "backup", Watching())
        target = await bring_back(folder / "backup", folder / "b")
        assert await rows_of(target) == await rows_of(origin)
        async with opened(target) as store:
            assert await resolved(store, hand.references)
            assert await findings(store) == []

    asyncio.run(run())


class Between(Watching):
    """An observer that does something after every body."""

    def __init__(self, deed: Callable[[], None]) -> None:
        super().__init__()
        self._deed = deed

    def advance(self, count: int) -> None:
        super().advance(count)
        self._deed()


class Changing:
    """Removes a body that was there, and adds one, each time until there are three new ones."""

    def __init__(self, origin: Settings) -> None:
        self.kept: dict[str, bytes] = {}
        self._origin = origin
        self._going = [in_store(origin, partial(put, data=LARGE + b"%d" % n)) for n in range(4)]

    def meddle(self) -> None:
        if self._going:
            in_store(self._origin, self._change)

    async def _change(self, store: ContentStore) -> None:
        await store.remove("a", self._going.pop().ref)
        await store.sweep()
        if len(self.kept) < 3:
            body = LARGE + b"new %d" % len(self.kept)
            self.kept[(await put(store, body)).ref] = body


def test_bodies_that_come_and_go_between_the_steps(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    changing = Changing(origin)
    with patch.object(backup, "FEW_BODIES", 0):
        report = back_up(origin, tmp_path / "backup", Between(changing.meddle))
    assert (report.references, report.bodies, report.linked, report.missing) == (3, 3, 3, 0)
    assert len(bodies_in(tmp_path / "backup")) == 3
    target = asyncio.run(bring_back(tmp_path / "backup", tmp_path / "b"))
    assert in_store(target, partial(resolved, references=changing.kept))
    assert in_store(target, findings) == []


def test_nobody_commits_while_the_rest_is_taken(tmp_path: Path) -> None:
    """The rest is taken after the first round, which took few bodies."""
    origin = embedded(tmp_path / "a")
    in_store(origin, lambda store: put(store, LARGE))
    outcomes: list[str] = []
    original = backup._Taking._take_bodies

    def watched(taking: Any) -> tuple[int, int]:
        with closing(sqlite3.connect(origin.data_dir / "consignee.db", timeout=0)) as rows:
            try:
                rows.execute("begin immediate")
            except sqlite3.OperationalError as error:
                outcomes.append(str(error))
            else:
                outcomes.append("free")
        return original(taking)

    with patch.object(backup._Taking, "_take_bodies", watched):
        back_up(origin, tmp_path / "backup", Watching())
    assert outcomes == ["free", "database is locked"]


def test_bodies_that_never_stop_coming_end_the_backup_and_leave_nothing(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    numbers = iter(range(1000))

    async def more(store: ContentStore) -> None:
        await put(store, LARGE + b"%d" % next(numbers))

    in_store(origin, more)
    with (
        patch.object(backup, "FEW_BODIES", 0),
        patch.object(backup, "ROUNDS", 2),
        patch.object(backup, "PAGE", 1),
        pytest.raises(Unavailable, match="faster than they can be copied"),
    ):
        back_up(origin, tmp_path / "backup", Between(lambda: in_store(origin, more)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_body_that_the_store_has_lost_is_counted_and_fsck_names_it_after_the_restore(
    tmp_path: Path,
) -> None:
    origin = embedded(tmp_path / "a")
    lost = in_store(origin, lambda store: put(store, LARGE))
    (body,) = bodies_in(origin.data_dir)
    body.unlink()
    report = back_up(origin, tmp_path / "backup", Watching())
    assert (report.bodies, report.missing) == (0, 1)
    watching = Watching()
    assert asyncio.run(restore(restored(tmp_path / "b"), tmp_path / "backup", watching)).damaged
    assert [(one.kind, one.sha256) for one in watching.faults] == [("missing", lost.sha256)]


def test_a_body_that_the_backup_holds_damaged_is_named(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    kept = in_store(origin, lambda store: put(store, b"small"))
    in_store(origin, lambda store: put(store, LARGE))
    back_up(origin, tmp_path / "backup", Watching())
    (body,) = bodies_in(tmp_path / "backup")
    body.unlink()
    body.write_bytes(LARGE[::-1])
    watching = Watching()
    target = restored(tmp_path / "b")
    assert asyncio.run(restore(target, tmp_path / "backup", watching)).damaged == 1
    assert [one.kind for one in watching.faults] == ["wrong_digest"]
    assert in_store(target, lambda store: get(store, kept.ref)) == b"small"


@pytest.mark.parametrize(
    "changes",
    [
        {"database_url": "postgresql+asyncpg://nobody@127.0.0.1:1/none"},
        {"blob_url": "s3://bucket/prefix?region=x"},
    ],
    ids=["database", "bodies"],
)
def test_engines_with_tools_of_their_own_are_named(tmp_path: Path, changes: Any) -> None:
    other = Settings(data_dir=tmp_path / "a", **changes)
    with pytest.raises(SettingsError, match="pg_dump") as raised:
        back_up(other, tmp_path / "backup", Watching())
    assert raised.value.exit_status == 2
    with pytest.raises(SettingsError, match="pg_dump"):
        asyncio.run(restore(other, tmp_path / "backup", Watching()))
    assert [*tmp_path.iterdir()] == []


def test_a_backup_never_replaces_anything(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    (tmp_path / "backup").mkdir()
    with pytest.raises(StoreError, match=r"^backup: is there"):
        back_up(origin, tmp_path / "backup", Watching())
    with pytest.raises(StoreError, match="no database"):
        back_up(restored(tmp_path / "none"), tmp_path / "new", Watching())
    with pytest.raises(FileNotFoundError):
        back_up(origin, tmp_path / "nowhere" / "new", Watching())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "backup"]


def test_two_that_make_the_same_backup_do_not_meet(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a")
    unfinished = tmp_path / ".backup.partial"
    (unfinished / "blobs").mkdir(parents=True)
    (unfinished / "left by one that was killed").touch()
    with held(unfinished), pytest.raises(StoreError, match="another process"):
        back_up(origin, tmp_path / "backup", Watching())
    assert (unfinished / "blobs").exists()
    back_up(origin, tmp_path / "backup", Watching())
    assert not unfinished.exists()
    assert not (tmp_path / "backup" / "left by one that was killed").exists()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_a_store_whose_writer_never_ends_is_busy(tmp_path: Path) -> None:
    origin = embedded(tmp_path / "a", database_timeout_seconds=0.1)
    with sqlite_rows(origin.data_dir) as rows:
        rows.execute("begin immediate")
        with pytest.raises(Unavailable, match="busy"):
            back_up(origin, tmp_path / "backup", Watching())
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data_dir: data_dir.joinpath("anything").touch(),
        lambda data_dir: data_dir.joinpath("blobs").mkdir(),
        lambda data_dir: data_dir.joinpath("consignee.db").touch(),
    ],
)
def test_nothing_is_restored_into_what_is_not_empty(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    back_up(embedded(tmp_path / "a"), tmp_path / "backup", Watching())
    target = restored(tmp_path / "b")
    target.data_dir.mkdir()
    spoil(target.data_dir)
    before = sorted(target.data_dir.iterdir())
    with pytest.raises(StoreError, match="empty data_dir"):
        asyncio.run(restore(target, tmp_path / "backup", Watching()))
    assert sorted(target.data_dir.iterdir()) == before


def test_parts_that_lie_elsewhere_have_to_be_free_too(tmp_path: Path) -> None:
    back_up(embedded(tmp_path / "a"), tmp_path / "backup", Watching())
    for name, url in (
        ("database_url", f"sqlite:///{tmp_path / 'taken.db'}"),
        ("blob_url", f"file://{tmp_path / 'a' / 'blobs'}"),
    ):
        (tmp_path / "taken.db").touch()
        (tmp_path / "a" / "blobs" / "kept").mkdir(parents=True, exist_ok=True)
        target = Settings.model_validate({"data_dir": tmp_path / "b", name: url})
        with pytest.raises(StoreError, match="empty data_dir"):
            asyncio.run(restore(target, tmp_path / "backup", Watching()))


def test_a_volume_with_lost_and_found_is_empty(tmp_path: Path) -> None:
    back_up(embedded(tmp_path / "a"), tmp_path / "backup", Watching())
    target = restored(tmp_path / "b")
    (target.data_dir / "lost+found").mkdir(parents=True)
    asyncio.run(restore(target, tmp_path / "backup", Watching()))
    assert (target.data_dir / "consignee.db").exists()


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        (None, "is no backup, or not a complete one"),
        ("{", "is damaged"),
        ("[]", "is no backup that this version"),
        ('{"format": 2}', "is no backup that this version"),
    ],
)
def test_what_is_no_backup_is_refused(tmp_path: Path, manifest: str | None, complaint: str) -> None:
    (tmp_path / "backup").mkdir()
    if manifest is not None:
        (tmp_path / "backup" / "backup.json").write_text(manifest)
    with pytest.raises(StoreError, match=complaint):
        asyncio.run(restore(restored(tmp_path / "b"), tmp_path / "backup", Watching()))
    assert not (tmp_path / "b").exists()


def test_a_damaged_database_is_not_restored(tmp_path: Path) -> None:
    back_up(embedded(tmp_path / "a"), tmp_path / "backup", Watching())
    with (tmp_path / "backup" / "consignee.db").open("r+b") as database:
        database.seek(5000)
        database.write(b"damage")
    target = restored(tmp_path / "b")
    with pytest.raises(StoreError, match="database of the backup is damaged"):
        asyncio.run(restore(target, tmp_path / "backup", Watching()))
    assert [*target.data_dir.iterdir()] == []


def test_a_file_in_a_backup_that_is_no_body_is_refused(tmp_path: Path) -> None:
    back_up(embedded(tmp_path / "a"), tmp_path / "backup", Watching())
    (tmp_path / "backup" / "blobs" / "..%2f").mkdir()
    (tmp_path / "backup" / "blobs" / "..%2f" / "stray").touch()
    report = asyncio.run(restore(restored(tmp_path / "b"), tmp_path / "backup", Watching()))
    assert report.bodies == 0


def test_a_backup_of_an_older_version_is_brought_up_to_date(tmp_path: Path) -> None:
    older = sqlite_settings(tmp_path / "a", blob_url=None)
    create_database_file(older)
    _migrate_to(older, "0001")
    with sqlite_rows(older.data_dir) as rows:
        digest = sha256(b"old")
        rows.execute(
            "insert into blobs values (1, ?, 3, null, 1, ?)", (bytes.fromhex(digest), b"old")
        )
        rows.execute(f"insert into content_refs values (1, '{REF}', 'a', 1, 'alice', 1, null)")
    assert back_up(older, tmp_path / "backup", Watching()).references == 1
    target = asyncio.run(bring_back(tmp_path / "backup", tmp_path / "b"))
    assert in_store(target, lambda store: get(store, REF)) == b"old"


def test_no_path_is_built_from_what_is_no_location(tmp_path: Path) -> None:
    places = backup.embedded(restored(tmp_path / "a"))
    with pytest.raises(ValueError, match="location"):
        places.body("../../etc/passwd")
