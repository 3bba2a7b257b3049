"""Tokens for one resource (RFC 6749, RFC 8707): client credentials, or a code with PKCE.

A token is asked for at the token endpoint of the issuer that vouched for it in its own metadata,
and the client's secret goes nowhere else. Neither is ever in a repr, a log or an error.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import quote_plus

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.sender.destinations import Answer, Courier, Destinations, named_host
from app.sender.discovery import IssuerMetadata
from app.sender.errors import AuthorizationError

MARGIN_SECONDS: Final = 30.0
"""A token that ends this soon is not used: the request that it opens needs some time itself."""

UNSTATED_LIFETIME_SECONDS: Final = 300.0
"""How long a token is kept whose server says no `expires_in`; a 401 ends it earlier."""

Flow = Literal["client_credentials", "authorization_code_pkce"]

_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1
_ERROR = re.compile(r"[a-z_]{1,60}")


@dataclass(frozen=True, slots=True)
class Client:
    """This sender as its authorization server knows it, and what it may ask for there.

    The secret is named, by a variable or a reference for the host to resolve, never held.
    `scopes` are all that is permitted. With `issuer` nobody else is asked, whatever is discovered.
    """

    client_id: str
    secret_env: str | None = None
    secret_ref: str | None = None
    flow: Flow = "client_credentials"
    scopes: tuple[str, ...] = ()
    issuer: str | None = None


@dataclass(frozen=True, slots=True)
class Interaction:
    """How a user is asked: `ask` has an authorization URL opened, in a browser of the user's.

    It gives the parameters with which `redirect_uri` is called back, and raises
    AuthorizationError where that never happens.
    """

    redirect_uri: str
    ask: Callable[[str], Awaitable[Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token is for: one resource at one issuer, for one client, in some scopes."""

    server: IssuerMetadata
    destinations: Destinations
    resource: str
    client: Client
    scopes: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str, frozenset[str]]:
        """What tells tokens apart that must not be mixed (AHP-S31)."""
        return (
            self.server.issuer,
            self.resource,
            self.client.client_id,
            frozenset(self.scopes),
        )


@dataclass(frozen=True, slots=True)
class Token:
    """An access token; `ends` is on the clock of the one that obtained it."""

    value: str = field(repr=False)
    ends: float
    refresh: str | None = field(default=None, repr=False)

    def holds(self, now: float) -> bool:
        """Whether it can still open a request."""
        return now < self.ends - MARGIN_SECONDS


class _TokenAnswer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", hide_input_in_errors=True)

    access_token: str = Field(pattern=rf"^{_TOKEN.pattern}$", repr=False)
    token_type: str
    expires_in: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    refresh_token: str | None = Field(default=None, min_length=1, repr=False)
    scope: str | None = None


class _ErrorAnswer(BaseModel):
    error: str = Field(pattern=rf"^{_ERROR.pattern}$")


class TokenRequests:
    """Asks authorization servers for tokens."""

    def __init__(
        self, courier: Courier, *, interaction: Interaction | None, clock: Callable[[], float]
    ) -> None:
        self._courier = courier
        self._interaction = interaction
        self._clock = clock

    async def obtain(self, grant: Grant, secret: str | None, previous: Token | None) -> Token:
        """A new token of `grant`, by the refresh token of the `previous` one where it has one.

        Raises AuthorizationError.
        """
        if previous is not None and previous.refresh is not None:
            renewed = await self._refresh(grant, secret, previous.refresh)
            if renewed is not None:
                return renewed
        if grant.client.flow == "client_credentials":
            return await self._by_credentials(grant, secret)
        return await self._by_code(grant, secret)

    async def _refresh(self, grant: Grant, secret: str | None, refresh: str) -> Token | None:
        form = {"grant_type": "refresh_token", "refresh_token": refresh, **_limits(grant)}
        answer = await self._ask(grant, secret, form)
        if _error(answer) == "invalid_grant":
            return None
        return self._token(answer, grant, refresh=refresh)

    async def _by_credentials(self, grant: Grant, secret: str | None) -> Token:
        _require_grant_type(grant, "client_credentials")
        if secret is None:
            raise AuthorizationError(
                "credential_missing", "Client credentials need the client's secret; name one."
            )
        form = {"grant_type": "client_credentials", **_limits(grant)}
        return self._token(await self._ask(grant, secret, form), grant)

    async def _by_code(self, grant: Grant, secret: str | None) -> Token:
        _require_grant_type(grant, "authorization_code")
        if self._interaction is None:
            raise AuthorizationError(
                "interaction_unavailable", "This flow needs a user, and nobody can be asked here."
            )
        verifier = secrets.token_urlsafe(48)
        form = {
            "grant_type": "authorization_code",
            "code": await _code(grant, self._interaction, verifier),
            "redirect_uri": self._interaction.redirect_uri,
            "code_verifier": verifier,
            "resource": grant.resource,
        }
        return self._token(await self._ask(grant, secret, form), grant)

    async def _ask(self, grant: Grant, secret: str | None, form: dict[str, str]) -> Answer:
        url = grant.destinations.admit(grant.server.token_endpoint, named_host(grant.server.issuer))
        identity, headers = _identification(grant, secret)
        return await self._courier.post(url, grant.destinations, {**form, **identity}, headers)

    def _token(self, answer: Answer, grant: Grant, refresh: str | None = None) -> Token:
        said = _read(answer)
        granted = set(grant.scopes) if said.scope is None else set(said.scope.split(" "))
        if not granted.issuperset(grant.scopes):
            raise AuthorizationError(
                "scope_refused", "The authorization server granted less than was asked for."
            )
        lifetime = UNSTATED_LIFETIME_SECONDS if said.expires_in is None else said.expires_in
        return Token(said.access_token, self._clock() + lifetime, said.refresh_token or refresh)


