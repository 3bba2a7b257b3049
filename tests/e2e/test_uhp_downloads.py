"""Downloads of a real server: behind nginx that sends the files itself, and by clients that go."""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import httpx
import pytest

from tests.backends import bodies_of
from tests.e2e.processes import RunningServer, running_server
from tests.e2e.proxies import Ports, in_front

BODY = bytes(range(256)) * 4096
SECONDS = 60


@dataclass(frozen=True, slots=True)
class Shelf:
    """A running server with a session to put artifacts in."""

    server: RunningServer
    container_id: str

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.server.token}"}

    def put(self, path: str, content: bytes) -> str:
        """Hand an artifact in; the path of its download."""
        answer = httpx.put(
            f"{self.server.url}/v1/containers/{self.container_id}/files/{path}",
            content=content,
            headers={
                **self.authorization,
                "Content-Type": "application/octet-stream",
                "AHP-Content-SHA256": hashlib.sha256(content).hexdigest(),
            },
            timeout=SECONDS,
        )
        assert answer.status_code == 201, answer.text
        return f"/v1/containers/{self.container_id}/files/{answer.json()['id']}/content"

    def open_blobs(self) -> list[str]:
        """The stored bodies that the server has open now."""
        folder = Path(f"/proc/{self.server.process.pid}/fd")
        targets = []
        for descriptor in folder.iterdir():
            try:
                targets.append(os.readlink(descriptor))
            except FileNotFoundError:
                continue
        return [target for target in targets if "/blobs/" in target]


def shelf_of(server: RunningServer) -> Shelf:
    created = httpx.post(
        f"{server.url}/v1/sessions", headers={"Authorization": f"Bearer {server.token}"}
    )
    return Shelf(server, created.json()["container_id"])


# Behind nginx


@dataclass(frozen=True, slots=True)
class Accelerated:
    shelf: Shelf
    proxy: httpx.Client


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Accelerated]:
    data = tmp_path_factory.mktemp("data")
    in_files = f"file://{data / 'blobs'}"
    environment = {"CONSIGNEE_ACCEL": "nginx", "CONSIGNEE_BLOB_URL": in_files}
    with running_server("--data-dir", str(data), environment=environment) as server:
        upstream = urlsplit(server.url).netloc
        with in_front("nginx", upstream, Ports.free(), blobs=data / "blobs") as front:
            shelf = shelf_of(server)
            with httpx.Client(
                base_url=front.url,
                verify=front.trust(),
                headers=shelf.authorization,
                timeout=SECONDS,
            ) as proxy:
                yield Accelerated(shelf, proxy)


pytestmark = pytest.mark.xdist_group("uhp downloads")


@pytest.mark.component("nginx")
@pytest.mark.requirement("UHP-18", "UHP-21", "UHP-22")
def test_nginx_sends_what_the_server_would(accelerated: Accelerated) -> None:
    path = accelerated.shelf.put("out/Grüße.html", BODY)
    told = httpx.get(accelerated.shelf.server.url + path, headers=accelerated.shelf.authorization)
    assert told.headers["x-accel-redirect"].startswith("/_consignee/blobs/")
    sent = accelerated.proxy.get(path)
    assert sent.status_code == 200
    assert sent.content == BODY
    assert "x-accel-redirect" not in sent.headers
    assert "last-modified" not in sent.headers
    assert sent.headers["content-length"] == str(len(BODY))
    for name in (
        "content-type",
        "content-disposition",
        "content-security-policy",
        "cross-origin-resource-policy",
        "cache-control",
        "etag",
        "repr-digest",
        "x-content-type-options",
        "uhp-version",
    ):
        assert sent.headers.get_list(name) == told.headers.get_list(name), name
    assert sent.headers.get_list("accept-ranges") == ["bytes"]
    assert len(sent.headers.get_list("x-request-id")) == 1
    head = accelerated.proxy.head(path)
    assert head.headers["content-length"] == str(len(BODY))
    assert head.headers["etag"] == sent.headers["etag"]


