"""Events and the bytes that they use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, event

from app.errors import Conflict, Malformed, NotFound, Refusal
from app.store import ContentStore, SweepReport, migrate
from app.store import events as events_module
from app.store import sweep as sweep_module
from app.store.events import MAX_EVENT_ID_BYTES, Arrival, Attached, accept_all
from app.store.tables import referring_columns
from tests.store.events import arrival, deliver, read
from tests.store.stores import (
    LARGE,
    SMALL,
    count,
    database,
    get,
    new_store,
    published,
    put,
    sha256,
    sqlite_settings,
    store_settings,
)

pytestmark = pytest.mark.anyio

Advance = Callable[[float], None]


@pytest.fixture
def advance(monkeypatch: pytest.MonkeyPatch) -> Advance:
    """Turns the clock on."""
    clock = time.time

    def by(seconds: float) -> None:
        monkeypatch.setattr(time, "time", lambda: clock() + seconds)

    return by


async def refusal_of(store: ContentStore, given: Arrival) -> tuple[type[Refusal], str]:
    with pytest.raises(Refusal) as refusal:
        await store.events.accept(given)
    return type(refusal.value), refusal.value.code


def rows(data_dir: Path) -> tuple[int, int]:
    return count(data_dir, "events"), count(data_dir, "event_refs")


@pytest.mark.requirement("AHP-R43")
async def test_an_accepted_event_is_kept_with_size_and_digest_of_what_it_uses(
    store: ContentStore,
) -> None:
    large, small = await put(store, LARGE), await put(store, SMALL)
    before = int(time.time())
    event = await deliver(store, large.ref, small.ref, mode="intercept")
    assert event.attachments == (
        Attached(large.ref, len(LARGE), sha256(LARGE)),
        Attached(small.ref, len(SMALL), sha256(SMALL)),
    )
    assert before <= event.received_at <= time.time()
    assert (event.event_id, event.type, event.mode) == ("evt_1", "turn.start", "intercept")
    assert (event.scope, event.principal) == ("a", "alice")
    assert (event.outcome, event.result) == (None, None)
    assert event.message == arrival(large.ref, small.ref).message
    assert await store.events.find("a", "evt_1") == event
    assert [await read(store, large.ref), await read(store, small.ref)] == [LARGE, SMALL]


async def test_an_event_may_use_nothing(store: ContentStore) -> None:
    assert (await deliver(store)).attachments == ()


async def test_events_are_listed_in_the_order_of_arrival_in_their_scope(
    store: ContentStore,
) -> None:
    reference = await put(store, SMALL)
    for event_id in "cab":
        await deliver(store, reference.ref, event_id=event_id)
    await deliver(store, event_id="d", scope="b")
    page = await store.events.page("a")
    assert [event.event_id for event in page] == ["c", "a", "b"]
    assert all(event.attachments[0].ref == reference.ref for event in page)
    (second,) = await store.events.page("a", after=page[0].position, limit=1)
    assert second == page[1]
    assert await store.events.page("a", after=page[-1].position) == []
    assert await store.events.latest("a", 2) == page[1:]
    assert await store.events.latest("b", 2) == await store.events.page("b")


@pytest.mark.requirement("AHP-R34", "AHP-R36", "AHP-R42")
@pytest.mark.parametrize("fault", ["unknown", "foreign", "removed", "expired", "no text"])
async def test_an_event_with_content_that_is_not_there_is_refused_whole(
    fault: str, tmp_path: Path, advance: Advance
) -> None:
    store = await new_store(tmp_path, retention=timedelta(hours=1))
    bad = (await put(store, SMALL, scope="b" if fault == "foreign" else "a")).ref
    if fault == "removed":
        await store.remove("a", bad)
    if fault == "expired":
        advance(3601)
    good = (await put(store, LARGE)).ref
    wrong = {"unknown": f"ref_{'x' * 32}", "no text": "ref_\0"}.get(fault, bad)
    assert await refusal_of(store, arrival(good, wrong)) == (NotFound, "content_not_found")
    assert rows(tmp_path) == (0, 0)
    await deliver(store, good)
    await store.close()


async def test_a_reference_whose_blob_is_gone_is_not_found(tmp_path: Path) -> None:
    store = await new_store(tmp_path)
    reference = await put(store, SMALL)
    with database(tmp_path) as other:
        other.execute("delete from blobs")  # without foreign keys, as no sweep does it
    assert await refusal_of(store, arrival(reference.ref)) == (NotFound, "content_not_found")
    assert rows(tmp_path) == (0, 0)
    await store.close()


@pytest.mark.requirement("AHP-R41")
async def test_a_reference_serves_any_number_of_events(store: ContentStore) -> None:
    reference = await put(store, LARGE)
    for event_id in ("first", "second"):
        await deliver(store, reference.ref, event_id=event_id)
        assert await read(store, reference.ref, event_id) == LARGE
    assert await store.events.using("a", reference.ref) == ["first", "second"]
    assert await store.events.using("b", reference.ref) == []
    assert await store.events.using("a", "\0") == []


async def test_a_second_arrival_gives_the_first_and_stores_nothing(
    store: ContentStore, tmp_path: Path
) -> None:
    reference = await put(store, SMALL)
    first = await deliver(store, reference.ref)
    await store.events.settle("a", "evt_1", "done", b'{"effects":[]}')
    await store.remove("a", reference.ref)
    again, is_new = await store.events.accept(arrival(reference.ref, principal="bob"))
    assert not is_new
    assert (again.position, again.principal) == (first.position, "alice")
    assert (again.outcome, again.result) == ("done", b'{"effects":[]}')
    assert rows(tmp_path) == (1, 1)


async def test_an_id_with_another_message_is_a_conflict(store: ContentStore) -> None:
    first = await deliver(store)
    changed = arrival(message=b"{}")
    assert await refusal_of(store, changed) == (Conflict, "event_mismatch")
    assert await store.events.find("a", "evt_1") == first


async def test_two_scopes_may_use_one_id(store: ContentStore) -> None:
    mine, theirs = await deliver(store), await deliver(store, scope="b", message=b"{}")
    assert await store.events.find("a", "evt_1") == mine
    assert await store.events.find("b", "evt_1") == theirs


async def test_arrivals_of_one_event_at_once_store_it_once(
    store: ContentStore, tmp_path: Path
) -> None:
    reference = await put(store, SMALL)
    accepted = await asyncio.gather(
        *(store.events.accept(arrival(reference.ref)) for _ in range(20))
    )
    assert sum(is_new for _, is_new in accepted) == 1
    assert len({event.position for event, _ in accepted}) == 1
    assert rows(tmp_path) == (1, 1)


async def test_a_delivery_that_is_cancelled_can_be_repeated(
    store: ContentStore, tmp_path: Path
) -> None:
    reference = await put(store, SMALL)
    for turns in range(8):
        given = arrival(reference.ref, event_id=f"evt_{turns}")
        task = asyncio.create_task(store.events.accept(given))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        event, _ = await store.events.accept(given)
        assert event.attachments[0].sha256 == sha256(SMALL)
    assert rows(tmp_path) == (8, 8)


@pytest.mark.parametrize("name", ["event_id", "scope", "principal"])
async def test_what_no_database_takes_as_text_is_malformed(store: ContentStore, name: str) -> None:
    for value in ("a\0b", "\ud800"):
        given = arrival(**{name: value}, message=b"{}")
        assert await refusal_of(store, given) == (Malformed, f"{name}_invalid")


async def test_an_id_may_have_a_kilobyte(store: ContentStore) -> None:
    longest = "é" * (MAX_EVENT_ID_BYTES // 2)
    await deliver(store, event_id=longest)
    too_long = arrival(event_id=longest + "x")
    assert await refusal_of(store, too_long) == (Malformed, "event_id_invalid")


async def test_an_event_may_use_more_than_one_statement_asks_for(
    store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "LOOKED_UP_AT_ONCE", 3)
    refs = [(await put(store, bytes([n]))).ref for n in range(10)]
    event = await deliver(store, *refs)
    assert [attached.ref for attached in event.attachments] == refs
    assert await store.events.find("a", "evt_1") == event


# A batch


MESSAGES = {
    b"[0]": [],
    b"[1]": ["a1"],
    b"[2]": ["a2", "a1"],
    b"[3]": ["b1"],
    b"[4]": ["a1", "gone"],
}
"""Messages, and what is referred to in each of them."""

deliveries = st.fixed_dictionaries(
    {
        "scope": st.sampled_from(["a", "b"]),
        "event_id": st.sampled_from(["1", "2", "3"]),
        "message": st.sampled_from(sorted(MESSAGES)),
    }
)


class Twins:
    """The same contents in scopes of one's own."""

    def __init__(self, store: ContentStore, name: str, references: dict[str, str]) -> None:
        self._store = store
        self._name = name
        self._references = references

    @classmethod
    async def of(cls, store: ContentStore, name: str) -> Twins:
        owners = {"a1": "a", "a2": "a", "b1": "b"}
        return cls(
            store,
            name,
            {ref: (await put(store, SMALL, name + scope)).ref for ref, scope in owners.items()},
        )

    def arrival(self, scope: str, event_id: str, message: bytes) -> Arrival:
        refs = [self._references.get(ref, f"ref_{'x' * 32}") for ref in MESSAGES[message]]
        return arrival(*refs, scope=self._name + scope, event_id=event_id, message=message)

    async def accept(self, batch: list[Arrival]) -> list[object]:
        told = await self._store._catalogue.write(
            lambda connection: accept_all(connection, batch, int(time.time()), None)
        )
        return [
            outcome.code if isinstance(outcome, Refusal) else (outcome[0].message, outcome[1])
            for outcome in told
        ]

    async def kept(self) -> list[tuple[str, list[str]]]:
        names = {ref: name for name, ref in self._references.items()}
        return [
            (event.event_id, [names[attached.ref] for attached in event.attachments])
            for scope in "ab"
            for event in await self._store.events.page(self._name + scope)
        ]


