"""JWT access tokens: who signed them, for whom, and when (RFC 9068)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.auth.authenticator import Authenticator
from app.auth.claims import MAX_NAME_CHARACTERS
from app.auth.principals import Principal
from app.errors import Unauthenticated
from app.settings import Settings
from tests.auth.conftest import Make, Trust
from tests.auth.issuer import (
    AUDIENCE,
    NOW,
    Clock,
    ScriptedIssuer,
    bearer,
    claims_of,
    encode,
    header_of,
    public,
    rsa_key,
    sign,
    signing_key,
)

pytestmark = pytest.mark.anyio

KEY = signing_key("key-1")


@pytest.fixture(autouse=True)
def published(issuer: ScriptedIssuer) -> None:
    issuer.publish(public(KEY), public(rsa_key("rsa-1")))


async def accept(checker: Authenticator, token: str) -> Principal:
    return await checker.authenticate(bearer(token))


async def refuse(checker: Authenticator, token: str) -> str:
    """The reason why `token` is refused."""
    with pytest.raises(Unauthenticated) as caught:
        await checker.authenticate(bearer(token))
    assert (caught.value.code, caught.value.token_given) == ("invalid_credential", True)
    assert checker.challenge(caught.value).endswith('error="invalid_token"')
    return caught.value.message


def good(issuer: ScriptedIssuer, **changes: Any) -> str:
    return sign(header_of(KEY), claims_of(issuer.url, **changes), KEY)


@pytest.mark.requirement("AHP-R10", "AHP-R29")
async def test_a_good_token_is_a_principal(issuer: ScriptedIssuer, trust: Trust) -> None:
    assert await accept(trust(), good(issuer)) == Principal(
        "agent-7", f"{issuer.url}#agent-7", frozenset({"ahp.upload"})
    )


# Audience ---------------------------------------------------------------------------------------

AUDIENCES = [
    ("us", True),
    (["us", "other"], True),
    (["other", "us"], True),
    (["us", 1], True),
    (["other"], False),
    ([], False),
    (None, False),
    ("us/", False),
    ("US", False),
    ("", False),
    (["us/"], False),
    ([["us"]], False),
    (7, False),
    (True, False),
    ({"us": 1}, False),
]


@pytest.mark.requirement("AHP-R11", "AHP-R29", "B81")
@pytest.mark.parametrize("configured", ["us", ["us", "them"], ["them", "us"]])
@pytest.mark.parametrize(("given", "accepted"), AUDIENCES)
async def test_one_exact_audience_is_enough(
    issuer: ScriptedIssuer, trust: Trust, configured: Any, given: Any, accepted: bool
) -> None:
    checker, token = trust(audience=configured), good(issuer, aud=given)
    if accepted:
        assert (await accept(checker, token)).name == "agent-7"
    else:
        assert "audience" in await refuse(checker, token) or given in (None, "", [])


# Times ------------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R29", "B82")
@pytest.mark.parametrize(
    "times",
    [
        {"iat": NOW + 5},
        {"nbf": NOW + 5},
        {"iat": NOW + 29, "nbf": NOW + 29},
        {"iat": NOW + 30, "nbf": NOW + 30},
        {"iat": None},
        {"nbf": 0},
        {"exp": NOW - 5},
        {"exp": NOW - 29},
    ],
)
async def test_clocks_may_differ_a_little(
    issuer: ScriptedIssuer, trust: Trust, times: dict[str, Any]
) -> None:
    assert (await accept(trust(), good(issuer, **times))).name == "agent-7"


@pytest.mark.requirement("AHP-R29", "B82")
@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ({"iat": NOW + 31}, "not valid yet"),
        ({"nbf": NOW + 300}, "not valid yet"),
        ({"exp": NOW - 30}, "expired"),
        ({"exp": NOW - 300}, "expired"),
        ({"exp": None}, "expiry"),
    ],
)
async def test_beyond_the_leeway_a_token_is_refused(
    issuer: ScriptedIssuer, trust: Trust, times: dict[str, Any], reason: str
) -> None:
    assert reason in await refuse(trust(), good(issuer, **times))


@pytest.mark.requirement("B82")
async def test_the_leeway_is_a_setting(issuer: ScriptedIssuer, trust: Trust) -> None:
    token = good(issuer, nbf=NOW + 5)
    assert "not valid yet" in await refuse(trust(leeway_seconds=0), token)
    assert (await accept(trust(leeway_seconds=60), token)).name == "agent-7"


ODD_TIMES = [
    "1800000300", "", True, False, [], {}, [NOW], -1, 10**18, 1e18, -1e400, NOW + 0.5, 1e400,
    float(NOW), 253402300800, int("9" * 400),
]  # fmt: skip


@pytest.mark.requirement("AHP-R29", "B82")
@pytest.mark.parametrize("claim", ["exp", "nbf", "iat"])
@pytest.mark.parametrize("value", ODD_TIMES, ids=lambda value: repr(value)[:12])
async def test_odd_times_are_refused(
    issuer: ScriptedIssuer, trust: Trust, claim: str, value: Any
) -> None:
    await refuse(trust(), good(issuer, **{claim: value}))


@pytest.mark.requirement("AHP-R29", "B82")
@pytest.mark.parametrize("text", ["NaN", "Infinity", "null", "9" * 5000, "[" * 5000])
async def test_what_is_no_json_number_is_refused(
    issuer: ScriptedIssuer, trust: Trust, text: str
) -> None:
    claims = json.dumps(claims_of(issuer.url, exp=0)).replace('"exp": 0', f'"exp": {text}')
    await refuse(trust(), sign(header_of(KEY), claims.encode(), KEY))


# Subject, scope, permissions --------------------------------------------------------------------


@pytest.mark.requirement("AHP-R10")
@pytest.mark.parametrize(
    "value",
    [None, "", " ", 7, True, [], ["a"], {}, "a\x00b", "a\nb", "\ud800", "x" * 1025],
    ids=lambda value: repr(value)[:12],
)
async def test_an_odd_subject_or_scope_is_refused(
    issuer: ScriptedIssuer, trust: Trust, value: Any
) -> None:
    await refuse(trust(), good(issuer, sub=value))
    await refuse(trust(scope_claim="tenant"), good(issuer, tenant=value))


@pytest.mark.requirement("AHP-R10", "AHP-R36")
async def test_a_claim_becomes_the_scope(issuer: ScriptedIssuer, trust: Trust) -> None:
    checker = trust(scope_claim="tenant")
    longest = "ä" * MAX_NAME_CHARACTERS
    assert (await accept(checker, good(issuer, tenant="acme"))).scope == "acme"
    assert (await accept(checker, good(issuer, tenant=longest))).scope == longest


@pytest.mark.requirement("AHP-R10", "AHP-R36")
async def test_the_same_subject_of_two_issuers_has_two_scopes(
    issuer: ScriptedIssuer, make: Make
) -> None:
    other = "https://other.test"
    tables = [
        {"issuer": name, "audience": AUDIENCE, "jwks_url": issuer.url + "/jwks"}
        for name in (issuer.url, other)
    ]
    checker = make(issuers=tables)
    ours = await accept(checker, good(issuer))
    theirs = await accept(checker, good(issuer, iss=other))
    assert ours.name == theirs.name
    assert ours.scope != theirs.scope


@pytest.mark.requirement("AHP-R11", "AHP-R30")
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ahp.upload uhp", {"ahp.upload", "uhp"}),
        ("openid  ahp.upload", {"ahp.upload"}),
        (["uhp", 7, None, "x", {}], {"uhp"}),
        ("AHP.UPLOAD", set()),
        ("ahp.upload,uhp", set()),
        ("", set()),
        ([], set()),
        (None, set()),
        (7, set()),
        ({"ahp.upload": True}, set()),
    ],
)
async def test_permissions_come_from_a_claim(
    issuer: ScriptedIssuer, trust: Trust, value: Any, expected: set[str]
) -> None:
    checker = trust(permissions_from="roles")
    assert (await accept(checker, good(issuer, roles=value))).permissions == expected


# Type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("typ", ["at+jwt", "AT+JWT", "application/at+jwt"])
async def test_the_type_says_access_token(issuer: ScriptedIssuer, trust: Trust, typ: str) -> None:
    token = sign(header_of(KEY, typ=typ), claims_of(issuer.url), KEY)
    assert (await accept(trust(), token)).name == "agent-7"


@pytest.mark.requirement("AHP-R29")
@pytest.mark.parametrize("typ", [None, "", "JWT", "jwt", "logout+jwt", "dpop+jwt", 7, ["at+jwt"]])
async def test_every_other_type_is_refused(issuer: ScriptedIssuer, trust: Trust, typ: Any) -> None:
    token = sign(header_of(KEY, typ=typ), claims_of(issuer.url), KEY)
    assert "at+jwt" in await refuse(trust(), token)


@pytest.mark.parametrize("typ", [None, "JWT", "jwt", "application/jwt"])
@pytest.mark.parametrize(
    "more", [{}, {"typ": "Bearer", "nonce": "n"}, {"token_use": "access"}], ids=str
)
async def test_untyped_tokens_are_a_choice(
    issuer: ScriptedIssuer, trust: Trust, typ: Any, more: dict[str, Any]
) -> None:
    token = sign(header_of(KEY, typ=typ), claims_of(issuer.url, **more), KEY)
    assert (await accept(trust(accept_untyped=True), token)).name == "agent-7"


@pytest.mark.requirement("AHP-R29")
@pytest.mark.parametrize(
    "more",
    [
        {"nonce": "n"},
        {"at_hash": "h"},
        {"events": {}},
        {"typ": "ID"},
        {"typ": "Refresh"},
        {"typ": ["Bearer"]},
        {"token_use": "id"},
    ],
    ids=str,
)
async def test_an_id_token_is_refused_even_then(
    issuer: ScriptedIssuer, trust: Trust, more: dict[str, Any]
) -> None:
    token = sign(header_of(KEY, typ="JWT"), claims_of(issuer.url, **more), KEY)
    assert "no access token" in await refuse(trust(accept_untyped=True), token)


async def test_a_foreign_type_is_refused_even_then(issuer: ScriptedIssuer, trust: Trust) -> None:
    token = sign(header_of(KEY, typ="dpop+jwt"), claims_of(issuer.url), KEY)
    assert "no access token" in await refuse(trust(accept_untyped=True), token)


@pytest.mark.requirement("AHP-R29")
async def test_a_bound_token_is_no_bearer_token(issuer: ScriptedIssuer, trust: Trust) -> None:
    assert "cnf" in await refuse(trust(), good(issuer, cnf={"jkt": "x"}))


# Issuers ----------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R29")
@pytest.mark.parametrize("iss", [None, "", "https://other.test", 7, [], {}, True])
async def test_a_token_of_another_issuer_is_unknown(
    issuer: ScriptedIssuer, trust: Trust, iss: Any
) -> None:
    assert "not known" in await refuse(trust(), good(issuer, iss=iss))
    assert issuer.fetches() == 0


@pytest.mark.requirement("AHP-R29")
async def test_the_issuer_is_compared_exactly(issuer: ScriptedIssuer, trust: Trust) -> None:
    assert "not known" in await refuse(trust(), good(issuer, iss=issuer.url + "/"))


async def test_an_issuer_is_configured_once() -> None:
    table: Any = {"issuer": "https://as.test", "audience": "x"}
    with pytest.raises(ValueError, match="two issuers"):
        Settings(issuers=(table, table))


@pytest.mark.parametrize("name", ["https://as.test#", "https://as.test/#a"])
async def test_an_issuer_has_no_fragment(name: str) -> None:
    table: Any = {"issuer": name, "audience": "x"}
    with pytest.raises(ValueError, match="no fragment"):
        Settings(issuers=(table,))


# The memory of verified tokens ------------------------------------------------------------------


@pytest.mark.requirement("AHP-R29", "B82")
async def test_a_remembered_token_still_ends(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    checker, token = trust(jwks_refresh_seconds=3600), good(issuer, exp=NOW + 60)
    first = await accept(checker, token)
    clock.advance(89)
    assert await accept(checker, token) is first  # the same object: nothing was verified again
    clock.advance(1)
    assert "expired" in await refuse(checker, token)


@pytest.mark.requirement("AHP-R29", "B82")
async def test_a_remembered_token_still_begins(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    checker, token = trust(), good(issuer, nbf=NOW + 20)
    assert (await accept(checker, token)).name == "agent-7"
    clock.advance(-60)
    assert "not valid yet" in await refuse(checker, token)


@pytest.mark.requirement("AHP-R29")
async def test_a_remembered_token_is_remembered_whole(issuer: ScriptedIssuer, trust: Trust) -> None:
    checker, token = trust(), good(issuer)
    await accept(checker, token)
    head, payload, signature = token.split(".")
    await refuse(checker, f"{head}.{payload}.{signature[:-4]}")
    await refuse(checker, f"{head}.{payload}.{encode(b'x' * 64)}")
    assert (await accept(checker, token)).name == "agent-7"
