"""UHP behind Caddy and nginx, with the configuration that is shipped for each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conformance.peer import Peer, citations_of, session_of
from tests.e2e.processes import running_server
from tests.e2e.proxies import Ports, in_front
from tests.e2e.wire import MIB

pytestmark = pytest.mark.xdist_group("uhp proxies")

LARGE = 3 * MIB


PREFIX = "/agents"
PLACES = [
    pytest.param((name, prefix), marks=pytest.mark.component(name), id=f"{name}{prefix}")
    for name in ("caddy", "nginx")
    for prefix in ("", PREFIX)
]


@pytest.fixture(scope="module", params=PLACES)
def peer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Peer]:
    """A client that knows the server by its public URL only."""
    name, prefix = request.param
    with running_peer(tmp_path_factory.mktemp("site"), name, prefix) as client:
        yield client


@contextmanager
def running_peer(
    folder: Path, name: str, prefix: str, environment: Mapping[str, str] | None = None
) -> Iterator[Peer]:
    ports = Ports.free()
    public_url = f"https://localhost:{ports.https}{prefix}"
    config = folder / "consignee.toml"
    config.write_text(f'public_url = "{public_url}"\ndata_dir = "data"\n')
    arguments = ("--config", str(config), "--token", "alice=alice-token")
    with running_server(*arguments, environment=environment) as server:
        upstream = urlsplit(server.url).netloc
        blobs = folder / "data" / "blobs"
        with (
            in_front(name, upstream, ports, prefix=prefix, blobs=blobs) as proxy,
            Peer(public_url, "alice-token", verify=proxy.trust()) as client,
        ):
            yield client


@pytest.mark.requirement("B96", "S-09")
@pytest.mark.parametrize("accepted", ["gzip, br, zstd", "identity"])
def test_events_pass_as_they_happen(peer: Peer, accepted: str) -> None:
    """The first one is here while the task still runs: it runs until this test has seen some."""
    body = {"input": "Count slowly from 1 to 200.", "stream": True}
    headers = {"Accept-Encoding": accepted}
    with peer.stream("POST", "/v1/responses", json=body, headers=headers) as events:
        begun = next(events).data["response"]
        deltas = (event for event in events if event.kind == "response.output_text.delta")
        assert [next(deltas).data["delta"] for _ in range(3)] == ["1\n", "2\n", "3\n"]
        assert peer.get(f"/v1/responses/{begun['id']}")["status"] == "in_progress"
        peer.post(f"/v1/responses/{begun['id']}/cancel")
        assert [event.kind for event in events][-1] == "response.failed"


@pytest.mark.requirement("UHP-12")
def test_download_urls_are_on_the_public_url(peer: Peer) -> None:
    response = peer.run("Create a file named a b.txt containing exactly: ä")
    (cited,) = citations_of(response)
    assert cited["download_url"].startswith(peer.base_url + "/v1/containers/")
    answer = peer.http.get(cited["download_url"])
    assert answer.text == "ä"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "default-src 'none'; sandbox"


@pytest.mark.requirement("UHP-12")
def test_download_urls_are_on_the_public_url_whatever_a_client_says(peer: Peer) -> None:
    forged = {"X-Forwarded-Host": "evil.example", "Forwarded": "host=evil.example;proto=http"}
    peer.http.headers.update(forged)
    try:
        response = peer.run("Create a file named a.txt containing exactly: a")
    finally:
        for name in forged:
            del peer.http.headers[name]
    (cited,) = citations_of(response)
    assert cited["download_url"].startswith(peer.base_url + "/v1/containers/")


@pytest.mark.component("nginx")
@pytest.mark.requirement("UHP-18")
@pytest.mark.parametrize("prefix", ["", PREFIX])
def test_nginx_sends_files_itself_below_a_path_too(tmp_path: Path, prefix: str) -> None:
    content = bytes(range(256)) * (LARGE // 256)
    in_files = f"file://{tmp_path / 'data' / 'blobs'}"
    environment = {"CONSIGNEE_ACCEL": "nginx", "CONSIGNEE_BLOB_URL": in_files}
    with running_peer(tmp_path, "nginx", prefix, environment) as peer:
        container = peer.ask("POST", "/v1/sessions").json()["container_id"]
        kept = peer.http.put(
            f"{peer.base_url}/v1/containers/{container}/files/a.bin",
            content=content,
            headers={
                "Content-Type": "application/octet-stream",
                "AHP-Content-SHA256": hashlib.sha256(content).hexdigest(),
            },
        ).json()
        path = f"/v1/containers/{container}/files/{kept['id']}/content"
        part = peer.http.get(peer.base_url + path, headers={"Range": "bytes=-3"})

        assert (part.status_code, part.content) == (206, content[-3:])
        assert peer.ask("GET", path).content == content


@pytest.mark.requirement("UHP-07", "B98")
def test_files_pass_both_ways(peer: Peer) -> None:
    content = bytes(range(256)) * (LARGE // 256)
    file = peer.upload("large.bin", content)
    assert file["bytes"] == len(content)
    response = peer.run(
        [{"role": "user", "content": [{"type": "input_file", "file_id": file["id"]}]}]
    )
    (digests,) = peer.artifacts(response)
    assert peer.content(digests).text.startswith(hashlib.sha256(content).hexdigest())
    archive = peer.ask("GET", f"/v1/sessions/{session_of(response)}/files/archive")
    assert int(archive.headers["content-length"]) == len(archive.content)


@pytest.mark.requirement("UHP-30", "UHP-31")
def test_refusals_pass_as_they_are(peer: Peer) -> None:
    """Encoded paths arrive as they were sent, and the envelope is not replaced by a page."""
    peer.refused(404, "response_not_found", "GET", "/v1/responses/resp_unknown")
    probe = "/v1/containers/cntr_x/files/..%2f..%2fetc%2fpasswd/content"
    peer.refused(404, "file_not_found", "GET", probe)
    assert peer.ask("DELETE", "/v1/files").status_code == 405
