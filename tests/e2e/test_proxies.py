"""Uploads and events through Caddy and nginx, with the configuration that is shipped for each."""

from __future__ import annotations

import hashlib
import http.client
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import httpx
import pytest

from tests.ahp.hook_examples import event, observation
from tests.components import require_component
from tests.e2e.processes import RunningServer, running_server
from tests.e2e.proxies import Ports, Proxy, in_front
from tests.e2e.upstreams import RecordingUpstream, headers_of, recording_upstream

MIB = 1024 * 1024
GIB = 1024 * MIB
LIMIT = 4 * MIB
PATH = "/ahp/uploads"
SECONDS = 60
"""Long enough for a busy machine: it keeps a test from hanging, nothing is measured by it."""

PREFIX = "/agents/in"
PARAMETERS = [
    pytest.param("caddy", marks=pytest.mark.component("caddy")),
    pytest.param("nginx", marks=pytest.mark.component("nginx")),
]
PLACES = [
    pytest.param((name, prefix), marks=pytest.mark.component(name), id=f"{name}{prefix}")
    for name in ("caddy", "nginx")
    for prefix in ("", PREFIX)
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A proxy, and what arrives behind it."""

    proxy: Proxy
    upstream: RecordingUpstream


@dataclass(frozen=True, slots=True)
class Site:
    """A receiver behind a proxy, as its operator sets it up, perhaps below a path."""

    proxy: Proxy
    name: str
    prefix: str
    server: RunningServer
    data_dir: Path

    @property
    def public_url(self) -> str:
        return self.proxy.url + self.prefix

    @property
    def endpoint(self) -> str:
        return self.public_url + PATH

    def metadata_url(self, path: str = PATH) -> str:
        """Where RFC 9728 has the metadata of the endpoint at `path`."""
        return f"{self.proxy.url}/.well-known/oauth-protected-resource{self.prefix}{path}"

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


@pytest.fixture(scope="module", params=PLACES)
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    name, prefix = request.param
    with running_site(tmp_path_factory.mktemp("site"), name, prefix) as found:
        yield found


@contextmanager
def running_site(
    folder: Path, name: str, prefix: str = "", max_upload_bytes: int = LIMIT
) -> Iterator[Site]:
    ports = Ports.free()
    config = folder / "consignee.toml"
    config.write_text(
        f'public_url = "https://localhost:{ports.https}{prefix}"\n'
        f'data_dir = "data"\nmax_upload_bytes = {max_upload_bytes}\ninternal_refs = true\n'
    )
    with running_server("--config", str(config), "--token", "sender=s3cret") as server:
        upstream = urlsplit(server.url).netloc
        with in_front(name, upstream, ports, prefix=prefix) as proxy:
            yield Site(proxy, name, prefix, server, folder / "data")


def framing(body: bytes, token: str = "s3cret") -> dict[str, str]:
    return {
        "Authorization": f"Bearer {token}",
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(body).hexdigest(),
    }


def client(proxy: Proxy, *, http2: bool = False) -> httpx.Client:
    return httpx.Client(verify=proxy.trust(), http2=http2, trust_env=False, timeout=SECONDS)


@contextmanager
def begun_upload(
    proxy: Proxy, body: bytes, sent: int, prefix: str = ""
) -> Iterator[http.client.HTTPSConnection]:
    """A connection on which the head and the first `sent` bytes of an upload have left."""
    host = urlsplit(proxy.url).netloc
    connection = http.client.HTTPSConnection(host, timeout=SECONDS, context=proxy.trust())
    try:
        connection.putrequest("POST", prefix + PATH)
        for name, value in framing(body).items():
            connection.putheader(name, value)
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body[:sent])
        yield connection
    finally:
        connection.close()


def wait_until(is_so: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = monotonic() + seconds
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


@pytest.mark.requirement("AHP-R05")
def test_who_the_client_is_is_what_the_proxy_sees(recorded: Recorded) -> None:
    """Consignee believes its proxy, which must not believe everybody."""
    forged = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "http"}
    with client(recorded.proxy) as sender:
        sender.post(recorded.proxy.url + PATH, headers=framing(b"") | forged, content=b"")
    headers = headers_of(recorded.upstream.heads.get(timeout=SECONDS))

    assert [value for name, value in headers if name == "x-forwarded-for"] == ["127.0.0.1"]
    assert [value for name, value in headers if name == "x-forwarded-proto"] == ["https"]


@pytest.mark.requirement("AHP-R03")
@pytest.mark.parametrize("name", PARAMETERS)
def test_below_a_path_the_rest_of_a_target_stays_as_it_is(name: str) -> None:
    target = "/agents//a//b%2Fc/%2e%2E/upload?x=1&y=%2F"
    with (
        recording_upstream() as upstream,
        in_front(name, upstream.address, Ports.free(), prefix="/agents") as proxy,
        client(proxy) as sender,
    ):
        url = httpx.URL(proxy.url, raw_path=target.encode())
        sender.post(url, headers=framing(b""), content=b"")
        line, _, _ = upstream.heads.get(timeout=SECONDS).partition(b"\r\n")

    assert line.decode() == f"POST {target.removeprefix('/agents')} HTTP/1.1"


@pytest.mark.requirement("B98")
@pytest.mark.parametrize("name", PARAMETERS)
def test_the_proxy_ends_its_idle_connections_itself(name: str) -> None:
    """By the line that says after how long; then Consignee never closes one that is about to be
    used. Until then one connection serves everybody.
    """
    edits = {
        "caddy": {"keepalive 60s": "keepalive 1s"},
        "nginx": {"keepalive_timeout 60s": "keepalive_timeout 1s"},
    }
    with (
        recording_upstream() as upstream,
        in_front(name, upstream.address, Ports.free(), edits=edits[name]) as proxy,
    ):
        for _ in range(3):
            with client(proxy) as sender:
                sender.post(proxy.url + PATH, headers=framing(b"abc"), content=b"abc")

        assert upstream.ended.get(timeout=SECONDS) == 3


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_proxy_speaks_both_versions_of_tls(recorded: Recorded, version: ssl.TLSVersion) -> None:
    trust = recorded.proxy.trust()
    trust.minimum_version = trust.maximum_version = version
    with httpx.Client(verify=trust, trust_env=False, timeout=SECONDS) as sender:
        answer = sender.post(recorded.proxy.url + PATH, headers=framing(b""), content=b"")

    assert answer.status_code == 201


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


def curl(proxy: Proxy, *arguments: str) -> Sequence[str]:
    """A command line that begins with an upload's constant part."""
    program = shutil.which("curl")
    require_component("curl", present=program is not None, why="Debian package curl")
    head = ("Authorization: Bearer s3cret", "Content-Type: application/octet-stream")
    lines = [part for line in (*head, "Expect:") for part in ("--header", line)]
    report = "%{http_version} %{http_code}"
    return [str(program), "--silent", "--show-error", "--cacert", str(proxy.authority),
            "--write-out", report, *lines, *arguments]  # fmt: skip


@pytest.mark.component("curl")
@pytest.mark.requirement("AHP-R17", "B98")
@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_curl_uploads_in_the_version_that_proxy_and_client_agree_on(
    site: Site, version: str, tmp_path: Path
) -> None:
    body = b"x" * (2 * MIB)
    (tmp_path / "body").write_bytes(body)
    digest = f"AHP-Content-SHA256: {hashlib.sha256(body).hexdigest()}"
    told = subprocess.check_output(
        curl(site.proxy, version, "--request", "POST", "--header", digest, "--output",
             str(tmp_path / "answer"), "--upload-file", str(tmp_path / "body"), site.endpoint),
        text=True,
        timeout=SECONDS,
    )  # fmt: skip

    is_second = version == "--http2" and site.name == "caddy"
    assert told == ("2 201" if is_second else "1.1 201")
    assert json.loads((tmp_path / "answer").read_text())["size"] == len(body)


@pytest.mark.component("curl")
@pytest.mark.timeout(SECONDS * 6)
@pytest.mark.requirement("B98", "AHP-R25")
@pytest.mark.parametrize(
    ("name", "version"),
    [
        pytest.param("caddy", "--http1.1", marks=pytest.mark.component("caddy")),
        pytest.param("caddy", "--http2", marks=pytest.mark.component("caddy")),
        pytest.param("nginx", "--http1.1", marks=pytest.mark.component("nginx")),
    ],
)
def test_two_gibibytes_pass_without_being_collected(
    name: str, version: str, tmp_path: Path
) -> None:
    """Neither in the memory of the proxy nor on its disk; the receiver has half of it meanwhile."""
    size = 2 * GIB
    source, receipt = tmp_path / "body", tmp_path / "answer"
    with source.open("wb") as hollow:
        hollow.truncate(size)
    digest = f"AHP-Content-SHA256: {sha256_of_zeros(size)}"
    with running_site(tmp_path, name, max_upload_bytes=size) as site:
        idle, kept = site.proxy.peak_memory(), site.proxy.on_disk()
        line = curl(site.proxy, version, "--request", "POST", "--header", digest, "--output",
                    str(receipt), "--upload-file", str(source), site.endpoint)  # fmt: skip
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as sender:
            wait_until(lambda: sender.poll() is not None or site.staged() > size // 2, SECONDS * 3)
            collected = site.proxy.on_disk() - kept
            told, _ = sender.communicate(timeout=SECONDS * 3)
        grown = site.proxy.peak_memory() - idle

    assert told.endswith(" 201")
    assert json.loads(receipt.read_text())["size"] == size
    assert collected < MIB
    assert grown < 64 * MIB


def sha256_of_zeros(size: int) -> str:
    digest = hashlib.sha256()
    piece = bytes(MIB)
    for _ in range(size // MIB):
        digest.update(piece)
    return digest.hexdigest()


@pytest.mark.requirement("B98")
def test_a_body_is_staged_while_it_arrives(site: Site) -> None:
    body = b"x" * LIMIT
    with begun_upload(site.proxy, body, LIMIT - MIB, site.prefix) as connection:
        wait_until(lambda: site.staged() >= MIB)
        connection.send(body[LIMIT - MIB :])

        assert connection.getresponse().status == 201


@pytest.mark.requirement("B09", "B97")
@pytest.mark.parametrize("linger", [None, 0], ids=["FIN", "RST"])
def test_a_client_that_leaves_leaves_nothing_behind(site: Site, linger: int | None) -> None:
    body = b"x" * LIMIT
    with begun_upload(site.proxy, body, LIMIT - MIB, site.prefix) as connection:
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
    assert f'resource_metadata="{site.metadata_url()}"' in answer.headers["www-authenticate"]


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
    return f"POST {site.prefix}{PATH} HTTP/1.1\r\n{head}\r\n3\r\nabc\r\n0\r\n\r\n".encode()


@contextmanager
def connected(proxy: Proxy) -> Iterator[ssl.SSLSocket]:
    address = ("127.0.0.1", urlsplit(proxy.url).port)
    with (
        socket.create_connection(address, timeout=SECONDS) as plain,
        proxy.trust().wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        yield secure


@pytest.mark.requirement("AHP-R08")
def test_the_metadata_is_found_at_the_public_url(site: Site) -> None:
    with client(site.proxy) as finder:
        documents = [finder.get(site.metadata_url(path)).json() for path in (PATH, "/ahp/hooks")]

    assert [document["resource"] for document in documents] == [
        site.endpoint,
        site.public_url + "/ahp/hooks",
    ]


@pytest.mark.requirement("AHP-R04", "B12")
@pytest.mark.parametrize("path", [PATH + "/", "/", "/nope"])
def test_another_path_is_unknown_and_not_redirected(site: Site, path: str) -> None:
    with client(site.proxy) as sender:
        answer = sender.post(site.public_url + path, headers=framing(b""), content=b"")

    assert answer.status_code == 404
    assert "location" not in answer.headers


@pytest.mark.requirement("AHP-R04")
def test_nothing_outside_of_the_path_of_the_public_url_is_the_receiver(site: Site) -> None:
    with client(site.proxy) as sender:
        answers = [
            sender.post(site.proxy.url + path, headers=framing(b""), content=b"").status_code
            for path in (PATH, site.prefix + "/x" + PATH, f"/x{site.prefix}{PATH}")
        ]

    assert answers == ([404, 404, 404] if site.prefix else [201, 404, 404])


@pytest.mark.requirement("AHP-R04", "B12")
def test_a_path_is_not_tidied_up_on_its_way(site: Site) -> None:
    """What Consignee does not know must not become what it knows."""
    upload = http.client.HTTPSConnection(
        urlsplit(site.proxy.url).netloc, timeout=SECONDS, context=site.proxy.trust()
    )
    answers = []
    for path in ("/" + PATH, "/x/.." + PATH, PATH.replace("/", "//")):
        upload.request("POST", site.prefix + path, b"", framing(b""))
        answer = upload.getresponse()
        answer.read()
        answers.append(answer.status)
    upload.close()

    assert answers == [404, 404, 404]


@pytest.mark.requirement("AHP-R37")
@pytest.mark.parametrize("name", ["/internal/refs/", "/%69nternal/refs/", "//internal/refs/"])
def test_the_bytes_of_references_stay_inside(site: Site, name: str) -> None:
    body = b"for programs of the operator"
    with client(site.proxy) as sender:
        ref = sender.post(site.endpoint, headers=framing(body), content=body).json()["ref"]
        sender.headers["Authorization"] = "Bearer s3cret"
        below = httpx.URL(site.proxy.url, raw_path=f"{site.prefix}{name}{ref}".encode())
        outside = sender.get(below)
        inside = sender.get(f"{site.server.url}/internal/refs/{ref}")

    assert (inside.status_code, inside.content) == (200, body)
    assert outside.status_code == 404
    assert body not in outside.content


def test_events_pass(site: Site) -> None:
    message = observation(event("turn.start"))
    with client(site.proxy) as host:
        answer = host.post(
            site.public_url + "/ahp/hooks",
            headers={"Authorization": "Bearer s3cret"},
            json=message,
        )

    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.requirement("AHP-R08")
@pytest.mark.parametrize(
    "forged",
    [
        {"X-Forwarded-Host": "evil.example", "X-Forwarded-Proto": "http"},
        {"Forwarded": "host=evil.example;proto=http", "X-Forwarded-Prefix": "/evil.example"},
        {"X-Forwarded-For": "203.0.113.9, evil.example", "X-Original-URL": "//evil.example/"},
    ],
    ids=["host", "forwarded", "for"],
)
def test_what_a_client_says_of_the_way_changes_no_url(site: Site, forged: dict[str, str]) -> None:
    with client(site.proxy) as sender:
        refused = sender.post(site.endpoint, headers=forged, content=b"")
        document = sender.get(site.metadata_url(), headers=forged)

    assert f'resource_metadata="{site.metadata_url()}"' in refused.headers["www-authenticate"]
    assert document.json()["resource"] == site.endpoint
    assert "evil.example" not in f"{refused.headers}{refused.text}{document.headers}{document.text}"


@pytest.mark.requirement("AHP-R08")
def test_another_host_changes_no_url(site: Site) -> None:
    """Caddy serves the name of its certificate only; nginx, its one site under any."""
    with client(site.proxy) as sender:
        document = sender.get(site.metadata_url(), headers={"Host": "evil.example"})

    assert "evil.example" not in f"{document.headers}{document.text}"
    if site.name == "caddy":
        assert document.status_code == 421
    else:
        assert document.json()["resource"] == site.endpoint
