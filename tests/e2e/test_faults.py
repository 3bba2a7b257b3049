"""A server on PostgreSQL and an S3 server whose engines, disk and workers fail at the wrong moment.

After each fault every upload that was confirmed gives its bytes, and there is no damage, nothing
unfinished and nothing that nobody needs.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from tests.conformance.peer import Peer
from tests.disks import fill, mounted_disk
from tests.e2e import deaths
from tests.e2e.crews import TOKEN, Crew, running_crew, upload
from tests.e2e.wire import Wire, head, upload_headers
from tests.faults import Fault, FaultProxy, proxied
from tests.objects import CREDENTIALS, object_server, stored_objects
from tests.postgres import Cluster, connected
from tests.store.servers import fresh_database, opened, server_settings
from tests.store.stores import get, staged

pytestmark = [
    pytest.mark.xdist_group("faults"),
    pytest.mark.component("seaweedfs"),
    pytest.mark.timeout(300),
]

MIB = 1024 * 1024
SCOPE = "alice"
PATIENCE = 60
"""Seconds that a server tries again in tests in which the fault passes: more than any takes."""

CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


@dataclass
class Ground:
    """A database, a prefix in the bucket, and a folder; what was `confirmed` on them."""

    folder: Path
    database_url: str
    prefix: str = field(default_factory=lambda: secrets.token_hex(8))
    confirmed: dict[str, bytes] = field(default_factory=dict, repr=False)

    @property
    def blob_url(self) -> str:
        """The prefix, reached directly."""
        return object_server().blob_url(self.prefix)

    def crew(self, workers: int = 2, **settings: Any) -> AbstractContextManager[Crew]:
        """Workers that keep every body in the bucket."""
        chosen = {
            "database_url": self.database_url,
            "blob_url": self.blob_url,
            "inline_bytes": 0,
            "internal_refs": True,
            "blob_retry_seconds": PATIENCE,
            "database_timeout_seconds": PATIENCE,
        }
        return running_crew(self.folder, workers=workers, **(chosen | settings))

    def confirm(self, crew: Crew, body: bytes) -> None:
        """An upload, which must be confirmed."""
        receipt = upload(crew.peer(), crew.server.upload_endpoint, body)
        assert receipt.status_code == 201, receipt.text
        self.confirmed[receipt.json()["ref"]] = body

    def resolves(self, peer: Peer) -> None:
        """Every confirmed upload gives its bytes."""
        for ref, body in self.confirmed.items():
            assert peer.http.get(f"/internal/refs/{ref}").content == body

    def is_whole(self) -> None:
        """The same for the next process, and there is nothing but what the records name."""
        asyncio.run(self._is_whole())

    async def _is_whole(self) -> None:
        # The S3 server tells whole seconds, rounded down: every orphan is old enough at once.
        settings = server_settings(
            self.folder, self.database_url, blob_url=self.blob_url, orphan_age_seconds=1e-9
        )
        async with opened(settings) as store:
            assert {ref: await get(store, ref, SCOPE) for ref in self.confirmed} == self.confirmed
            await store.sweep()
            assert [finding async for finding in store.verify()] == []
            assert {ref: await get(store, ref, SCOPE) for ref in self.confirmed} == self.confirmed
        assert staged(self.folder) == []
        with connected(self.database_url) as rows:
            named = rows.execute("select location from blobs where location is not null")
        assert sorted(found.name for found in stored_objects(self.blob_url)) == sorted(
            location for (location,) in named
        )


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with fresh_database(f"faults_{secrets.token_hex(8)}") as url:
        yield Ground(tmp_path / "data", url)


# Workers that are killed


@pytest.fixture
def mortal(ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """Workers that die where a test says so; see `deaths`."""
    monkeypatch.setenv(deaths.FOLDER, str(tmp_path))
    with ground.crew(workers=3, event_handler=deaths.HANDLER) as crew:
        yield crew


@contextmanager
def killed(folder: Path, moment: str, step: str) -> Iterator[None]:
    """In the block a worker dies, and takes an answer with it."""
    order = deaths.order(folder, step, moment)
    with pytest.raises(httpx.TransportError):
        yield
    assert not order.exists()


# What is after one step is before the next one.
DEATHS_IN_AN_UPLOAD = (
    ("before", "seal"),
    ("after", "seal"),
    ("after", "publish"),
    ("after", "commit"),
    ("after", "discard"),
)


@pytest.mark.requirement("AHP-R26", "B09", "B73")
def test_a_worker_killed_at_any_step_of_an_upload_costs_nothing_that_was_confirmed(
    ground: Ground, mortal: Crew, tmp_path: Path
) -> None:
    for moment, step in DEATHS_IN_AN_UPLOAD:
        body = os.urandom(10_000)
        with killed(tmp_path, moment, step):
            upload(mortal.peer(), mortal.server.upload_endpoint, body)
        ground.confirm(mortal, body)
    ground.resolves(mortal.peer())
    end(mortal)
    ground.is_whole()


DEATHS_IN_A_TASK = {
    ("before", "accept"): "completed",
    ("after", "accept"): "failed",
    ("after", "prepare"): "failed",
    ("after", "events"): "failed",
    ("before", "artifact"): "failed",
    ("after", "artifact"): "failed",
    ("after", "end"): "completed",
}
"""What becomes of the request when it is sent once more: it is done, and done only once."""


@pytest.mark.requirement("UHP-16", "AHP-R26", "AHP-R38")
def test_a_worker_killed_at_any_step_of_a_task_leaves_it_an_end_and_its_session_usable(
    ground: Ground, mortal: Crew, tmp_path: Path
) -> None:
    ground.confirm(mortal, b"before the deaths")
    ids = []
    for (moment, step), status in DEATHS_IN_A_TASK.items():
        text = f"{moment} {step}"
        request: dict[str, Any] = {
            "json": {"input": f"Create a file named a.txt containing exactly: {text}"},
            "headers": {"Idempotency-Key": text},
        }
        with killed(tmp_path, moment, step):
            mortal.peer().ask("POST", "/v1/responses", **request)
        peer = mortal.peer()
        ended = peer.ask("POST", "/v1/responses", **request).json()
        assert (text, ended["status"]) == (text, status)
        ids.append(ended["id"])
        files = peer.artifacts(ended)
        assert [peer.content(file).text for file in files] == [text] * len(files)
        assert len(files) == 1 or status == "failed"
    peer = mortal.peer()
    began = [peer.run("And now?", previous_response_id=id_, background=True) for id_ in ids]
    assert {peer.follow(each)["status"] for each in began} == {"completed"}
    end(mortal)
    ground.is_whole()


def end(crew: Crew) -> None:
    """The end of the server in order, whatever was killed."""
    crew.server.process.terminate()
    assert crew.server.process.wait(PATIENCE) == 0, crew.server.stderr()


# A database that goes


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    yield started
    started.close()


class Uploaders:
    """Eight clients that upload until they are told to stop, each upload confirmed."""

    def __init__(self, ground: Ground, crew: Crew) -> None:
        self._ground = ground
        self._crew = crew
        self._stop = Event()
        self._working: list[Future[None]] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """They begin, and at the end of the block end what they have begun."""
        with ThreadPoolExecutor(8) as pool:
            self._working = [pool.submit(self._upload) for _ in range(8)]
            try:
                self.wait_for_more(8)
                yield
                self.wait_for_more(16)
            finally:
                self._stop.set()
            for each in self._working:
                each.result()

    def wait_for_more(self, count: int) -> None:
        """Until so many more uploads were confirmed, or one was not."""
        enough = len(self._ground.confirmed) + count

        def is_over() -> bool:
            return self.is_broken or len(self._ground.confirmed) >= enough

        self._crew.wait_until(is_over, "no upload")

    @property
    def is_broken(self) -> bool:
        """Whether one of them had to give up; the end of `at_work` tells why."""
        return any(each.done() for each in self._working)

    def _upload(self) -> None:
        while not self._stop.is_set():
            self._ground.confirm(self._crew, os.urandom(20_000))


@pytest.mark.requirement("AHP-R26", "B73")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["restarted", "crashed"])
def test_uploads_outlast_a_database_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, how: signal.Signals
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    ground = Ground(tmp_path / "data", cluster.url("postgres"))
    body = os.urandom(100_000)
    with ground.crew() as crew, Wire(crew.server.url) as wire:
        with Uploaders(ground, crew).at_work():
            wire.send(head(upload_headers(body, TOKEN)), body[:50_000])
            cluster.stop(how)
            wire.send(body[50_000:])
            cluster.start()
            receipt = wire.response()
        assert receipt.status == 201
        ground.confirmed[receipt.json["ref"]] = body
        ground.resolves(crew.peer())
    ground.is_whole()


@pytest.mark.requirement("AHP-R26", "B73")
def test_uploads_outlast_connections_to_the_database_that_are_cut(ground: Ground) -> None:
    with ground.crew() as crew:
        uploaders = Uploaders(ground, crew)
        with uploaders.at_work(), connected(ground.database_url) as other:
            cut = 0
            while cut < 20 and not uploaders.is_broken:
                cut += len(other.execute(CUT))
                uploaders.wait_for_more(3)
        ground.resolves(crew.peer())
    ground.is_whole()


# An object store that fails


@pytest.fixture
def proxy(ground: Ground) -> Iterator[FaultProxy]:
    with proxied(object_server().address) as running:
        yield running


PASSING = (Fault.ERROR, Fault.BUSY, Fault.SLOW, Fault.RESET, Fault.LOST)


@pytest.mark.requirement("AHP-R26", "B73")
def test_transfers_outlast_every_fault_of_the_object_store_that_passes(
    ground: Ground, proxy: FaultProxy
) -> None:
    behind = object_server().blob_url(ground.prefix, address=proxy.address)
    with ground.crew(workers=1, blob_url=behind) as crew, ThreadPoolExecutor(4) as pool:
        for fault in PASSING:
            with broken(proxy, fault, "PUT /", times=3):
                # The last one goes up in parts.
                sizes = (10_000, 20_000, 300_000, 12 * MIB)
                bodies = [os.urandom(size) for size in sizes]
                list(pool.map(ground.confirm, [crew] * len(bodies), bodies))
        for fault in (*PASSING, Fault.CUT):
            with broken(proxy, fault, "GET /", times=3):
                ground.resolves(crew.peer())
    ground.is_whole()


@contextmanager
def broken(proxy: FaultProxy, fault: Fault, where: str, *, times: int) -> Iterator[None]:
    """In the block the object store fails so many times, and it is well afterwards."""
    happened: list[str] = []

    def rule(line: str) -> Fault | None:
        if where not in line or len(happened) == times:
            return None
        happened.append(line)
        return fault

    proxy.rules.append(rule)
    yield
    proxy.heal()
    assert len(happened) == times


REFUSALS: Sequence[tuple[Fault, str, int, str, int]] = (
    (Fault.ERROR, "", 503, "storage_unavailable", 503),
    (Fault.BUSY, "", 503, "storage_unavailable", 503),
    (Fault.RESET, "", 503, "storage_unavailable", 503),
    (Fault.FULL, "PUT /", 507, "storage_exhausted", 200),
)
"""What fails and where, the status and code of an upload then, the status of a download."""


@pytest.mark.requirement("AHP-R26", "B73")
def test_what_an_object_store_that_stays_broken_refuses_can_be_sent_again(
    ground: Ground, proxy: FaultProxy
) -> None:
    behind = object_server().blob_url(ground.prefix, address=proxy.address)
    with ground.crew(workers=1, blob_url=behind, blob_retry_seconds=0.5) as crew:
        kept, whole = os.urandom(10_000), os.urandom(40 * MIB)
        ground.confirm(crew, kept)
        ground.confirm(crew, whole)
        peer = crew.peer()
        (first, last) = ground.confirmed
        for fault, where, status, code, download in REFUSALS:
            proxy.always(fault, where=where)
            body = os.urandom(10_000)
            refused = upload(peer, crew.server.upload_endpoint, body)
            assert (refused.status_code, refused.json()["code"]) == (status, code)
            assert peer.http.get(f"/internal/refs/{first}").status_code == download
            proxy.heal()
            ground.confirm(crew, body)
        assert begun_and_not_ended(peer, f"/internal/refs/{last}", proxy) < len(whole)
        proxy.heal()
        ground.resolves(peer)
    ground.is_whole()


def begun_and_not_ended(peer: Peer, path: str, proxy: FaultProxy) -> int:
    """How many bytes of a download come when the object store breaks once it has begun."""
    received: list[int] = []
    with peer.http.stream("GET", path) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_raw()
        received.append(len(next(pieces)))
        proxy.always(Fault.ERROR, where="GET /")
        with pytest.raises(httpx.TransportError):
            received.extend(map(len, pieces))
    return sum(received)


# A disk without room


@pytest.mark.component("tmpfs")
@pytest.mark.requirement("B73")
def test_an_upload_without_room_in_staging_is_refused_and_can_be_sent_again(
    ground: Ground, tmp_path: Path
) -> None:
    body = os.urandom(8 * MIB)
    with mounted_disk(ground.folder) as disk:
        with ground.crew(workers=1) as crew:
            ground.confirm(crew, b"with room")
            filler = fill(disk, leave=4 * MIB)
            peer = crew.peer()
            for _ in range(2):
                refused = upload(peer, crew.server.upload_endpoint, body)
                assert (refused.status_code, refused.json()["code"]) == (507, "storage_exhausted")
            ground.confirm(crew, os.urandom(MIB))
            ground.resolves(peer)
            filler.unlink()
            ground.confirm(crew, body)
        ground.is_whole()


# Sweepers


@pytest.mark.requirement("B74", "B76")
def test_two_sweepers_take_nothing_from_eight_uploaders(ground: Ground) -> None:
    shared = [os.urandom(10_000) for _ in range(3)]
    with ground.crew(workers=2, sweep_interval_seconds=0.02) as crew:

        def work(number: int) -> None:
            peer = crew.peer()
            for round_ in range(8):
                there_and_gone(peer, shared[(number + round_) % len(shared)])
                ground.confirm(crew, os.urandom(5_000))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        ground.resolves(crew.peer())
        # What nobody needs is swept by the workers themselves.
        crew.wait_until(
            lambda: len(stored_objects(ground.blob_url)) == len(ground.confirmed), "no sweep"
        )
    assert len(ground.confirmed) == 64
    ground.is_whole()


def there_and_gone(peer: Peer, body: bytes) -> None:
    """An uploaded file, which is there until it is deleted, whoever deletes the same bytes."""
    file = peer.upload("shared.bin", body, "application/octet-stream")
    path = f"/v1/files/{file['id']}"
    assert peer.ask("GET", f"{path}/content").content == body
    peer.delete(path)
