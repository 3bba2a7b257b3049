"""Events are an audience of their own (AHP-R48): what the `aud` of a token leaves of it."""

from __future__ import annotations

from typing import Any

import pytest

from app.auth.audiences import Audiences
from app.auth.principals import Principal
from app.errors import Forbidden
from app.settings import IntrospectionSettings, IssuerSettings, Permission, Settings
from tests.auth.conftest import Make
from tests.auth.issuer import (
    Reply,
    ScriptedIssuer,
    bearer,
    claims_of,
    header_of,
    public,
    sign,
    signing_key,
)

pytestmark = [pytest.mark.anyio, pytest.mark.requirement("AHP-R48")]

BASE = "https://files.test"
UPLOADS, HOOKS = BASE + "/ahp/uploads", BASE + "/ahp/hooks"
ALL: frozenset[Permission] = frozenset({"ahp.upload", "ahp.hooks", "uhp"})
WHOLE = Principal("agent", "scope", ALL)

EVERYTHING, EVENTS, REST, NOTHING = "everything", "events", "rest", "nothing"
OPENED = {
    EVERYTHING: ALL,
    EVENTS: {"ahp.hooks"},
    REST: ALL - {"ahp.hooks"},
    NOTHING: frozenset[Permission](),
}


def of_issuer(**table: Any) -> Audiences:
    issuer = IssuerSettings(**{"issuer": "https://as.test", "audience": UPLOADS, **table})
    return Audiences.of(issuer, Settings(public_url=BASE))


def of_introspection(**table: Any) -> Audiences:
    url = "https://as.test/introspect"
    known = IntrospectionSettings(url=url, client_id="c", client_secret_env="S", **table)
    return Audiences.of(known, Settings(public_url=BASE))


@pytest.mark.parametrize(
    ("table", "aud", "opened"),
    [
        ({}, UPLOADS, REST),
        ({}, HOOKS, EVENTS),
        ({}, [UPLOADS, HOOKS], EVERYTHING),
        ({}, "other", NOTHING),
        ({}, [["x"], 1, None], NOTHING),
        # The hooks URL opens events alone, wherever it is listed.
        ({"audience": [UPLOADS, HOOKS]}, HOOKS, EVENTS),
        ({"audience": [UPLOADS, HOOKS]}, UPLOADS, REST),
        ({"audience": HOOKS}, HOOKS, EVENTS),
        ({"event_audience": "events"}, "events", EVENTS),
        ({"event_audience": ["events"]}, UPLOADS, REST),
        ({"audience": "us"}, "us", REST),
        # Granted: one value for both.
        ({"audience": "us", "event_audience": "us"}, "us", EVERYTHING),
        ({"event_audience": UPLOADS}, UPLOADS, EVERYTHING),
    ],
)
def test_the_audience_decides_which_permissions_count(
    table: dict[str, Any], aud: object, opened: str
) -> None:
    assert of_issuer(**table).limit(WHOLE, aud).permissions == OPENED[opened]


@pytest.mark.parametrize(
    ("table", "aud", "opened"),
    [
        ({}, None, EVERYTHING),
        ({}, "something", EVERYTHING),
        ({}, UPLOADS, REST),
        ({}, HOOKS, EVENTS),
        ({}, [UPLOADS, HOOKS], EVERYTHING),
        ({"event_audience": ["events"]}, None, REST),
        ({"event_audience": ["events"]}, "events", EVERYTHING),
        ({"audience": ["us"]}, "us", REST),
        ({"audience": ["us"]}, HOOKS, EVENTS),
    ],
)
def test_a_server_without_audiences_leaves_it_to_the_permissions(
    table: dict[str, Any], aud: object, opened: str
) -> None:
    assert of_introspection(**table).limit(WHOLE, aud).permissions == OPENED[opened]


def test_what_is_accepted_at_all_is_what_opens_something() -> None:
    assert of_issuer(event_audience="events").accepted == {UPLOADS, HOOKS, "events"}
    assert of_issuer(audience=[HOOKS, "us"]).accepted == {HOOKS, "us"}
    assert of_introspection().accepted == frozenset()
    assert of_introspection(event_audience=["events"]).accepted == frozenset()


def test_a_permission_that_a_token_lacks_is_never_added() -> None:
    bare = Principal("agent", "scope", frozenset({"uhp"}))
    assert of_issuer().limit(bare, [UPLOADS, HOOKS]).permissions == {"uhp"}
    assert of_issuer().limit(bare, HOOKS).permissions == frozenset()


@pytest.mark.parametrize(
    ("aud", "opened", "closed"),
    [
        (UPLOADS, "ahp.upload", "ahp.hooks"),
        (HOOKS, "ahp.hooks", "ahp.upload"),
    ],
)
async def test_a_jwt_for_one_endpoint_does_not_open_the_other(
    issuer: ScriptedIssuer,
    make: Make,
    aud: str,
    opened: Permission,
    closed: Permission,
) -> None:
    """Also where it lists both permissions, and both times that it is looked at."""
    key = signing_key("key-1")
    issuer.publish(public(key))
    checker = make(public_url=BASE, issuers=[{"issuer": issuer.url, "audience": UPLOADS}])
    claims = claims_of(issuer.url, aud=aud, scope="ahp.upload ahp.hooks")
    token = bearer(sign(header_of(key), claims, key))
    for _ in range(2):
        principal = await checker.authenticate(token)
        principal.require(opened)
        with pytest.raises(Forbidden):
            principal.require(closed)


@pytest.mark.parametrize(
    ("aud", "opened", "closed"),
    [
        (UPLOADS, "ahp.upload", "ahp.hooks"),
        (HOOKS, "ahp.hooks", "ahp.upload"),
    ],
)
@pytest.mark.parametrize("audience", [[], [UPLOADS]])
async def test_an_opaque_token_for_one_endpoint_does_not_open_the_other(
    issuer: ScriptedIssuer,
    make: Make,
    aud: str,
    opened: Permission,
    closed: Permission,
    audience: list[str],
) -> None:
    members = claims_of(issuer.url, aud=aud, scope="ahp.upload ahp.hooks", active=True)
    issuer.routes["/introspect"] = Reply(body=members)
    url = issuer.url + "/introspect"
    table = {"url": url, "client_id": "c", "client_secret_env": "S", "audience": audience}
    checker = make(public_url=BASE, introspection=table, environment={"S": "secret"})
    principal = await checker.authenticate(bearer("opaque"))
    principal.require(opened)
    with pytest.raises(Forbidden):
        principal.require(closed)
