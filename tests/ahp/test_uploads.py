"""The upload route over a real store, with ASGI by hand."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive

from app.ahp.uploads import receipt_of
from app.errors import Exhausted, Unavailable
from app.main import create_app
from app.settings import AnonymousSettings, Settings, TokenSettings
from app.store.content import ContentStore
from app.store.migrations import migrate
from app.store.records import Reference
from tests import backends
from tests.http.messages import (
    DISCONNECT,
    Header,
    Sent,
    chunk,
    http_scope,
    living,
    receive_nothing,
    receiving,
)

pytestmark = pytest.mark.anyio

PATH = "/ahp/uploads"
BODY = b"abc"


def settings_for(folder: Path, **more: Any) -> Settings:
    settings = Settings(
        data_dir=folder / "data",
        tokens=(
            _token("uploader", "ahp.upload"),
            _token("reader", "refs.read"),
            _token("operator", "admin"),
        ),
        **(backends.settings_of(folder / "data") | more),
    )
    migrate(settings)
    return settings


def _token(name: str, permission: Any) -> TokenSettings:
    return TokenSettings(
        name=name,
        scope="uploads",
        permissions=frozenset({permission}),
        token_sha256=hashlib.sha256(name.encode()).hexdigest(),
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


def headers_for(body: bytes = BODY, token: str | None = "uploader", **more: bytes) -> list[Header]:
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"%d" % len(body)),
        (b"ahp-content-sha256", hashlib.sha256(body).hexdigest().encode()),
        *[(name.replace("_", "-").encode(), value) for name, value in more.items()],
    ]
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    return headers


async def post(app: ASGIApp, headers: list[Header], receive: Receive, method: str = "POST") -> Sent:
    sent = Sent()
    await app(http_scope(method, PATH, headers), receive, sent)
    return sent


async def uploads_by_outcome(app: ASGIApp) -> dict[str, float]:
    """What the metrics say, as an operator sees it."""
    sent = Sent()
    authorized = [(b"authorization", b"Bearer operator")]
    await app(http_scope("GET", "/metrics", authorized), receive_nothing, sent)
    lines = [line for line in sent.body.decode().splitlines() if "uploads_total{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@asynccontextmanager
async def stored(settings: Settings) -> AsyncIterator[ContentStore]:
    """The store, as another process sees it."""
    store = await ContentStore.start(settings)
    try:
        yield store
    finally:
        await store.close()


def staged(settings: Settings) -> list[Path]:
    found = settings.staging_dir.rglob("*")
    return [path for path in found if path.is_file() and not path.name.startswith(".")]


@pytest.mark.requirement("AHP-R25", "AHP-R26")
async def test_a_receipt_is_for_what_is_there(settings: Settings) -> None:
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        sent = await post(app, headers_for(), receiving(chunk(b"a"), chunk(b"bc", more=False)))
        assert sent.status == 201
        assert sent.headers[b"content-type"] == b"application/json"
        assert sent.json == {
            "ref": sent.json["ref"],
            "size": 3,
            "sha256": hashlib.sha256(BODY).hexdigest(),
        }
        reference = await store.resolve("uploads", sent.json["ref"])
        assert (reference.size, reference.principal) == (3, "uploader")
        assert await uploads_by_outcome(app) == {"confirmed": 1}


def test_a_receipt_is_canonical() -> None:
    reference = Reference("ref_x", 3, "0" * 64, "scope", "principal", 1, None)
    receipt = receipt_of(reference)
    assert receipt == b'{"ref":"ref_x","size":3,"sha256":"%s"}' % (b"0" * 64)
    assert list(json.loads(receipt)) == ["ref", "size", "sha256"]


@pytest.mark.requirement(
    "AHP-R09", "AHP-R15", "AHP-R28", "AHP-R29", "AHP-R30", "AHP-R32", "AHP-R52"
)
@pytest.mark.parametrize(
    ("method", "headers", "status", "code"),
    [
        ("PUT", headers_for(token=None), 405, "method_not_allowed"),
        ("POST", headers_for(token=None), 401, "missing_credential"),
        ("POST", headers_for(token="wrong"), 401, "invalid_credential"),
        ("POST", headers_for(token="reader", content_encoding=b"gzip"), 403, "insufficient_scope"),
        ("POST", headers_for(content_encoding=b"gzip"), 400, "content_encoding"),
        ("POST", headers_for(bytes(2048)), 413, "too_large"),
    ],
)
async def test_a_refusal_is_decided_from_the_head_alone(
    tmp_path: Path, method: str, headers: list[Header], status: int, code: str
) -> None:
    """The body is asked for only after the refusal has left."""
    app = create_app(settings_for(tmp_path, max_upload_bytes=2047))
    sent = Sent()

    async def receive() -> Any:
        assert sent.body, "the body was asked for before the answer"
        return chunk(b"", more=False)

    async with living(app):
        await app(http_scope(method, PATH, headers), receive, sent)
        assert (sent.status, sent.json["code"]) == (status, code)
        assert sent.is_complete
        assert await uploads_by_outcome(app) == {code: 1}


@pytest.mark.requirement("AHP-R08", "AHP-R29", "AHP-R30")
@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 401), ("reader", 403)])
async def test_who_may_not_is_told_where_to_ask(
    settings: Settings, token: str | None, status: int
) -> None:
    app = create_app(settings)
    async with living(app):
        sent = await post(app, headers_for(token=token), receiving(chunk(BODY, more=False)))
    challenge = sent.headers[b"www-authenticate"].decode()
    assert sent.status == status
    assert (
        f'resource_metadata="{settings.base_url}/.well-known/oauth-protected-resource' in challenge
    )


@pytest.mark.requirement("AHP-R17", "AHP-R18", "AHP-R23", "AHP-R28", "B08")
@pytest.mark.parametrize(
    ("body", "code"),
    [(b"ab", "length_mismatch"), (b"abcd", "length_mismatch"), (b"abd", "digest_mismatch")],
)
async def test_a_body_that_is_not_as_declared(settings: Settings, body: bytes, code: str) -> None:
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        sent = await post(app, headers_for(), receiving(chunk(body, more=False)))
        assert (sent.status, sent.json["code"]) == (400, code)
        usage = await store.usage()
        assert (usage.blobs, usage.references) == (0, 0)


@pytest.mark.requirement("AHP-R46", "B09", "B97")
@pytest.mark.parametrize("size", [3, 3_000_000])
async def test_a_client_that_goes_gets_no_answer_and_leaves_nothing(
    settings: Settings, size: int
) -> None:
    app = create_app(settings)
    body = bytes(size)
    async with living(app), stored(settings) as store:
        sent = await post(app, headers_for(body), receiving(chunk(body[:-1]), DISCONNECT))
        assert sent.messages == []
        assert staged(settings) == []
        assert (await store.usage()).references == 0
        assert await uploads_by_outcome(app) == {"disconnected": 1}


@pytest.mark.requirement("AHP-R46", "B09")
async def test_a_cancelled_upload_leaves_nothing(settings: Settings) -> None:
    app = create_app(settings)
    body = bytes(3_000_000)
    async with living(app), stored(settings) as store:
        receive = receiving(chunk(body[:-1]))
        upload = asyncio.ensure_future(post(app, headers_for(body), receive))
        while not staged(settings):
            await asyncio.sleep(0.005)
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert staged(settings) == []
        assert (await store.usage()).references == 0


@pytest.mark.requirement("AHP-R33", "AHP-R47")
@pytest.mark.parametrize(
    ("refusal", "status"), [(Exhausted(), 507), (Unavailable("database_busy", "Try again."), 503)]
)
async def test_a_store_that_cannot_keep_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, refusal: Exception, status: int
) -> None:
    async def receive(*_: object, **__: object) -> Reference:
        raise refusal

    monkeypatch.setattr(ContentStore, "receive", receive)
    app = create_app(settings)
    async with living(app):
        sent = await post(app, headers_for(), receiving(chunk(BODY, more=False)))
    assert sent.status == status
    assert (b"retry-after" in sent.headers) == (status == 503)


@pytest.mark.requirement("B16")
async def test_a_body_that_stops(tmp_path: Path) -> None:
    app = create_app(settings_for(tmp_path, idle_timeout_seconds=0.01, drain_seconds=0.01))
    async with living(app):
        sent = await post(app, headers_for(), receiving(chunk(b"ab")))
    assert (sent.status, sent.json["code"]) == (408, "too_slow")


@pytest.mark.requirement("AHP-R13")
async def test_anonymous_uploads_where_they_are_allowed(tmp_path: Path) -> None:
    anonymous = AnonymousSettings(scope="guests", permissions=frozenset({"ahp.upload"}))
    settings = settings_for(tmp_path, anonymous=anonymous)
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        sent = await post(app, headers_for(token=None), receiving(chunk(BODY, more=False)))
        assert sent.status == 201
        assert (await store.resolve("guests", sent.json["ref"])).size == 3
        refused = await post(app, headers_for(token="wrong"), receiving(chunk(BODY, more=False)))
        assert refused.status == 401
