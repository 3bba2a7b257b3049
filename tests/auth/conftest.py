"""What the identity tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from app.auth.authenticator import Authenticator
from app.settings import Settings
from tests.auth.issuer import AUDIENCE, Clock, ScriptedIssuer, scripted_issuer

Make = Callable[..., Authenticator]
Trust = Callable[..., Authenticator]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def issuer() -> AsyncIterator[ScriptedIssuer]:
    async with scripted_issuer() as running:
        yield running


@pytest.fixture
async def make(clock: Clock) -> AsyncIterator[Make]:
    """Authenticators of given settings, closed at the end."""
    made: list[Authenticator] = []

    def build(*, environment: dict[str, str] | None = None, **settings: Any) -> Authenticator:
        made.append(Authenticator(Settings(**settings), environment=environment or {}, clock=clock))
        return made[-1]

    yield build
    for authenticator in made:
        await authenticator.close()


@pytest.fixture
def trust(make: Make, issuer: ScriptedIssuer) -> Trust:
    """Authenticators that trust the scripted issuer, with changes to its settings."""

    def build(**changes: Any) -> Authenticator:
        table = {"issuer": issuer.url, "audience": [AUDIENCE], "timeout_seconds": 30}
        return make(issuers=[{**table, **changes}])

    return build
