"""JWT access tokens of configured issuers (RFC 9068)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.auth.audiences import Audiences
from app.auth.claims import check_claims, principal_of
from app.auth.credentials import Credential, invalid
from app.auth.jose import Jwt, KeySet, read_jwt
from app.auth.keys import KeyRing
from app.auth.principals import Principal
from app.auth.recent import Recent
from app.auth.remote import Remote
from app.settings import IssuerSettings, Settings

REQUIRED_CLAIMS = ("iss", "sub", "aud", "exp")
"""Claims without which a token is refused; others of RFC 9068 are missing at common servers."""

_ACCESS_TOKEN_TYPES = ("at+jwt", "application/at+jwt")
_ID_TOKEN_CLAIMS = frozenset({"nonce", "at_hash", "c_hash", "s_hash", "events"})


@dataclass(frozen=True, slots=True)
class _Verified:
    """What one token gave, and while it gives that: times in seconds, leeway included."""

    principal: Principal
    ring: KeyRing
    keys: KeySet
    begins: int
    ends: int

    def holds(self, now: float) -> bool:
        """Whether the token would be accepted now: in its time, and its key set still in use."""
        return self.begins <= now < self.ends and self.keys is self.ring.current()


class JwtIssuers:
    """The principals of JWTs that a configured issuer signed."""

    def __init__(self, settings: Settings, remote: Remote, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._issuers = {
            table.issuer: _Issuer(
                table, KeyRing(table, remote, clock), Audiences.of(table, settings)
            )
            for table in settings.issuers
        }
        self._recent: Recent[_Verified] = Recent()

    def start(self) -> None:
        """Begin to fetch the keys of every issuer."""
        for issuer in self._issuers.values():
            issuer.ring.start()

    async def close(self) -> None:
        """End every fetch that is under way."""
        for issuer in self._issuers.values():
            await issuer.ring.close()

    async def verify(self, credential: Credential) -> Principal | None:
        """The principal of a JWT; None when it is none, or names no configured issuer.

        Raises Unauthenticated, and Unavailable while the keys of the issuer are unknown.
        """
        known = self._recent.get(credential.digest)
        if known is not None and known.holds(self._clock()):
            return known.principal
        token = read_jwt(credential.token)
        issuer = self._issuer_of(token) if token else None
        if token is None or issuer is None:
            return None
        verified = await issuer.verify(token, self._clock)
        self._recent.put(credential.digest, verified)
        return verified.principal

    def _issuer_of(self, token: Jwt) -> _Issuer | None:
        name = token.claims.get("iss")
        return self._issuers.get(name) if isinstance(name, str) else None


class _Issuer:
    """The rules of one issuer."""

    def __init__(self, settings: IssuerSettings, ring: KeyRing, audiences: Audiences) -> None:
        self.ring = ring
        self._settings = settings
        self._audiences = audiences

    async def verify(self, token: Jwt, clock: Callable[[], float]) -> _Verified:
        """Judge header, signature and claims, in this order. Raises as JwtIssuers.verify."""
        kid, algorithm = self._judge_header(token)
        keys = await self._signing_keys(token, kid, algorithm)
        check_claims(
            token.claims,
            audience=self._audiences.accepted,
            now=clock(),
            leeway=self._settings.leeway_seconds,
            required=REQUIRED_CLAIMS,
        )
        _refuse_bound(token.claims)
        return self._verified(token.claims, keys)

    def _judge_header(self, token: Jwt) -> tuple[str | None, str]:
        """The `kid` and `alg` of the header. A key that the header brings is never looked at."""
        header = token.header
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in self._settings.algorithms:
            raise invalid("The token is signed with an algorithm that is not accepted here.")
        if "crit" in header:
            raise invalid("The token asks for extensions that are not known here (`crit`).")
        if not (kid is None or isinstance(kid, str)):
            raise invalid("The token has a `kid` that is no string.")
        self._judge_type(token)
        return kid, str(algorithm)

    def _judge_type(self, token: Jwt) -> None:
        kind = token.header.get("typ")
        name = kind.lower() if isinstance(kind, str) else kind
        if name in _ACCESS_TOKEN_TYPES:
            return
        untyped = name is None or name in ("jwt", "application/jwt")
        if not (untyped and self._settings.accept_untyped and _is_access_token(token.claims)):
            raise invalid("The token is no access token: its `typ` must be `at+jwt` (RFC 9068).")

    async def _signing_keys(self, token: Jwt, kid: str | None, algorithm: str) -> KeySet:
        keys = await self.ring.ready()
        if keys.signed(token, kid, algorithm):
            return keys
        renewed = await self.ring.renewed()
        if renewed is not None and renewed is not keys and renewed.signed(token, kid, algorithm):
            return renewed
        raise invalid("The token is not signed with a key of its issuer.")

    def _verified(self, claims: dict[str, Any], keys: KeySet) -> _Verified:
        leeway = self._settings.leeway_seconds
        principal = principal_of(
            claims,
            issuer=self._settings.issuer,
            scope_claim=self._settings.scope_claim,
            permissions_from=self._settings.permissions_from,
        )
        principal = self._audiences.limit(principal, claims["aud"])
        begins = max(claims.get("nbf", 0), claims.get("iat", 0)) - leeway
        return _Verified(principal, self.ring, keys, begins, claims["exp"] + leeway)


def _is_access_token(claims: dict[str, Any]) -> bool:
    """Whether the claims of a token without a telling `typ` are those of an access token.

    Keycloak says so in a claim `typ`, Cognito in `token_use`; where neither is there, an ID or
    logout token is known by claims that only it has.
    """
    if "typ" in claims or "token_use" in claims:
        kind, use = claims.get("typ", "Bearer"), claims.get("token_use", "access")
        return (kind, use) == ("Bearer", "access")
    return _ID_TOKEN_CLAIMS.isdisjoint(claims)


def _refuse_bound(claims: dict[str, Any]) -> None:
    """A token bound to a key of its holder is worth nothing as a plain bearer token (RFC 7800)."""
    if "cnf" in claims:
        raise invalid("The token is bound to a key (`cnf`); this receiver takes bearer tokens.")
