"""The credential of an upload, resolved for its endpoint alone (AHP-S10, AHP-S11, AHP-S48).

A configured `auth` is used as it is, and its failure never leads to another way. Without one the
first request carries no credential; the 401 that it may bring begins discovery (RFC 9728), and a
token for this very resource (RFC 8707) is obtained at the issuer that the endpoint names.
"""

from __future__ import annotations

import math
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import httpx

from app.sender.budget import Budget
from app.sender.challenges import bearer_parameters
from app.sender.config import BearerAuth, OAuthAuth, UploadConfiguration
from app.sender.destinations import Courier, Destinations, Resolve, named_host, resolve_host
from app.sender.discovery import Discovery
from app.sender.errors import AuthorizationError
from app.sender.oauth import Client, Grant, Interaction, Token, TokenRequests, is_token
from app.sender.turns import Turns

ResolveSecret = Callable[[str], Awaitable[str]]
"""Gives the secret behind a `tokenRef` or `clientSecretRef`; LookupError or OSError: none."""

_SCOPES = re.compile(r"[!#-\[\]-~ ]{1,200}")


class Authorization(Protocol):
    """What gives an upload the right to be made."""

    async def credential(
        self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
    ) -> str | None:
        """The value of the Authorization header, None for a request without one.

        `challenge` is None at first, then the WWW-Authenticate value of the 401 that refused the
        last credential of this `budget` ("" where it had none). Raises AuthorizationError and
        BudgetExceeded.
        """
        ...


@dataclass(slots=True)
class _Place:
    """One endpoint with one binding: the grant that its tokens are of, once that is known."""

    grant: Grant | None = None
    turns: Turns = field(default_factory=Turns)


