"""A receiver whose PostgreSQL server goes away: what its clients are told, and what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import RunningServer, running_server
from tests.e2e.wire import Response, Wire, head, upload, upload_headers
from tests.postgres import Cluster, connected
from tests.store.servers import opened, server_settings
from tests.store.stores import LARGE, get

TOKEN = "alice-token"
SCOPE = "alice"
CUT = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    started = Cluster()
    yield started
    started.close()


def serving(
    cluster: Cluster, data_dir: Path, patience: float
) -> AbstractContextManager[RunningServer]:
    environment = {
        "CONSIGNEE_DATABASE_URL": cluster.url("postgres"),
        "CONSIGNEE_DATABASE_TIMEOUT_SECONDS": str(patience),
    }
    arguments = ("--data-dir", str(data_dir), "--token", f"{SCOPE}={TOKEN}")
    return running_server(*arguments, environment=environment)


def send(server: RunningServer, body: bytes) -> Response:
    with Wire(server.url) as wire:
        wire.send(upload(body, token=TOKEN))
        return wire.response()


def kept_whole(cluster: Cluster, data_dir: Path, confirmed: Mapping[str, bytes]) -> None:
    """Every confirmed reference gives its bytes, and there is no fault anywhere."""

    async def look() -> None:
        async with opened(server_settings(data_dir, cluster.url("postgres"))) as store:
            assert {ref: await get(store, ref, SCOPE) for ref in confirmed} == confirmed
            assert [finding async for finding in store.verify()] == []

    asyncio.run(look())


@pytest.mark.requirement("AHP-R26", "B73")
def test_a_database_that_goes_away_amid_an_upload_is_503_and_nothing_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    with serving(cluster, tmp_path, patience=0.3) as server:
        first = send(server, LARGE).json["ref"]
        with Wire(server.url) as wire:
            wire.send(head(upload_headers(LARGE[::-1], TOKEN)), LARGE[::-1][:100])
            cluster.stop()
            wire.send(LARGE[::-1][100:])
            answers = [wire.response(), send(server, b"small")]
        assert [(a.status, a.code) for a in answers] == [(503, "storage_unavailable")] * 2
        assert all("retry-after" in answer.headers for answer in answers)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        listed = httpx.get(f"{server.uhp_base_url}/v1/files", headers=headers)
        ready = httpx.get(f"{server.url}/readyz")
        assert (listed.status_code, ready.status_code) == (503, 503)
        assert set(listed.json()["error"]) == {"type", "code", "message", "param", "detail"}
        cluster.start()
        again = send(server, LARGE[::-1])
        assert again.status == 201
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert server.stderr().count("Traceback") == 0, server.stderr()
    kept_whole(cluster, tmp_path, {first: LARGE, again.json["ref"]: LARGE[::-1]})


@pytest.mark.requirement("AHP-R26")
def test_an_upload_outlasts_a_restart_of_the_database(cluster: Cluster, tmp_path: Path) -> None:
    with serving(cluster, tmp_path, patience=60) as server:
        first = send(server, b"before")
        with Wire(server.url) as wire:
            wire.send(head(upload_headers(LARGE, TOKEN)), LARGE[:100])
            cluster.stop()
            wire.send(LARGE[100:])
            cluster.start()
            second = wire.response()
        assert (first.status, second.status) == (201, 201)
    kept_whole(cluster, tmp_path, {first.json["ref"]: b"before", second.json["ref"]: LARGE})


@pytest.mark.requirement("AHP-R26")
def test_connections_that_are_cut_cost_no_client_an_answer(
    cluster: Cluster, tmp_path: Path
) -> None:
    bodies = [b"%d" % number + (LARGE if number % 5 == 0 else b"") for number in range(200)]
    with serving(cluster, tmp_path, patience=60) as server, ThreadPoolExecutor(8) as senders:
        sending = [senders.submit(send, server, body) for body in bodies]
        with connected(cluster.url("postgres")) as other:
            while not all(each.done() for each in sending):
                other.execute(CUT)
                other.execute("select pg_sleep(0.05)")
        answers = [each.result() for each in sending]
    assert {answer.status for answer in answers} == {201}
    confirmed = {a.json["ref"]: body for a, body in zip(answers, bodies, strict=True)}
    kept_whole(cluster, tmp_path, confirmed)
