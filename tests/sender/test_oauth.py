"""Tokens: client credentials, authorization code with PKCE, refresh, and servers that misbehave."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from app.sender.destinations import Courier, Destinations
from app.sender.discovery import IssuerMetadata
from app.sender.errors import AuthorizationError
from app.sender.oauth import (
    MARGIN_SECONDS,
    UNSTATED_LIFETIME_SECONDS,
    Client,
    Grant,
    Interaction,
    Token,
    TokenRequests,
    is_token,
)
from tests.auth.issuer import Reply, Request
from tests.sender.authorities import AGENT, SECRET, World, form_of, scripted, world

pytestmark = pytest.mark.anyio

BROWSER = Client("desk", flow="authorization_code_pkce", scopes=("ahp.upload",))
REDIRECT = "https://host.test/callback"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[World]:
    async with world(tmp_path) as running:
        yield running


def grant(here: World, client: Client = AGENT, **server: Any) -> Grant:
    metadata = IssuerMetadata.model_validate(here.server(**server), strict=False)
    destinations = Destinations(httpx.URL(here.endpoint))
    return Grant(metadata, destinations, here.endpoint, client, client.scopes)


def requests(here: World, interaction: Interaction | None = None) -> TokenRequests:
    return TokenRequests(Courier(trust=here.tls.trust), interaction=interaction, clock=here.clock)


async def obtain(here: World, secret: str | None = SECRET, **server: Any) -> Token:
    return await requests(here).obtain(grant(here, **server), secret, None)


async def refused(here: World, secret: str | None = SECRET, **server: Any) -> AuthorizationError:
    with pytest.raises(AuthorizationError) as caught:
        await obtain(here, secret, **server)
    return caught.value


class User:
    """A user who consents: remembers the authorization URL and answers with `change`s."""

    def __init__(self, here: World, **change: str | None) -> None:
        self.asked: list[dict[str, str]] = []
        self.url = ""
        self._own: dict[str, str | None] = {"code": "c0de", "iss": here.issuer.url, **change}

    async def ask(self, url: str) -> Mapping[str, str]:
        self.url = url
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        self.asked.append(query)
        answer = {"state": query["state"], **self._own}
        return {name: value for name, value in answer.items() if value is not None}

    @property
    def interaction(self) -> Interaction:
        return Interaction(REDIRECT, self.ask)


async def test_client_credentials_name_the_resource_and_the_scopes(here: World) -> None:
    token = await obtain(here)
    assert (token.value, token.ends) == ("token-1", here.clock.now + 3600)
    (request,) = here.issuer.requests
    assert form_of(request) == {
        "grant_type": "client_credentials",
        "resource": here.endpoint,
        "scope": "ahp.upload refs.read",
    }
    assert request.headers["content-type"] == "application/x-www-form-urlencoded"


async def test_without_scopes_none_are_asked_for(here: World) -> None:
    plain = grant(here, replace(AGENT, scopes=()))
    await requests(here).obtain(plain, SECRET, None)
    assert "scope" not in here.token_requests()[0]


@pytest.mark.parametrize("methods", [None, ["client_secret_post", "client_secret_basic"]])
async def test_the_secret_goes_into_the_header_form_encoded(here: World, methods: Any) -> None:
    await obtain(here, token_endpoint_auth_methods_supported=methods)
    (request,) = here.issuer.requests
    pair = base64.b64decode(request.headers["authorization"].removeprefix("Basic "))
    assert pair == b"agent:s3cret%2F%2B+value"
    assert b"cret" not in request.body


async def test_the_secret_goes_into_the_form_where_the_server_takes_it_only_there(
    here: World,
) -> None:
    await obtain(here, token_endpoint_auth_methods_supported=["client_secret_post"])
    (request,) = here.issuer.requests
    assert form_of(request)["client_secret"] == SECRET
    assert "authorization" not in request.headers


async def test_a_server_that_takes_no_secret_gets_none(here: World) -> None:
    error = await refused(here, token_endpoint_auth_methods_supported=["private_key_jwt"])
    assert error.code == "grant_unsupported"
    assert here.issuer.requests == []


async def test_client_credentials_need_a_secret_and_the_servers_support(here: World) -> None:
    assert (await refused(here, None)).code == "credential_missing"
    assert (await refused(here, grant_types_supported=None)).code == "grant_unsupported"
    assert here.issuer.requests == []


async def test_a_token_endpoint_elsewhere_gets_nothing(here: World) -> None:
    """Not on another host, not over http, and not at the endpoint that wants the token."""
    async with scripted(None) as plain:
        for url in (plain.url + "/token", here.receiver.url + "/token", "https://else.test/token"):
            assert (await refused(here, token_endpoint=url)).code == "destination_refused"
        assert plain.requests == here.receiver.requests == here.issuer.requests == []


async def test_an_allowed_host_may_hold_the_token_endpoint(here: World) -> None:
    here.receiver.routes["/token"] = here.issue
    elsewhere = grant(here, token_endpoint=here.receiver.url + "/token")
    destinations = replace(elsewhere.destinations, allowed=frozenset({"127.0.0.1"}))
    token = await requests(here).obtain(replace(elsewhere, destinations=destinations), SECRET, None)
    assert token.value == "token-1"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(400, {"error": "invalid_client", "error_description": SECRET}), "invalid_client"),
        (Reply(401, {"error": "invalid_target"}), "invalid_target"),
        (Reply(400, {"error": "x" * 100}), "no reason given"),
        (Reply(400, {"error": f"<{SECRET}>"}), "no reason given"),
        (Reply(400, b"<html>"), "no reason given"),
        (Reply(500, b""), "no reason given"),
        (Reply(201, {"access_token": "a", "token_type": "Bearer"}), "status 201"),
        (Reply(307, b"", ("Location: /other",)), "status 307"),
    ],
)
async def test_a_refusal_of_the_token_endpoint(here: World, reply: Reply, said: str) -> None:
    here.issuer.routes["/token"] = reply
    error = await refused(here)
    assert error.code == "token_refused"
    assert said in error.message
    assert "s3cret" not in error.message
    assert len(here.issuer.requests) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"token_type": "DPoP"},
        {"token_type": "mac"},
        {"token_type": None},
        {"access_token": None},
        {"access_token": ""},
        {"access_token": "a b"},
        {"access_token": "a\r\nX-Evil: 1"},
        {"access_token": "a\n"},
        {"access_token": "\u00e9"},
        {"access_token": 7},
        {"expires_in": -1},
        {"expires_in": "soon"},
    ],
)
async def test_a_token_response_that_cannot_be_used(here: World, change: dict[str, Any]) -> None:
    here.answer_tokens(**change)
    assert (await refused(here)).code == "token_invalid"


@pytest.mark.parametrize("body", [b"", b"[]", b"access_token=a&token_type=bearer", b"\xff"])
async def test_a_token_response_that_is_none(here: World, body: bytes) -> None:
    here.issuer.routes["/token"] = Reply(body=body)
    assert (await refused(here)).code == "token_invalid"


async def test_the_token_type_has_no_case(here: World) -> None:
    here.answer_tokens(token_type="bEARER")
    assert (await obtain(here)).value == "token-1"


async def test_a_token_without_a_stated_end_is_kept_for_a_while(here: World) -> None:
    here.answer_tokens(expires_in=None)
    assert (await obtain(here)).ends == here.clock.now + UNSTATED_LIFETIME_SECONDS


def test_a_token_is_used_up_to_the_margin_before_its_end() -> None:
    token = Token("t", ends=100 + MARGIN_SECONDS)
    assert token.holds(99.9)
    assert not token.holds(100)


async def test_a_token_of_fewer_scopes_is_refused(here: World) -> None:
    here.answer_tokens(scope="ahp.upload")
    assert (await refused(here)).code == "scope_refused"
    here.answer_tokens(scope="refs.read ahp.upload more")
    assert (await obtain(here)).value == "token-2"


async def test_secrets_are_in_no_repr(here: World) -> None:
    token = Token("acc3ss", 1.0, "r3fresh")
    assert "acc3ss" not in repr(token)
    assert "r3fresh" not in repr(token)
    assert "s3cret" not in repr(grant(here))


def test_what_is_a_token() -> None:
    assert is_token("abc.DEF-1_~+/==")
    for text in ("", "a b", "a\n", "=", "a=b", "é"):
        assert not is_token(text)


async def test_an_authorization_code_is_asked_for_with_pkce(here: World) -> None:
    user = User(here)
    token = await requests(here, user.interaction).obtain(grant(here, BROWSER), None, None)
    assert token.value == "token-1"
    (asked,), (form,) = user.asked, here.token_requests()
    assert user.url.startswith(here.issuer.url + "/authorize?")
    digest = hashlib.sha256(form.pop("code_verifier").encode()).digest()
    assert asked.pop("code_challenge") == base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    assert len(asked.pop("state")) >= 32
    assert asked == {
        "tenant": "acme",  # the endpoint's own query stays
        "response_type": "code",
        "client_id": "desk",
        "redirect_uri": REDIRECT,
        "code_challenge_method": "S256",
        "resource": here.endpoint,
        "scope": "ahp.upload",
    }
    assert form == {
        "grant_type": "authorization_code",
        "code": "c0de",
        "redirect_uri": REDIRECT,
        "resource": here.endpoint,
        "client_id": "desk",
    }


async def test_state_and_verifier_are_new_each_time(here: World) -> None:
    user = User(here)
    for _ in range(2):
        await requests(here, user.interaction).obtain(grant(here, BROWSER), None, None)
    first, second = user.asked
    assert first["state"] != second["state"]
    assert first["code_challenge"] != second["code_challenge"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"state": "forged"}, "another request"),
        ({"state": None}, "another request"),
        ({"iss": "https://else.test"}, "another issuer"),
        ({"error": "access_denied", "code": None}, "access_denied"),
        ({"error": "<script>"}, "an error"),
        ({"code": None}, "no code"),
        ({"code": ""}, "no code"),
    ],
)
async def test_a_redirect_that_is_not_the_answer(
    here: World, change: dict[str, str | None], said: str
) -> None:
    user = User(here, **change)
    with pytest.raises(AuthorizationError) as caught:
        await requests(here, user.interaction).obtain(grant(here, BROWSER), None, None)
    assert caught.value.code == "interaction_failed"
    assert said in caught.value.message
    assert here.token_requests() == []


async def test_a_missing_iss_counts_where_the_server_promises_one(here: World) -> None:
    user = requests(here, User(here, iss=None).interaction)
    assert (await user.obtain(grant(here, BROWSER), None, None)).value == "token-1"
    promising = grant(here, BROWSER, authorization_response_iss_parameter_supported=True)
    with pytest.raises(AuthorizationError) as caught:
        await user.obtain(promising, None, None)
    assert caught.value.code == "interaction_failed"


@pytest.mark.parametrize(
    ("server", "code"),
    [
        ({"code_challenge_methods_supported": None}, "grant_unsupported"),
        ({"code_challenge_methods_supported": ["plain"]}, "grant_unsupported"),
        ({"grant_types_supported": ["client_credentials"]}, "grant_unsupported"),
        ({"authorization_endpoint": None}, "metadata_invalid"),
        ({"authorization_endpoint": "https://else.test/a"}, "destination_refused"),
        ({"authorization_endpoint": "http://localhost/a"}, "destination_refused"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "destination_refused"),
    ],
)
async def test_the_user_is_not_sent_where_it_is_not_safe(
    here: World, server: dict[str, Any], code: str
) -> None:
    user = User(here)
    with pytest.raises(AuthorizationError) as caught:
        await requests(here, user.interaction).obtain(grant(here, BROWSER, **server), None, None)
    assert caught.value.code == code
    assert user.asked == []


async def test_without_a_user_there_is_no_code(here: World) -> None:
    with pytest.raises(AuthorizationError) as caught:
        await requests(here).obtain(grant(here, BROWSER), None, None)
    assert caught.value.code == "interaction_unavailable"


async def test_a_refresh_token_spares_the_user(here: World) -> None:
    user = User(here)
    asking, desk = requests(here, user.interaction), grant(here, BROWSER)
    here.answer_tokens(refresh_token="r1")
    first = await asking.obtain(desk, None, None)
    here.answer_tokens(refresh_token="r2")
    second = await asking.obtain(desk, None, first)
    here.answer_tokens()
    third = await asking.obtain(desk, None, second)
    assert (first.refresh, second.refresh, third.refresh) == ("r1", "r2", "r2")
    assert len(user.asked) == 1
    assert here.token_requests()[1] == {
        "grant_type": "refresh_token",
        "refresh_token": "r1",
        "resource": here.endpoint,
        "scope": "ahp.upload",
        "client_id": "desk",
    }


async def test_a_refresh_token_that_has_ended_leads_back_to_the_user(here: World) -> None:
    def answer(request: Request) -> Reply:
        if form_of(request)["grant_type"] == "refresh_token":
            return Reply(400, {"error": "invalid_grant"})
        return here.issue(request)

    user = User(here)
    here.issuer.routes["/token"] = answer
    old = Token("old", 0.0, "r1")
    token = await requests(here, user.interaction).obtain(grant(here, BROWSER), None, old)
    assert token.value == "token-1"
    assert len(user.asked) == 1


async def test_a_refresh_that_fails_otherwise_asks_nobody(here: World) -> None:
    user = User(here)
    here.issuer.routes["/token"] = Reply(503)
    with pytest.raises(AuthorizationError) as caught:
        await requests(here, user.interaction).obtain(
            grant(here, BROWSER), None, Token("old", 0.0, "r1")
        )
    assert caught.value.code == "token_refused"
    assert user.asked == []
