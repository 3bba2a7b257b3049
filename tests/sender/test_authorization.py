"""Credentials of an upload endpoint: configured, discovered, cached, renewed, and never mixed."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.sender.authorization import Authorization, Credentials
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.errors import AuthorizationError, BudgetExceeded
from app.sender.oauth import MARGIN_SECONDS, Client, Interaction
from app.sender.sources import Source
from app.sender.transfer import Sender
from app.sender.turns import Turns
from tests.auth.issuer import Reply, Request
from tests.sender.authorities import (
    AGENT,
    RESOURCE_PLACE,
    SECRET,
    SERVER_PLACE,
    UPLOADS,
    World,
    budget,
    scripted,
    world,
)

pytestmark = pytest.mark.anyio

PLAIN: dict[str, Any] = {"endpoint": "https://127.0.0.1/up", "timeoutMs": 1000, "maxBytes": 10}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


def bearer(**auth: str) -> UploadConfiguration:
    return UploadConfiguration.parse({**PLAIN, "auth": {"type": "bearer", **auth}})


def preset(here: World, **changes: Any) -> UploadConfiguration:
    auth = {
        "type": "oauth",
        "resource": "urn:uploads",
        "issuer": here.issuer.url,
        "clientId": "preset",
        "clientSecretRef": "vault/agent",
        "flow": "client_credentials",
        "scopes": ["ahp.upload"],
        **changes,
    }
    return here.configuration(auth=auth)


def vault(here: World, **options: Any) -> Credentials:
    async def resolve(reference: str) -> str:
        return {"vault/agent": "kept"}[reference]

    return here.credentials(client=None, resolve_secret=resolve, **options)


async def refused(
    credentials: Authorization, configuration: UploadConfiguration, challenge: str | None = None
) -> AuthorizationError:
    with pytest.raises(AuthorizationError) as caught:
        await credentials.credential(configuration, challenge, budget())
    return caught.value


async def renewed(here: World, credentials: Credentials, challenge: str | None = None) -> str:
    """What one whole upload ends up with: without credential first, then as challenged."""
    own = budget()
    configuration = here.configuration()
    first = await credentials.credential(configuration, None, own)
    assert first is None
    second = await credentials.credential(
        configuration, here.challenge if challenge is None else challenge, own
    )
    assert second is not None
    return second


# --- bearer ------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-S09")
async def test_ahp_s09_a_token_of_the_environment_is_read_at_use() -> None:
    environment = {"UP": "one"}
    credentials = Credentials(environment=environment)
    assert await credentials.credential(bearer(tokenEnv="UP"), None, budget()) == "Bearer one"
    environment["UP"] = "two"
    assert await credentials.credential(bearer(tokenEnv="UP"), None, budget()) == "Bearer two"


@pytest.mark.requirement("AHP-S09")
async def test_ahp_s09_a_token_reference_is_resolved_by_the_host() -> None:
    async def resolve(reference: str) -> str:
        return {"vault/up": "kept"}[reference]

    credentials = Credentials(resolve_secret=resolve)
    assert await credentials.credential(bearer(tokenRef="vault/up"), None, budget()) == (
        "Bearer kept"
    )
    assert (await refused(credentials, bearer(tokenRef="else"))).code == "credential_missing"
    assert (await refused(Credentials(), bearer(tokenRef="x"))).code == "credential_missing"


@pytest.mark.parametrize("token", ["a b", "a\r\nX: y", "t\n", "é", "="])
@pytest.mark.requirement("AHP-S33")
async def test_ahp_s33_what_is_no_token_reaches_no_header(token: str) -> None:
    error = await refused(Credentials(environment={"UP": token}), bearer(tokenEnv="UP"))
    assert error.code == "credential_invalid"
    assert token not in error.message


@pytest.mark.parametrize("environment", [{}, {"UP": ""}])
async def test_a_missing_token_is_no_anonymous_upload(environment: dict[str, str]) -> None:
    error = await refused(Credentials(environment=environment), bearer(tokenEnv="UP"))
    assert error.code == "credential_missing"


async def test_a_refused_bearer_token_leads_to_no_other_way(here: World) -> None:
    configuration = here.configuration(auth={"type": "bearer", "tokenEnv": "UP"})
    credentials = here.credentials(environment={"UP": "old", "AGENT_SECRET": SECRET})
    assert await credentials.credential(configuration, None, budget()) == "Bearer old"
    error = await refused(credentials, configuration, here.challenge)
    assert error.code == "credential_refused"
    assert here.receiver.requests == here.issuer.requests == []


# --- discovery ---------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-S11")
async def test_ahp_s11_first_without_credential_then_as_the_challenge_leads(here: World) -> None:
    credentials = here.credentials()
    assert await credentials.credential(here.configuration(), None, budget()) is None
    assert here.receiver.requests == []
    assert await renewed(here, credentials) == "Bearer token-1"
    assert here.token_requests() == [
        {
            "grant_type": "client_credentials",
            "resource": here.endpoint,
            "scope": "ahp.upload refs.read",
        }
    ]


@pytest.mark.parametrize("challenge", ["", "Basic realm=x", 'Bearer realm="uploads"'])
@pytest.mark.requirement("AHP-S11")
async def test_ahp_s11_a_challenge_without_pointer_leads_to_the_well_known_places(
    here: World, challenge: str
) -> None:
    assert await renewed(here, here.credentials(), challenge) == "Bearer token-1"
    assert [r.path for r in here.receiver.requests] == [RESOURCE_PLACE + UPLOADS]


async def test_a_challenge_of_several_schemes_is_understood(here: World) -> None:
    challenge = f'Basic realm="a, Bearer b=\\"c\\"", {here.challenge}, scope="ahp.upload", DPoP'
    assert await renewed(here, here.credentials(), challenge) == "Bearer token-1"
    assert here.token_requests()[0]["scope"] == "ahp.upload"


async def test_a_malformed_challenge_leads_nowhere(here: World) -> None:
    error = await refused(here.credentials(), here.configuration(), 'Bearer realm="open')
    assert error.code == "challenge_invalid"
    assert here.receiver.requests == []


async def test_without_a_client_nobody_is_asked(here: World) -> None:
    error = await refused(here.credentials(client=None), here.configuration(), here.challenge)
    assert error.code == "authorization_required"
    assert here.receiver.requests == here.issuer.requests == []


async def test_a_challenge_is_no_consent_to_more_scopes(here: World) -> None:
    challenge = here.challenge + ', scope="ahp.upload admin"'
    error = await refused(here.credentials(), here.configuration(), challenge)
    assert error.code == "scope_not_permitted"
    assert "ahp.upload admin" in error.message
    odd = await refused(here.credentials(), here.configuration(), 'Bearer scope="a\x1b[31m"')
    assert "\x1b" not in odd.message
    assert here.receiver.requests == here.issuer.requests == []


@pytest.mark.parametrize(
    "name", ["http://127.0.0.1:9/m", "https://else.test/m", "https://10.0.0.1"]
)
async def test_a_challenge_that_points_elsewhere_is_not_followed(here: World, name: str) -> None:
    challenge = f'Bearer resource_metadata="{name}"'
    error = await refused(here.credentials(), here.configuration(), challenge)
    assert error.code == "destination_refused"
    assert here.receiver.requests == []


async def test_an_issuer_over_http_is_not_contacted(here: World) -> None:
    async with scripted(None) as plain:
        here.publish_resource(authorization_servers=[plain.url])
        error = await refused(here.credentials(), here.configuration(), here.challenge)
        assert error.code == "destination_refused"
        assert plain.requests == []


async def test_an_issuer_at_a_private_address_is_not_contacted(here: World) -> None:
    """As seen from an endpoint that is not on this machine."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    credentials = here.credentials(resolve=resolve)
    port = here.receiver.url.rpartition(":")[2]
    endpoint = f"https://receiver.test:{port}/up"
    configuration = UploadConfiguration.parse({**PLAIN, "endpoint": endpoint})
    destinations = credentials._destinations(endpoint, AGENT)
    with pytest.raises(AuthorizationError) as caught:
        await credentials._discovery.issuer(here.issuer.url, destinations)
    assert caught.value.code == "destination_refused"
    assert (await refused(credentials, configuration, "")).code == "metadata_unavailable"
    assert here.issuer.requests == []