def test_a_batch_is_told_what_each_would_be_told_alone(tmp_path: Path) -> None:
    migrate(store_settings(tmp_path))
    numbers = iter(range(10_000))

    async def compare(given: list[dict[str, Any]]) -> None:
        store = await ContentStore.start(store_settings(tmp_path))
        number = next(numbers)
        together = await Twins.of(store, f"together-{number}-")
        alone = await Twins.of(store, f"alone-{number}-")
        told = await together.accept([together.arrival(**one) for one in given])
        one_by_one = [(await alone.accept([alone.arrival(**one)]))[0] for one in given]
        assert told == one_by_one
        assert await together.kept() == await alone.kept()
        await store.close()

    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(given=st.lists(deliveries, max_size=12))
    def check(given: list[dict[str, Any]]) -> None:
        asyncio.run(compare(given))

    check()


# Settling


async def test_an_event_is_settled_once(store: ContentStore) -> None:
    await deliver(store)
    await store.events.settle("a", "evt_1", "timed_out", None)
    await store.events.settle("a", "evt_1", "done", b"{}")
    event = await store.events.find("a", "evt_1")
    assert (event.outcome, event.result) == ("timed_out", None)
    assert (await store.events.page("a"))[0].outcome == "timed_out"


@pytest.mark.requirement("AHP-R36")
@pytest.mark.parametrize(
    ("scope", "event_id"), [("b", "evt_1"), ("a", "evt_2"), ("a", "\0"), ("\ud800", "evt_1")]
)
async def test_a_foreign_event_is_an_unknown_one(
    store: ContentStore, scope: str, event_id: str
) -> None:
    reference = await put(store, SMALL)
    await deliver(store, reference.ref)
    for asking in (
        store.events.find(scope, event_id),
        store.events.settle(scope, event_id, "done", None),
    ):
        with pytest.raises(NotFound) as refusal:
            await asking
        assert refusal.value.code == "event_not_found"
    with pytest.raises(NotFound) as refusal:
        await read(store, reference.ref, event_id, scope)
    assert refusal.value.code == "content_not_found"
    assert await store.events.page("\ud800") == await store.events.latest("\0", 1) == []


