"""Tokens that somebody made to get in: every one is refused, and none is followed anywhere."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from joserfc import jwk

from app.auth.credentials import MAX_TOKEN_BYTES
from app.auth.principals import Principal
from app.errors import Unauthenticated
from tests.auth.conftest import Trust
from tests.auth.issuer import (
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

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("AHP-R29")]

EC = signing_key("ec")
RSA = rsa_key("rsa")
FOREIGN = signing_key("foreign")
EVERY_ALGORITHM = [
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
    "ES256", "ES384", "ES512", "Ed25519", "EdDSA",
]  # fmt: skip


@pytest.fixture(autouse=True)
def published(issuer: ScriptedIssuer) -> None:
    issuer.publish(public(EC), public(RSA))


async def refuse(issuer: ScriptedIssuer, trust: Trust, token: str, **settings: Any) -> str:
    """The reason why `token` is refused, where a good one is accepted."""
    checker = trust(**settings)
    good = sign(header_of(EC), claims_of(issuer.url), EC)
    assert isinstance(await checker.authenticate(bearer(good)), Principal)
    with pytest.raises(Unauthenticated) as caught:
        await checker.authenticate(bearer(token))
    assert caught.value.token_given
    assert {request.path for request in issuer.requests} == {
        "/.well-known/oauth-authorization-server",
        "/jwks",
    }
    return caught.value.message


def unsigned(issuer: ScriptedIssuer, alg: Any, signature: bytes = b"") -> str:
    header = encode(json.dumps({"alg": alg, "typ": "at+jwt", "kid": "ec"}).encode())
    claims = encode(json.dumps(claims_of(issuer.url)).encode())
    return f"{header}.{claims}.{encode(signature)}"


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "", None, 0, [], {}, ["ES256"]])
@pytest.mark.parametrize("signature", [b"", b"x", b"\0" * 64])
async def test_an_unsigned_token(
    issuer: ScriptedIssuer, trust: Trust, alg: Any, signature: bytes
) -> None:
    assert "token" in await refuse(issuer, trust, unsigned(issuer, alg, signature))


@pytest.mark.parametrize("form", ["pem", "pem-stripped", "der", "jwk", "n"])
@pytest.mark.parametrize("alg", ["HS256", "HS384", "HS512"])
async def test_a_public_key_as_secret(
    issuer: ScriptedIssuer, trust: Trust, form: str, alg: str
) -> None:
    assert isinstance(RSA, jwk.RSAKey)
    pem = RSA.public_key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    secret = {
        "pem": pem,
        "pem-stripped": pem.strip(),
        "der": RSA.public_key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        "jwk": json.dumps(public(RSA)).encode(),
        "n": str(public(RSA)["n"]).encode(),
    }[form]
    header = {"alg": alg, "typ": "at+jwt", "kid": "rsa"}
    signed = f"{encode(json.dumps(header).encode())}." + encode(
        json.dumps(claims_of(issuer.url)).encode()
    )
    digest = hmac.new(secret, signed.encode(), getattr(hashlib, f"sha{alg[2:]}")).digest()
    reason = await refuse(issuer, trust, f"{signed}.{encode(digest)}", algorithms=EVERY_ALGORITHM)
    assert "algorithm" in reason


async def test_an_algorithm_that_is_not_on_the_list(issuer: ScriptedIssuer, trust: Trust) -> None:
    token = sign(header_of(RSA, alg="PS256"), claims_of(issuer.url), RSA)
    assert "algorithm" in await refuse(issuer, trust, token)


@pytest.mark.parametrize("kid", ["ec", None, "foreign"])
async def test_a_foreign_key(issuer: ScriptedIssuer, trust: Trust, kid: str | None) -> None:
    token = sign(header_of(FOREIGN, kid=kid), claims_of(issuer.url), FOREIGN)
    assert "key of its issuer" in await refuse(issuer, trust, token)


@pytest.mark.parametrize("member", ["jwk", "jku", "x5u", "x5c"])
async def test_a_key_that_the_token_brings(
    issuer: ScriptedIssuer, trust: Trust, member: str
) -> None:
    issuer.publish(public(FOREIGN), path="/evil")
    issuer.publish(public(EC), public(RSA))
    value = {"jwk": public(FOREIGN), "x5c": ["AAAA"]}.get(member, issuer.url + "/evil")
    for kid in ("ec", "foreign"):
        header = header_of(FOREIGN, kid=kid, **{member: value})
        token = sign(header, claims_of(issuer.url), FOREIGN)
        assert "key of its issuer" in await refuse(issuer, trust, token)


@pytest.mark.parametrize("alg", ["ES384", "ES512", "RS256", "Ed25519"])
async def test_an_algorithm_that_is_not_of_the_key(
    issuer: ScriptedIssuer, trust: Trust, alg: str
) -> None:
    key = {"ES384": signing_key("p384", "EC", "P-384")}.get(alg, EC)
    if alg == "ES384":
        token = sign(header_of(key, alg=alg, kid="ec"), claims_of(issuer.url), key)
    else:
        token = sign(header_of(EC, alg=alg), claims_of(issuer.url), EC, using="ES256")
    reason = await refuse(issuer, trust, token, algorithms=EVERY_ALGORITHM)
    assert "key of its issuer" in reason


@pytest.mark.parametrize("header", [{"crit": ["exp"], "exp": 1}, {"crit": []}, {"crit": 7}])
async def test_critical_extensions(
    issuer: ScriptedIssuer, trust: Trust, header: dict[str, Any]
) -> None:
    token = sign(header_of(EC, **header), claims_of(issuer.url), EC)
    assert "crit" in await refuse(issuer, trust, token)


async def test_an_unencoded_payload(issuer: ScriptedIssuer, trust: Trust) -> None:
    token = sign(header_of(EC, b64=False), claims_of(issuer.url), EC)
    assert "key of its issuer" in await refuse(issuer, trust, token)


@pytest.mark.requirement("B79")
@pytest.mark.parametrize("kid", [7, True, [], {}, ["ec"]])
async def test_a_kid_that_is_no_string(issuer: ScriptedIssuer, trust: Trust, kid: Any) -> None:
    token = sign(header_of(EC, kid=kid), claims_of(issuer.url), EC)
    assert "kid" in await refuse(issuer, trust, token)


@pytest.mark.requirement("B79")
@pytest.mark.parametrize("kid", ["k" * 10_000, "../../x", "", "ec\x00", "\ud800", "' or 1=1"])
async def test_a_kid_that_names_nothing(issuer: ScriptedIssuer, trust: Trust, kid: str) -> None:
    token = sign(header_of(EC, kid=kid), claims_of(issuer.url), EC)
    assert "key of its issuer" in await refuse(issuer, trust, token)


async def test_every_changed_byte_counts(issuer: ScriptedIssuer, trust: Trust) -> None:
    checker = trust()
    token = sign(header_of(EC), claims_of(issuer.url), EC)
    assert (await checker.authenticate(bearer(token))).name == "agent-7"
    places = [i for i, letter in enumerate(token) if letter != "."]
    for place in places[::7]:
        changed = token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
        with pytest.raises(Unauthenticated):
            await checker.authenticate(bearer(changed))


@pytest.mark.parametrize("length", [1, 10, 60, 100, 200, -1, -40])
async def test_a_truncated_token(issuer: ScriptedIssuer, trust: Trust, length: int) -> None:
    token = sign(header_of(EC), claims_of(issuer.url), EC)
    assert "token" in await refuse(issuer, trust, token[:length])


@pytest.mark.parametrize("claims", [b"", b"7", b"[]", b'"x"', b"{", b"\xff", b"[" * 9000])
async def test_claims_that_are_no_object(
    issuer: ScriptedIssuer, trust: Trust, claims: bytes
) -> None:
    assert "token" in await refuse(issuer, trust, sign(header_of(EC), claims, EC))


async def test_a_header_that_is_no_object(issuer: ScriptedIssuer, trust: Trust) -> None:
    _, claims, signature = sign(header_of(EC), claims_of(issuer.url), EC).split(".")
    for header in (b"7", b"[]", b"{", b"null"):
        token = f"{encode(header)}.{claims}.{signature}"
        assert "not known" in await refuse(issuer, trust, token)


async def test_a_nested_and_an_encrypted_token(issuer: ScriptedIssuer, trust: Trust) -> None:
    inner = sign(header_of(EC), claims_of(issuer.url), EC)
    nested = sign(header_of(EC, cty="JWT"), inner.encode(), EC)
    assert "not known" in await refuse(issuer, trust, nested)
    assert "not known" in await refuse(issuer, trust, f"{inner}.AAAA.AAAA")


async def test_a_token_of_more_than_16_kib(issuer: ScriptedIssuer, trust: Trust) -> None:
    fits = sign(header_of(EC), claims_of(issuer.url, pad="x" * 11_000), EC)
    assert (await trust().authenticate(bearer(fits))).name == "agent-7"
    large = sign(header_of(EC), claims_of(issuer.url, pad="x" * MAX_TOKEN_BYTES), EC)
    assert "longer than" in await refuse(issuer, trust, large)