@pytest.mark.parametrize(
    "name", ["https://169.254.169.254", "https://10.0.0.1:8443/t", "https://[fd00::1]"]
)
async def test_an_issuer_at_the_address_of_another_machine_here_is_not_contacted(
    here: World, name: str
) -> None:
    here.publish_resource(authorization_servers=[name])
    error = await refused(here.credentials(), here.configuration(), here.challenge)
    assert error.code == "destination_refused"


async def test_the_secret_goes_to_the_issuer_of_the_client_alone(here: World) -> None:
    registered = replace(AGENT, issuer="https://issuer.test")
    error = await refused(here.credentials(client=registered), here.configuration(), here.challenge)
    assert error.code == "issuer_mismatch"
    assert here.issuer.requests == []


async def test_the_issuer_of_the_client_is_chosen_among_several(here: World) -> None:
    here.publish_resource(authorization_servers=["https://else.test", here.issuer.url])
    registered = replace(AGENT, issuer=here.issuer.url)
    assert await renewed(here, here.credentials(client=registered)) == "Bearer token-1"


async def test_an_invalid_issuer_of_the_client_is_refused(here: World) -> None:
    registered = replace(AGENT, issuer="https://[:")
    here.publish_resource(authorization_servers=[registered.issuer])
    error = await refused(here.credentials(client=registered), here.configuration(), here.challenge)
    assert error.code == "destination_refused"


