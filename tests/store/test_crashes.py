"""SIGKILL at every step, and what the next process finds."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from app.store import ContentStore
from tests.store import victim
from tests.store.stores import (
    LARGE,
    SMALL,
    count,
    database,
    get,
    make_old,
    new_store,
    published,
    put,
    staged,
    store_settings,
)
from tests.store.victim import Moment

pytestmark = pytest.mark.anyio

LARGE_STEPS = ["write", "seal", "publish", "commit", "confirm", "discard"]
DEATHS = [("commit", SMALL), *((step, LARGE) for step in LARGE_STEPS)]


async def settled(data_dir: Path) -> ContentStore:
    """The store as the next process opens it, after a sweep at which every orphan is old."""
    store = await ContentStore.start(store_settings(data_dir))
    assert staged(data_dir) == []
    make_old(data_dir)
    await store.sweep()
    return store


@pytest.mark.requirement("AHP-R26", "B09", "B73")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("twin", [False, True], ids=["fresh", "twin"])
@pytest.mark.parametrize(("step", "data"), DEATHS)
async def test_killed_while_receiving(
    tmp_path: Path, step: str, data: bytes, moment: Moment, twin: bool
) -> None:
    store = await new_store(tmp_path)
    kept = [await put(store, SMALL[::-1])] + ([await put(store, data)] if twin else [])
    await store.close()
    confirmed, status = victim.run(tmp_path, "receive", step, moment, data)
    assert status == -signal.SIGKILL
    store = await settled(tmp_path)
    assert await get(store, kept[0].ref) == SMALL[::-1]
    for reference in [*kept[1:], *confirmed]:
        assert await get(store, reference.ref) == data
    unconfirmed = count(tmp_path, "content_refs") - len(kept) - len(confirmed)
    committed = (step, moment) == ("commit", "after") or step in ("confirm", "discard")
    assert unconfirmed == (1 if committed else 0)
    with database(tmp_path) as rows:
        locations = rows.execute("select location from blobs where location is not null").fetchall()
    assert sorted(path.name for path in published(tmp_path)) == sorted(
        name for (name,) in locations
    )
    assert [finding async for finding in store.verify()] == []
    await store.close()


@pytest.mark.requirement("AHP-R26")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_after_the_confirmation(tmp_path: Path, moment: Moment) -> None:
    store = await new_store(tmp_path)
    first = await put(store, LARGE)
    await store.close()
    confirmed, status = victim.run(tmp_path, "receive", "close", moment, LARGE)
    assert (len(confirmed), status) == (1, -signal.SIGKILL)
    store = await settled(tmp_path)
    assert await get(store, first.ref) == await get(store, confirmed[0].ref) == LARGE
    assert len(published(tmp_path)) == 1
    await store.close()


@pytest.mark.requirement("B74")
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("step", ["commit", "unlink"])
async def test_killed_while_sweeping(tmp_path: Path, step: str, moment: Moment) -> None:
    store = await new_store(tmp_path)
    kept, removed = await put(store, SMALL), await put(store, LARGE)
    await store.remove("a", removed.ref)
    await store.close()
    _, status = victim.run(tmp_path, "sweep", step, moment)
    assert status == -signal.SIGKILL
    store = await settled(tmp_path)
    again = await put(store, LARGE)
    assert await get(store, kept.ref) == SMALL
    assert await get(store, again.ref) == LARGE
    assert len(published(tmp_path)) == 1
    await store.close()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_killed_while_removing(tmp_path: Path, moment: Moment) -> None:
    store = await new_store(tmp_path)
    reference = await put(store, LARGE)
    await store.close()
    _, status = victim.run(tmp_path, "remove", "commit", moment, ref=reference.ref)
    assert status == -signal.SIGKILL
    store = await settled(tmp_path)
    left = [listed.ref for listed in await store.references("a")]
    assert left == ([reference.ref] if moment == "before" else [])
    assert len(published(tmp_path)) == len(left)
    await store.close()