@pytest.mark.component("nginx")
@pytest.mark.requirement("B44", "B47")
def test_nginx_sends_ranges_and_refusals_stay_ours(accelerated: Accelerated) -> None:
    path = accelerated.shelf.put("ranges.bin", BODY)
    etag = accelerated.proxy.head(path).headers["etag"]
    part = accelerated.proxy.get(path, headers={"Range": "bytes=-100", "If-Range": etag})
    assert (part.status_code, part.content) == (206, BODY[-100:])
    assert part.headers["content-range"] == f"bytes {len(BODY) - 100}-{len(BODY) - 1}/{len(BODY)}"
    assert part.headers["etag"] == etag
    assert part.headers["x-content-type-options"] == "nosniff"
    stale = accelerated.proxy.get(path, headers={"Range": "bytes=-100", "If-Range": '"old"'})
    assert (stale.status_code, stale.content) == (200, BODY)
    ignored = accelerated.proxy.get(path, headers={"Range": "bytes=5-4"})
    assert (ignored.status_code, ignored.content) == (200, BODY)
    several = accelerated.proxy.get(path, headers={"Range": "bytes=0-1,10-11"})
    assert several.headers["content-type"].startswith("multipart/byteranges")
    beyond = accelerated.proxy.get(path, headers={"Range": f"bytes={len(BODY)}-"})
    assert beyond.status_code == 416
    assert beyond.json()["error"]["code"] == "consignee_range_not_satisfiable"
    assert beyond.headers["content-range"] == f"bytes */{len(BODY)}"
    known = accelerated.proxy.get(path, headers={"If-None-Match": etag})
    assert (known.status_code, known.content) == (304, b"")
    matching = accelerated.proxy.get(path, headers={"If-Match": etag})
    assert matching.content == BODY


@pytest.mark.component("nginx")
@pytest.mark.requirement("UHP-29")
def test_nobody_reaches_the_files_of_nginx_directly(accelerated: Accelerated) -> None:
    path = accelerated.shelf.put("secret.bin", BODY)
    told = httpx.get(accelerated.shelf.server.url + path, headers=accelerated.shelf.authorization)
    assert accelerated.proxy.get(told.headers["x-accel-redirect"]).status_code == 404
    stranger = httpx.get(accelerated.shelf.server.url + path)
    assert stranger.status_code == 401
    assert "x-accel-redirect" not in stranger.headers


# Clients that go


@pytest.fixture
def shelf_of_files(tmp_path: Path) -> Iterator[Shelf]:
    """One whose bodies are files, whatever the other tests run on."""
    environment = {"CONSIGNEE_BLOB_URL": f"file://{tmp_path / 'blobs'}"}
    with running_server(environment=environment) as server:
        yield shelf_of(server)


def test_a_client_that_goes_leaves_no_file_open(shelf_of_files: Shelf) -> None:
    shelf = shelf_of_files
    path = shelf.put("large.bin", BODY * 64)
    address = urlsplit(shelf.server.url)
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET {path} HTTP/1.1\r\nHost: x\r\n"
        request += "".join(f"{name}: {value}\r\n" for name, value in shelf.authorization.items())
        client.sendall(request.encode() + b"\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert len(shelf.open_blobs()) == 1
    deadline = monotonic() + SECONDS
    while shelf.open_blobs():
        assert monotonic() < deadline, "the file is still open"
        sleep(0.01)


@pytest.mark.requirement("B62")
def test_an_archive_that_fails_is_cut_on_the_wire(tmp_path: Path) -> None:
    with running_server("--data-dir", str(tmp_path / "data")) as server:
        shelf = shelf_of(server)
        shelf.put("1", BODY * 8)
        shelf.put("2", BODY)
        digest = hashlib.sha256(BODY).hexdigest()
        (lost,) = [path for path in bodies_of(tmp_path / "data") if path.name.startswith(digest)]
        lost.unlink()
        sessions = httpx.get(f"{server.url}/v1/sessions", headers=shelf.authorization).json()
        (session,) = sessions["sessions"]
        address = urlsplit(server.url)
        assert address.hostname is not None
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=SECONDS)
        target = f"/v1/sessions/{session['id']}/files/archive"
        connection.request("GET", target, headers=shelf.authorization)
        answer = connection.getresponse()
        assert answer.status == 200
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
        connection.close()
