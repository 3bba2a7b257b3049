"""Backups and copies of a store whose server goes on working."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest

from app.settings import Settings
from app.store import ContentStore, migrate
from tests import backends
from tests.e2e.processes import ROOT, RunningServer, running_server
from tests.objects import CREDENTIALS, object_server, stored_objects
from tests.store.moves import findings, in_store, rows_of
from tests.store.stores import get

SECONDS = 60
BODY_BYTES = 100_000
"""Too large for a row."""

BACKUPS = 2


class Load:
    """Uploads, and sessions that come and go with their files, until it is ended."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._is_over = threading.Event()
        self._confirmed: dict[str, bytes] = {}
        self.troubles: list[str] = []

    @contextmanager
    def running(self) -> Iterator[Load]:
        works = (self._upload, self._upload, self._come_and_go, self._come_and_go)
        threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()
        assert self.troubles == []

    def confirmed(self) -> dict[str, bytes]:
        """The references that are confirmed by now, with the digests of their bytes."""
        return dict(self._confirmed)

    def wait_for(self, count: int) -> None:
        """Until so many more uploads are confirmed."""
        goal, deadline = len(self._confirmed) + count, monotonic() + SECONDS
        while len(self._confirmed) < goal:
            assert monotonic() < deadline, self.troubles
            sleep(0.01)

    def _repeat(self, work: Callable[[httpx.Client], None]) -> None:
        headers = {"Authorization": f"Bearer {self._server.token}"}
        with httpx.Client(base_url=self._server.url, headers=headers, timeout=SECONDS) as client:
            while not self._is_over.is_set():
                try:
                    work(client)
                except (httpx.HTTPError, AssertionError) as trouble:
                    self.troubles.append(repr(trouble))
                    return

    def _upload(self, client: httpx.Client) -> None:
        body = os.urandom(BODY_BYTES)
        answer = client.post(self._server.upload_endpoint, content=body, headers=framed(body))
        assert answer.status_code == 201, answer.text
        self._confirmed[answer.json()["ref"]] = hashlib.sha256(body).digest()

    def _come_and_go(self, client: httpx.Client) -> None:
        session = client.post("/v1/sessions", json={}).json()
        body = os.urandom(BODY_BYTES)
        path = f"/v1/containers/{session['container_id']}/files/a.bin"
        kept = client.put(path, content=body, headers=framed(body))
        assert kept.status_code == 201, kept.text
        gone = client.delete(f"/v1/sessions/{session['id']}")
        assert gone.is_success, gone.text


def framed(body: bytes) -> dict[str, str]:
    """The head of raw octets."""
    return {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }


@contextmanager
def serving(data_dir: Path) -> Iterator[RunningServer]:
    """A server on SQLite and files, whatever the other tests run on, that sweeps all the time."""
    environment = {
        "CONSIGNEE_DATABASE_URL": f"sqlite:///{data_dir / 'consignee.db'}",
        "CONSIGNEE_BLOB_URL": f"file://{data_dir / 'blobs'}",
        "CONSIGNEE_SWEEP_INTERVAL_SECONDS": "1",
    }
    with running_server("--data-dir", str(data_dir), environment=environment) as server:
        yield server


def command(*words: str) -> subprocess.Popen[str]:
    """`consignee WORDS…`, begun, without any setting but those it names."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CONSIGNEE_")}
    environment = kept | CREDENTIALS | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "app.cli", *words]
    return subprocess.Popen(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def done(process: subprocess.Popen[str]) -> str:
    """What a command said that ended well."""
    output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors + output
    return output


def sqlite_store(data_dir: Path) -> Settings:
    url = f"sqlite:///{data_dir / 'consignee.db'}"
    return Settings(data_dir=data_dir, database_url=url, blob_url=f"file://{data_dir / 'blobs'}")


def digests_of(settings: Settings) -> dict[str, bytes]:
    """Every reference of a store, and the digest of what it really gives."""

    async def read(store: ContentStore) -> dict[str, bytes]:
        listed = (await rows_of(settings))["content_refs"]
        owners = {row[1]: row[2] for row in listed}
        bodies = {ref: await get(store, ref, scope) for ref, scope in owners.items()}
        return {ref: hashlib.sha256(body).digest() for ref, body in bodies.items()}

    return in_store(settings, read)


def test_a_backup_under_load_has_every_reference_with_its_bytes(tmp_path: Path) -> None:
    data_dir = tmp_path / "live"
    confirmed: list[dict[str, bytes]] = []
    with serving(data_dir) as server, Load(server).running() as load:
        for number in range(BACKUPS):
            load.wait_for(20)
            confirmed.append(load.confirmed())
            folder = str(tmp_path / f"backup-{number}")
            done(command("backup", "--data-dir", str(data_dir), folder))
    for number, known in enumerate(confirmed):
        back = tmp_path / f"back-{number}"
        folder = str(tmp_path / f"backup-{number}")
        assert "no damage" in done(command("restore", "--data-dir", str(back), folder))
        assert "no damage" in done(command("fsck", "--data-dir", str(back)))
        found = digests_of(sqlite_store(back))
        assert found.items() >= known.items()
        assert in_store(sqlite_store(back), findings) == []


@pytest.mark.component("seaweedfs")
def test_a_live_copy_that_is_killed_goes_on_and_the_last_one_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    data_dir = tmp_path / "live"
    goal = Settings(
        data_dir=tmp_path / "goal",
        database_url=backends.new_database(f"moving_{os.getpid()}"),
        blob_url=object_server().blob_url(),
    )
    migrate(goal)
    (tmp_path / "goal.toml").write_text(
        f'data_dir = "goal"\ndatabase_url = "{goal.database_url}"\nblob_url = "{goal.blob_url}"\n'
    )
    words = ("copy", "--data-dir", str(data_dir), "--to", str(tmp_path / "goal.toml"))
    with serving(data_dir) as server, Load(server).running() as load:
        load.wait_for(60)
        kill_in_the_middle(command(*words), goal)
        load.wait_for(5)
        process = command(*words)
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode in (0, 1), errors
        assert process.returncode == 0 or "copy once more" in output
    output = done(command(*words, "--verify"))
    assert "verified: no damage" in output
    assert asyncio.run(rows_of(goal)) == asyncio.run(rows_of(sqlite_store(data_dir)))
    assert digests_of(goal) == load.confirmed()


def kill_in_the_middle(process: subprocess.Popen[str], goal: Settings) -> None:
    """Kill a copy once it has brought a few bodies."""
    deadline = monotonic() + SECONDS
    while len(stored_objects(goal.blobs)) < 3:
        assert monotonic() < deadline
        assert process.poll() is None, process.communicate()
    process.kill()
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