# --- cache -------------------------------------------------------------------------------------


async def test_a_discovered_token_opens_the_next_upload_at_once(here: World) -> None:
    credentials = here.credentials()
    await renewed(here, credentials)
    first = await credentials.credential(here.configuration(), None, budget())
    assert first == "Bearer token-1"
    assert len(here.token_requests()) == 1


async def test_endpoints_of_one_resource_share_its_token(here: World) -> None:
    credentials = here.credentials()
    for query in ("?tenant=acme", "?tenant=globex"):
        configuration = here.configuration(endpoint=here.endpoint + query)
        found = await credentials.credential(configuration, here.challenge, budget())
        assert found == "Bearer token-1"
    assert len(here.token_requests()) == 1


async def test_a_token_that_ends_is_renewed_without_discovery(here: World) -> None:
    credentials = here.credentials()
    await renewed(here, credentials)
    here.clock.advance(3600 - MARGIN_SECONDS)
    first = await credentials.credential(here.configuration(), None, budget())
    assert first == "Bearer token-2"
    assert [r.path for r in here.issuer.requests] == [SERVER_PLACE, "/token", "/token"]


async def test_a_refused_token_is_dropped_and_renewed_once(here: World) -> None:
    credentials = here.credentials()
    await renewed(here, credentials)
    own = budget()
    assert await credentials.credential(here.configuration(), None, own) == "Bearer token-1"
    challenge = here.challenge + ', error="invalid_token"'
    second = await credentials.credential(here.configuration(), challenge, own)
    assert second == "Bearer token-2"
    assert await credentials.credential(here.configuration(), None, budget()) == second


async def test_a_late_refusal_of_an_old_token_does_not_drop_the_new_one(here: World) -> None:
    credentials, early, late = here.credentials(), budget(), budget()
    await renewed(here, credentials)
    for own in (early, late):
        await credentials.credential(here.configuration(), None, own)
    for own in (early, late):
        challenged = await credentials.credential(here.configuration(), here.challenge, own)
        assert challenged == "Bearer token-2"
    assert len(here.token_requests()) == 2


async def test_concurrent_uploads_make_one_token_request(here: World) -> None:
    credentials = here.credentials()
    found = await asyncio.gather(*(renewed(here, credentials) for _ in range(20)))
    assert set(found) == {"Bearer token-1"}
    assert len(here.token_requests()) == 1
    assert len(here.receiver.requests) == 1


