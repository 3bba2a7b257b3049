"""`/internal/refs/{ref}` over a real store: ASGI by hand, and once a real process."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from app.errors import Unavailable
from app.main import create_app
from app.settings import Settings, TokenSettings
from app.store.content import ContentStore
from app.store.events import Arrival, Events
from app.store.migrations import migrate
from app.store.records import Reference
from tests import backends
from tests.e2e.processes import running_server
from tests.http.messages import DISCONNECT, Header, Sent, chunk, http_scope, living, receiving

pytestmark = pytest.mark.anyio

DATA = bytes(range(256)) * 1000
END = chunk(b"", more=False)


def _token(name: str, permission: Any, scope: str) -> TokenSettings:
    return TokenSettings(
        name=name,
        scope=scope,
        permissions=frozenset({permission}),
        token_sha256=hashlib.sha256(name.encode()).hexdigest(),
    )


def settings_for(folder: Path, **more: Any) -> Settings:
    given: dict[str, Any] = {"internal_refs": True}
    given |= backends.settings_of(folder / "data") | more
    settings = Settings(
        data_dir=folder / "data",
        tokens=(
            _token("reader", "refs.read", "mine"),
            _token("stranger", "refs.read", "theirs"),
            _token("uploader", "ahp.upload", "mine"),
        ),
        **given,
    )
    migrate(settings)
    return settings


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


@pytest.fixture
async def store(settings: Settings) -> AsyncIterator[ContentStore]:
    """The store, as another process sees it."""
    opened = await ContentStore.start(settings)
    yield opened
    await opened.close()


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[ASGIApp]:
    application = create_app(settings)
    async with living(application):
        yield application


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def put(store: ContentStore, data: bytes = DATA, scope: str = "mine") -> Reference:
    digest = hashlib.sha256(data).hexdigest()
    return await store.receive(
        _pieces(data), scope=scope, principal="uploader", size=len(data), sha256=digest
    )


async def use(store: ContentStore, reference: Reference) -> None:
    """Have an event accepted that uses the reference."""
    event = Arrival(
        event_id="evt_1",
        type="turn.start",
        mode="observe",
        scope=reference.scope,
        principal="host",
        message=b"{}",
        refs=(reference.ref,),
    )
    await store.events.accept(event)


async def ask(
    app: ASGIApp,
    ref: str,
    *,
    token: str | None = "reader",
    method: str = "GET",
    headers: list[Header] | None = None,
    path: str = "/internal/refs/",
) -> Sent:
    sent = Sent()
    given = list(headers or [])
    if token is not None:
        given.append((b"authorization", b"Bearer " + token.encode()))
    await app(http_scope(method, path + ref, given), receiving(END), sent)
    assert sent.is_complete
    return sent


@pytest.mark.requirement("AHP-R37")
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
async def test_there_is_no_such_route_unless_it_is_configured(tmp_path: Path, method: str) -> None:
    application = create_app(settings_for(tmp_path, internal_refs=False))
    async with living(application):
        for token in ("reader", None):
            sent = await ask(application, "ref_x", token=token, method=method)
            assert (sent.status, sent.json["code"]) == (404, "route_not_found")


@pytest.mark.requirement("AHP-R37", "AHP-R41", "AHP-R43")
@pytest.mark.parametrize("data", [DATA, b"small", b""], ids=["large", "small", "empty"])
async def test_a_processor_gets_the_bytes_any_number_of_times(
    data: bytes, app: ASGIApp, store: ContentStore
) -> None:
    reference = await put(store, data)
    for _ in range(2):
        assert (await ask(app, reference.ref)).body == data
    sent = await ask(app, reference.ref)
    assert (sent.status, sent.body) == (200, data)
    assert sent.headers[b"content-type"] == b"application/octet-stream"
    assert sent.headers[b"content-length"] == b"%d" % len(data)
    assert sent.headers[b"etag"] == b'"sha256-%b"' % reference.sha256.encode()
    assert sent.headers[b"x-content-type-options"] == b"nosniff"
    assert sent.headers[b"content-security-policy"] == b"default-src 'none'; sandbox"
    assert sent.headers[b"content-disposition"].startswith(b"attachment")
    assert sent.headers[b"cache-control"] == b"private, no-transform"


async def test_head_tells_the_same_without_the_bytes(app: ASGIApp, store: ContentStore) -> None:
    reference = await put(store)
    whole, head = [await ask(app, reference.ref, method=method) for method in ("GET", "HEAD")]
    assert (head.status, head.body) == (200, b"")
    ids = (b"x-request-id",)
    told = [{k: v for k, v in sent.headers.items() if k not in ids} for sent in (whole, head)]
    assert told[0] == told[1]


async def test_ranges_are_given_as_of_any_download(app: ASGIApp, store: ContentStore) -> None:
    reference = await put(store)
    part = await ask(app, reference.ref, headers=[(b"range", b"bytes=1000-1999")])
    assert (part.status, part.body) == (206, DATA[1000:2000])
    assert part.headers[b"content-range"] == b"bytes 1000-1999/%d" % len(DATA)
    beyond = await ask(app, reference.ref, headers=[(b"range", b"bytes=%d-" % len(DATA))])
    assert (beyond.status, beyond.json["code"]) == (416, "range_not_satisfiable")
    assert (beyond.json["size"], beyond.json["status"]) == (len(DATA), 416)
    assert beyond.headers[b"content-range"] == b"bytes */%d" % len(DATA)
    assert beyond.headers[b"content-type"] == b"application/problem+json"


async def test_conditions_are_heard_as_of_any_download(app: ASGIApp, store: ContentStore) -> None:
    reference = await put(store)
    etag = b'"sha256-%b"' % reference.sha256.encode()
    known = await ask(app, reference.ref, headers=[(b"if-none-match", etag)])
    assert (known.status, known.body) == (304, b"")
    failed = await ask(app, reference.ref, headers=[(b"if-match", b'"other"')])
    assert (failed.status, failed.json["code"]) == (412, "precondition_failed")


@pytest.mark.requirement("AHP-R38")
async def test_an_ended_reference_is_given_while_an_event_keeps_it(
    app: ASGIApp, store: ContentStore
) -> None:
    kept, ended = await put(store), await put(store, b"ended")
    await use(store, kept)
    for reference in (kept, ended):
        await store.remove("mine", reference.ref)
    await store.sweep()
    assert (await ask(app, kept.ref)).body == DATA
    part = await ask(app, kept.ref, headers=[(b"range", b"bytes=-5")])
    assert (part.status, part.body) == (206, DATA[-5:])
    assert (await ask(app, ended.ref)).json["code"] == "content_not_found"
    assert (await ask(app, kept.ref, token="stranger")).json["code"] == "content_not_found"


@pytest.mark.requirement("AHP-R36", "AHP-R42")
async def test_a_foreign_reference_is_an_unknown_one(app: ASGIApp, store: ContentStore) -> None:
    mine = await put(store)
    answers = []
    for ref in (mine.ref, f"ref_{'x' * 32}", "ref", "r\0"):
        sent = await ask(app, ref, token="stranger")
        answers.append((sent.status, sent.body, set(sent.headers)))
    assert answers == answers[:1] * 4
    assert answers[0][0] == 404
    assert json.loads(answers[0][1])["code"] == "content_not_found"


@pytest.mark.requirement("AHP-R29", "AHP-R30", "AHP-R48")
@pytest.mark.parametrize(
    ("token", "status", "code"),
    [
        (None, 401, "missing_credential"),
        ("nobody", 401, "invalid_credential"),
        ("uploader", 403, "insufficient_scope"),
    ],
)
async def test_only_whoever_may_read_references_gets_any(
    token: str | None, status: int, code: str, app: ASGIApp, store: ContentStore
) -> None:
    reference = await put(store)
    for ref in (reference.ref, "unknown"):
        sent = await ask(app, ref, token=token)
        assert (sent.status, sent.json["code"]) == (status, code)
        assert sent.headers[b"www-authenticate"].startswith(b"Bearer ")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_nothing_can_be_changed_here(method: str, app: ASGIApp, store: ContentStore) -> None:
    reference = await put(store)
    sent = await ask(app, reference.ref, method=method)
    assert (sent.status, sent.headers[b"allow"]) == (405, b"GET, HEAD")
    assert (await ask(app, reference.ref)).body == DATA


@pytest.mark.parametrize("ref", ["", "a/b", "../refs/a"])
async def test_other_paths_are_no_route(ref: str, app: ASGIApp) -> None:
    assert (await ask(app, ref)).json["code"] == "route_not_found"


async def test_a_request_with_a_body_is_malformed(app: ASGIApp, store: ContentStore) -> None:
    reference = await put(store)
    sent = await ask(app, reference.ref, headers=[(b"content-length", b"3")])
    assert (sent.status, sent.json["code"]) == (400, "malformed_body")


async def test_bytes_that_are_gone_are_refused_before_the_answer_begins(
    app: ASGIApp, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await put(store)

    async def still_there(*_: object) -> Reference:
        return reference

    await store.remove("mine", reference.ref)
    await store.sweep()
    monkeypatch.setattr(Events, "resolve", still_there)
    sent = await ask(app, reference.ref)
    assert (sent.status, sent.json["code"]) == (404, "content_not_found")


async def test_a_failure_in_the_middle_cuts_the_answer(
    app: ASGIApp, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await put(store)

    class Failing:
        async def __aenter__(self) -> AsyncIterator[bytes]:
            return self._chunks()

        async def __aexit__(self, *_: object) -> None: ...

        async def _chunks(self) -> AsyncIterator[bytes]:
            yield DATA[:10]
            raise Unavailable("storage_unavailable", "It went away.")

    monkeypatch.setattr(Events, "read", lambda *_, **__: Failing())
    sent = Sent()
    scope = http_scope(
        "GET", f"/internal/refs/{reference.ref}", [(b"authorization", b"Bearer reader")]
    )
    with pytest.raises(Unavailable):
        await app(scope, receiving(END), sent)
    assert (sent.status, sent.is_complete) == (200, False)


async def test_a_client_that_leaves_ends_the_reading(
    app: ASGIApp, store: ContentStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = await put(store)
    closed = asyncio.Event()

    class Endless:
        async def __aenter__(self) -> AsyncIterator[bytes]:
            return self._chunks()

        async def __aexit__(self, *_: object) -> None:
            closed.set()

        async def _chunks(self) -> AsyncIterator[bytes]:
            await asyncio.get_running_loop().create_future()
            yield b""

    monkeypatch.setattr(Events, "read", lambda *_, **__: Endless())
    scope = http_scope(
        "GET", f"/internal/refs/{reference.ref}", [(b"authorization", b"Bearer reader")]
    )
    await app(scope, receiving(END, DISCONNECT), Sent())
    assert closed.is_set()


@pytest.mark.requirement("AHP-R37")
def test_a_real_server_gives_the_bytes_to_a_real_client() -> None:
    with running_server(environment={"CONSIGNEE_INTERNAL_REFS": "true"}) as server:
        with httpx.Client(headers={"Authorization": f"Bearer {server.token}"}) as client:
            receipt = client.post(
                server.upload_endpoint,
                content=DATA,
                headers={
                    "Content-Type": "application/octet-stream",
                    "AHP-Content-SHA256": hashlib.sha256(DATA).hexdigest(),
                },
            ).json()
            url = f"{server.url}/internal/refs/{receipt['ref']}"
            assert client.get(url).content == DATA
            assert client.get(url, headers={"Range": "bytes=5-9"}).content == DATA[5:10]
            assert client.head(url).headers["content-length"] == str(len(DATA))
        assert httpx.get(url).status_code == 401
        assert DATA[:40].hex() not in server.log_with("  401  ")
