"""The upload configuration: what it takes, what it refuses, and what goes on the wire of it."""

from __future__ import annotations

from typing import Any

import pytest
from agenthooksprotocol.runtime import ProtocolError, Validator
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from app.sender.config import BearerAuth, OAuthAuth, UploadConfiguration, require_endpoint
from app.sender.errors import ConfigurationError

SCHEMA = Validator()
BOUNDS = {"timeoutMs": 1000, "maxBytes": 10}
OAUTH = {
    "type": "oauth",
    "resource": "https://receiver.example/upload",
    "issuer": "https://login.example",
    "clientId": "sender",
    "flow": "client_credentials",
}


def parsed(
    endpoint: str = "https://receiver.example/upload", **members: Any
) -> UploadConfiguration:
    return UploadConfiguration.parse({"endpoint": endpoint, **BOUNDS, **members})


def refusal(mapping: dict[str, Any], *, allow_loopback_http: bool = False) -> str:
    with pytest.raises(ConfigurationError) as caught:
        UploadConfiguration.parse(mapping, allow_loopback_http=allow_loopback_http)
    assert caught.value.code == "configuration"
    return caught.value.message


def is_valid_by_the_draft(mapping: dict[str, Any]) -> bool:
    try:
        SCHEMA.validate("content-upload", mapping)
    except ProtocolError:
        return False
    return True


def is_valid_here(mapping: dict[str, Any]) -> bool:
    try:
        UploadConfiguration.parse(mapping, allow_loopback_http=True)
    except ConfigurationError:
        return False
    return True


@pytest.mark.requirement("AHP-S02")
def test_ahp_s02_a_configuration_has_auth_or_none() -> None:
    without = parsed()
    assert (without.endpoint, without.timeout_ms, without.max_bytes) == (
        "https://receiver.example/upload",
        1000,
        10,
    )
    assert without.auth is None
    assert parsed(auth={"type": "bearer", "tokenEnv": "TOKEN"}).auth == BearerAuth(
        token_env="TOKEN"
    )
    assert parsed(auth=OAUTH | {"scopes": ["a", "b"]}).auth == OAuthAuth(
        resource="https://receiver.example/upload",
        issuer="https://login.example",
        client_id="sender",
        flow="client_credentials",
        scopes=("a", "b"),
    )


@pytest.mark.requirement("AHP-S02")
@pytest.mark.parametrize("missing", ["endpoint", "timeoutMs", "maxBytes"])
def test_ahp_s02_every_member_but_auth_is_required(missing: str) -> None:
    mapping = {"endpoint": "https://receiver.example/", **BOUNDS}
    del mapping[missing]
    assert refusal(mapping) == f"upload.{missing}: Field required."


@pytest.mark.requirement("AHP-S02")
@pytest.mark.parametrize("member", ["timeoutMs", "maxBytes"])
@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_bounds_are_integers(member: str, value: object) -> None:
    mapping = {"endpoint": "https://receiver.example/", **BOUNDS, member: value}
    assert refusal(mapping).startswith(f"upload.{member}: ")


def test_no_time_is_refused_and_no_bytes_are_a_bound() -> None:
    assert refusal({"endpoint": "https://r.example/", "timeoutMs": 0, "maxBytes": 1})
    assert parsed(maxBytes=0).max_bytes == 0


@pytest.mark.requirement("AHP-S03")
@pytest.mark.parametrize(
    ("endpoint", "target"),
    [
        ("https://r.example", b"/"),
        ("https://r.example?x=1", b"/?x=1"),
        ("https://r.example/a/../b//c/./d", b"/a/../b//c/./d"),
        ("https://r.example/%7e%2F%2f~?", b"/%7e%2F%2f~?"),
        ("https://r.example/u?a=1&a=1&&b=%20+c?d/e", b"/u?a=1&a=1&&b=%20+c?d/e"),
        ("https://r.example:8443/u/", b"/u/"),
        ("https://R.example/$&'()*+,;=:@!", b"/$&'()*+,;=:@!"),
    ],
)
def test_ahp_s03_the_target_is_what_was_configured(endpoint: str, target: bytes) -> None:
    assert parsed(endpoint).target == target