async def test_who_waited_for_a_failed_request_shares_its_failure(here: World) -> None:
    gate = asyncio.Event()

    async def held(request: Request) -> Reply:
        await gate.wait()
        return Reply(503)

    here.issuer.routes["/token"] = held
    credentials = here.credentials()
    waiting = [
        asyncio.ensure_future(refused(credentials, here.configuration(), here.challenge))
        for _ in range(5)
    ]
    async with asyncio.timeout(30):
        while not here.issuer.fetches("/token"):
            await asyncio.sleep(0.01)
    gate.set()
    assert {error.code for error in await asyncio.gather(*waiting)} == {"token_refused"}
    assert len(here.token_requests()) == 1
    here.answer_tokens()
    assert await renewed(here, credentials) == "Bearer token-1"


async def test_a_cancelled_request_leaves_the_next_to_work_itself(here: World) -> None:
    never = asyncio.Event()

    async def silent(request: Request) -> Reply:
        await never.wait()
        raise AssertionError

    here.issuer.routes["/token"] = silent
    credentials = here.credentials()
    first, second = (
        asyncio.ensure_future(
            credentials.credential(here.configuration(), here.challenge, budget())
        )
        for _ in range(2)
    )
    async with asyncio.timeout(30):
        while not here.issuer.fetches("/token"):
            await asyncio.sleep(0.01)
    here.answer_tokens()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == "Bearer token-1"


@pytest.mark.requirement("AHP-S12")
async def test_ahp_s12_a_slow_token_endpoint_ends_with_the_budget_of_the_upload(
    here: World,
) -> None:
    async def silent(request: Request) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    here.issuer.routes["/token"] = silent
    with pytest.raises(BudgetExceeded):
        await here.credentials().credential(here.configuration(), here.challenge, Budget(0.5))
    assert here.issued == 0


@pytest.mark.requirement("AHP-S31")
async def test_ahp_s31_no_token_serves_another_client_resource_or_scope(here: World) -> None:
    """Each of these is an authorization context of its own."""
    credentials = vault(here)
    contexts = [
        preset(here),
        preset(here, clientId="other"),
        preset(here, resource="urn:else"),
        preset(here, scopes=["refs.read"]),
        preset(here, scopes=[]),
    ]
    found = [await credentials.credential(each, None, budget()) for each in contexts]
    again = [await credentials.credential(each, None, budget()) for each in contexts]
    assert found == [f"Bearer token-{n}" for n in range(1, 6)] == again
    forms = here.token_requests()
    assert [form.get("scope") for form in forms] == ["ahp.upload"] * 3 + ["refs.read", None]
    assert [form["resource"] for form in forms] == ["urn:uploads"] * 2 + ["urn:else"] + [
        "urn:uploads"
    ] * 2


async def test_a_discovered_token_is_no_token_of_another_binding(here: World) -> None:
    credentials = vault(here)
    assert await credentials.credential(preset(here), None, budget()) == "Bearer token-1"
    assert await credentials.credential(here.configuration(), None, budget()) is None


async def test_ended_uploads_leave_nothing_behind(here: World) -> None:
    credentials = here.credentials()
    for _ in range(5):
        await renewed_or_known(here, credentials)
    gc.collect()
    assert len(credentials._given) == 0


async def renewed_or_known(here: World, credentials: Credentials) -> None:
    own = budget()
    if await credentials.credential(here.configuration(), None, own) is None:
        await credentials.credential(here.configuration(), here.challenge, own)


# --- a configured oauth binding ----------------------------------------------------------------


async def test_a_preset_asks_its_issuer_before_the_first_upload(here: World) -> None:
    assert await vault(here).credential(preset(here), None, budget()) == "Bearer token-1"
    assert here.receiver.requests == []
    assert here.token_requests()[0]["resource"] == "urn:uploads"


