"""Authorization header -> credential: one well-formed bearer token, or a refusal."""

from __future__ import annotations

import hashlib
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.auth.authenticator import Authenticator
from app.auth.credentials import MAX_TOKEN_BYTES, read_credential
from app.auth.principals import Principal
from app.errors import Unauthenticated
from app.settings import Settings
from tests.auth.conftest import Make
from tests.auth.issuer import (
    AUDIENCE,
    ScriptedIssuer,
    bearer,
    claims_of,
    header_of,
    public,
    sign,
    signing_key,
)

pytestmark = pytest.mark.anyio

DIGEST = hashlib.sha256(b"right").hexdigest()
TOKEN = {"name": "ci", "token_sha256": DIGEST, "scope": "team"}
ANONYMOUS = {"scope": "public", "permissions": ["ahp.upload"]}


def authenticator(**more: object) -> Authenticator:
    return Authenticator(Settings(tokens=(TOKEN,), **more), environment={})  # type: ignore[arg-type]  # pydantic converts


async def refusal(value: bytes, **more: object) -> Unauthenticated:
    with pytest.raises(Unauthenticated) as caught:
        await authenticator(**more).authenticate([(b"host", b"x"), (b"authorization", value)])
    return caught.value


@pytest.mark.parametrize(
    "value", [b"Bearer right", b"bearer right", b"BEARER   right", b" Bearer right\t"]
)
async def test_a_configured_token_is_a_principal(value: bytes) -> None:
    principal = await authenticator().authenticate([(b"authorization", value)])
    assert principal == Principal("ci", "team", frozenset({"ahp.upload"}))


async def test_the_name_of_the_header_has_no_case() -> None:
    principal = await authenticator().authenticate([(b"Authorization", b"Bearer right")])
    assert principal.name == "ci"


@pytest.mark.requirement("AHP-R13", "AHP-R29")
async def test_no_header_is_a_missing_credential() -> None:
    with pytest.raises(Unauthenticated) as caught:
        await authenticator().authenticate([(b"host", b"x")])
    assert (caught.value.code, caught.value.token_given) == ("missing_credential", False)


@pytest.mark.requirement("AHP-R13")
async def test_no_header_is_anonymous_where_the_configuration_says_so() -> None:
    principal = await authenticator(anonymous=ANONYMOUS).authenticate([])
    assert principal == Principal("anonymous", "public", frozenset({"ahp.upload"}))


@pytest.mark.requirement("AHP-R29", "B83")
@pytest.mark.parametrize("anonymous", [None, ANONYMOUS])
@pytest.mark.parametrize("value", [b"", b" ", b"Bearer", b"Bearer ", b"Basic eDp5", b"right"])
async def test_a_header_without_bearer_token_is_refused(
    value: bytes, anonymous: dict[str, object] | None
) -> None:
    refused = await refusal(value, anonymous=anonymous)
    assert (refused.code, refused.token_given) == ("missing_credential", False)


@pytest.mark.requirement("AHP-R13", "AHP-R29", "B83")
@pytest.mark.parametrize("anonymous", [None, ANONYMOUS])
@pytest.mark.parametrize(
    "value",
    [
        b"Bearer wrong",
        b"Bearer right right",
        b"Bearer right,",
        b"Bearer \xff\xfe",
        b"Bearer r\xc3\xa4t",
        b"Bearer =",
        b"Bearer right\x00",
        b"Bearer a.b.c",
        b"Bearer " + b"a" * (MAX_TOKEN_BYTES + 1),
    ],
)
async def test_a_bad_token_is_never_taken_for_none(
    value: bytes, anonymous: dict[str, object] | None
) -> None:
    refused = await refusal(value, anonymous=anonymous)
    assert (refused.code, refused.token_given) == ("invalid_credential", True)


@pytest.mark.requirement("AHP-R29", "B83")
@pytest.mark.parametrize("second", [b"Bearer right", b"", b"Basic x"])
async def test_two_headers_are_refused_even_when_one_is_good(second: bytes) -> None:
    headers = [(b"authorization", b"Bearer right"), (b"authorization", second)]
    with pytest.raises(Unauthenticated) as caught:
        await authenticator(anonymous=ANONYMOUS).authenticate(headers)
    assert (caught.value.code, caught.value.token_given) == ("invalid_credential", True)


def test_a_credential_does_not_show_its_token() -> None:
    credential = read_credential(bearer("s3cret"))
    assert credential is not None
    assert credential.token == "s3cret"
    assert "s3cret" not in repr(credential)


@pytest.mark.requirement("AHP-R14")
async def test_a_refused_token_is_in_no_log_and_no_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    refused = await refusal(b"Bearer s3cret.t0ken")
    assert "s3cret" not in caplog.text + refused.message
    assert "a token was refused" in caplog.text


def _jwt_like(header: dict[str, object], claims: dict[str, object]) -> bytes:
    return b"Bearer " + sign(header, claims, signing_key("k"), using="ES256").encode()


ISSUER = "https://issuer.test"
GOOD = claims_of(ISSUER)
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.text())
)
VALUES = st.one_of(
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda tail: b"Bearer " + tail),
    st.text("ab.-_~+/= ", max_size=40).map(lambda tail: b"Bearer " + tail.encode()),
    st.builds(
        _jwt_like,
        st.dictionaries(st.sampled_from(["alg", "kid", "typ", "crit", "jwk", "jku"]), ODD),
        st.dictionaries(st.sampled_from(["iss", "sub", "aud", "exp", "nbf", "iat"]), ODD),
    ),
    st.dictionaries(st.sampled_from(["exp", "aud", "sub", "nbf"]), ODD, min_size=1).map(
        lambda odd: _jwt_like(header_of(signing_key("k")), {**GOOD, **odd})
    ),
)


@pytest.fixture
async def fuzzed(make: Make, issuer: ScriptedIssuer) -> Authenticator:
    issuer.publish(public(signing_key("k")))
    table = {"issuer": ISSUER, "jwks_url": issuer.url + "/jwks", "audience": AUDIENCE}
    return make(tokens=[TOKEN], anonymous=ANONYMOUS, issuers=[table])


@pytest.mark.requirement("AHP-R29")
@settings(
    max_examples=300,
    # One authenticator and one issuer for all examples, on purpose.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(values=st.lists(VALUES, min_size=1, max_size=2))
async def test_every_header_gives_a_principal_or_a_refusal(
    fuzzed: Authenticator, values: list[bytes]
) -> None:
    try:
        found = (await fuzzed.authenticate([(b"authorization", v) for v in values])).scope
    except Unauthenticated as refused:
        found = fuzzed.challenge(refused)
    assert found.startswith(("Bearer resource_metadata=", ISSUER + "#"))