# The bytes


@pytest.mark.requirement("AHP-R38", "AHP-R43", "AHP-R44")
@pytest.mark.parametrize("data", [SMALL, LARGE, b""], ids=["small", "large", "empty"])
async def test_bytes_that_an_event_uses_outlast_their_reference(
    data: bytes, store: ContentStore, tmp_path: Path
) -> None:
    used, unused = await put(store, data), await put(store, b"unused")
    await deliver(store, used.ref)
    for reference in (used, unused):
        await store.remove("a", reference.ref)
    report = await store.sweep()
    assert (report.blobs, report.bytes) == (1, len(b"unused"))
    assert await read(store, used.ref) == data
    with pytest.raises(NotFound):
        await store.resolve("a", used.ref)
    assert await refusal_of(store, arrival(used.ref, event_id="evt_2")) == (
        NotFound,
        "content_not_found",
    )
    assert count(tmp_path, "blobs") == 1


async def test_bytes_go_with_the_last_event_that_uses_them(
    tmp_path: Path, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "PAGE", 2)
    store = await new_store(
        tmp_path, retention=timedelta(hours=1), event_retention=timedelta(hours=2)
    )
    reference = await put(store, LARGE)
    for event_id in "abcde":
        await deliver(store, reference.ref, event_id=event_id)
    advance(3601)
    assert await store.sweep() == SweepReport(expired=1)
    assert await read(store, reference.ref, "c") == LARGE
    advance(7201)
    assert await store.sweep(dry_run=True) == SweepReport(dry_run=True, events=5)
    assert await read(store, reference.ref, "c") == LARGE
    assert await store.sweep() == SweepReport(events=5, blobs=1, bytes=len(LARGE))
    assert rows(tmp_path) == (0, 0)
    assert published(tmp_path) == []
    with pytest.raises(NotFound):
        await store.events.find("a", "c")
    await store.close()


