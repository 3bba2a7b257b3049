"""Against a real authorization server: discovery, JWTs, rotation, outage, introspection."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.auth.authenticator import Authenticator
from app.errors import Unauthenticated, Unavailable
from tests.auth.authorization_server import (
    JWT_RESOURCE,
    OPAQUE_RESOURCE,
    AuthorizationServer,
    running,
)
from tests.auth.conftest import Make
from tests.auth.issuer import Clock, bearer
from tests.components import require_component
from tests.npm import is_installable

pytestmark = [pytest.mark.anyio, pytest.mark.component("oidc-provider")]

UPLOAD = frozenset({"ahp.upload"})


@pytest.fixture(params=["RS256", "ES256"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AuthorizationServer]:
    require_component(
        "oidc-provider", present=is_installable(), why="it needs node 20 or newer and npm"
    )
    with running(tmp_path_factory.mktemp("oidc"), request.param) as started:
        yield started


@pytest.fixture
def clock() -> Clock:
    """The server's own time, read once: it stands still for the receiver."""
    return Clock(time.time())


@pytest.fixture
def checker(server: AuthorizationServer, make: Make) -> Authenticator:
    table = {"issuer": server.issuer, "audience": JWT_RESOURCE, "scope_claim": "tenant"}
    return make(issuers=[table])


async def refused(checker: Authenticator, token: str) -> str:
    with pytest.raises(Unauthenticated) as caught:
        await checker.authenticate(bearer(token))
    return caught.value.message


@pytest.mark.requirement("AHP-R10", "AHP-R11", "AHP-R29", "AHP-R36")
async def test_client_credentials_with_a_resource_indicator(
    server: AuthorizationServer, checker: Authenticator
) -> None:
    agent = await checker.authenticate(bearer(await server.token()))
    assert (agent.name, agent.scope, agent.permissions) == (
        "agent",
        "acme",
        frozenset({"ahp.upload"}),
    )
    stranger = await checker.authenticate(
        bearer(await server.token(client="stranger", scope="refs.read"))
    )
    assert (stranger.scope, stranger.permissions) == ("globex", frozenset({"refs.read"}))


@pytest.mark.requirement("AHP-R10")
async def test_the_scope_is_issuer_and_subject_by_default(
    server: AuthorizationServer, make: Make
) -> None:
    checker = make(issuers=[{"issuer": server.issuer, "audience": JWT_RESOURCE}])
    principal = await checker.authenticate(bearer(await server.token()))
    assert principal.scope == f"{server.issuer}#agent"


@pytest.mark.requirement("AHP-R11", "AHP-R29", "B81")
async def test_a_token_for_another_resource(server: AuthorizationServer, make: Make) -> None:
    checker = make(issuers=[{"issuer": server.issuer, "audience": "https://else.test/up"}])
    assert "audience" in await refused(checker, await server.token())


@pytest.mark.requirement("AHP-R29", "B82")
async def test_a_token_ends(
    server: AuthorizationServer, checker: Authenticator, clock: Clock
) -> None:
    token = await server.token()
    await checker.authenticate(bearer(token))
    clock.advance(3600 + 60)
    assert "expired" in await refused(checker, token)


@pytest.mark.requirement("B79")
async def test_rotation(server: AuthorizationServer, checker: Authenticator, clock: Clock) -> None:
    before = await server.token()
    assert (await checker.authenticate(bearer(before))).name == "agent"
    server.command("rotate")
    after = await server.token()
    assert (await checker.authenticate(bearer(after))).name == "agent"
    assert (await checker.authenticate(bearer(before))).name == "agent"
    server.command("retire")
    server.command("rotate")
    clock.advance(10)
    assert (await checker.authenticate(bearer(await server.token()))).name == "agent"
    assert "key of its issuer" in await refused(checker, before)


@pytest.mark.requirement("B78")
async def test_an_outage(
    server: AuthorizationServer, checker: Authenticator, make: Make, clock: Clock
) -> None:
    first, second = await server.token(), await server.token()
    await checker.authenticate(bearer(first))
    cold = make(issuers=[{"issuer": server.issuer, "audience": JWT_RESOURCE}])
    server.command("fail")
    clock.advance(600)
    assert (await checker.authenticate(bearer(second))).name == "agent"
    with pytest.raises(Unavailable):
        await cold.authenticate(bearer(first))
    server.command("heal")
    clock.advance(1)
    assert (await cold.authenticate(bearer(first))).name == "agent"


@pytest.fixture
def asking(server: AuthorizationServer, make: Make) -> Authenticator:
    table: dict[str, Any] = {
        "url": server.issuer + "/token/introspection",
        "client_id": "consignee",
        "client_secret_env": "SECRET",
        "issuer": server.issuer,
        "audience": [OPAQUE_RESOURCE],
        "scope_claim": "tenant",
    }
    return make(introspection=table, environment={"SECRET": "consignee-secret"})


@pytest.mark.requirement("AHP-R10", "AHP-R29")
async def test_an_opaque_token_until_it_is_revoked(
    server: AuthorizationServer, asking: Authenticator
) -> None:
    token = await server.token(resource=OPAQUE_RESOURCE)
    assert "." not in token
    agent = await asking.authenticate(bearer(token))
    assert (agent.name, agent.scope, agent.permissions) == (
        "agent",
        "acme",
        frozenset({"ahp.upload"}),
    )
    await server.revoke(token)
    assert "not active" in await refused(asking, token)
    assert "not active" in await refused(asking, "never-issued")


@pytest.mark.requirement("B78")
async def test_introspection_in_an_outage(
    server: AuthorizationServer, asking: Authenticator
) -> None:
    token = await server.token(resource=OPAQUE_RESOURCE)
    server.command("fail")
    with pytest.raises(Unavailable):
        await asking.authenticate(bearer(token))


async def test_a_wrong_client_secret_is_not_the_clients_fault(
    server: AuthorizationServer, make: Make
) -> None:
    table = {
        "url": server.issuer + "/token/introspection",
        "client_id": "consignee",
        "client_secret_env": "SECRET",
    }
    checker = make(introspection=table, environment={"SECRET": "wrong"})
    with pytest.raises(Unavailable):
        await checker.authenticate(bearer(await server.token(resource=OPAQUE_RESOURCE)))
