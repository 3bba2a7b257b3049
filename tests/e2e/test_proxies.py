"""Uploads through Caddy and nginx, with the configuration that is shipped for each."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.processes import RunningServer, running_server
from tests.e2e.proxies import Ports, Proxy, in_front
from tests.e2e.upstreams import RecordingUpstream, headers_of, recording_upstream

MIB = 1024 * 1024
LIMIT = 4 * MIB
PATH = "/ahp/uploads"
SECONDS = 60
"""Long enough for a busy machine: it keeps a test from hanging, nothing is measured by it."""

PARAMETERS = [
    pytest.param("caddy", marks=pytest.mark.component("caddy")),
    pytest.param("nginx", marks=pytest.mark.component("nginx")),
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A proxy, and what arrives behind it."""

    proxy: Proxy
    upstream: RecordingUpstream


@dataclass(frozen=True, slots=True)
class Site:
    """A receiver behind a proxy, as its operator sets it up."""

    proxy: Proxy
    server: RunningServer
    data_dir: Path

    @property
    def endpoint(self) -> str:
        return self.proxy.url + PATH

    def staged(self) -> int:
        """Bytes of bodies that are on their way in."""
        total = 0
        for path in (self.data_dir / "staging").rglob("*"):
            with suppress(FileNotFoundError):  # its upload has just ended
                is_body = path.is_file() and not path.name.startswith(".")
                total += path.stat().st_size if is_body else 0
        return total


@pytest.fixture(params=PARAMETERS)
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    with (
        recording_upstream() as upstream,
        in_front(request.param, upstream.address, Ports.free()) as proxy,
    ):
        yield Recorded(proxy, upstream)


@pytest.fixture(scope="module", params=PARAMETERS)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    ports = Ports.free()
    config = folder / "consignee.toml"
    config.write_text(
        f'public_url = "https://localhost:{ports.https}"\n'
        f'data_dir = "data"\nmax_upload_bytes = {LIMIT}\n'
    )
    with running_server("--config", str(config), "--token", "sender=s3cret") as server:
        upstream = urlsplit(server.url).netloc
        with in_front(request.param, upstream, ports) as proxy:
            yield Site(proxy, server, folder / "data")


def framing(body: bytes, token: str = "s3cret") -> dict[str, str]:
    return {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }


def client(proxy: Proxy, *, http2: bool = False) -> httpx.Client:
    return httpx.Client(verify=proxy.trust(), http2=http2, trust_env=False, timeout=SECONDS)


@contextmanager
def begun_upload(proxy: Proxy, body: bytes, sent: int) -> Iterator[http.client.HTTPSConnection]:
    """A connection on which the head and the first `sent` bytes of an upload have left."""
    host = urlsplit(proxy.url).netloc
    connection = http.client.HTTPSConnection(host, timeout=SECONDS, context=proxy.trust())
    try:
        connection.putrequest("POST", PATH)
        for name, value in framing(body).items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:sent])
        yield connection
    finally:
        connection.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = monotonic() + SECONDS
    while not is_so():
        assert monotonic() < deadline, "it does not come about"
        sleep(0.02)


# --- what the proxy makes of a request ----------------------------------------------------------


@pytest.mark.requirement("AHP-R17", "AHP-R21", "B98")
@pytest.mark.parametrize("size", [0, 1, 8 * MIB], ids=["empty", "a byte", "8 MiB"])
def test_an_upload_keeps_its_framing(recorded: Recorded, size: int) -> None:
    body = b"x" * size
    with client(recorded.proxy) as sender:
        answer = sender.post(recorded.proxy.url + PATH, headers=framing(body), content=body)
    headers = headers_of(recorded.upstream.heads.get(timeout=SECONDS))

    assert answer.status_code == 201
    assert [value for name, value in headers if name == "content-length"] == [str(size)]
    assert not {"transfer-encoding", "content-encoding", "expect"} & dict(headers).keys()
    assert [v for name, v in headers if name == "content-type"] == ["application/octet-stream"]
    for name, value in framing(body).items():
        assert [v for n, v in headers if n == name.lower()] == [value]


@pytest.mark.requirement("AHP-R03")
def test_the_target_arrives_as_the_client_wrote_it(recorded: Recorded) -> None:
    target = "/tenants/a//b%2Fc/upload?x=1&y=%2F"
    with client(recorded.proxy) as sender:
        url = httpx.URL(recorded.proxy.url, raw_path=target.encode())
        sender.post(url, headers=framing(b""), content=b"")
    line, _, _ = recorded.upstream.heads.get(timeout=SECONDS).partition(b"\r\n")

    assert line.decode() == f"POST {target} HTTP/1.1"


@pytest.mark.requirement("B98")
def test_a_body_streams(recorded: Recorded) -> None:
    """The first half arrives while the client has not sent the second."""
    body = b"x" * (2 * MIB)
    arrived = 0
    with begun_upload(recorded.proxy, body, sent=MIB) as connection:
        while arrived < MIB // 2:
            arrived += len(recorded.upstream.bodies.get(timeout=SECONDS))
        connection.send(body[MIB:])
        answer = connection.getresponse()

        assert answer.status == 201