def test_the_host_is_what_was_configured() -> None:
    assert parsed("https://R.example:443/x").host == "R.example:443"
    assert parsed("https://[2001:db8::1]:8443/x").host == "[2001:db8::1]:8443"


@pytest.mark.requirement("AHP-S06", "AHP-S33")
@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("", "ASCII"),
        ("https://r.example/\r\nX: y", "ASCII"),
        ("https://r.example/a\nb", "ASCII"),
        ("https://r.example/a b", "ASCII"),
        ("https://r.example/\x00", "ASCII"),
        ("https://r.example/ü", "ASCII"),
        ("https://ü.example/", "ASCII"),
        ("/upload", "absolute"),
        ("https:///upload", "absolute"),
        ("https:r.example", "absolute"),
        ("ftp://r.example/", "absolute"),
        ("HTTPS://r.example/", "absolute"),
        ("https://user@r.example/", "user name"),
        ("https://user:secret@r.example/", "user name"),
        ("https://@r.example/", "user name"),
        ("https://r.example/#part", "fragment"),
        ("https://r.example/#", "fragment"),
        ("https://r.example:0/", "port"),
        ("https://r.example:65536/", "port"),
        ("https://r.example:x/", "port"),
        ("https://[::1/", "port"),
        ("https://[g]/", "port"),
        ("https://-x\\y.example/", "percent-encode"),
        ("https://a..b/", "percent-encode"),
        (f"https://{'a' * 64}.example/", "percent-encode"),
        ("https://r.example/%", "percent-encode"),
        ("https://r.example/%zz", "percent-encode"),
        ('https://r.example/"', "percent-encode"),
        ("https://r.example/{id}", "percent-encode"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint: str, why: str) -> None:
    message = refusal({"endpoint": endpoint, **BOUNDS}, allow_loopback_http=True)
    assert why in message
    assert "secret" not in message


@pytest.mark.requirement("AHP-S06")
@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:8080/u", "http://localhost/u", "http://[::1]:1/u"]
)
def test_ahp_s06_http_to_loopback_needs_the_switch(endpoint: str) -> None:
    mapping = {"endpoint": endpoint, **BOUNDS}
    assert "must be https" in refusal(mapping)
    assert UploadConfiguration.parse(mapping, allow_loopback_http=True).endpoint == endpoint
    with pytest.raises(ValidationError, match="must be https"):
        UploadConfiguration(endpoint=endpoint, timeout_ms=1, max_bytes=1)


@pytest.mark.requirement("AHP-S06")
@pytest.mark.parametrize(
    "host",
    ["r.example", "127.0.0.1.r.example", "127.1", "10.0.0.1", "0.0.0.0", "[::2]", "localhost.a"],
)
def test_ahp_s06_http_to_anything_else_is_refused(host: str) -> None:
    mapping = {"endpoint": f"http://{host}/u", **BOUNDS}
    assert "must be https" in refusal(mapping, allow_loopback_http=True)


@pytest.mark.requirement("AHP-S06")
def test_ahp_s06_a_configuration_cannot_flip_the_switch_itself() -> None:
    for name in ("allow_loopback_http", "allowLoopbackHttp"):
        mapping = {"endpoint": "http://127.0.0.1/", **BOUNDS, name: True}
        assert "must be https" in refusal(mapping)


@pytest.mark.requirement("AHP-S09")
@pytest.mark.parametrize(
    "auth",
    [
        {"type": "bearer"},
        {"type": "bearer", "tokenEnv": "A", "tokenRef": "b"},
        {"type": "bearer", "tokenEnv": "not a name"},
        {"type": "bearer", "tokenEnv": 1},
        {"type": "bearer", "tokenRef": ""},
        {"type": "basic", "tokenEnv": "A"},
        {"type": "none"},
        {"tokenEnv": "A"},
        {},
        "bearer",
        OAUTH | {"flow": "password"},
        OAUTH | {"issuer": "http://login.example"},
        OAUTH | {"scopes": ["a", "a"]},
        OAUTH | {"scopes": [""]},
        OAUTH | {"scopes": "a b"},
        {name: value for name, value in OAUTH.items() if name != "clientId"},
    ],
)
def test_ahp_s09_auth_is_bearer_with_one_source_or_oauth(auth: object) -> None:
    mapping = {"endpoint": "https://r.example/", **BOUNDS, "auth": auth}
    assert refusal(mapping).startswith("upload.auth")
    assert not is_valid_by_the_draft(mapping)


