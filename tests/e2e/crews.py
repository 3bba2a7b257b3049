"""`consignee serve` with several workers, and clients of which it is known who answers them."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import httpx

from tests.backends import environment_of
from tests.conformance.peer import SECONDS, Peer
from tests.e2e.processes import RunningServer, running_server

TOKEN = "alice-token"
TOKENS = json.dumps(
    [
        {
            "name": "alice",
            "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(),
            "scope": "alice",
            "permissions": ["ahp.upload", "uhp", "admin", "refs.read", "artifacts.write"],
        }
    ]
)


@dataclass
class Crew:
    """A parent and its workers."""

    server: RunningServer
    data_dir: Path
    opened: ExitStack = field(default_factory=ExitStack)

    @property
    def parent(self) -> int:
        return self.server.process.pid

    def workers(self) -> list[int]:
        """The process ids of the workers, the oldest first."""
        children = Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()
        return [int(pid) for pid in children if b"spawn_main" in _command_line(int(pid))]

    def peer(self, worker: int | None = None, **options: Any) -> Peer:
        """A client with a connection to one worker, or to anybody."""
        limits = httpx.Limits(max_connections=1, keepalive_expiry=SECONDS)
        peer = self.opened.enter_context(
            Peer(self.server.uhp_base_url, TOKEN, limits=limits, **options)
        )
        if worker is not None:
            with alone(worker, self.workers()):
                peer.get("/v1/uhp")
        return peer

    def wait_until(self, is_so: Any, what: str) -> None:
        deadline = monotonic() + SECONDS
        while not is_so():
            assert monotonic() < deadline, f"{what}:\n{self.server.stderr()}"
            sleep(0.05)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


@contextmanager
def alone(worker: int, workers: list[int]) -> Iterator[None]:
    """Nobody but `worker` accepts a connection in the block."""
    others = [pid for pid in workers if pid != worker]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def running_crew(
    data_dir: Path, *arguments: str, workers: int = 2, **settings: Any
) -> Iterator[Crew]:
    """`consignee serve` on `data_dir`, made ready for it, with `settings` as variables."""
    environment = (
        environment_of(data_dir)
        | {"CONSIGNEE_TOKENS": TOKENS}
        | {
            f"CONSIGNEE_{key.upper()}": value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
    )
    line = ("--data-dir", str(data_dir), "--migrate", "--workers", str(workers), *arguments)
    with running_server(*line, environment=environment, command="serve") as server:
        crew = Crew(server, data_dir)
        with crew.opened:
            yield crew


def upload(peer: Peer, endpoint: str, body: bytes) -> httpx.Response:
    """One AHP upload."""
    headers = {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }
    return peer.http.post(endpoint, content=body, headers=headers)
