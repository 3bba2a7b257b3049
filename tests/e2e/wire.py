"""The other end of the wire: octets as a test wants them, and what the receiver makes of them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import select
import socket
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import urlsplit

from app.settings import Settings
from app.store.content import ContentStore
from app.store.records import Usage
from tests import backends
from tests.e2e.processes import RunningServer, running_server

T = TypeVar("T")

KIB = 1024
MIB = 1024 * KIB
SECONDS = 60
"""Long enough for a busy machine: it keeps a test from hanging, nothing is measured by it."""

UPLOADER = "uploader-token"
READER = "reader-token"
OTHER_PATH = "/tenants/a/upload"

_CONFIGURATION = f"""
upload_paths = ["/ahp/uploads", "{OTHER_PATH}"]

[[tokens]]
name = "uploader"
scope = "uploads"
token_sha256 = "{hashlib.sha256(UPLOADER.encode()).hexdigest()}"

[[tokens]]
name = "reader"
scope = "uploads"
permissions = ["refs.read"]
token_sha256 = "{hashlib.sha256(READER.encode()).hexdigest()}"
"""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer as it came over the wire; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The reason that a problem document gives."""
        assert self.headers["content-type"] == "application/problem+json"
        code: str = self.json["code"]
        return code


class Wire:
    """One TCP connection to the receiver."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        address = (str(parts.hostname), int(parts.port or 80))
        self.socket = socket.create_connection(address, timeout=SECONDS)
        self._pending = b""

    def send(self, *data: bytes) -> None:
        for part in data:
            self.socket.sendall(part)

    def finish(self) -> None:
        """Send FIN, and stay to read."""
        self.socket.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Send RST, as a process does that dies with the connection open."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def response(self) -> Response:
        """The next answer; raises AssertionError where there is none."""
        response = self._next()
        assert response is not None, "the receiver closed without an answer"
        return response

    def until_closed(self) -> list[Response]:
        """Every answer up to the receiver's FIN."""
        found = []
        while (response := self._next()) is not None:
            found.append(response)
        return found

    def _next(self) -> Response | None:
        while b"\r\n\r\n" not in self._pending:
            if not self._more():
                assert self._pending == b"", self._pending
                return None
        head, _, self._pending = self._pending.partition(b"\r\n\r\n")
        status, headers = _parse_head(head)
        size = int(headers.get("content-length", 0))
        while len(self._pending) < size:
            assert self._more(), "the answer ended early"
        body, self._pending = self._pending[:size], self._pending[size:]
        return Response(status, headers, body)

    def _more(self) -> bool:
        data = self.socket.recv(64 * KIB)
        self._pending += data
        return bool(data)

    def has_arrived(self, *, within: float) -> bool:
        """Whether something can be read, now or `within` so many seconds."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(self._pending or poll.poll(within * 1000))

    def interim(self) -> bytes:
        """The next head, which has no body: 100 Continue."""
        while b"\r\n\r\n" not in self._pending:
            assert self._more(), "the receiver closed without an answer"
        head, _, self._pending = self._pending.partition(b"\r\n\r\n")
        return head

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("ascii").split("\r\n")
    status = re.fullmatch(r"HTTP/1\.1 ([0-9]{3}) .*", first)
    assert status is not None, first
    pairs = [line.split(": ", 1) for line in lines]
    headers = {name.lower(): value for name, value in pairs}
    assert len(headers) == len(pairs), f"a header appears twice: {pairs}"
    return int(status[1]), headers


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def upload_headers(body: bytes, token: str | None = UPLOADER) -> dict[str, str]:
    """The headers that an upload of `body` needs, apart from those of every request."""
    headers = {
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(body)),
        "AHP-Content-SHA256": digest(body),
    }
    return headers if token is None else headers | {"Authorization": f"Bearer {token}"}


def head(
    headers: Mapping[str, str | None], *extra: bytes, line: str = "POST /ahp/uploads HTTP/1.1"
) -> bytes:
    """A request head of `headers` (None leaves one out) and of `extra` lines as they stand."""
    pairs = {"Host": "receiver.example"} | dict(headers)
    lines = [f"{name}: {value}".encode("latin-1") for name, value in pairs.items() if value]
    return b"\r\n".join([line.encode("latin-1"), *lines, *extra, b"", b""])


def upload(body: bytes, *extra: bytes, token: str | None = UPLOADER) -> bytes:
    """A whole valid upload, with `extra` header lines."""
    return head(upload_headers(body, token), *extra) + body


@dataclass(frozen=True, slots=True)
class Receiver:
    """A running receiver, and what it has stored."""

    server: RunningServer
    data_dir: Path

    @property
    def endpoint(self) -> str:
        return self.server.upload_endpoint

    def connect(self) -> Wire:
        return Wire(self.server.url)

    def talk(self, *data: bytes, fin: bool = False) -> list[Response]:
        """Send `data` at once, then read every answer up to the receiver's FIN."""
        with self.connect() as wire:
            wire.send(*data)
            if fin:
                wire.finish()
            return wire.until_closed()

    def usage(self) -> Usage:
        """What is stored, as another process sees it."""

        async def count(store: ContentStore) -> Usage:
            return await store.usage()

        return self._in_store(count)

    def content(self, ref: str, scope: str = "uploads") -> bytes:
        """The bytes of a reference, as another process sees them."""

        async def read(store: ContentStore) -> bytes:
            async with store.open(scope, ref) as content:
                return b"".join([chunk async for chunk in content])

        return self._in_store(read)

    def _settings(self) -> Settings:
        return Settings(data_dir=self.data_dir, **backends.settings_of(self.data_dir))

    def _in_store(self, work: Callable[[ContentStore], Coroutine[Any, Any, T]]) -> T:
        async def run() -> T:
            store = await ContentStore.start(self._settings())
            try:
                return await work(store)
            finally:
                await store.close()

        return asyncio.run(run())

    @contextmanager
    def keeps_nothing(self) -> Iterator[None]:
        """Afterwards exactly that is stored which was before, and nothing is on its way in."""
        before = self.usage()
        yield
        assert self.usage() == before
        self.wait_until_nothing_is_staged()

    def wait_until_nothing_is_staged(self) -> None:
        deadline = monotonic() + SECONDS
        while self.staged():
            assert monotonic() < deadline, f"still staged: {self.staged()}"
            sleep(0.02)

    def staged(self) -> list[str]:
        """The files of bodies on their way in."""
        found = (self.data_dir / "staging").rglob("*")
        return [path.name for path in found if path.is_file() and not path.name.startswith(".")]


@contextmanager
def running_receiver(
    folder: Path, settings: str = "", environment: Mapping[str, str] | None = None
) -> Iterator[Receiver]:
    """A receiver with two upload paths, one token that may upload and one that may not."""
    config = configuration(folder, settings)
    data_dir = folder / "data"
    options = ("--config", str(config), "--data-dir", str(data_dir))
    with running_server(*options, environment=environment) as server:
        yield Receiver(server, data_dir)


def configuration(folder: Path, settings: str = "") -> Path:
    """The configuration file of such a receiver."""
    path = folder / "consignee.toml"
    path.write_text(settings + _CONFIGURATION)
    return path
