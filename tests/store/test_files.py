"""Files of the protocol: kept whole, found by their owner alone, counted exactly."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.errors import NotFound, QuotaExhausted, Refusal, Unavailable
from app.store import ContentStore
from app.store.files import Totals
from app.store.sessions import SessionRecord
from tests.backends import IN_OBJECTS
from tests.store.sessions import (
    add_artifact,
    add_input,
    add_upload,
    begin,
    content_of,
    counted,
    executed,
    noted,
    plans_of,
)
from tests.store.stores import (
    LARGE,
    count,
    new_sqlite_store,
    new_store,
    published,
    stored_files,
)

pytestmark = pytest.mark.anyio

UNKNOWN = "file_0123456789abcdef0123456789abcdef"


@pytest.fixture
async def session(store: ContentStore) -> SessionRecord:
    return await store.sessions.create(scope="a", principal="alice")


async def quiet(store: ContentStore) -> None:
    """Wait until nothing is cleared up in the background any more."""
    while store._background:
        await asyncio.wait(store._background)


@pytest.mark.requirement("UHP-04", "B01")
@pytest.mark.parametrize("data", [b"", b"small", LARGE])
async def test_an_upload_is_what_was_sent(store: ContentStore, data: bytes) -> None:
    record = await add_upload(store, data, filename="q3.pdf", expires_at=2**40)
    assert (record.kind, record.filename, record.path) == ("upload", "q3.pdf", "q3.pdf")
    assert (record.size, record.purpose, record.current) == (len(data), "user_data", False)
    assert (record.session_id, record.container_id, record.response_id) == (None, None, None)
    assert await content_of(store, record) == data
    assert await store.files.get("a", record.id) == record
    assert await store.files.get_upload("a", record.id) == record
    place = await store.files.location(record)
    assert (place is not None) == (data == LARGE and not IN_OBJECTS)


async def test_the_bytes_of_small_files_come_at_once(store: ContentStore) -> None:
    small, large = await add_upload(store, b"small"), await add_upload(store, LARGE)
    assert await store.files.small([small, large]) == {small.id: b"small"}


@pytest.mark.requirement("UHP-14", "UHP-16")
async def test_an_artifact_takes_the_place_of_the_one_before(
    store: ContentStore, session: SessionRecord
) -> None:
    first = await add_artifact(store, session, b"one", "out/a.txt")
    other = await add_artifact(store, session, b"two", "out/b.txt")
    second = await add_artifact(store, session, b"three", "out/a.txt")
    listed = await store.files.of_session("a", session.id)
    assert [(file.id, file.current) for file in listed] == [
        (first.id, False),
        (other.id, True),
        (second.id, True),
    ]
    assert (first.filename, first.path, first.container_id) == (
        "a.txt",
        "out/a.txt",
        session.container_id,
    )
    assert await content_of(store, first) == b"one"
    assert (await store.sessions.get("a", session.id)).bytes == 11


@pytest.mark.requirement("UHP-29", "UHP-30", "B85")
async def test_foreign_and_unknown_files_are_the_same(
    store: ContentStore, session: SessionRecord
) -> None:
    upload = await add_upload(store)
    artifact = await add_artifact(store, session)
    other = await store.sessions.create(scope="a", principal="alice")
    files = store.files
    for wrong in (
        files.get("b", upload.id),
        files.get("b", artifact.id),
        files.get("a", UNKNOWN),
        files.get_upload("b", upload.id),
        files.get_upload("a", artifact.id),
        files.delete_upload("b", upload.id),
        files.delete_upload("a", artifact.id),
        files.get_in_container("b", session.container_id, artifact.id),
        files.get_in_container("a", other.container_id, artifact.id),
        files.get_in_container("a", session.container_id, upload.id),
    ):
        with pytest.raises(NotFound) as refused:
            await wrong
        assert (refused.value.code, refused.value.message) == (
            "file_not_found",
            "There is no such file.",
        )
    with pytest.raises(NotFound, match="no such session"):
        await files.of_session("b", session.id)
    assert await files.uploads("b") == []
    assert await files.get_in_container("a", session.container_id, artifact.id) == artifact


async def test_inputs_are_kept_and_not_listed(store: ContentStore) -> None:
    begun = await begin(store)
    record = await add_input(store, begun)
    assert await content_of(store, record) == b"data"
    assert await store.files.of_session("a", begun.session.id) == []
    assert (await store.sessions.get("a", begun.session.id)).files == 1


async def test_uploads_come_newest_first_in_pages(
    store: ContentStore, session: SessionRecord
) -> None:
    ids = [(await add_upload(store, b"%d" % number)).id for number in range(3)][::-1]
    await add_artifact(store, session)
    first = await store.files.uploads("a", limit=2)
    rest = await store.files.uploads("a", before=first[-1].position, limit=2)
    assert [file.id for file in first + rest] == ids
    assert await store.files.uploads("a", before=rest[-1].position) == []
    assert await store.files.uploads("a", before=0) == []


async def test_what_is_past_its_time_is_gone_before_it_is_removed(
    store: ContentStore, tmp_path: Path
) -> None:
    past = int(time.time()) - 1
    over = await add_upload(store, LARGE, expires_at=past)
    kept = await add_upload(store, b"kept", expires_at=past + 1000)
    with pytest.raises(NotFound):
        await store.files.get("a", over.id)
    assert [file.id for file in await store.files.uploads("a")] == [kept.id]
    assert await store.files.expire() == 1
    assert await store.files.expire() == 0
    assert counted(tmp_path) == noted(tmp_path) == {"a": (1, 4)}
    await quiet(store)
    assert published(tmp_path) == []


@pytest.mark.requirement("UHP-28", "UHP-34", "B89")
async def test_deleting_gives_bytes_and_quota_back(store: ContentStore, tmp_path: Path) -> None:
    record = await add_upload(store, LARGE)
    twin = await add_upload(store, LARGE)
    async with store.files.open(record) as pieces:
        await anext(pieces)
        await store.files.delete_upload("a", record.id)
        await store.files.delete_upload("a", twin.id)
        await quiet(store)
        assert published(tmp_path) == []
    assert count(tmp_path, "blobs") == 0
    assert await store.files.totals("a") == Totals(0, 0)
    with pytest.raises(NotFound):
        await content_of(store, record)
    with pytest.raises(NotFound):
        await store.files.delete_upload("a", record.id)
    assert await store.files.location(record) is None


async def test_bytes_that_somebody_else_has_stay(store: ContentStore) -> None:
    mine, theirs = await add_upload(store, LARGE), await add_upload(store, LARGE, scope="b")
    await store.files.delete_upload("a", mine.id)
    await quiet(store)
    assert await content_of(store, theirs) == LARGE


async def test_lost_bytes_are_no_missing_file(store: ContentStore, tmp_path: Path) -> None:
    record = await add_upload(store, LARGE)
    for path in published(tmp_path):
        path.unlink()
    with pytest.raises(Unavailable):
        await content_of(store, record)


@pytest.mark.requirement("UHP-36")
@pytest.mark.parametrize(
    ("limits", "of"),
    [
        ({"max_session_files": 1}, "files in this session"),
        ({"max_session_bytes": 15}, "bytes in this session"),
        ({"max_scope_files": 1}, "files in this scope"),
        ({"max_scope_bytes": 15}, "bytes in this scope"),
    ],
)
async def test_a_spent_budget_keeps_nothing(
    tmp_path: Path, limits: dict[str, Any], of: str
) -> None:
    store = await new_store(tmp_path, inline_bytes=4, **limits)
    session = await store.sessions.create(scope="a", principal="alice")
    first = await add_artifact(store, session, b"x" * 10)
    for path in ("a.txt", "b.txt"):
        with pytest.raises(QuotaExhausted) as refused:
            await add_artifact(store, session, b"y" * 10, path)
        assert refused.value.of == of
    assert [file.id for file in await store.files.of_session("a", session.id)] == [first.id]
    assert (await store.files.of_session("a", session.id))[0].current
    assert counted(tmp_path) == noted(tmp_path) == {"a": (1, 10)}
    assert len(stored_files(tmp_path)) == 1
    await store.close()


@pytest.mark.requirement("B89")
async def test_nothing_is_added_to_a_session_that_is_gone(
    store: ContentStore, session: SessionRecord, tmp_path: Path
) -> None:
    begun = await begin(store)
    for gone in (session, begun.session):
        await store.sessions.delete("a", gone.id, running=True)
    with pytest.raises(NotFound, match="no such session"):
        await add_artifact(store, session, LARGE)
    with pytest.raises(NotFound, match="no such session"):
        await add_input(store, begun, LARGE)
    await quiet(store)
    assert (stored_files(tmp_path), count(tmp_path, "blobs")) == ([], 0)
    assert (counted(tmp_path), noted(tmp_path)) == ({}, {})


async def test_adding_and_deleting_at_once_leaves_nothing(
    store: ContentStore, session: SessionRecord, tmp_path: Path
) -> None:
    adding = [add_artifact(store, session, LARGE + b"%d" % n, f"{n}") for n in range(20)]
    outcomes = await asyncio.gather(
        *adding, store.sessions.delete("a", session.id), return_exceptions=True
    )
    assert all(isinstance(one, Refusal) or not isinstance(one, Exception) for one in outcomes)
    await quiet(store)
    await store.sweep()
    assert (stored_files(tmp_path), count(tmp_path, "files")) == ([], 0)
    assert (counted(tmp_path), noted(tmp_path)) == ({}, {})


async def test_uploads_of_one_path_at_once_leave_one_current(
    store: ContentStore, session: SessionRecord
) -> None:
    await asyncio.gather(*(add_artifact(store, session, b"%d" % n) for n in range(10)))
    listed = await store.files.of_session("a", session.id)
    assert [file.current for file in listed] == [False] * 9 + [True]


async def test_listings_of_sqlite_read_an_index_and_sort_nothing(tmp_path: Path) -> None:
    store = await new_sqlite_store(tmp_path)
    session = await store.sessions.create(scope="a", principal="alice")
    with executed(store) as statements:
        await store.files.uploads("a", before=5)
        await store.files.of_session("a", session.id)
        with suppress(NotFound):
            await store.files.get("a", UNKNOWN)
        await store.files.expire()
    assert plans_of(tmp_path, statements) == [
        "SEARCH files USING INDEX ix_files_uploads (scope=? AND id<?)",
        "SEARCH sessions USING INDEX sqlite_autoindex_sessions_1 (session_id=?)",
        "SEARCH files USING INDEX ix_files_session (session_id=?)",
        "SEARCH files USING INDEX sqlite_autoindex_files_1 (file_id=?)",
        "SEARCH files USING INDEX ix_files_expires_at (expires_at<?)",
    ]
    await store.close()