async def test_a_preset_is_renewed_by_a_401_within_its_own_limits(here: World) -> None:
    credentials, own = vault(here), budget()
    await credentials.credential(preset(here), None, own)
    challenge = 'Bearer resource_metadata="https://else.test/m", scope="ahp.upload"'
    assert await credentials.credential(preset(here), challenge, own) == "Bearer token-2"
    assert here.receiver.requests == []
    with pytest.raises(AuthorizationError) as caught:
        await credentials.credential(preset(here), 'Bearer scope="admin"', own)
    assert caught.value.code == "scope_not_permitted"


async def test_a_preset_without_its_secret_is_refused(here: World) -> None:
    assert (await refused(here.credentials(), preset(here))).code == "credential_missing"
    assert here.token_requests() == []


async def test_after_a_failure_the_next_upload_begins_anew(here: World) -> None:
    credentials = vault(here)
    here.publish_server(token_endpoint=here.issuer.url + "/gone")
    assert (await refused(credentials, preset(here))).code == "token_refused"
    here.publish_server()
    assert await credentials.credential(preset(here), None, budget()) == "Bearer token-1"


async def test_a_refused_token_stays_refused_when_no_new_one_comes(here: World) -> None:
    credentials, own = vault(here), budget()
    assert await credentials.credential(preset(here), None, own) == "Bearer token-1"
    here.issuer.routes["/token"] = Reply(503)
    with pytest.raises(AuthorizationError):
        await credentials.credential(preset(here), "", own)
    here.answer_tokens()
    assert await credentials.credential(preset(here), None, budget()) == "Bearer token-2"


async def test_the_user_is_asked_once_and_the_refresh_token_kept(here: World) -> None:
    asked: list[str] = []

    async def ask(url: str) -> dict[str, str]:
        asked.append(url)
        state = url.partition("state=")[2].partition("&")[0]
        return {"state": state, "code": "c0de"}

    here.answer_tokens(refresh_token="r1")
    credentials = vault(here, interaction=Interaction("https://host.test/cb", ask))
    configuration = preset(here, flow="authorization_code_pkce")
    assert await credentials.credential(configuration, None, budget()) == "Bearer token-1"
    here.clock.advance(3600)
    assert await credentials.credential(configuration, None, budget()) == "Bearer token-2"
    assert len(asked) == 1
    assert here.token_requests()[1]["grant_type"] == "refresh_token"


async def test_a_public_client_names_no_secret(here: World) -> None:
    async def ask(url: str) -> dict[str, str]:
        return {"state": url.partition("state=")[2].partition("&")[0], "code": "c0de"}

    desk = Client("desk", flow="authorization_code_pkce")
    credentials = here.credentials(
        client=desk, interaction=Interaction("https://host.test/cb", ask)
    )
    assert await renewed(here, credentials) == "Bearer token-1"
    assert here.token_requests()[0]["client_id"] == "desk"


async def test_an_allowed_host_is_spelled_as_in_a_url(here: World) -> None:
    here.receiver.routes["/token"] = here.issue
    here.publish_server(token_endpoint=here.receiver.url + "/token")
    assert (await refused(vault(here), preset(here))).code == "destination_refused"
    allowing = vault(here, allowed_hosts=["127.0.0.1", "[::1]", "ELSE.test"])
    assert await allowing.credential(preset(here), None, budget()) == "Bearer token-1"
    assert allowing._allowed == {"127.0.0.1", "::1", "else.test"}


