"""Uploads by real clients: what they get back, and what is kept."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx
import psutil
import pytest
from agenthooksprotocol.transports.http import HTTPTransport

from tests.e2e.uploaders import CLIENTS, UPLOADERS
from tests.e2e.wire import (
    MIB,
    OTHER_PATH,
    UPLOADER,
    Receiver,
    Response,
    head,
    running_receiver,
    upload,
    upload_headers,
)

OCTETS = bytes(range(256))
BODIES = {
    "empty": b"",
    "one": b"\x00",
    "every octet": OCTETS * 300,
    "invalid UTF-8": b"\xff\xfe\xc3\x28\xed\xa0\x80",
    "line ends": b"\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n\n\r",
    "gzip": gzip.compress(b"abc"),
    "json": b'{"ref":"x"}',
    "larger than a row": Random(1).randbytes(3 * MIB + 1),
}
AUTHORIZED = {"Authorization": f"Bearer {UPLOADER}"}


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with running_receiver(tmp_path_factory.mktemp("receiver")) as running:
        yield running


@pytest.mark.requirement("AHP-R19", "AHP-R26", "AHP-R43", "B10")
@pytest.mark.parametrize("kind", BODIES)
def test_what_was_confirmed_is_what_is_kept(receiver: Receiver, kind: str) -> None:
    """Read by another process as soon as the receipt is here, over a connection still open."""
    body = BODIES[kind]
    with receiver.connect() as wire:
        wire.send(upload(body))
        receipt = wire.response().json
        assert receiver.content(receipt["ref"]) == body
        assert receipt["size"] == len(body)
        assert receipt["sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.requirement("AHP-R24", "AHP-R25", "AHP-R27", "AHP-R37")
@pytest.mark.parametrize("accepted", [b"gzip", b"br, zstd, deflate", b"*", b"identity;q=0"])
def test_a_receipt_is_canonical(receiver: Receiver, accepted: bytes) -> None:
    (response,) = receiver.talk(
        upload(b"abc", b"Accept-Encoding: " + accepted, b"Connection: close")
    )
    assert response.status == 201
    assert response.headers["content-type"] == "application/json"
    assert "content-encoding" not in response.headers
    assert "transfer-encoding" not in response.headers
    assert response.headers["x-content-type-options"] == "nosniff"
    pattern = (
        rb'\{"ref":"(?P<ref>[A-Za-z][A-Za-z0-9_-]{21,199})","size":3,'
        rb'"sha256":"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"\}'
    )
    assert re.fullmatch(pattern, response.body)
    assert len(response.body) < 1024


@pytest.mark.requirement("AHP-R24", "AHP-R39", "AHP-R40")
def test_equal_bytes_get_references_of_their_own(receiver: Receiver) -> None:
    responses = receiver.talk(*[upload(b"same")] * 9, upload(b"same", b"Connection: close"))
    references = {each.json["ref"] for each in responses}
    assert len(references) == 10
    assert all(receiver.content(ref) == b"same" for ref in references)


@pytest.mark.requirement("AHP-R25")
def test_a_receipt_leaves_at_once(receiver: Receiver) -> None:
    """Head and body are one segment: there is no second one to wait for an acknowledgement."""
    with receiver.connect() as wire:
        for _ in range(20):
            wire.send(upload(b"abc"))
            piece = wire.socket.recv(65536)
            assert piece.startswith(b"HTTP/1.1 201 ")
            assert piece.endswith(b'"}')


@pytest.mark.requirement("AHP-R03", "AHP-R06", "AHP-R22")
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("kind", ["empty", "every octet", "larger than a row"])
def test_every_client_uploads(receiver: Receiver, tmp_path: Path, client: str, kind: str) -> None:
    file = tmp_path / "body"
    file.write_bytes(BODIES[kind])
    headers = upload_headers(BODIES[kind])
    if client == "raw socket":
        headers["Connection"] = "close"
    before = receiver.usage().references
    assert UPLOADERS[client](receiver.endpoint, headers, file) == 201
    assert receiver.usage().references == before + 1


@pytest.mark.requirement("AHP-R25", "AHP-R26")
@pytest.mark.parametrize("kind", ["empty", "larger than a row"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_the_sdk_accepts_the_receipt(receiver: Receiver, kind: str, is_stream: bool) -> None:
    body = BODIES[kind]
    ref, size, sha256 = asyncio.run(_by_sdk(receiver.endpoint + "?tenant=a", body, is_stream))
    assert (size, sha256) == (len(body), hashlib.sha256(body).hexdigest())
    assert receiver.content(ref) == body


async def _by_sdk(endpoint: str, body: bytes, is_stream: bool) -> tuple[str, int, str]:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    transport = HTTPTransport("http://event-receiver.invalid")
    try:
        receipt = await transport.upload(
            endpoint,
            pieces() if is_stream else body,
            headers=AUTHORIZED,
            size=len(body),
            sha256=hashlib.sha256(body).hexdigest(),
        )
    finally:
        await transport.aclose()
    assert receipt is not None
    return receipt.ref, receipt.size, receipt.sha256


@pytest.mark.requirement("AHP-R45", "B97")
def test_many_uploads_at_once(receiver: Receiver) -> None:
    """Equal and different bytes, small and large, all of one principal."""
    bodies = [bytes([n % 8]) * (3 if n % 2 else 300_000) for n in range(64)]

    def send(body: bytes) -> Response:
        (response,) = receiver.talk(upload(body, b"Connection: close"))
        return response

    with ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(send, bodies))
    assert [each.status for each in responses] == [201] * 64
    assert len({each.json["ref"] for each in responses}) == 64
    for body, response in list(zip(bodies, responses, strict=True))[::8]:
        assert receiver.content(response.json["ref"]) == body


@pytest.mark.requirement("AHP-R08", "AHP-R29")
@pytest.mark.parametrize("path", ["/ahp/uploads", OTHER_PATH])
@pytest.mark.parametrize("token", [None, "wrong"])
def test_the_challenge_leads_to_the_metadata_of_this_endpoint(
    receiver: Receiver, path: str, token: str | None
) -> None:
    """Whatever the request says of host and scheme."""
    lies = [
        b"X-Forwarded-Host: evil.example",
        b"X-Forwarded-Proto: https",
        b"X-Forwarded-For: 203.0.113.9",
        b"Forwarded: host=evil.example;proto=https",
    ]
    hostile = upload_headers(b"", token) | {"Host": "evil.example"}
    (response,) = receiver.talk(
        head(hostile, *lies, b"Connection: close", line=f"POST {path} HTTP/1.1")
    )
    assert response.status == 401
    challenge = response.headers["www-authenticate"]
    assert ("invalid_token" in challenge) == (token is not None)
    found = re.match(r'Bearer resource_metadata="([^"]+)"', challenge)
    assert found is not None
    metadata = httpx.get(found[1], headers={"X-Forwarded-Host": "evil.example"})
    assert metadata.status_code == 200
    assert metadata.headers["content-type"] == "application/json"
    assert metadata.json()["resource"] == receiver.server.url + path


@pytest.mark.requirement("AHP-R30")
def test_a_principal_that_may_not_upload_is_told_what_it_lacks(receiver: Receiver) -> None:
    (response,) = receiver.talk(upload(b"abc", b"Connection: close", token="reader-token"))
    assert response.status == 403
    assert 'error="insufficient_scope", scope="ahp.upload"' in response.headers["www-authenticate"]


@pytest.mark.requirement("AHP-R14", "AHP-R50", "B19")
def test_no_answer_and_no_log_line_repeats_a_secret(receiver: Receiver) -> None:
    secret = "s3cret-credential"
    answers = [
        *receiver.talk(upload(b"b0dy-text", token=secret)),
        *receiver.talk(upload(b"b0dy-text", b"X-A: he4der-text", b"Content-Encoding: he4der-text")),
        *receiver.talk(b"POST /?qu3ry-text HTTP/1.1\r\nHost: a\r\nX-A: he4der\x00-text\r\n\r\n"),
        *receiver.talk(head({"Connection": "close"}, line="GET /the-last?qu3ry-text HTTP/1.1")),
    ]
    assert [each.status for each in answers] == [401, 400, 400, 404]
    said = "".join(str(each) for each in answers) + receiver.server.log_with("/the-last")
    for text in (secret, UPLOADER, "b0dy-text", "he4der-text", "qu3ry-text"):
        assert text not in said
    for folder in (receiver.data_dir, receiver.server.scratch):
        assert str(folder) not in "".join(each.body.decode() for each in answers)


@pytest.mark.requirement("B26")
def test_hashing_and_writing_leave_the_event_loop(receiver: Receiver) -> None:
    """The work that a large body makes is done by threads other than the one that answers."""
    before = _busy_seconds(receiver)
    for _ in range(8):
        receiver.talk(upload(bytes(16 * MIB), b"Connection: close"))
    after = _busy_seconds(receiver)
    loop = receiver.server.process.pid
    assert sum(after[each] - before[each] for each in after if each != loop) > 0


def _busy_seconds(receiver: Receiver) -> Counter[int]:
    """Processor time by thread; the event loop's thread has the id of the process."""
    threads = psutil.Process(receiver.server.process.pid).threads()
    return Counter({each.id: each.user_time + each.system_time for each in threads})


@pytest.mark.requirement("AHP-R25")
def test_operation_is_answered(receiver: Receiver) -> None:
    url = receiver.server.url
    assert httpx.get(url + "/healthz").json() == {"status": "ok"}
    assert httpx.get(url + "/readyz").json() == {"status": "ready"}
    assert httpx.get(url + "/metrics").status_code == 401
    assert httpx.get(url + "/metrics", headers=AUTHORIZED).status_code == 403
