"""The wiring: what is opened, in which order, and closed again."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

import app.main
from app.errors import Unavailable
from app.http.protocol import LIMITS_KEY, STOPPING_KEY, ConnectionLimits
from app.main import _admission, create_app
from app.settings import AnonymousSettings, Settings, SettingsError, TokenSettings
from app.store.content import ContentStore
from app.store.migrations import migrate
from app.store.records import StoreError, Usage
from app.uhp.limits import RequestRate, SharedRate
from tests import backends
from tests.http.messages import Sent, chunk, http_scope, living, receive_nothing, receiving
from tests.store.stores import new_sqlite_store

pytestmark = pytest.mark.anyio

EVERYTHING = AnonymousSettings(scope="a", permissions=frozenset({"uhp"}))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


def settings_for(folder: Path, **more: Any) -> Settings:
    settings = Settings(
        data_dir=folder / "data",
        tokens=(
            TokenSettings(
                name="operator",
                scope="operation",
                permissions=frozenset({"admin"}),
                token_sha256=hashlib.sha256(b"operator").hexdigest(),
            ),
        ),
        **(backends.settings_of(folder / "data") | more),
    )
    migrate(settings)
    return settings


async def get(application: ASGIApp, path: str, token: str | None = None) -> Sent:
    sent = Sent()
    headers = [(b"authorization", b"Bearer " + token.encode())] if token else []
    await application(http_scope("GET", path, headers), receive_nothing, sent)
    return sent


def workers() -> list[str]:
    """The threads of this process, apart from those that the event loop itself keeps."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if not name.startswith(("MainThread", "asyncio_"))]


async def test_operation_is_answered(settings: Settings) -> None:
    application = create_app(settings)
    async with living(application):
        assert (await get(application, "/healthz")).json == {"status": "ok"}
        assert (await get(application, "/readyz")).json == {"status": "ready"}
        assert (await get(application, "/nope")).status == 404


@pytest.mark.requirement("AHP-R08")
async def test_the_metadata_of_the_endpoint_is_served(settings: Settings) -> None:
    application = create_app(settings)
    async with living(application):
        sent = await get(application, "/.well-known/oauth-protected-resource/ahp/uploads")
    assert (sent.status, sent.headers[b"content-type"]) == (200, b"application/json")
    assert sent.json["resource"] == settings.upload_endpoints[0]


@pytest.mark.requirement("UHP-31")
async def test_each_protocol_answers_in_its_own_form(settings: Settings) -> None:
    application = create_app(settings)
    async with living(application):
        sent = await get(application, "/v1/nope")
    assert sent.status == 404
    assert b"uhp-version" in sent.headers


async def test_a_store_that_does_not_answer_is_not_ready(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(_: ContentStore) -> None:
        raise Unavailable("not_ready", "The database does not answer.")

    monkeypatch.setattr(ContentStore, "probe", probe)
    application = create_app(settings)
    async with living(application):
        sent = await get(application, "/readyz")
        assert (sent.status, sent.json["code"]) == (503, "not_ready")
        assert (await get(application, "/healthz")).status == 200


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("wrong", 401), ("operator", 200)])
async def test_metrics_are_for_operators(
    settings: Settings, token: str | None, status: int
) -> None:
    application = create_app(settings)
    async with living(application):
        sent = await get(application, "/metrics", token)
    assert sent.status == status
    assert (b"www-authenticate" in sent.headers) == (status == 401)
    assert (b"consignee_uploads_in_flight" in sent.body) == (status == 200)


async def test_metrics_on_a_port_of_their_own(tmp_path: Path) -> None:
    port = _free_port()
    async with (
        living(create_app(settings_for(tmp_path, metrics_port=port))),
        httpx.AsyncClient() as client,
    ):
        response = await client.get(f"http://127.0.0.1:{port}/metrics")
        assert "consignee_uploads_in_flight" in response.text
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", port)) != 0


async def test_a_taken_metrics_port_is_named_and_nothing_stays_open(tmp_path: Path) -> None:
    before = workers()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = settings_for(tmp_path, metrics_port=taken.getsockname()[1])
        with pytest.raises(SettingsError, match="metrics_port: cannot listen"):
            async with living(create_app(settings)):
                raise AssertionError("it started")
    assert workers() == before
    assert [path for path in settings.staging_dir.iterdir() if path.is_dir()] == []


async def test_a_store_without_a_schema_stops_the_start(tmp_path: Path) -> None:
    before = workers()
    with pytest.raises(StoreError):
        async with living(create_app(Settings(data_dir=tmp_path / "data"))):
            raise AssertionError("it started")
    assert workers() == before


async def test_everything_is_closed_at_the_end(settings: Settings) -> None:
    before = workers()
    async with living(create_app(settings)):
        assert workers() != before
    assert workers() == before
    assert [path for path in settings.staging_dir.iterdir() if path.is_dir()] == []


