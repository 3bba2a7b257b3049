"""Configured tokens: read at the start, kept as digests, refused when they cannot work."""

from __future__ import annotations

import hashlib

import pytest

from app.auth.principals import Principal
from app.errors import Forbidden
from app.settings import SettingsError
from tests.auth.conftest import Make
from tests.auth.issuer import bearer

pytestmark = pytest.mark.anyio


def by_digest(name: str, token: str, scope: str = "team") -> dict[str, object]:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"name": name, "token_sha256": digest, "scope": scope}


def by_variable(name: str, variable: str) -> dict[str, object]:
    return {"name": name, "token_env": variable, "scope": "team", "permissions": ["uhp", "admin"]}


async def test_a_token_comes_from_a_variable(make: Make) -> None:
    checker = make(tokens=[by_variable("ops", "OPS")], environment={"OPS": "abc-123="})
    principal = await checker.authenticate(bearer("abc-123="))
    assert principal == Principal("ops", "team", frozenset({"uhp", "admin"}))


@pytest.mark.requirement("AHP-R10")
async def test_every_token_has_its_own_scope(make: Make) -> None:
    tokens = [by_digest(f"n{i}", f"token-{i}", f"scope-{i}") for i in range(5)]
    checker = make(tokens=tokens)
    found = [await checker.authenticate(bearer(f"token-{i}")) for i in range(5)]
    assert [principal.scope for principal in found] == [f"scope-{i}" for i in range(5)]


@pytest.mark.parametrize("value", [None, "", "two words", "tab\t", "ä", "x" * 20_000])
async def test_a_variable_without_usable_token_is_an_error(make: Make, value: str | None) -> None:
    environment = {} if value is None else {"OPS": value}
    with pytest.raises(SettingsError, match="variable OPS of token 'ops'") as caught:
        make(tokens=[by_variable("ops", "OPS")], environment=environment)
    assert not value or value not in str(caught.value)


async def test_the_same_token_twice_is_an_error(make: Make) -> None:
    with pytest.raises(SettingsError, match="'a' and 'b' have the same token"):
        make(
            tokens=[by_digest("a", "same"), by_variable("b", "B")],
            environment={"B": "same"},
        )


async def test_the_same_digest_twice_is_an_error(make: Make) -> None:
    with pytest.raises(ValueError, match="same token_sha256"):
        make(tokens=[by_digest("a", "same"), by_digest("b", "same")])


@pytest.mark.requirement("AHP-R11", "AHP-R30")
async def test_a_principal_without_the_permission_is_forbidden(make: Make) -> None:
    principal = await make(tokens=[by_digest("a", "t")]).authenticate(bearer("t"))
    principal.require("ahp.upload")
    with pytest.raises(Forbidden) as caught:
        principal.require("admin")
    assert caught.value.permission == "admin"


async def test_an_authenticator_without_servers_starts_and_closes(make: Make) -> None:
    checker = make(tokens=[by_digest("a", "t")])
    await checker.start()
    await checker.close()
    assert (await checker.authenticate(bearer("t"))).name == "a"