async def test_secrets_are_in_no_log_and_no_error(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    credentials = here.credentials()
    await renewed(here, credentials)
    here.issuer.routes["/token"] = Reply(400, {"error": SECRET, "error_description": "token-1"})
    here.clock.advance(7200)
    error = await refused(credentials, here.configuration())
    said = caplog.text + repr(error) + str(error) + repr(credentials) + repr(credentials._tokens)
    assert "httpcore" in said
    for secret in (SECRET, "s3cret", "token-1", "czNjcmV0"):
        assert secret not in said


async def test_turns_are_taken_one_at_a_time() -> None:
    turns, running = Turns(), 0

    async def work() -> int:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        assert running == 1
        running -= 1
        return 7

    assert await asyncio.gather(*(turns.take(work) for _ in range(5))) == [7] * 5


# --- with the real sender ----------------------------------------------------------------------


def protect(here: World, accepted: str) -> None:
    """Let the endpoint take uploads with the credential `accepted`, and refuse all others."""

    def answer(request: Request) -> Reply:
        if request.headers.get("authorization") != accepted:
            return Reply(401, headers=(f"WWW-Authenticate: {here.challenge}",))
        digest = request.headers["ahp-content-sha256"]
        receipt = {"ref": "urn:a", "size": len(request.body), "sha256": digest}
        return Reply(201, receipt, ("Content-Type: application/json",))

    here.receiver.routes[UPLOADS] = answer


async def upload(here: World, credentials: Credentials) -> str:
    async with Sender(credentials, trust=here.tls.trust) as sender:
        receipt = await sender.upload(Source.memory(b"octets"), here.configuration())
    return receipt.ref


@pytest.mark.requirement("AHP-S11")
async def test_ahp_s11_an_upload_finds_its_way_to_a_token(here: World) -> None:
    protect(here, "Bearer token-1")
    assert await upload(here, here.credentials()) == "urn:a"
    uploads = [r for r in here.receiver.requests if r.path == UPLOADS]
    assert [r.headers.get("authorization") for r in uploads] == [None, "Bearer token-1"]


@pytest.mark.requirement("AHP-S10")
async def test_ahp_s10_event_credentials_are_never_a_substitute(here: World) -> None:
    """Those of events are in reach, and neither the receiver nor the issuer sees them."""
    protect(here, "Bearer event-token")
    environment = {"AGENT_SECRET": SECRET, "EVENT_TOKEN": "event-token"}
    with pytest.raises(AuthorizationError):
        await upload(here, here.credentials(environment=environment))
    seen = [*here.receiver.requests, *here.issuer.requests]
    assert len(seen) == 5
    assert all("event-token" not in str(request) for request in seen)


@pytest.mark.requirement("AHP-S48")
async def test_ahp_s48_nothing_of_the_token_request_reaches_the_receiver(here: World) -> None:
    protect(here, "Bearer token-1")
    cookie = ("Set-Cookie: session=1; Path=/",)
    here.issuer.routes["/token"] = lambda request: here.issue(request)._replace(headers=cookie)
    await upload(here, here.credentials())
    for request in here.receiver.requests:
        assert "cookie" not in request.headers
        assert SECRET.encode() not in request.body
        assert "Basic" not in request.headers.get("authorization", "")
    assert all("token-1" not in str(r.headers) for r in here.issuer.requests)


async def test_a_receiver_that_refuses_every_token_is_asked_twice(here: World) -> None:
    protect(here, "Bearer none-of-these")
    credentials = here.credentials()
    for uploads in (2, 4):
        with pytest.raises(AuthorizationError):
            await upload(here, credentials)
        assert sum(r.path == UPLOADS for r in here.receiver.requests) == uploads
    assert len(here.token_requests()) == 2


async def test_concurrent_uploads_through_one_sender(here: World) -> None:
    protect(here, "Bearer token-1")
    credentials = here.credentials()
    assert await asyncio.gather(*(upload(here, credentials) for _ in range(8))) == ["urn:a"] * 8
    assert len(here.token_requests()) == 1


async def test_a_receiver_that_leads_discovery_astray_gets_no_second_upload(
    here: World,
) -> None:
    protect(here, "Bearer token-1")
    here.publish_resource(authorization_servers=["https://else.test:9"])

    async def nowhere(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"] if host == "127.0.0.1" else ["10.0.0.1"]

    with pytest.raises(AuthorizationError) as caught:
        await upload(here, here.credentials(resolve=nowhere))
    assert caught.value.code == "destination_refused"
    assert sum(r.path == UPLOADS for r in here.receiver.requests) == 1


def test_a_client_holds_no_secret() -> None:
    assert "s3cret" not in repr(Client("agent", secret_env="AGENT_SECRET"))