async def test_an_event_never_ends_without_a_retention(
    store: ContentStore, advance: Advance
) -> None:
    reference = await put(store, SMALL)
    await deliver(store, reference.ref)
    advance(100 * 365 * 86400)
    assert await store.sweep() == SweepReport()
    assert await read(store, reference.ref) == SMALL


async def test_an_event_gives_ranges_of_what_it_uses(store: ContentStore) -> None:
    reference = await put(store, LARGE)
    other = await put(store, SMALL)
    await deliver(store, reference.ref)
    assert await read(store, reference.ref, start=5, stop=5000) == LARGE[5:5000]
    assert await read(store, reference.ref, start=10_000, stop=10**9) == LARGE[10_000:]
    with pytest.raises(ValueError, match="negative"):
        await read(store, reference.ref, start=-1)
    with pytest.raises(ValueError, match="negative"):
        store.events.read(reference, stop=-1)
    with pytest.raises(NotFound):
        await read(store, other.ref)
    assert await get(store, other.ref) == SMALL


@pytest.mark.requirement("AHP-R36")
async def test_a_reference_that_an_event_keeps_is_found_in_its_scope_alone(
    store: ContentStore,
) -> None:
    live, kept = await put(store, LARGE), await put(store, SMALL)
    event = await deliver(store, kept.ref, principal="bob")
    await store.remove("a", kept.ref)
    assert await store.events.resolve("a", live.ref) == live
    found = await store.events.resolve("a", kept.ref)
    assert (found.ref, found.size, found.sha256) == (kept.ref, kept.size, kept.sha256)
    assert (found.scope, found.principal, found.created_at) == ("a", "bob", event.received_at)
    async with store.events.read(found, start=1) as content:
        assert b"".join([chunk async for chunk in content]) == SMALL[1:]
    for scope, ref in (("b", live.ref), ("b", kept.ref), ("a", "ref_x"), ("a", "\0")):
        with pytest.raises(NotFound) as refusal:
            await store.events.resolve(scope, ref)
        assert refusal.value.code == "content_not_found"


async def test_bytes_that_went_since_they_were_looked_up_are_not_found(
    store: ContentStore,
) -> None:
    reference = await put(store, LARGE)
    await store.remove("a", reference.ref)
    await store.sweep()
    with pytest.raises(NotFound) as refusal:
        async with store.events.read(reference):
            pytest.fail("there is nothing to read")
    assert refusal.value.code == "content_not_found"


# fsck, and the database


@pytest.mark.requirement("AHP-R40")
async def test_fsck_counts_events_among_what_damage_hits(
    store: ContentStore, tmp_path: Path
) -> None:
    reference = await put(store, LARGE)
    for event_id in "ab":
        await deliver(store, reference.ref, event_id=event_id)
    (path,) = published(tmp_path)
    path.write_bytes(LARGE[::-1])
    (finding,) = [finding async for finding in store.verify()]
    assert (finding.kind, finding.references) == ("wrong_digest", 3)


async def test_fsck_finds_an_event_whose_body_has_no_row(
    store: ContentStore, tmp_path: Path
) -> None:
    reference = await put(store, SMALL)
    await deliver(store, reference.ref)
    await store.remove("a", reference.ref)
    with database(tmp_path) as other:
        other.execute("delete from blobs")  # without foreign keys, as no sweep does it
    (finding,) = [finding async for finding in store.verify()]
    assert (finding.kind, finding.references) == ("dangling_reference", 1)


def test_the_rows_of_events_are_among_those_that_keep_blobs() -> None:
    assert "event_refs.blob_id" in {str(column) for column, _ in referring_columns()}


LOOK_UPS = "_find _find_all _page _latest _attached _live_bodies _kept _kept_by_event _using"
VALUES: dict[str, Any] = {
    "ids": ["1", "2"],
    "events": [1, 2],
    "refs": ["x", "y"],
    "scope": "a",
    "event_id": "1",
    "ref": "x",
    "after": 0,
    "limit": 9,
    "now": 0,
}


@pytest.mark.parametrize("name", LOOK_UPS.split())
async def test_every_look_up_uses_an_index_of_sqlite(tmp_path: Path, name: str) -> None:
    migrate(sqlite_settings(tmp_path))
    engine = create_engine(f"sqlite:///{tmp_path / 'consignee.db'}")
    statement = getattr(events_module, name)
    wanted = {key: VALUES[key] for key in VALUES if key in statement.compile().params}
    with engine.connect() as connection:
        event.listen(connection, "before_cursor_execute", _explained, retval=True)
        steps = [row[3] for row in connection.execute(statement, wanted).cursor.fetchall()]
    engine.dispose()
    assert steps
    assert [step for step in steps if step.startswith("SCAN") and "CONSTANT ROW" not in step] == []


def _explained(*given: Any) -> tuple[str, Any]:
    return f"explain query plan {given[2]}", given[3]