@pytest.mark.requirement("AHP-S09", "AHP-S33")
def test_ahp_s09_the_name_of_a_variable_has_no_line_break() -> None:
    """The draft's pattern means the same; Python's own `$` would let a last line break pass."""
    auth = {"type": "bearer", "tokenEnv": "A\n"}
    mapping = {"endpoint": "https://r.example/", **BOUNDS, "auth": auth}
    assert refusal(mapping).startswith("upload.auth.tokenEnv: ")


@pytest.mark.requirement("AHP-S13")
def test_ahp_s13_a_secret_in_the_configuration_is_refused_and_not_shown() -> None:
    for auth in ({"type": "bearer", "tokenEnv": "A"}, OAUTH):
        for name in ("token", "clientSecret", "secret"):
            mapping = {"endpoint": "https://r.example/", **BOUNDS, "auth": auth | {name: "s3cret"}}
            message = refusal(mapping)
            assert f"upload.auth.{name}" in message
            assert "s3cret" not in message


def test_what_the_draft_does_not_know_is_ignored_beside_auth() -> None:
    assert parsed(later={"x": 1}) == parsed()


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError):
        parsed().max_bytes = 11


def test_a_mapping_uses_the_names_of_the_draft() -> None:
    mapping = {"endpoint": "https://r.example/", "timeout_ms": 1, "max_bytes": 1}
    assert "timeoutMs" in refusal(mapping)


TOKEN_SOURCES = st.dictionaries(
    st.sampled_from(["tokenEnv", "tokenRef"]), st.sampled_from(["NAME", "a b", "", 7])
)
AUTH = st.one_of(
    TOKEN_SOURCES.map(lambda sources: {"type": "bearer", **sources}),
    st.fixed_dictionaries(
        {"type": st.just("oauth")},
        optional={
            "resource": st.sampled_from(["https://r.example", "", 1]),
            "issuer": st.sampled_from(["https://l.example", "http://l.example"]),
            "clientId": st.sampled_from(["me", ""]),
            "clientSecretRef": st.sampled_from(["ref", ""]),
            "flow": st.sampled_from(["client_credentials", "authorization_code_pkce", "other"]),
            "scopes": st.lists(st.sampled_from(["a", "b", ""]), max_size=2),
        },
    ),
    st.sampled_from([{"type": "mtls"}, {}, 3]),
)
CONFIGURATIONS = st.fixed_dictionaries(
    {},
    optional={
        "endpoint": st.sampled_from(
            [
                "https://r.example/u?x",
                "http://127.0.0.1:1/u",
                "http://[::1]/",
                "http://r.example/",
                "ws://r.example/",
                7,
            ]
        ),
        "timeoutMs": st.sampled_from([1, 0, -1, 30_000, "1", True, 1.5]),
        "maxBytes": st.sampled_from([1, 0, -1, 1 << 40, "1", False, 1.5]),
        "auth": AUTH,
        "unknown": st.integers(),
    },
)


@pytest.mark.requirement("AHP-S02", "AHP-S09")
@given(CONFIGURATIONS)
def test_the_verdict_is_that_of_the_schema(mapping: dict[str, Any]) -> None:
    assert is_valid_here(mapping) == is_valid_by_the_draft(mapping)


@given(st.text(max_size=30))
def test_no_text_is_an_endpoint_that_could_break_a_header(rest: str) -> None:
    try:
        require_endpoint(f"https://r.example/{rest}")
    except ValueError:
        return
    assert rest.isascii()
    assert rest.isprintable()
    assert not set(rest) & set(' #"<>\\')
