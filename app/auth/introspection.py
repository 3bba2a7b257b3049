"""Opaque tokens, asked about at their authorization server (RFC 7662)."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote_plus

from app.auth.audiences import Audiences
from app.auth.claims import check_claims, principal_of
from app.auth.credentials import Credential, invalid
from app.auth.principals import Principal
from app.auth.recent import Recent
from app.auth.remote import Remote, RemoteFault
from app.errors import Unavailable
from app.settings import IntrospectionSettings, SettingsError

_log = logging.getLogger("consignee.auth")


class _Answer(NamedTuple):
    """What was answered about a token; None for a principal says that it is not active."""

    principal: Principal | None
    begins: float
    ends: float


class Introspection:
    """The principals of tokens that the authorization server calls active.

    It is asked last and decides: every credential that nobody else knows is asked about.
    """

    def __init__(
        self,
        settings: IntrospectionSettings,
        audiences: Audiences,
        remote: Remote,
        environment: Mapping[str, str],
        clock: Callable[[], float],
    ) -> None:
        """Raises SettingsError when the variable of the client's secret is not set."""
        self._settings = settings
        self._audiences = audiences
        self._remote = remote
        self._clock = clock
        self._authorization = _basic(settings, environment)
        self._recent: Recent[_Answer] = Recent()

    async def verify(self, credential: Credential) -> Principal:
        """The principal of an active token.

        Raises Unauthenticated for every other, and Unavailable when the server does not answer.
        """
        answer = self._recent.get(credential.digest)
        if answer is None or not answer.begins <= self._clock() < answer.ends:
            answer = self._judge(await self._ask(credential.token))
            self._keep(credential, answer)
        if answer.principal is None:
            raise invalid("The token is not active at its authorization server.")
        return answer.principal

    async def _ask(self, token: str) -> dict[str, Any]:
        form = {"token": token, "token_type_hint": "access_token"}
        try:
            return await self._remote.post(
                self._settings.url,
                form,
                authorization=self._authorization,
                seconds=self._settings.timeout_seconds,
            )
        except RemoteFault as fault:
            _log.warning("a token could not be introspected: %s", fault)
            raise Unavailable(
                "issuer_unavailable", "The authorization server does not answer now; try again."
            ) from None

    def _judge(self, members: dict[str, Any]) -> _Answer:
        now = self._clock()
        ends = now + self._settings.cache_seconds
        if members.get("active") is not True:
            return _Answer(None, now, ends)
        _refuse_other_kinds(members)
        check_claims(
            members,
            audience=self._audiences.accepted,
            now=now,
            leeway=self._settings.leeway_seconds,
            required=("aud",) if self._audiences.accepted else (),
        )
        return _Answer(self._principal(members), now, min(ends, members.get("exp", ends)))

    def _principal(self, members: dict[str, Any]) -> Principal:
        """The subject, or the client itself where it acts for nobody (RFC 7662: both optional)."""
        principal = principal_of(
            members,
            issuer=self._issuer(members),
            scope_claim=self._settings.scope_claim,
            permissions_from=self._settings.permissions_from,
            named_by="sub" if "sub" in members else "client_id",
        )
        return self._audiences.limit(principal, members.get("aud"))

    def _issuer(self, members: dict[str, Any]) -> str:
        """The issuer that the answer names, or the configured one where it names none."""
        expected = self._settings.issuer
        given = members.get("iss", expected)
        if expected is not None and given != expected:
            raise invalid("The token is of another issuer.")
        if isinstance(given, str) and "#" not in given:
            return given
        if self._settings.scope_claim is not None:
            return ""
        _log.warning("an introspection answer names no issuer: set introspection.issuer")
        raise invalid("The token names no issuer, which this receiver needs for its scope.")

    def _keep(self, credential: Credential, answer: _Answer) -> None:
        if answer.begins < answer.ends:
            self._recent.put(credential.digest, answer)


def _refuse_other_kinds(members: dict[str, Any]) -> None:
    """Only bearer access tokens: refresh tokens are active too, bound ones prove nothing here."""
    kind = members.get("token_type", "Bearer")
    if not isinstance(kind, str) or kind.lower() != "bearer" or "cnf" in members:
        raise invalid("The token is no bearer token.")
    if members.get("typ", "Bearer") != "Bearer":
        raise invalid("The token is no access token.")


def _basic(settings: IntrospectionSettings, environment: Mapping[str, str]) -> str:
    secret = environment.get(settings.client_secret_env, "")
    if not secret:
        raise SettingsError(
            f"introspection: the variable {settings.client_secret_env} is not set; export it"
        )
    # Both parts are form-encoded before they are joined (RFC 6749 section 2.3.1).
    pair = f"{quote_plus(settings.client_id)}:{quote_plus(secret)}"
    return "Basic " + base64.b64encode(pair.encode("ascii")).decode("ascii")
