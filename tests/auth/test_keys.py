"""Key sets: discovery, rotation, floods of unknown keys, and outages (B78, B79)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from joserfc import jwk

from app.auth.authenticator import Authenticator
from app.auth.jose import MAX_KEYS, read_jwt, read_key_set
from app.auth.keys import KeyRing, metadata_urls
from app.errors import Unauthenticated, Unavailable
from tests.auth.conftest import Make, Trust
from tests.auth.issuer import (
    AUDIENCE,
    Clock,
    Reply,
    Request,
    Route,
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

OLD = signing_key("old")
NEW = signing_key("new")
FOREIGN = signing_key("foreign")


def token_of(issuer: ScriptedIssuer, key: Any = OLD, **header: Any) -> str:
    return sign(header_of(key, **header), claims_of(issuer.url, exp=1_900_000_000), key)


async def outcome(checker: Authenticator, token: str) -> str:
    """`ok`, or the code of the refusal."""
    try:
        await checker.authenticate(bearer(token))
    except (Unauthenticated, Unavailable) as refusal:
        return refusal.code
    return "ok"


def ring_of(checker: Authenticator, issuer: ScriptedIssuer) -> KeyRing:
    assert checker._issuers is not None
    return checker._issuers._issuers[issuer.url].ring


def limit(checker: Authenticator, issuer: ScriptedIssuer, seconds: float) -> None:
    """Change the time limit of a request: short where every request is to fail, long elsewhere.

    So no test hangs on how fast the machine is.
    """
    ring = ring_of(checker, issuer)
    ring._settings = ring._settings.model_copy(update={"timeout_seconds": seconds})


async def settled(checker: Authenticator, issuer: ScriptedIssuer, fetches: int) -> None:
    """Wait until the background has fetched `fetches` times and taken in what came."""
    ring = ring_of(checker, issuer)
    async with asyncio.timeout(20):
        while issuer.fetches() < fetches or ring._flight is not None:
            await asyncio.sleep(0.001)


def down(kind: str) -> Route:
    async def hang(request: Request) -> Reply:
        await asyncio.Event().wait()
        return Reply()

    routes: dict[str, Route] = {
        "500": Reply(500),
        "hangs": hang,
        "empty set": Reply(body={"keys": []}),
        "no keys": Reply(body={}),
        "keys of no use": Reply(body={"keys": [7, {}, {"kty": "oct", "k": "AAAA"}]}),
        "keys is no list": Reply(body={"keys": {"kid": "old"}}),
        "html": Reply(body=b"<html>We are down</html>"),
        "a list": Reply(body=[public(OLD)]),
        "nothing": Reply(),
        "too large": Reply(body=b'{"keys": [' + b" " * 1_048_576 + b"]}"),
        "redirect": Reply(302, b"", ("Location: /elsewhere",)),
        "compressed": Reply(200, b"{}", ("Content-Encoding: gzip",)),
        "deep": Reply(body=b'{"keys":' + b"[" * 200_000),
        "no http": lambda request: _raise(ConnectionError()),
    }
    return routes[kind]


def _raise(error: Exception) -> Reply:
    raise error


OUTAGES = [
    "500", "hangs", "empty set", "no keys", "keys of no use", "keys is no list", "html", "a list",
    "nothing", "too large", "redirect", "compressed", "deep", "no http",
]  # fmt: skip


# Outages ----------------------------------------------------------------------------------------


@pytest.mark.requirement("B78")
@pytest.mark.parametrize("kind", OUTAGES)
async def test_known_keys_outlive_an_outage(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock, kind: str
) -> None:
    issuer.publish(public(OLD))
    issuer.routes["/elsewhere"] = Reply(body={"keys": [public(FOREIGN)]})
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    issuer.routes["/jwks"] = down(kind)
    limit(checker, issuer, 0.05)
    for _ in range(10):
        clock.advance(60)
        fresh = token_of(issuer, jti=str(clock.now))  # not one that is remembered
        assert await outcome(checker, fresh) == "ok"
        await settled(checker, issuer, issuer.fetches())
    assert issuer.fetches() > 1
    assert issuer.fetches("/elsewhere") == 0
    assert await outcome(checker, token_of(issuer, FOREIGN)) == "invalid_credential"


@pytest.mark.requirement("B78")
async def test_stale_keys_end(issuer: ScriptedIssuer, trust: Trust, clock: Clock) -> None:
    issuer.publish(public(OLD))
    checker = trust(jwks_stale_seconds=1000)
    token = token_of(issuer)
    assert await outcome(checker, token) == "ok"
    issuer.routes["/jwks"] = Reply(500)
    clock.advance(1000)
    assert await outcome(checker, token) == "ok"
    await settled(checker, issuer, 2)
    clock.advance(1.5)
    assert await outcome(checker, token) == "issuer_unavailable"
    issuer.publish(public(OLD))
    clock.advance(1)
    assert await outcome(checker, token) == "ok"


@pytest.mark.requirement("B78")
@pytest.mark.parametrize("kind", OUTAGES)
async def test_a_cold_cache_in_an_outage_is_unavailable(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock, kind: str
) -> None:
    issuer.publish(public(OLD))
    issuer.routes["/jwks"] = down(kind)
    checker = trust()
    limit(checker, issuer, 0.05 if kind == "hangs" else 30)
    with pytest.raises(Unavailable) as caught:
        await checker.authenticate(bearer(token_of(issuer)))
    assert (caught.value.code, caught.value.retry_after) == ("issuer_unavailable", 1)
    issuer.publish(public(OLD))
    limit(checker, issuer, 30)
    clock.advance(1)
    assert await outcome(checker, token_of(issuer)) == "ok"


@pytest.mark.requirement("B78")
async def test_a_cold_cache_asks_at_most_once_a_second(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.routes["/.well-known/oauth-authorization-server"] = Reply(500)
    checker = trust()
    for _ in range(20):
        assert await outcome(checker, token_of(issuer)) == "issuer_unavailable"
    assert issuer.fetches("/.well-known/oauth-authorization-server") == 1
    clock.advance(1)
    assert await outcome(checker, token_of(issuer)) == "issuer_unavailable"
    assert issuer.fetches("/.well-known/oauth-authorization-server") == 2


@pytest.mark.requirement("B78")
async def test_a_host_that_says_nothing_is_asked_in_one_place_only(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    for url in metadata_urls(issuer.url):
        issuer.routes[url.removeprefix(issuer.url)] = down("no http")
    assert await outcome(trust(), token_of(issuer)) == "issuer_unavailable"
    assert len(issuer.requests) == 1


@pytest.mark.requirement("B78")
async def test_an_issuer_that_is_not_there_is_unavailable(make: Make) -> None:
    checker = make(issuers=[{"issuer": "http://127.0.0.1:1", "audience": AUDIENCE}])
    token = sign(header_of(OLD), claims_of("http://127.0.0.1:1"), OLD)
    assert await outcome(checker, token) == "issuer_unavailable"


@pytest.mark.requirement("B78")
async def test_other_credentials_do_not_need_the_issuer(issuer: ScriptedIssuer, make: Make) -> None:
    checker = make(
        tokens=[{"name": "ops", "token_env": "OPS", "scope": "s"}],
        issuers=[{"issuer": issuer.url, "audience": AUDIENCE}],
        environment={"OPS": "t"},
    )
    assert await outcome(checker, "t") == "ok"
    assert await outcome(checker, "garbage") == "invalid_credential"
    assert issuer.requests == []


@pytest.mark.requirement("B78")
async def test_a_known_key_never_waits_for_a_refresh(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    await outcome(checker, token_of(issuer))
    issuer.routes["/jwks"] = down("hangs")
    clock.advance(301)
    assert await outcome(checker, token_of(issuer, jti="2")) == "ok"
    async with asyncio.timeout(20):
        while issuer.fetches() < 2:
            await asyncio.sleep(0.001)
    assert await outcome(checker, token_of(issuer, jti="3")) == "ok"


@pytest.mark.requirement("B78")
async def test_an_outage_is_not_asked_about_more_than_once_in_a_cooldown(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    issuer.routes["/jwks"] = Reply(500)
    clock.advance(400)
    for fetches in (2, 3):
        for _ in range(5):
            assert await outcome(checker, token_of(issuer)) == "ok"
            await settled(checker, issuer, fetches)
            assert issuer.fetches() == fetches
        clock.advance(10)


# Rotation ---------------------------------------------------------------------------------------


@pytest.mark.requirement("B79")
async def test_a_new_key_is_accepted_at_once(issuer: ScriptedIssuer, trust: Trust) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    issuer.publish(public(OLD), public(NEW))
    assert await outcome(checker, token_of(issuer, NEW)) == "ok"
    assert await outcome(checker, token_of(issuer)) == "ok"
    assert issuer.fetches() == 2


@pytest.mark.requirement("B79")
async def test_a_removed_key_is_refused_though_its_token_is_remembered(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    old = token_of(issuer)
    assert await outcome(checker, old) == "ok"
    issuer.publish(public(NEW))
    assert await outcome(checker, token_of(issuer, NEW)) == "ok"
    assert await outcome(checker, old) == "invalid_credential"


@pytest.mark.requirement("B79")
async def test_a_key_that_was_replaced_under_its_name(issuer: ScriptedIssuer, trust: Trust) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    issuer.publish(public(NEW, kid="old"))
    assert await outcome(checker, token_of(issuer, NEW, kid="old")) == "ok"
    assert await outcome(checker, token_of(issuer)) == "invalid_credential"


@pytest.mark.requirement("B79")
async def test_old_age_is_refreshed_in_the_background(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker, old = trust(), token_of(issuer)
    assert await outcome(checker, old) == "ok"
    issuer.publish(public(NEW))
    clock.advance(299)
    assert await outcome(checker, old) == "ok"
    assert issuer.fetches() == 1
    clock.advance(1)
    assert await outcome(checker, old) == "ok"
    await settled(checker, issuer, 2)
    assert await outcome(checker, old) == "invalid_credential"


@pytest.mark.requirement("B79")
async def test_a_flood_of_unknown_keys_is_one_fetch(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    for round_ in (2, 3):
        flood = [token_of(issuer, FOREIGN, kid=f"{round_}-{i}") for i in range(1000)]
        found = await asyncio.gather(*(outcome(checker, token) for token in flood))
        assert set(found) == {"invalid_credential"}
        assert issuer.fetches() == round_
        clock.advance(9.9)
        assert await outcome(checker, flood[0]) == "invalid_credential"
        assert issuer.fetches() == round_
        clock.advance(0.1)


@pytest.mark.requirement("B79")
async def test_a_flood_in_an_outage_does_not_touch_known_keys(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    issuer.routes["/jwks"] = Reply(500)
    for i in range(5):
        assert await outcome(checker, token_of(issuer, FOREIGN, kid=f"k{i}")) == (
            "invalid_credential"
        )
    assert await outcome(checker, token_of(issuer, jti="2")) == "ok"
    assert issuer.fetches() == 2


@pytest.mark.requirement("B78", "B79")
async def test_concurrent_requests_share_the_first_fetch(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    await checker.start()
    found = await asyncio.gather(*(outcome(checker, token_of(issuer)) for _ in range(50)))
    assert set(found) == {"ok"}
    assert issuer.fetches() == 1


@pytest.mark.requirement("B78")
async def test_a_cancelled_request_leaves_the_fetch_to_the_others(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    keys, asked, release = issuer.routes["/jwks"], asyncio.Event(), asyncio.Event()

    async def hold(request: Request) -> Reply:
        asked.set()
        await release.wait()
        assert isinstance(keys, Reply)
        return keys

    issuer.routes["/jwks"] = hold
    checker = trust()
    first = asyncio.create_task(outcome(checker, token_of(issuer)))
    await asked.wait()
    clock.advance(2)
    second = asyncio.create_task(outcome(checker, token_of(issuer)))
    await asyncio.sleep(0)  # the second waits now, for the fetch of the first
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    release.set()
    assert await second == "ok"
    assert issuer.fetches() == 1


async def test_a_clock_that_was_turned_back_does_not_stop_refreshes(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    token = sign(header_of(OLD), claims_of(issuer.url, iat=None), OLD)
    assert await outcome(checker, token) == "ok"
    clock.advance(-86_400)
    assert await outcome(checker, token) == "ok"
    await settled(checker, issuer, 2)
    issuer.publish(public(NEW))
    fresh = sign(header_of(NEW), claims_of(issuer.url, iat=None), NEW)
    assert await outcome(checker, fresh) == "ok"


# Keys -------------------------------------------------------------------------------------------


@pytest.mark.requirement("B79")
@pytest.mark.parametrize("key", [OLD, NEW])
async def test_two_keys_of_one_name(issuer: ScriptedIssuer, trust: Trust, key: Any) -> None:
    issuer.publish(public(OLD, kid="same"), public(NEW, kid="same"))
    assert await outcome(trust(), token_of(issuer, key, kid="same")) == "ok"


@pytest.mark.requirement("B79")
async def test_a_token_without_kid(issuer: ScriptedIssuer, trust: Trust) -> None:
    issuer.publish(public(rsa_key("rsa-1")), public(NEW), public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer, kid=None)) == "ok"
    assert await outcome(checker, token_of(issuer, FOREIGN, kid=None)) == "invalid_credential"


@pytest.mark.requirement("B79")
async def test_a_key_without_kid(issuer: ScriptedIssuer, trust: Trust) -> None:
    issuer.publish(public(OLD, kid=None))
    assert await outcome(trust(), token_of(issuer)) == "ok"


@pytest.mark.requirement("B79")
async def test_the_keys_that_one_token_is_tried_with_are_bounded(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    others = [public(signing_key(f"other-{i}")) for i in range(8)]
    issuer.publish(*others, public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer, kid=None)) == "invalid_credential"
    assert await outcome(checker, token_of(issuer)) == "ok"


@pytest.mark.requirement("B79")
async def test_keys_of_another_kind_do_not_count(issuer: ScriptedIssuer, trust: Trust) -> None:
    others = [public(signing_key(f"p384-{i}", "EC", "P-384")) for i in range(8)]
    issuer.publish(*others, public(OLD))
    assert await outcome(trust(), token_of(issuer, kid=None)) == "ok"


@pytest.mark.parametrize(
    ("alg", "key"),
    [
        ("RS256", rsa_key("rsa-1")),
        ("RS512", rsa_key("rsa-1")),
        ("PS256", rsa_key("rsa-1")),
        ("ES256", OLD),
        ("ES384", signing_key("p384", "EC", "P-384")),
        ("ES512", signing_key("p521", "EC", "P-521")),
        ("Ed25519", signing_key("ed", "OKP", "Ed25519")),
        ("EdDSA", signing_key("ed", "OKP", "Ed25519")),
    ],
)
async def test_every_algorithm_that_can_be_configured_works(
    issuer: ScriptedIssuer, trust: Trust, alg: str, key: Any
) -> None:
    issuer.publish(public(key, alg=alg, use="sig", key_ops=["verify"]))
    assert await outcome(trust(algorithms=[alg]), token_of(issuer, key, alg=alg)) == "ok"
    assert await outcome(trust(algorithms=["RS384"]), token_of(issuer, key, alg=alg)) == (
        "invalid_credential"
    )


def test_keys_of_other_uses_are_left_out() -> None:
    weak = signing_key("weak", "RSA", 2048)
    document = {
        "keys": [
            public(OLD, use="enc"),
            public(OLD, key_ops=["encrypt"]),
            public(OLD, alg="ES384"),
            public(OLD, kid=7),
            public(OLD, crv="P-384"),
            public(OLD, kty="dlp"),
            public(weak, n="AQAB"),
            public(weak, n=encode((2**1023 + 1).to_bytes(128))),
            public(weak, n=7),
            public(weak, n=None),
            public(weak, n="A" * 20_000),
            public(signing_key("x", "OKP", "X25519")),
            {"kty": "oct", "k": "AAAA", "kid": "old"},
            "old",
            public(NEW),
        ]
    }
    assert [key.kid for key in read_key_set(document).keys] == ["new"]


def test_a_leaked_private_key_is_used_as_a_public_one() -> None:
    (key,) = read_key_set({"keys": [OLD.as_dict(private=True)]}).keys
    assert not key.key.is_private


def test_a_key_checks_public_key_signatures_only() -> None:
    (key,) = read_key_set({"keys": [public(OLD)]}).keys
    secret = jwk.import_key({"kty": "oct", "k": "c2VjcmV0LW9mLTE2LWJ5dGVz"})
    token = read_jwt(sign({"alg": "HS256"}, {}, secret))
    assert token is not None
    assert not key.signed(token)


def test_the_keys_of_one_set_are_bounded() -> None:
    document = {"keys": [public(OLD, kid=str(i)) for i in range(MAX_KEYS + 1)]}
    assert len(read_key_set(document).keys) == MAX_KEYS


# Discovery --------------------------------------------------------------------------------------


def test_where_metadata_is_looked_for() -> None:
    assert metadata_urls("https://as.test") == [
        "https://as.test/.well-known/oauth-authorization-server",
        "https://as.test/.well-known/openid-configuration",
    ]
    assert metadata_urls("https://as.test/realms/a/") == [
        "https://as.test/.well-known/oauth-authorization-server/realms/a",
        "https://as.test/realms/a/.well-known/openid-configuration",
        "https://as.test/.well-known/openid-configuration/realms/a",
    ]


@pytest.mark.parametrize(
    "place",
    [
        "/.well-known/oauth-authorization-server/tenant",
        "/tenant/.well-known/openid-configuration",
        "/.well-known/openid-configuration/tenant",
    ],
)
async def test_metadata_is_found_in_every_place(
    issuer: ScriptedIssuer, make: Make, place: str
) -> None:
    name = issuer.url + "/tenant"
    issuer.routes["/jwks"] = Reply(body={"keys": [public(OLD)]})
    issuer.routes[place] = Reply(body={"issuer": name, "jwks_uri": issuer.url + "/jwks"})
    checker = make(issuers=[{"issuer": name, "audience": AUDIENCE}])
    assert await outcome(checker, sign(header_of(OLD), claims_of(name), OLD)) == "ok"


@pytest.mark.parametrize(
    "change",
    [
        {"issuer": "https://other.test"},
        {"issuer": None},
        {"jwks_uri": None},
        {"jwks_uri": 7},
        {"jwks_uri": "http://as.test/jwks"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "https://user:pw@as.test/jwks"},
    ],
    ids=str,
)
async def test_metadata_that_is_not_to_be_trusted(
    issuer: ScriptedIssuer, trust: Trust, change: dict[str, Any]
) -> None:
    issuer.publish(public(OLD))
    document = {"issuer": issuer.url, "jwks_uri": issuer.url + "/jwks", **change}
    issuer.routes["/.well-known/oauth-authorization-server"] = Reply(body=document)
    assert await outcome(trust(), token_of(issuer)) == "issuer_unavailable"
    assert issuer.fetches() == 0


async def test_a_wrong_document_does_not_hide_a_right_one(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    issuer.publish(public(OLD))
    good = issuer.routes["/.well-known/oauth-authorization-server"]
    issuer.routes["/.well-known/oauth-authorization-server"] = Reply(body={"issuer": "x"})
    issuer.routes["/.well-known/openid-configuration"] = good
    assert await outcome(trust(), token_of(issuer)) == "ok"


async def test_a_given_url_needs_no_discovery(issuer: ScriptedIssuer, trust: Trust) -> None:
    issuer.routes["/here"] = Reply(body={"keys": [public(OLD)]})
    checker = trust(jwks_url=issuer.url + "/here")
    assert await outcome(checker, token_of(issuer)) == "ok"
    assert [request.path for request in issuer.requests] == ["/here"]
    assert issuer.requests[0].headers["accept-encoding"] == "identity"


async def test_moved_keys_are_found_again(
    issuer: ScriptedIssuer, trust: Trust, clock: Clock
) -> None:
    issuer.publish(public(OLD))
    checker = trust()
    assert await outcome(checker, token_of(issuer)) == "ok"
    del issuer.routes["/jwks"]
    issuer.publish(public(NEW), path="/moved")
    assert await outcome(checker, token_of(issuer, NEW)) == "invalid_credential"
    clock.advance(10)
    assert await outcome(checker, token_of(issuer, NEW)) == "ok"


# Logs -------------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R14", "B78")
async def test_an_outage_and_a_rotation_are_logged(
    issuer: ScriptedIssuer, trust: Trust, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "consignee.auth")
    issuer.publish(public(OLD))
    checker, token = trust(), token_of(issuer)
    await outcome(checker, token)
    issuer.routes["/jwks"] = Reply(500)
    await outcome(checker, token_of(issuer, FOREIGN))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"{issuer.url} has 1 usable key(s) now"),
        ("WARNING", f"the keys of {issuer.url} were not refreshed: it answered with status 500"),
        ("INFO", "a token was refused: The token is not signed with a key of its issuer."),
    ]
    assert token.split(".")[2] not in caplog.text


async def test_a_fetch_under_way_ends_with_the_authenticator(
    issuer: ScriptedIssuer, trust: Trust
) -> None:
    issuer.publish(public(OLD))
    issuer.routes["/jwks"] = down("hangs")
    checker = trust()
    await checker.start()
    async with asyncio.timeout(20):
        while not issuer.fetches():
            await asyncio.sleep(0.001)
    await checker.close()
    assert [task for task in asyncio.all_tasks() if "_refresh" in repr(task)] == []