@pytest.mark.requirement("B13", "B16")
async def test_the_connection_limits_are_those_of_the_settings(tmp_path: Path) -> None:
    settings = settings_for(
        tmp_path, head_timeout_seconds=1, max_head_bytes=2048, drain_bytes=3, drain_seconds=4
    )
    async with living(create_app(settings)) as state:
        assert state[LIMITS_KEY] == ConnectionLimits(1, 2048, 3, 4)


async def test_what_is_stored_is_counted(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def usage(_: ContentStore) -> Usage:
        return Usage(blobs=1, bytes=2, references=3)

    monkeypatch.setattr(ContentStore, "usage", usage)
    application = create_app(settings)
    async with living(application), asyncio.timeout(10):
        while "consignee_references 3.0" not in await metrics_of(application):
            await asyncio.sleep(0.01)
        assert "consignee_stored_blobs 1.0" in await metrics_of(application)
        assert "consignee_stored_bytes 2.0" in await metrics_of(application)


async def metrics_of(application: ASGIApp) -> list[str]:
    return (await get(application, "/metrics", "operator")).body.decode().splitlines()


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Unavailable("database_busy", "Try again."), "sweep put off"),
        (RuntimeError("unexpected"), "sweep failed"),
    ],
)
async def test_regular_work_goes_on_after_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: Exception,
    message: str,
) -> None:
    turns = 0
    enough = asyncio.Event()

    async def sweep(_: ContentStore) -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            enough.set()
        raise failure

    monkeypatch.setattr(ContentStore, "sweep", sweep)
    settings = settings_for(tmp_path, sweep_interval_seconds=0.001)
    async with living(create_app(settings)), asyncio.timeout(10):
        await enough.wait()
    assert message in caplog.messages


def test_uvicorn_finds_the_application(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONSIGNEE_DATA_DIR", str(tmp_path))
    configured: list[Settings] = []
    monkeypatch.setattr(app.main, "configure", configured.append)
    assert callable(app.main.app)
    assert [each.data_dir for each in configured] == [tmp_path]


def test_a_wrong_configuration_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONSIGNEE_PORT", "many")
    with pytest.raises(SystemExit, match="consignee: port: "):
        _ = app.main.app


def test_the_module_has_no_other_surprises() -> None:
    with pytest.raises(AttributeError):
        _ = app.main.nothing


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.mark.requirement("UHP-31", "B19")
async def test_plain_http_from_elsewhere_is_refused_as_each_protocol_refuses(
    tmp_path: Path,
) -> None:
    application = create_app(settings_for(tmp_path))
    async with living(application):
        health, sessions = [await from_elsewhere(application, p) for p in ("/healthz", "/v1/x")]
    assert (health.status, health.json["code"]) == (403, "https_required")
    assert (sessions.status, sessions.headers[b"content-type"]) == (403, b"application/json")
    assert sessions.headers[b"uhp-version"]
    error = sessions.json["error"]
    assert set(error) == {"type", "code", "message", "param", "detail"}
    assert (error["type"], error["code"]) == ("permission_error", "consignee_https_required")


async def from_elsewhere(application: ASGIApp, path: str) -> Sent:
    sent = Sent()
    scope = http_scope("GET", path, server=("192.0.2.1", 80))
    await application(scope, receiving(chunk(b"", more=False)), sent)
    return sent


async def test_tasks_are_told_when_the_server_begins_to_stop(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, anonymous=EVERYTHING)
    application = create_app(settings)
    async with living(application) as state:
        state[STOPPING_KEY]()
        body = b'{"input": "x"}'
        scope = http_scope("POST", "/v1/responses", [(b"content-length", b"%d" % len(body))])
        sent = Sent()
        await application(scope, receiving(chunk(body, more=False)), sent)
        assert (sent.status, sent.json["error"]["code"]) == (503, "harness_unavailable")


async def test_listed_origins_may_call_from_a_browser(tmp_path: Path) -> None:
    application = create_app(settings_for(tmp_path, cors_origins=("https://app.example",)))
    async with living(application):
        sent = Sent()
        scope = http_scope("GET", "/v1/uhp", [(b"origin", b"https://app.example")])
        await application(scope, receiving(chunk(b"", more=False)), sent)
        assert sent.headers[b"access-control-allow-origin"] == b"https://app.example"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, type(None)),
        ({"max_requests_per_second": 5}, RequestRate),
        ({"max_requests_per_second": 5, "workers": 2}, SharedRate),
        (
            {"max_requests_per_second": 5, "database_url": "postgresql+asyncpg://db.example/c"},
            SharedRate,
        ),
    ],
)
async def test_requests_are_counted_where_every_process_that_answers_sees_it(
    tmp_path: Path, given: dict[str, Any], kind: type[object]
) -> None:
    store = await new_sqlite_store(tmp_path)
    assert type(_admission(Settings(data_dir=tmp_path, **given), store)) is kind
    await store.close()
