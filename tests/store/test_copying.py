"""`copy_store`: one store into another, between all back ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import Unavailable
from app.settings import Settings, SettingsError
from app.store import StoreError, copying, record_copies, snapshots
from app.store.copying import copy_store
from app.store.local import LocalBlobs
from app.store.record_copies import TABLES
from app.store.tables import metadata, writers
from app.store.worker_tables import request_budgets
from tests import backends
from tests.objects import CREDENTIALS, stored_objects
from tests.store.moves import (
    LARGE_TOO,
    Ends,
    Hand,
    Watching,
    fill,
    findings,
    resolved,
    rows_of,
    settings_on,
)
from tests.store.servers import opened
from tests.store.stores import LARGE, get, put, sqlite_rows

pytestmark = [pytest.mark.anyio, pytest.mark.component("seaweedfs")]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


async def filled(settings: Settings) -> dict[str, bytes]:
    """Something of everything in the store of `settings`; the references that last."""
    async with opened(settings) as store:
        return await fill(store)


async def is_whole(settings: Settings, references: dict[str, bytes]) -> bool:
    """Whether the store of `settings` has these references and no fault."""
    async with opened(settings) as store:
        faults = [found for found in await findings(store) if found.kind != "orphan"]
        return faults == [] and await resolved(store, references)


def test_every_table_is_copied_but_those_of_running_processes() -> None:
    assert {*TABLES} == {*metadata.tables.values()} - {writers, request_budgets}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("sqlite+files", "postgres+s3"),
        ("postgres+files", "sqlite+s3"),
        ("sqlite+files", "sqlite+files"),
    ],
)
async def test_there_and_back_every_table_is_the_same(
    tmp_path: Path, first: Ends, second: Ends
) -> None:
    origin, there, back = (
        settings_on(ends, tmp_path / name)
        for ends, name in ((first, "a"), (second, "b"), (first, "c"))
    )
    references = await filled(origin)
    watching = Watching()
    report = await copy_store(origin, there, watching)
    assert (report.faults, report.swept, watching.faults) == (0, 0, [])
    assert watching.done == watching.steps
    expected = await rows_of(origin)
    assert all(expected.values()), "every table has something to show"
    assert report.inserted == sum(map(len, expected.values()))
    assert await rows_of(there) == expected
    assert await is_whole(there, references)
    await copy_store(there, back, Watching())
    assert await rows_of(back) == expected
    assert await is_whole(back, references)


@pytest.mark.parametrize("ends", ["sqlite+files", "postgres+s3"])
async def test_numbers_go_on_behind_those_that_were_given(tmp_path: Path, ends: Ends) -> None:
    origin, goal = settings_on("sqlite+files", tmp_path / "a"), settings_on(ends, tmp_path / "b")
    async with opened(origin) as store:
        kept = await put(store, b"kept")
        await store.remove("a", (await put(store, b"the newest, gone again")).ref)
    await copy_store(origin, goal, Watching())
    async with opened(goal) as store:
        after = await put(store, b"after")
        listed = await store.references("a")
    assert [(one.ref, one.position) for one in listed] == [(kept.ref, 1), (after.ref, 3)]


@pytest.mark.parametrize("ends", ["sqlite+files", "postgres+files"])
async def test_one_more_copy_brings_what_changed_and_nothing_else(
    tmp_path: Path, ends: Ends
) -> None:
    origin, goal = settings_on("sqlite+files", tmp_path / "a"), settings_on(ends, tmp_path / "b")
    references = await filled(origin)
    await copy_store(origin, goal, Watching())
    idle = await copy_store(origin, goal, Watching())
    assert (idle.bodies, idle.inserted, idle.updated, idle.removed) == (0, 0, 0, 0)
    assert idle.unchanged == sum(map(len, (await rows_of(origin)).values()))
    async with opened(origin) as store:
        ref = next(ref for ref, body in references.items() if body == b"small")
        await store.remove("a", ref)
        del references[ref]
        references[(await put(store, LARGE + b"late")).ref] = LARGE + b"late"
    report = await copy_store(origin, goal, Watching())
    assert (report.bodies, report.inserted, report.removed) == (1, 2, 1)
    assert await rows_of(goal) == await rows_of(origin)
    assert await is_whole(goal, references)


@given(
    before=st.lists(st.integers(0, 10_000), max_size=25),
    after=st.lists(st.integers(0, 10_000), max_size=25),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[*HealthCheck])
def test_whatever_was_done_the_copy_is_what_the_source_is(
    tmp_path_factory: pytest.TempPathFactory, before: list[int], after: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    origin, goal = (settings_on("sqlite+files", folder / name) for name in ("a", "b"))

    async def run() -> None:
        hand = Hand(origin)
        for deeds in (before, after):
            await hand.do_all(deeds)
            with (
                patch.object(record_copies, "BATCH_ROWS", 3),
                patch.object(copying, "PAGE", 2),
                patch.object(snapshots, "PAGE", 2),
            ):
                report = await copy_store(origin, goal, Watching())
            assert (report.faults, report.swept) == (0, 0)
            assert await rows_of(goal) == await rows_of(origin)
        assert await is_whole(goal, hand.references)

    asyncio.run(run())


VICTIM = """
import asyncio, os, signal, sys
from pathlib import Path
from app.errors import Unavailable
from app.settings import Settings, SettingsError
from app.store import copying, local, objects, record_copies
from tests.store.moves import Watching

