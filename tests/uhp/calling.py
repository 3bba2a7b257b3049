"""Calling the routes under /v1 as ASGI: real authenticator, real store, requests by hand."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from app.auth.authenticator import Authenticator
from app.http.bodies import BodyLimits
from app.http.metrics import Metrics
from app.settings import Settings, TokenSettings
from app.store import ContentStore, migrate
from app.uhp.application import UhpApplication
from app.uhp.cursors import Cursors
from app.uhp.http import Admission, UhpRoute
from app.uhp.services import Services
from tests import backends
from tests.http.messages import Header, Sent, chunk, http_scope, receiving

FIRST = "first-token"
SECOND = "second-token"
SHARING = "sharing-token"
POWERLESS = "powerless-token"


def _token(name: str, token: str, scope: str, permissions: frozenset[Any]) -> TokenSettings:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return TokenSettings(name=name, token_sha256=digest, scope=scope, permissions=permissions)


def settings_for(data_dir: Path, **changes: Any) -> Settings:
    """Two scopes, a second principal in the first of them, and one without permission."""
    uhp = frozenset({"uhp"})
    tokens = (
        _token("first", FIRST, "a", uhp),
        _token("sharing", SHARING, "a", uhp),
        _token("second", SECOND, "b", uhp),
        _token("powerless", POWERLESS, "a", frozenset({"ahp.upload"})),
    )
    given = backends.settings_of(data_dir) | changes
    return Settings(data_dir=data_dir, tokens=tokens, **given)


def application_of(
    routes: Iterable[UhpRoute],
    settings: Settings,
    admission: Admission | None = None,
    cors_origins: Iterable[str] = (),
) -> UhpApplication:
    """The application with `routes` and nothing else."""
    return UhpApplication(
        routes,
        authenticator=Authenticator(settings),
        body_limits=BodyLimits.of(settings),
        admission=admission,
        cors_origins=cors_origins,
    )


@asynccontextmanager
async def services_in(data_dir: Path, **changes: Any) -> AsyncIterator[Services]:
    """Services on a store of their own, without anything that runs tasks."""
    settings = settings_for(data_dir, **changes)
    migrate(settings)
    store = await ContentStore.start(settings)
    try:
        yield services_on(settings, store)
    finally:
        await store.close()


def services_on(settings: Settings, store: Any) -> Services:
    """Services with nothing behind those that files do not need."""
    absent: Any = None
    return Services(
        settings=settings,
        store=store,
        authenticator=Authenticator(settings),
        metrics=Metrics(),
        harnesses={},
        workspaces=absent,
        engine=absent,
        previews=absent,
        cursors=Cursors(b"k" * 32),
    )


async def call(
    app: ASGIApp,
    method: str,
    target: str,
    *chunks: bytes,
    token: str | None = FIRST,
    headers: Iterable[Header] = (),
) -> Sent:
    """One request; `chunks` are its body as it arrives."""
    path, _, query = target.partition("?")
    given = [*headers]
    if token is not None:
        given.append((b"authorization", b"Bearer " + token.encode()))
    if chunks and not any(name == b"content-length" for name, _ in given):
        given.append((b"content-length", b"%d" % sum(map(len, chunks))))
    scope = http_scope(method, path, given, query_string=query.encode())
    body = [chunk(part) for part in chunks[:-1]] + [
        chunk(chunks[-1] if chunks else b"", more=False)
    ]
    sent = Sent()
    await app(scope, receiving(*body), sent)
    return sent


def error_of(sent: Sent) -> dict[str, Any]:
    """The error of an answer that must be the envelope, with all of its keys and its version."""
    error: dict[str, Any] = sent.json["error"]
    assert set(error) == {"type", "code", "message", "param", "detail"}
    assert all(isinstance(error[key], str) and error[key] for key in ("type", "code", "message"))
    assert sent.headers[b"content-type"] == b"application/json"
    assert sent.headers[b"uhp-version"]
    return error