@pytest.mark.requirement("AHP-R04", "AHP-R05")
@pytest.mark.parametrize("path", [PATH, PATH + "/", "/"])
def test_plain_http_is_refused_and_not_redirected(recorded: Recorded, path: str) -> None:
    with client(recorded.proxy) as sender:
        answer = sender.post(recorded.proxy.plain_url + path, headers=framing(b""), content=b"")

    assert answer.status_code == 403
    assert "location" not in answer.headers
    assert recorded.upstream.heads.empty()


# --- the receiver behind the proxy --------------------------------------------------------------


@pytest.mark.requirement("AHP-R25", "B98")
def test_an_upload_gets_its_receipt(site: Site) -> None:
    body = bytes(range(256)) * (LIMIT // 512)
    with client(site.proxy) as sender:
        answer = sender.post(site.endpoint, headers=framing(body), content=body)
    receipt = answer.json()

    assert (answer.status_code, answer.http_version) == (201, "HTTP/1.1")
    assert answer.headers["content-type"] == "application/json"
    assert "content-encoding" not in answer.headers
    assert set(receipt) == {"ref", "size", "sha256"}
    assert receipt["size"] == len(body)
    assert receipt["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.requirement("AHP-R17")
def test_an_upload_over_http2_gets_its_receipt_where_the_proxy_speaks_it(site: Site) -> None:
    body = b"x" * (2 * MIB)
    with client(site.proxy, http2=True) as sender:
        answer = sender.post(site.endpoint, headers=framing(body), content=body)

    assert answer.status_code == 201
    assert answer.json()["size"] == len(body)


@pytest.mark.requirement("B98")
def test_a_body_is_staged_while_it_arrives(site: Site) -> None:
    body = b"x" * LIMIT
    with begun_upload(site.proxy, body, sent=LIMIT - MIB) as connection:
        wait_until(lambda: site.staged() >= MIB)
        connection.send(body[LIMIT - MIB :])

        assert connection.getresponse().status == 201


@pytest.mark.requirement("B09", "B97")
@pytest.mark.parametrize("linger", [None, 0], ids=["FIN", "RST"])
def test_a_client_that_leaves_leaves_nothing_behind(site: Site, linger: int | None) -> None:
    body = b"x" * LIMIT
    with begun_upload(site.proxy, body, sent=LIMIT - MIB) as connection:
        wait_until(lambda: site.staged() >= MIB)
        if linger is not None:
            leave_by_reset(connection)

    wait_until(lambda: site.staged() == 0)
    assert httpx.get(f"{site.server.url}/readyz", trust_env=False).status_code == 200


def leave_by_reset(connection: http.client.HTTPSConnection) -> None:
    """Have the close that follows send RST instead of FIN."""
    plain = connection.sock
    assert isinstance(plain, ssl.SSLSocket)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")


@pytest.mark.requirement("AHP-R29", "B13")
def test_an_early_401_arrives(site: Site) -> None:
    body = b"x" * (8 * MIB)
    with client(site.proxy) as sender:
        answer = sender.post(site.endpoint, headers=framing(body, "wrong"), content=body)

    assert answer.status_code == 401
    assert f'resource_metadata="{metadata_url(site)}"' in answer.headers["www-authenticate"]


@pytest.mark.requirement("AHP-R32", "B13")
def test_an_early_413_arrives(site: Site) -> None:
    body = b"x" * (LIMIT * 2)
    with client(site.proxy) as sender:
        answer = sender.post(site.endpoint, headers=framing(body), content=body)

    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.requirement("AHP-R21")
def test_a_chunked_upload_is_refused_however_it_arrives(site: Site) -> None:
    """In one piece with its head, nginx would otherwise hand it on as if it had had a length."""
    with connected(site.proxy) as connection:
        connection.sendall(chunked_upload(site))
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        problem = json.loads(answer.read())

    assert answer.status == 400
    assert answer.getheader("Content-Type") == "application/problem+json"
    assert problem["code"] == "transfer_encoding"


def chunked_upload(site: Site) -> bytes:
    fields = framing(b"abc") | {
        "Host": urlsplit(site.proxy.url).netloc,
        "Transfer-Encoding": "chunked",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {PATH} HTTP/1.1\r\n{head}\r\n3\r\nabc\r\n0\r\n\r\n".encode()


@contextmanager
def connected(proxy: Proxy) -> Iterator[ssl.SSLSocket]:
    address = ("127.0.0.1", urlsplit(proxy.url).port)
    with (
        socket.create_connection(address, timeout=SECONDS) as plain,
        proxy.trust().wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        yield secure


def metadata_url(site: Site) -> str:
    return f"{site.proxy.url}/.well-known/oauth-protected-resource{PATH}"


@pytest.mark.requirement("AHP-R08")
def test_the_metadata_is_found_at_the_public_url(site: Site) -> None:
    with client(site.proxy) as finder:
        document = finder.get(metadata_url(site)).json()

    assert document["resource"] == site.endpoint


@pytest.mark.requirement("AHP-R04", "B12")
@pytest.mark.parametrize("path", [PATH + "/", "/", "/nope"])
def test_another_path_is_unknown_and_not_redirected(site: Site, path: str) -> None:
    with client(site.proxy) as sender:
        answer = sender.post(site.proxy.url + path, headers=framing(b""), content=b"")

    assert answer.status_code == 404
    assert "location" not in answer.headers