left = int(sys.argv[3])

def deadly(original):
    async def step(*arguments, **named):
        global left
        outcome = await original(*arguments, **named)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome
    return step

if sys.argv[4] == "body":
    for kind in (local.LocalBlobs, objects.ObjectBlobs):
        kind.publish = deadly(kind.publish)
else:
    copying.written = record_copies.written = deadly(record_copies.written)
origin, goal = (Settings.model_validate_json(text) for text in sys.argv[1:3])
asyncio.run(copying.copy_store(origin, goal, Watching()))
"""


async def killed(origin: Settings, goal: Settings, step: int, kind: str) -> None:
    """Copy in a process that dies behind so many steps of a kind."""
    names = {"data_dir", "database_url", "blob_url", "inline_bytes"}
    given = [settings.model_dump_json(include=names) for settings in (origin, goal)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VICTIM, *given, str(step), kind, stderr=subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()


@pytest.mark.parametrize("ends", ["sqlite+files", "postgres+s3"])
async def test_a_copy_that_was_killed_goes_on_where_it_was(tmp_path: Path, ends: Ends) -> None:
    origin, goal = settings_on("sqlite+files", tmp_path / "a"), settings_on(ends, tmp_path / "b")
    references = await filled(origin)
    bodies = len({*references.values()} - {b"", b"small"})
    await killed(origin, goal, 1, "body")
    other = settings_on("sqlite+files", tmp_path / "other")
    with pytest.raises(StoreError, match="copy of another"):
        await copy_store(other, goal, Watching())
    await killed(origin, goal, 3, "rows")
    await killed(origin, goal, 9, "rows")
    report = await copy_store(origin, goal, Watching())
    assert report.bodies == 0
    assert report.present >= bodies
    assert report.unchanged > 0
    assert await rows_of(goal) == await rows_of(origin)
    assert await is_whole(goal, references)


async def test_what_a_live_source_confirms_meanwhile_comes_with_the_next_copy(
    tmp_path: Path,
) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    confirmed: dict[str, bytes] = {}
    async with opened(origin) as store:
        ended = asyncio.Event()

        async def go_on_uploading() -> None:
            number = 0
            while not ended.is_set():
                body = LARGE + b"%d" % number
                reference = await put(store, body)
                confirmed[reference.ref] = body
                number += 1
                if number % 3 == 0:
                    await store.remove("a", reference.ref)
                    del confirmed[reference.ref]
                    await store.sweep()

        async with asyncio.TaskGroup() as group:
            uploading = group.create_task(go_on_uploading())
            for _ in range(3):
                assert (await copy_store(origin, goal, Watching())).faults == 0
            ended.set()
            await uploading
        await copy_store(origin, goal, Watching())
    assert confirmed
    assert await rows_of(goal) == await rows_of(origin)
    assert await is_whole(goal, confirmed)


async def test_the_same_blob_store_is_left_where_it_is(tmp_path: Path) -> None:
    origin = settings_on("sqlite+files", tmp_path / "a")
    goal = settings_on("postgres+files", tmp_path / "b", blob_url=origin.blobs)
    references = await filled(origin)
    report = await copy_store(origin, goal, Watching())
    assert (report.bodies, report.faults) == (0, 0)
    assert report.present > 0
    async with opened(origin) as store:
        gone = next(ref for ref, body in references.items() if body == LARGE)
        await store.remove("a", gone)
        del references[gone]
        more = await put(store, LARGE + b"more")
        await store.remove("a", more.ref)
    await copy_store(origin, goal, Watching())
    async with opened(origin) as store:
        await store.sweep()
    await copy_store(origin, goal, Watching())
    assert await rows_of(goal) == await rows_of(origin)
    assert await is_whole(goal, references)


async def test_a_body_that_a_shared_blob_store_lost_is_named(tmp_path: Path) -> None:
    origin = settings_on("sqlite+files", tmp_path / "a")
    goal = settings_on("sqlite+files", tmp_path / "b", blob_url=origin.blobs)
    async with opened(origin) as store:
        await put(store, LARGE)
    (body,) = bodies_in(origin)
    body.unlink()
    watching = Watching()
    await copy_store(origin, goal, watching)
    assert [found.kind for found in watching.faults] == ["missing"]


async def test_a_body_that_healed_elsewhere_is_copied_and_its_old_place_emptied(
    tmp_path: Path,
) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        first = await put(store, LARGE)
        await copy_store(origin, goal, Watching())
        (lost,) = bodies_in(origin)
        lost.unlink()
        await put(store, LARGE)
    report = await copy_store(origin, goal, Watching())
    assert (report.bodies, report.updated) == (1, 1)
    assert [body.name for body in bodies_in(goal)] == [body.name for body in bodies_in(origin)]
    assert await is_whole(goal, {first.ref: LARGE})


def bodies_in(settings: Settings) -> list[Path]:
    return [path for path in (settings.data_dir / "blobs").rglob("*-*") if path.is_file()]


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda body: body.unlink(), "missing"),
        (lambda body: body.write_bytes(LARGE_TOO), "wrong_digest"),
        (lambda body: body.write_bytes(b"short"), "wrong_size"),
    ],
)
async def test_a_damaged_body_is_named_and_everything_else_is_copied(
    tmp_path: Path, damage: object, kind: str
) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        kept, hurt = await put(store, b"small"), await put(store, LARGE)
    (body,) = bodies_in(origin)
    assert callable(damage)
    damage(body)
    watching = Watching()
    report = await copy_store(origin, goal, watching)
    assert report.faults == len(watching.faults) == 1
    assert {(found.kind, found.sha256) for found in watching.faults} == {(kind, hurt.sha256)}
    assert await rows_of(goal) == await rows_of(origin)
    assert bodies_in(goal) == []
    async with opened(goal) as store:
        assert await get(store, kept.ref) == b"small"
        assert [found.kind for found in await findings(store)] == ["missing"]
        again = await put(store, LARGE)
        assert await get(store, hurt.ref) == await get(store, again.ref) == LARGE


async def test_damaged_bytes_in_a_row_are_named(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        hurt = await put(store, b"small")
    with sqlite_rows(origin.data_dir) as rows:
        rows.execute("update blobs set data = ?", (b"smell",))
    watching = Watching()
    assert (await copy_store(origin, goal, watching)).faults == 1
    assert [(one.kind, one.sha256) for one in watching.faults] == [("wrong_digest", hurt.sha256)]


class Meddling(Watching):
    """An observer that does something when a step begins."""

    def __init__(self, step: str, deed: Callable[[], None]) -> None:
        super().__init__()
        self._chosen = step
        self._deed = deed

    def begin(self, step: str, total: int) -> None:
        super().begin(step, total)
        if step == self._chosen:
            self._deed()


def sweep_from_outside(origin: Settings, *copies: Settings) -> None:
    """What a sweep of another process does, and the copy had no body yet."""
    with sqlite_rows(origin.data_dir) as rows:
        rows.execute("delete from content_refs")
        rows.execute("delete from blobs")
    for body in [body for held in (origin, *copies) for body in bodies_in(held)]:
        body.unlink()


async def test_a_body_that_a_sweep_takes_meanwhile_asks_for_one_more_copy(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        await put(store, LARGE)
    meddling = Meddling("blobs", lambda: sweep_from_outside(origin, goal))
    report = await copy_store(origin, goal, meddling)
    assert (report.swept, report.faults) == (1, 0)
    report = await copy_store(origin, goal, Watching())
    assert (report.swept, report.removed) == (0, 2)
    assert await rows_of(goal) == await rows_of(origin)


async def test_a_body_that_a_sweep_takes_before_the_moment_is_nobody_s_loss(
    tmp_path: Path,
) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        await put(store, LARGE)
    with patch.object(LocalBlobs, "size", swept_when_asked(origin, LocalBlobs.size)):
        report = await copy_store(origin, goal, Watching())
    assert (report.swept, report.faults, report.bodies) == (0, 0, 0)
    assert await rows_of(goal) == await rows_of(origin)


def swept_when_asked(origin: Settings, size: Callable[..., Awaitable[int | None]]) -> object:
    async def asked(blobs: LocalBlobs, location: str) -> int | None:
        sweep_from_outside(origin)
        return await size(blobs, location)

    return asked


async def test_a_body_that_the_copy_lost_is_brought_again(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        kept = await put(store, LARGE)
    await copy_store(origin, goal, Watching())
    (body,) = bodies_in(goal)
    body.write_bytes(LARGE[:10])
    report = await copy_store(origin, goal, Watching())
    assert (report.bodies, report.bytes, report.unchanged) == (1, len(LARGE), 2)
    assert await is_whole(goal, {kept.ref: LARGE})


async def test_a_target_that_does_not_keep_a_body_ends_the_copy(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        kept = await put(store, LARGE)

    async def forget(blobs: LocalBlobs, staged: Path, location: str) -> None:
        del blobs, staged, location

    with patch.object(LocalBlobs, "publish", forget), pytest.raises(Unavailable, match="target"):
        await copy_store(origin, goal, Watching())
    assert [*(goal.data_dir / "staging").glob("*/*")] == []
    await copy_store(origin, goal, Watching())
    assert await is_whole(goal, {kept.ref: LARGE})


async def test_an_unreadable_body_is_named(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        await put(store, LARGE)
    watching = Watching()
    broken = Unavailable("storage_unavailable", "a broken disk")
    with patch("app.store.local._ReadFile.read", side_effect=broken):
        await copy_store(origin, goal, watching)
    assert [found.kind for found in watching.faults] == ["unreadable"]
    assert bodies_in(goal) == []


async def test_damage_in_a_bucket_is_named(tmp_path: Path) -> None:
    origin = settings_on("sqlite+s3", tmp_path / "a")
    goal = settings_on("sqlite+files", tmp_path / "b")
    async with opened(origin) as store:
        await put(store, LARGE)
    (body,) = stored_objects(origin.blobs)
    body.write_bytes(LARGE_TOO)
    watching = Watching()
    await copy_store(origin, goal, watching)
    assert [found.kind for found in watching.faults] == ["wrong_digest"]


async def test_what_a_copy_will_not_touch(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    await filled(origin)
    with pytest.raises(SettingsError, match="is to be copied"):
        await copy_store(origin, origin, Watching())
    with pytest.raises(StoreError, match=r"^--to: The database has no tables"):
        await copy_store(origin, Settings(data_dir=tmp_path / "none"), Watching())
    with pytest.raises(StoreError, match=r"^the source: The database has no tables"):
        await copy_store(Settings(data_dir=tmp_path / "none"), goal, Watching())
    async with opened(goal) as store:
        await put(store, b"its own")
    before = await rows_of(goal)
    with pytest.raises(StoreError, match="records of its own"):
        await copy_store(origin, goal, Watching())
    assert await rows_of(goal) == before


@pytest.mark.parametrize("ends", ["sqlite+files", "postgres+files"])
async def test_a_copy_that_is_in_use_is_not_overwritten(tmp_path: Path, ends: Ends) -> None:
    origin, goal = settings_on("sqlite+files", tmp_path / "a"), settings_on(ends, tmp_path / "b")
    await filled(origin)
    await copy_store(origin, goal, Watching())
    async with opened(goal) as store:
        own = await put(store, b"its own")
        await store.sweep()
    with pytest.raises(StoreError, match="used since"):
        await copy_store(origin, goal, Watching())
    async with opened(goal) as store:
        await store.remove("a", own.ref)
    with pytest.raises(StoreError, match="used since"):
        await copy_store(origin, goal, Watching())


async def test_a_server_that_is_not_there_is_said_to_be_unavailable(tmp_path: Path) -> None:
    origin, goal = (settings_on("postgres+files", tmp_path / name) for name in ("a", "b"))
    name = str(origin.database_url).rpartition("/")[2]

    def cut_off() -> None:
        backends.cluster().execute(f"drop database {name} with (force)")

    with pytest.raises(Unavailable):
        await copy_store(origin, goal, Meddling("blobs", cut_off))


async def test_what_goes_in_many_transactions_goes(tmp_path: Path) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    async with opened(origin) as store:
        references = [await put(store, LARGE + b"%d" % number) for number in range(5)]
        await copy_store(origin, goal, Watching())
        for reference in references[:4]:
            await store.remove("a", reference.ref)
        await store.sweep()
    with patch.object(record_copies, "BATCH_ROWS", 2):
        report = await copy_store(origin, goal, Watching())
    assert (report.removed, len(bodies_in(goal))) == (8, 1)
    assert await rows_of(goal) == await rows_of(origin)


async def test_what_somebody_adds_to_the_target_meanwhile_waits_for_the_next_copy(
    tmp_path: Path,
) -> None:
    origin, goal = (settings_on("sqlite+files", tmp_path / name) for name in ("a", "b"))
    await filled(origin)

    def add() -> None:
        with sqlite_rows(goal.data_dir) as rows:
            rows.execute("insert into condemned values ('of another process', 1, 1)")

    await copy_store(origin, goal, Meddling("content_refs", add))
    assert (await copy_store(origin, goal, Watching())).removed == 1
    assert await rows_of(goal) == await rows_of(origin)
