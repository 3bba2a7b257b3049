"""Where everything is wired: settings in, one ASGI application out.

`uvicorn app.main:app` finds `app` here; it is made on first use, from `consignee.toml` and
`CONSIGNEE_*` variables.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import start_http_server
from starlette.routing import Route, Router

from app import audit, telemetry
from app.ahp.events import load_handler
from app.ahp.hook_replies import Replies
from app.ahp.hook_runs import Runs
from app.ahp.hooks import HooksEndpoint
from app.ahp.internal import internal_routes
from app.ahp.uploads import UploadEndpoint
from app.auth.authenticator import Authenticator
from app.auth.metadata import documents
from app.errors import Forbidden, Refusal, Unauthenticated
from app.harness.registry import build_harnesses
from app.harness.workspace import Workspaces
from app.http.afterwards import Afterwards
from app.http.answers import JSON, encode_json
from app.http.bodies import BodyLimits
from app.http.metrics import CONTENT_TYPE, Metrics
from app.http.middleware import Rendered, https_required, record_of, surround
from app.http.outflow import file_sending
from app.http.protocol import (
    AFTERWARDS_KEY,
    DRAINING_KEY,
    LIMITS_KEY,
    SENDING_KEY,
    STOPPING_KEY,
    ConnectionLimits,
)
from app.http.resources import Answer, Resource, UnknownRoute, refused
from app.logs import configure
from app.settings import SettingsError, load_settings
from app.store.content import ContentStore
from app.store.database import is_postgres
from app.uhp.application import UhpApplication, is_uhp
from app.uhp.application import https_required as uhp_https_required
from app.uhp.cursors import Cursors, load_key
from app.uhp.engine import Engine
from app.uhp.limits import RequestRate, SharedRate
from app.uhp.previews import Previews
from app.uhp.routes import all_routes
from app.uhp.services import Services
from app.uhp.upkeep import Upkeep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from app.settings import Settings
    from app.uhp.http import Admission

log = logging.getLogger("consignee.server")

USAGE_SECONDS = 60.0
"""Pause between two counts of what is stored: counting a large database is not free."""

SWEPT = {"expired": "references", "blobs": "bodies"}
"""What sweeps take away, as the metric calls it where their report does not."""


def _https_required(scope: Scope) -> Rendered:
    return uhp_https_required() if is_uhp(scope["path"]) else https_required(scope)


def _nothing() -> None:
    """What there is to end early before the application has started."""


async def _drained() -> None:
    """What there is to wait for before the application has started."""


def create_app(settings: Settings) -> ASGIApp:
    """The whole server as one ASGI application; its lifespan opens and closes the store."""
    limits = BodyLimits.of(settings)
    receiver = Receiver(settings, limits)
    return surround(
        receiver,
        receiver.metrics,
        limits,
        is_protected=settings.is_protected,
        refusal=_https_required,
    )


class Receiver:
    """The routes, and the services behind them while the application lives."""

    def __init__(self, settings: Settings, limits: BodyLimits) -> None:
        self.metrics = Metrics()
        self._afterwards = Afterwards()
        self._settings = settings
        self._authenticator = Authenticator(settings)
        self._body_limits = limits
        self._uhp: ASGIApp | None = None
        self._replies = Replies(settings)
        self._handler = load_handler(settings.event_handler)
        self._endpoints: dict[str, ASGIApp] = {}
        self._stop: Callable[[], None] = _nothing
        self._drain: Callable[[], Awaitable[None]] = _drained
        self._router = Router(redirect_slashes=False, lifespan=self._lifespan)
        self._router.default = UnknownRoute(limits)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._router(scope, receive, send)
        return self._endpoint(scope["path"])(scope, receive, send)

    def _endpoint(self, path: str) -> ASGIApp:
        """Who answers a path. Uploads and events are found at once: most of what arrives is one."""
        endpoint = self._endpoints.get(path)
        if endpoint is not None:
            return endpoint
        return self._uhp if self._uhp is not None and is_uhp(path) else self._router

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as opened:
            opened.enter_context(audit.kept(self._settings, self.metrics.audit_lost.inc))
            end_telemetry = telemetry.start(self._settings, self.metrics.registry)
            opened.push_async_callback(asyncio.to_thread, end_telemetry)
            opened.callback(self._afterwards.catch_up)
            store = await ContentStore.start(
                self._settings, self.metrics, meanwhile=self._afterwards.have_time
            )
            opened.push_async_callback(store.close)
            opened.push_async_callback(self._authenticator.close)
            await self._authenticator.start()
            await self._serve_metrics(opened)
            self._router.routes[:] = [
                *self._ahp(store, await opened.enter_async_context(self._handling(store))),
                *internal_routes(self._settings, self._authenticator, store),
                *self._operation(store),
            ]
            self._uhp = await opened.enter_async_context(self._open_uhp(store))
            seconds = self._settings.sweep_interval_seconds
            sweep = partial(self._sweep, store)
            await opened.enter_async_context(self._kept_up("sweep", seconds, sweep))
            count = partial(self._count, store)
            await opened.enter_async_context(self._kept_up("count", USAGE_SECONDS, count))
            yield {
                LIMITS_KEY: self._connection_limits(),
                AFTERWARDS_KEY: self._afterwards.do,
                SENDING_KEY: opened.enter_context(file_sending()),
                STOPPING_KEY: self._stop,
                DRAINING_KEY: self._drain,
            }

    @asynccontextmanager
    async def _open_uhp(self, store: ContentStore) -> AsyncIterator[ASGIApp]:
        settings = self._settings
        workspaces = Workspaces.of(settings)
        await workspaces.start()
        engine = Engine(settings, store, workspaces, self.metrics)
        previews = Previews(settings, store.sessions.exists)
        upkeep = Upkeep(settings, store, workspaces, previews)
        services = Services(
            settings=settings,
            store=store,
            authenticator=self._authenticator,
            metrics=self.metrics,
            harnesses=build_harnesses(settings),
            workspaces=workspaces,
            engine=engine,
            previews=previews,
            cursors=Cursors(await asyncio.to_thread(load_key, settings.secret_key)),
        )
        await engine.start()
        self._stop, self._drain = engine.stop, engine.drain
        try:
            async with self._kept_up("upkeep", settings.sweep_interval_seconds, upkeep.run):
                yield UhpApplication(
                    all_routes(services),
                    authenticator=self._authenticator,
                    body_limits=self._body_limits,
                    admission=_admission(settings, store),
                    cors_origins=settings.cors_origins,
                )
        finally:
            await engine.close()
            await previews.close()

    def _connection_limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            head_seconds=self._settings.head_timeout_seconds,
            head_bytes=self._settings.max_head_bytes,
            drain_bytes=self._settings.drain_bytes,
            drain_seconds=self._settings.drain_seconds,
        )

    @asynccontextmanager
    async def _handling(self, store: ContentStore) -> AsyncIterator[Runs | None]:
        """The operator's code for events, where there is any; on leaving, its runs end."""
        if self._handler is None:
            yield None
            return
        seconds = self._settings.event_timeout_seconds
        runs = Runs(self._handler, self._replies, store.events, seconds=seconds)
        try:
            yield runs
        finally:
            await runs.close()

    def _ahp(self, store: ContentStore, runs: Runs | None) -> list[Route]:
        settings = self._settings
        for path in settings.upload_paths:
            self._endpoints[path] = UploadEndpoint(
                path, settings, self._authenticator, store, self.metrics
            )
        for path in settings.hooks_paths:
            self._endpoints[path] = HooksEndpoint(
                path,
                settings,
                self._authenticator,
                store.events,
                self.metrics,
                self._replies,
                runs,
            )
        endpoints = [Route(path, endpoint) for path, endpoint in self._endpoints.items()]
        metadata = [
            Route(path, self._resource(partial(_document, encode_json(document))))
            for path, document in documents(settings).items()
        ]
        return [*endpoints, *metadata]

    def _operation(self, store: ContentStore) -> list[Route]:
        return [
            Route("/healthz", self._resource(_alive)),
            Route("/readyz", self._resource(partial(_ready, store))),
            Route("/metrics", self._resource(self._metrics)),
        ]

    def _resource(self, answer: Any) -> Resource:
        return Resource(answer, self._body_limits)

    async def _metrics(self, scope: Scope) -> Answer:
        try:
            principal = await self._authenticator.authenticate(scope["headers"])
            record_of(scope).serve(principal.name, principal.scope)
            principal.require("admin")
        except (Unauthenticated, Forbidden) as refusal:
            challenge = self._authenticator.challenge(refusal).encode("ascii")
            return refused(refusal, (b"www-authenticate", challenge))
        self._afterwards.catch_up()
        return Answer(200, CONTENT_TYPE, self.metrics.render())

    async def _serve_metrics(self, opened: AsyncExitStack) -> None:
        """Answer `/metrics` on a loopback port of its own, where one is configured."""
        port = self._settings.metrics_port
        if port is None:
            return
        try:
            server, _ = start_http_server(port, addr="127.0.0.1", registry=self.metrics.shown)
        except OSError as error:
            raise SettingsError(
                f"metrics_port: cannot listen on {port}: {error.strerror}"
            ) from None
        opened.callback(server.server_close)
        opened.push_async_callback(asyncio.to_thread, server.shutdown)
        log.info("metrics", extra={"port": server.server_port})

    async def _count(self, store: ContentStore) -> None:
        usage = await store.usage()
        self.metrics.stored_bytes.set(usage.bytes)
        self.metrics.stored_blobs.set(usage.blobs)
        self.metrics.references.set(usage.references)
        population = await store.accounts.population()
        self.metrics.sessions.set(population.sessions)
        self.metrics.files.set(population.files)
        self.metrics.file_bytes.set(population.bytes)
        disk = await asyncio.to_thread(shutil.disk_usage, self._settings.data_dir)
        self.metrics.free_bytes.set(disk.free)

    async def _sweep(self, store: ContentStore) -> None:
        report = await store.sweep()
        for what, count in asdict(report).items():
            if what not in ("dry_run", "kept"):
                name = SWEPT.get(what, what)
                self.metrics.swept.labels(name).inc(count)

    @asynccontextmanager
    async def _kept_up(
        self, name: str, seconds: float, work: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """Do `work` regularly for as long as the block lasts."""
        task = asyncio.create_task(_regularly(name, seconds, work, self.metrics))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _admission(settings: Settings, store: ContentStore) -> Admission | None:
    """Who may make a request now; counted in the database where other processes answer, too."""
    rate = settings.max_requests_per_second
    if rate is None:
        return None
    is_alone = settings.workers == 1 and not is_postgres(settings)
    return RequestRate(rate) if is_alone else SharedRate(rate, store.budgets)


async def _regularly(
    name: str, seconds: float, work: Callable[[], Awaitable[object]], metrics: Metrics
) -> None:
    """Do `work` again and again; a failure is reported and the next turn comes all the same."""
    while True:
        began = time.perf_counter()
        outcome = await _outcome_of(name, work)
        metrics.count_round(name, outcome, time.perf_counter() - began)
        await asyncio.sleep(seconds)


async def _outcome_of(name: str, work: Callable[[], Awaitable[object]]) -> str:
    try:
        with telemetry.span(name):
            await work()
    except Refusal as refusal:
        log.warning("%s put off", name, extra={"code": refusal.code})
        return "put_off"
    except Exception:
        log.exception("%s failed", name)
        return "failed"
    return "done"


async def _document(body: bytes, _: Scope) -> Answer:
    return Answer(200, JSON, body)


async def _alive(_: Scope) -> Answer:
    return Answer(200, JSON, b'{"status":"ok"}')


async def _ready(store: ContentStore, _: Scope) -> Answer:
    await store.probe()
    return Answer(200, JSON, b'{"status":"ready"}')


def _configured_app() -> ASGIApp:
    try:
        settings = load_settings()
        configure(settings)
        return create_app(settings)
    except SettingsError as error:
        raise SystemExit(f"consignee: {error}") from None


def __getattr__(name: str) -> Any:
    if name == "app":
        return _configured_app()
    raise AttributeError(name)
