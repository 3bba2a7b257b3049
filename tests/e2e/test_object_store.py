"""A real server with its bodies in a real S3 server."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.processes import RunningServer, running_server
from tests.objects import CREDENTIALS, object_server

pytestmark = pytest.mark.component("seaweedfs")

BODY = os.urandom(300_000)
SECONDS = 60


@dataclass(frozen=True, slots=True)
class Depot:
    """A server whose bodies lie in the bucket; `client` speaks to it with its token."""

    server: RunningServer
    client: httpx.Client

    def session(self) -> dict[str, str]:
        """A new session."""
        created: dict[str, str] = self.client.post("/v1/sessions", json={}).json()
        return created

    def artifact(
        self, name: str, content: bytes, media_type: str, session: dict[str, str] | None = None
    ) -> str:
        """Hand an artifact in; the path of its download."""
        session = session or self.session()
        answer = self.client.put(
            f"/v1/containers/{session['container_id']}/files/{name}",
            content=content,
            params={"media_type": media_type},
            headers=framed(content),
        )
        assert answer.status_code == 201, answer.text
        return f"/v1/containers/{session['container_id']}/files/{answer.json()['id']}/content"


@contextmanager
def depot(**settings: str) -> Iterator[Depot]:
    environment = {f"CONSIGNEE_{name.upper()}": value for name, value in settings.items()}
    environment |= CREDENTIALS | {"CONSIGNEE_BLOB_URL": object_server().blob_url()}
    with (
        running_server(environment=environment) as server,
        httpx.Client(
            base_url=server.url,
            headers={"Authorization": f"Bearer {server.token}"},
            timeout=SECONDS,
            trust_env=False,
        ) as client,
    ):
        yield Depot(server, client)


@pytest.fixture(scope="module")
def redirecting() -> Iterator[Depot]:
    with depot(redirect_downloads="true", redirect_seconds="5", internal_refs="true") as running:
        yield running


def framed(content: bytes) -> Mapping[str, str]:
    return {
        "Content-Type": "application/octet-stream",
        "AHP-Content-SHA256": hashlib.sha256(content).hexdigest(),
    }


def elsewhere(location: str) -> httpx.Response:
    """What anybody gets there who has no credential."""
    return httpx.get(location, timeout=SECONDS, trust_env=False)


def test_a_client_is_sent_to_the_bucket_and_gets_the_same_headers_there(
    redirecting: Depot,
) -> None:
    path = redirecting.artifact("Bericht €.html", BODY, "text/html; charset=utf-8")
    sent = redirecting.client.get(path)
    assert (sent.status_code, sent.content) == (302, b"")
    assert sent.headers["cache-control"] == "no-store"
    assert urlsplit(sent.headers["location"]).netloc == object_server().address
    own = redirecting.client.head(path)
    fetched = elsewhere(sent.headers["location"])
    assert fetched.content == BODY
    for name in ("content-type", "content-disposition", "cache-control", "content-length"):
        assert fetched.headers[name] == own.headers[name]
    assert fetched.headers["content-disposition"].startswith("attachment")


def test_a_client_that_follows_gets_whole_bodies_and_ranges(redirecting: Depot) -> None:
    path = redirecting.artifact("a.bin", BODY, "application/octet-stream")
    whole = redirecting.client.get(path, follow_redirects=True)
    part = redirecting.client.get(path, follow_redirects=True, headers={"Range": "bytes=1000-1999"})
    assert whole.content == BODY
    assert (part.status_code, part.content) == (206, BODY[1000:2000])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Range": "bytes=0-1,5-6"}, 206),
        ({"Range": "bytes=999999999-"}, 416),
        ({"Range": "lines=1-2"}, 200),
        ({"If-Match": '"other"'}, 412),
        ({"If-None-Match": "*"}, 304),
    ],
)
def test_what_the_bucket_would_answer_otherwise_is_answered_here(
    redirecting: Depot, headers: dict[str, str], status: int
) -> None:
    path = redirecting.artifact("a.bin", BODY, "application/octet-stream")
    assert redirecting.client.get(path, headers=headers).status_code == status


def test_what_lies_in_a_row_and_what_is_only_asked_about_stays_here(redirecting: Depot) -> None:
    small = redirecting.artifact("small.txt", b"small", "text/plain")
    assert redirecting.client.get(small).content == b"small"
    large = redirecting.artifact("a.bin", BODY, "application/octet-stream")
    assert redirecting.client.head(large).status_code == 200


def test_nobody_else_is_sent_anywhere(redirecting: Depot) -> None:
    path = redirecting.artifact("a.bin", BODY, "application/octet-stream")
    answer = httpx.get(redirecting.server.url + path, trust_env=False)
    assert answer.status_code == 401
    assert "location" not in answer.headers


def test_a_reference_is_fetched_from_the_bucket_and_its_upload_goes_through_the_server(
    redirecting: Depot,
) -> None:
    sent = redirecting.client.post(
        redirecting.server.upload_endpoint, content=BODY, headers=framed(BODY)
    )
    assert sent.status_code == 201
    answer = redirecting.client.get(f"/internal/refs/{sent.json()['ref']}")
    assert answer.status_code == 302
    assert elsewhere(answer.headers["location"]).content == BODY


def test_no_log_line_holds_a_key_or_a_signature(redirecting: Depot) -> None:
    path = redirecting.artifact("a.bin", BODY, "application/octet-stream")
    redirecting.client.get(path)
    logged = redirecting.server.log_with(path) + redirecting.server.stdout()
    assert CREDENTIALS["AWS_SECRET_ACCESS_KEY"] not in logged
    assert "X-Amz-Signature" not in logged


def test_without_redirects_bytes_come_through_the_server_and_readyz_asks_the_bucket() -> None:
    with depot() as here:
        session = here.session()
        path = here.artifact("a.bin", BODY, "application/octet-stream", session)
        whole, part = here.client.get(path), here.client.get(path, headers={"Range": "bytes=-7"})
        ready = httpx.get(f"{here.server.url}/readyz", trust_env=False)
        archive = here.client.get(f"/v1/sessions/{session['id']}/files/archive")
    assert (whole.status_code, whole.content) == (200, BODY)
    assert (part.status_code, part.content) == (206, BODY[-7:])
    assert ready.status_code == 200
    assert BODY in archive.content


def test_a_server_without_its_bucket_is_not_ready() -> None:
    environment = CREDENTIALS | {
        "CONSIGNEE_BLOB_URL": "s3://depot/x?endpoint=http://127.0.0.1:9",
        "CONSIGNEE_BLOB_RETRY_SECONDS": "0.1",
    }
    with running_server(environment=environment) as server:
        answer = httpx.get(f"{server.url}/readyz", timeout=SECONDS, trust_env=False)
        upload = httpx.post(
            server.upload_endpoint,
            content=BODY,
            headers={**framed(BODY), "Authorization": f"Bearer {server.token}"},
            timeout=SECONDS,
            trust_env=False,
        )
    assert answer.status_code == 503
    assert (upload.status_code, upload.json()["code"]) == (503, "storage_unavailable")
    assert "127.0.0.1:9" not in answer.text + upload.text
