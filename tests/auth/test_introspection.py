"""Opaque tokens: asked about, believed only when active, never guessed (RFC 7662)."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import pytest

from app.auth.authenticator import Authenticator
from app.auth.principals import Principal
from app.errors import Unauthenticated, Unavailable
from app.settings import SettingsError
from tests.auth.conftest import Make
from tests.auth.issuer import (
    AUDIENCE,
    NOW,
    Clock,
    Reply,
    Request,
    ScriptedIssuer,
    bearer,
    claims_of,
    header_of,
    public,
    sign,
    signing_key,
)

pytestmark = pytest.mark.anyio

SECRET = "s:e c/r%et"
Ask = Callable[..., Authenticator]


@pytest.fixture
def ask(issuer: ScriptedIssuer, make: Make) -> Ask:
    """Authenticators that introspect at the scripted issuer, with changes to the settings."""

    def build(**changes: Any) -> Authenticator:
        table = {
            "url": issuer.url + "/introspect",
            "client_id": "consignee:1",
            "client_secret_env": "SECRET",
            "timeout_seconds": 30,
            **changes,
        }
        return make(introspection=table, environment={"SECRET": SECRET})

    return build


def answer(issuer: ScriptedIssuer, **members: Any) -> None:
    """What the server says of every token; a member that is None is left out."""
    body = claims_of(issuer.url, **{"active": True, "token_type": "Bearer", **members})
    issuer.routes["/introspect"] = Reply(body=body)


async def refuse(checker: Authenticator, token: str = "opaque") -> str:
    with pytest.raises(Unauthenticated) as caught:
        await checker.authenticate(bearer(token))
    assert (caught.value.code, caught.value.token_given) == ("invalid_credential", True)
    return caught.value.message


@pytest.mark.requirement("AHP-R10", "AHP-R29")
async def test_an_active_token_is_a_principal(issuer: ScriptedIssuer, ask: Ask) -> None:
    answer(issuer)
    assert await ask().authenticate(bearer("opaque")) == Principal(
        "agent-7", f"{issuer.url}#agent-7", frozenset({"ahp.upload"})
    )


async def test_the_question_is_as_the_standard_has_it(issuer: ScriptedIssuer, ask: Ask) -> None:
    answer(issuer)
    await ask().authenticate(bearer("a+b/c=="))
    (request,) = issuer.requests
    assert request.method == "POST"
    assert request.headers["content-type"] == "application/x-www-form-urlencoded"
    assert parse_qs(request.body.decode()) == {
        "token": ["a+b/c=="],
        "token_type_hint": ["access_token"],
    }
    pair = base64.b64decode(request.headers["authorization"].removeprefix("Basic "))
    assert pair == b"consignee%3A1:s%3Ae+c%2Fr%25et"


@pytest.mark.requirement("AHP-R29")
@pytest.mark.parametrize("active", [False, None, "true", 1, [], {}])
async def test_only_true_is_active(issuer: ScriptedIssuer, ask: Ask, active: Any) -> None:
    issuer.routes["/introspect"] = Reply(body={**claims_of(issuer.url), "active": active})
    assert "not active" in await refuse(ask())


@pytest.mark.requirement("AHP-R11", "AHP-R29", "B81", "B82")
@pytest.mark.parametrize(
    ("members", "settings", "reason"),
    [
        ({"aud": "other"}, {"audience": [AUDIENCE]}, "audience"),
        ({"aud": None}, {"audience": [AUDIENCE]}, "audience"),
        ({"exp": NOW - 31}, {}, "expired"),
        ({"exp": "soon"}, {}, "expiry"),
        ({"nbf": NOW + 31}, {}, "not valid yet"),
        ({"sub": None}, {}, "no subject"),
        ({"iss": "https://other.test"}, {"issuer": "https://as.test"}, "another issuer"),
        ({"iss": None}, {}, "no issuer"),
        ({"iss": 7}, {}, "issuer"),
        ({"iss": "https://a#b"}, {}, "no issuer"),
        ({"token_type": "DPoP"}, {}, "no bearer token"),
        ({"token_type": 7}, {}, "no bearer token"),
        ({"cnf": {"jkt": "x"}}, {}, "no bearer token"),
        ({"typ": "Refresh"}, {}, "no access token"),
        ({}, {"scope_claim": "tenant"}, "no scope"),
    ],
    ids=str,
)
async def test_an_active_token_that_is_not_for_us(
    issuer: ScriptedIssuer, ask: Ask, members: dict[str, Any], settings: Any, reason: str
) -> None:
    answer(issuer, **members)
    assert reason in await refuse(ask(**settings))


@pytest.mark.parametrize(
    ("members", "settings", "scope"),
    [
        ({"iss": None}, {"issuer": "https://as.test"}, "https://as.test#agent-7"),
        ({"iss": None, "tenant": "acme"}, {"scope_claim": "tenant"}, "acme"),
        ({"aud": ["x", AUDIENCE]}, {"audience": [AUDIENCE], "scope_claim": "sub"}, "agent-7"),
        ({"aud": None, "exp": None, "iss": "https://as.test"}, {}, "https://as.test#agent-7"),
        ({"token_type": None, "typ": "Bearer"}, {"scope_claim": "sub"}, "agent-7"),
        (
            {"sub": None, "client_id": "a?#b", "iss": "https://as.test"},
            {},
            "https://as.test?client_id=a%3F%23b",
        ),
    ],
    ids=str,
)
async def test_where_the_scope_comes_from(
    issuer: ScriptedIssuer, ask: Ask, members: dict[str, Any], settings: Any, scope: str
) -> None:
    answer(issuer, **members)
    assert (await ask(**settings).authenticate(bearer("opaque"))).scope == scope


@pytest.mark.requirement("AHP-R33", "B78")
@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 429, 500, 503])
async def test_a_server_that_does_not_answer_is_unavailable(
    issuer: ScriptedIssuer, ask: Ask, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    issuer.routes["/introspect"] = Reply(status, b"", ("Location: /introspect",))
    with (
        caplog.at_level(logging.WARNING, "consignee.auth"),
        pytest.raises(Unavailable) as caught,
    ):
        await ask().authenticate(bearer("0paque"))
    assert caught.value.code == "issuer_unavailable"
    assert f"status {status}" in caplog.text
    assert "0paque" not in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.requirement("B78")
@pytest.mark.parametrize("body", [b"", b"active", b"[]", b"{" + b" " * 1_100_000 + b"}"])
async def test_an_unusable_answer_is_unavailable(
    issuer: ScriptedIssuer, ask: Ask, body: bytes
) -> None:
    issuer.routes["/introspect"] = Reply(body=body)
    with pytest.raises(Unavailable):
        await ask().authenticate(bearer("opaque"))


@pytest.mark.requirement("B78")
async def test_a_server_that_hangs_is_unavailable(issuer: ScriptedIssuer, ask: Ask) -> None:
    async def hang(request: Request) -> Reply:
        await asyncio.Event().wait()
        return Reply()

    issuer.routes["/introspect"] = hang
    with pytest.raises(Unavailable):
        await ask(timeout_seconds=0.05).authenticate(bearer("opaque"))


@pytest.mark.requirement("AHP-R29")
async def test_revocation_counts_at_once(issuer: ScriptedIssuer, ask: Ask) -> None:
    checker = ask()
    answer(issuer)
    await checker.authenticate(bearer("opaque"))
    issuer.routes["/introspect"] = Reply(body={"active": False})
    assert "not active" in await refuse(checker)


async def test_answers_may_be_reused_for_a_while(
    issuer: ScriptedIssuer, ask: Ask, clock: Clock
) -> None:
    checker = ask(cache_seconds=60)
    answer(issuer, exp=NOW + 90)
    for _ in range(3):
        await checker.authenticate(bearer("opaque"))
    assert len(issuer.requests) == 1
    clock.advance(60)
    await checker.authenticate(bearer("opaque"))
    assert len(issuer.requests) == 2
    clock.advance(30)  # the token itself has ended meanwhile, so the answer has too
    issuer.routes["/introspect"] = Reply(body={"active": False})
    assert "not active" in await refuse(checker)
    assert "not active" in await refuse(checker)
    assert len(issuer.requests) == 3


async def test_a_jwt_of_a_known_issuer_is_not_asked_about(
    issuer: ScriptedIssuer, make: Make
) -> None:
    issuer.publish(public(signing_key("k")))
    answer(issuer)
    checker = make(
        issuers=[{"issuer": issuer.url, "audience": AUDIENCE}],
        introspection={
            "url": issuer.url + "/introspect",
            "client_id": "c",
            "client_secret_env": "SECRET",
        },
        environment={"SECRET": "x"},
    )
    expired = sign(
        header_of(signing_key("k")), claims_of(issuer.url, exp=NOW - 60), signing_key("k")
    )
    assert "expired" in await refuse(checker, expired)
    assert issuer.fetches("/introspect") == 0
    foreign = sign(header_of(signing_key("k")), claims_of("https://other.test"), signing_key("k"))
    assert (await checker.authenticate(bearer(foreign))).name == "agent-7"
    assert issuer.fetches("/introspect") == 1


@pytest.mark.parametrize("environment", [{}, {"SECRET": ""}])
async def test_a_missing_secret_is_an_error(make: Make, environment: dict[str, str]) -> None:
    table = {"url": "https://as.test/i", "client_id": "c", "client_secret_env": "SECRET"}
    with pytest.raises(SettingsError, match="variable SECRET is not set"):
        make(introspection=table, environment=environment)