class Credentials:
    """Bearer tokens and OAuth as configured, else what discovery leads to.

    `client` is who asks at an issuer that is discovered; a configured `oauth` brings its own.
    `allowed_hosts`, spelled as in a URL, may be contacted although no rule admits them, and at
    private addresses.
    `trust` are the certificate authorities of discovery, those of httpx by default.
    Serves any number of uploads of one event loop at once; tokens live as long as this object.
    """

    def __init__(
        self,
        *,
        client: Client | None = None,
        resolve_secret: ResolveSecret | None = None,
        interaction: Interaction | None = None,
        allowed_hosts: Iterable[str] = (),
        trust: ssl.SSLContext | None = None,
        environment: Mapping[str, str] = os.environ,
        resolve: Resolve = resolve_host,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        courier = Courier(trust=trust, resolve=resolve)
        self._client = client
        self._resolve_secret = resolve_secret
        self._environment = environment
        self._allowed = frozenset(named_host(f"https://{host}") for host in allowed_hosts)
        self._clock = clock
        self._discovery = Discovery(courier)
        self._requests = TokenRequests(courier, interaction=interaction, clock=clock)
        self._places: dict[tuple[str, OAuthAuth | None], _Place] = {}
        self._tokens: dict[tuple[str, str, str, frozenset[str]], Token] = {}
        # A budget is one upload's, so what it was given last is what the next 401 refuses.
        self._given: WeakKeyDictionary[Budget, dict[str, str]] = WeakKeyDictionary()

    async def credential(
        self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
    ) -> str | None:
        """As Authorization has it. Everything that is done for it is taken from `budget`."""
        async with budget.limit():
            token = await self._token(configuration, challenge, budget)
        if token is None:
            return None
        self._given.setdefault(budget, {})[configuration.endpoint] = token
        return f"Bearer {token}"

    async def _token(
        self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
    ) -> str | None:
        if isinstance(configuration.auth, BearerAuth):
            return await self._bearer(configuration.auth, challenge)
        place = self._places.setdefault((configuration.endpoint, configuration.auth), _Place())
        if challenge is None and configuration.auth is None and place.grant is None:
            return None
        given = self._given.get(budget, {})
        refused = None if challenge is None else given.get(configuration.endpoint)
        return await place.turns.take(
            lambda: self._current(place, configuration, challenge, refused)
        )

    async def _bearer(self, auth: BearerAuth, challenge: str | None) -> str:
        if challenge is not None:  # a challenge cannot choose another secret
            raise AuthorizationError(
                "credential_refused", "The receiver refused the configured token; renew it."
            )
        token = await self._secret(auth.token_env, auth.token_ref)
        if token is None or not is_token(token):
            raise AuthorizationError(
                "credential_invalid", "The configured token is no bearer token (RFC 6750)."
            )
        return token

    async def _current(
        self,
        place: _Place,
        configuration: UploadConfiguration,
        challenge: str | None,
        refused: str | None,
    ) -> str:
        """The token in force, a new one where there is none or it was `refused`."""
        if (held := self._usable(place.grant, refused)) is not None:
            return held.value
        try:
            if place.grant is None or (challenge is not None and configuration.auth is None):
                place.grant = await self._grant(configuration, challenge)
            _require_permitted(challenge, place.grant.client)
            return (await self._obtained(place.grant, refused)).value
        except AuthorizationError:
            place.grant = None  # whatever was wrong with it, the next upload begins anew
            raise

    def _usable(self, grant: Grant | None, refused: str | None) -> Token | None:
        token = None if grant is None else self._tokens.get(grant.key)
        if token is None or token.value == refused or not token.holds(self._clock()):
            return None
        return token

    async def _obtained(self, grant: Grant, refused: str | None) -> Token:
        held = self._usable(grant, refused)
        if held is None:
            secret = await self._secret(grant.client.secret_env, grant.client.secret_ref)
            previous = self._ended(grant)
            held = await self._requests.obtain(grant, secret, previous)
            self._tokens[grant.key] = held
        return held

    def _ended(self, grant: Grant) -> Token | None:
        """The token that is used no more: of it only the refresh token still counts."""
        token = self._tokens.get(grant.key)
        if token is not None:
            token = self._tokens[grant.key] = replace(token, ends=-math.inf)
        return token

    async def _grant(self, configuration: UploadConfiguration, challenge: str | None) -> Grant:
        if isinstance(configuration.auth, OAuthAuth):
            return await self._configured(configuration.endpoint, configuration.auth)
        return await self._discovered(configuration.endpoint, challenge or "")

    async def _configured(self, endpoint: str, auth: OAuthAuth) -> Grant:
        client = Client(
            auth.client_id,
            secret_ref=auth.client_secret_ref,
            flow=auth.flow,
            scopes=auth.scopes,
            issuer=auth.issuer,
        )
        destinations = self._destinations(endpoint, client)
        server = await self._discovery.issuer(auth.issuer, destinations)
        return Grant(server, destinations, auth.resource, client, auth.scopes)

    async def _discovered(self, endpoint: str, challenge: str) -> Grant:
        if self._client is None:
            raise AuthorizationError(
                "authorization_required",
                "The receiver wants a credential; give a token, or a client that can obtain one.",
            )
        client, asked = self._client, _parameters(challenge)
        _require_permitted(challenge, client)
        destinations = self._destinations(endpoint, client)
        resource = await self._discovery.resource(
            endpoint, asked.get("resource_metadata"), destinations
        )
        issuer = _chosen(resource.authorization_servers, client)
        server = await self._discovery.issuer(issuer, destinations)
        scopes = tuple(asked["scope"].split()) if "scope" in asked else client.scopes
        return Grant(server, destinations, resource.resource, client, scopes)

    def _destinations(self, endpoint: str, client: Client) -> Destinations:
        """An issuer that the operator names is as trusted as a host that he allows."""
        named = {named_host(client.issuer)} if client.issuer is not None else frozenset()
        return Destinations(httpx.URL(endpoint), self._allowed | named)

    async def _secret(self, variable: str | None, reference: str | None) -> str | None:
        """The secret that one of both names, read at this moment; None where neither does."""
        if variable is not None:
            secret = self._environment.get(variable)
        elif reference is not None:
            secret = await self._referenced(reference)
        else:
            return None
        if not secret:
            raise AuthorizationError(
                "credential_missing", "The variable or reference of the credential holds nothing."
            )
        return secret

    async def _referenced(self, reference: str) -> str | None:
        if self._resolve_secret is None:
            return None
        try:
            return await self._resolve_secret(reference)
        except (LookupError, OSError, UnicodeError):
            return None


def _parameters(challenge: str) -> Mapping[str, str]:
    try:
        return bearer_parameters(challenge)
    except ValueError:
        raise AuthorizationError(
            "challenge_invalid", "The receiver's challenge (WWW-Authenticate) is malformed."
        ) from None


def _require_permitted(challenge: str | None, client: Client) -> None:
    """Refuse a challenge that asks for more than this client may: it is no consent."""
    asked = _parameters(challenge or "").get("scope", "")
    if set(asked.split()) <= set(client.scopes):
        return
    shown = f": {asked}" if _SCOPES.fullmatch(asked) else ""
    raise AuthorizationError(
        "scope_not_permitted",
        f"The receiver asks for scopes that are not permitted here{shown}.",
    )


def _chosen(issuers: tuple[str, ...], client: Client) -> str:
    """The first of the `issuers`, or the one that the client is registered at."""
    if client.issuer is None:
        return issuers[0]
    if client.issuer not in issuers:
        raise AuthorizationError(
            "issuer_mismatch", "The endpoint does not accept tokens of the client's issuer."
        )
    return client.issuer