def is_token(text: str) -> bool:
    """Whether `text` can stand in an Authorization header as a bearer token."""
    return _TOKEN.fullmatch(text) is not None


def _limits(grant: Grant) -> dict[str, str]:
    """The resource indicator (RFC 8707) and the scopes that a request is held to."""
    scope = {"scope": " ".join(grant.scopes)} if grant.scopes else {}
    return {"resource": grant.resource, **scope}


def _require_grant_type(grant: Grant, name: str) -> None:
    if name not in grant.server.grant_types_supported:
        raise AuthorizationError(
            "grant_unsupported", f"The authorization server does not support {name}."
        )


async def _code(grant: Grant, interaction: Interaction, verifier: str) -> str:
    """The code that the user's consent gives, once the redirect proves to answer us."""
    state = secrets.token_urlsafe(32)
    url = _authorization_url(grant, interaction.redirect_uri, state, verifier)
    return _code_of(await interaction.ask(url), grant.server, state)


def _authorization_url(grant: Grant, redirect_uri: str, state: str, verifier: str) -> str:
    if "S256" not in grant.server.code_challenge_methods_supported:
        raise AuthorizationError(
            "grant_unsupported", "The authorization server does not support PKCE with S256."
        )
    if grant.server.authorization_endpoint is None:
        raise AuthorizationError(
            "metadata_invalid", "The authorization server names no authorization endpoint."
        )
    url = grant.destinations.admit(
        grant.server.authorization_endpoint, named_host(grant.server.issuer)
    )
    return str(
        url.copy_merge_params(
            {
                "response_type": "code",
                "client_id": grant.client.client_id,
                "redirect_uri": redirect_uri,
                "state": state,
                "code_challenge": _s256(verifier),
                "code_challenge_method": "S256",
                **_limits(grant),
            }
        )
    )


def _s256(verifier: str) -> str:
    digest = hashlib.sha256(verifier.encode("ascii")).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")


def _code_of(redirect: Mapping[str, str], server: IssuerMetadata, state: str) -> str:
    """The code in the parameters of a `redirect` that answers the request with `state`."""
    if not secrets.compare_digest(redirect.get("state", "").encode(), state.encode()):
        raise _failed("the redirect answers another request")
    issuer = redirect.get("iss")
    expected = server.authorization_response_iss_parameter_supported or issuer is not None
    if expected and issuer != server.issuer:  # RFC 9207 section 2.4
        raise _failed("the redirect comes from another issuer")
    if "error" in redirect:
        raise _failed(f"the server said {_plain(redirect['error'])}")
    if not redirect.get("code"):
        raise _failed("the redirect has no code")
    return redirect["code"]


def _failed(reason: str) -> AuthorizationError:
    return AuthorizationError("interaction_failed", f"Authorization failed: {reason}.")


def _plain(error: str) -> str:
    """An `error` of a server, if it is one of the plain words that RFC 6749 uses."""
    return error if _ERROR.fullmatch(error) else "an error"


def _identification(grant: Grant, secret: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Form fields and headers that say who asks (RFC 6749 section 2.3.1)."""
    client, methods = grant.client, grant.server.token_endpoint_auth_methods_supported
    if secret is None:
        return {"client_id": client.client_id}, {}
    if "client_secret_basic" in methods:
        pair = f"{quote_plus(client.client_id)}:{quote_plus(secret)}"
        encoded = base64.b64encode(pair.encode("ascii")).decode("ascii")
        return {}, {"Authorization": f"Basic {encoded}"}
    if "client_secret_post" in methods:
        return {"client_id": client.client_id, "client_secret": secret}, {}
    raise AuthorizationError(
        "grant_unsupported", "The authorization server takes no client secret."
    )


def _read(answer: Answer) -> _TokenAnswer:
    if answer.status != httpx.codes.OK:
        raise AuthorizationError(
            "token_refused",
            f"The token endpoint refused with status {answer.status}: "
            f"{_error(answer) or 'no reason given'}.",
        )
    try:
        said = _TokenAnswer.model_validate_json(answer.body)
    except ValidationError:
        raise _invalid("it is no token response") from None
    if said.token_type.lower() != "bearer":
        raise _invalid("its token is no bearer token")
    return said


def _error(answer: Answer) -> str | None:
    """The error code of a refusal (RFC 6749 section 5.2), None where it has none."""
    if answer.status == httpx.codes.OK:
        return None
    try:
        return _ErrorAnswer.model_validate_json(answer.body).error
    except ValidationError:
        return None


def _invalid(reason: str) -> AuthorizationError:
    return AuthorizationError(
        "token_invalid", f"The answer of the token endpoint cannot be used: {reason}."
    )
