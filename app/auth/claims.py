"""What the claims of an access token must be, and the principal that they give.

The rules are those of RFC 9068 by way of Authlib, with two differences that the field asked for:
times are whole numbers of seconds in a range that a calendar has, and an audience is matched by
any string of the list, whatever else the list holds. The members of an introspection answer have
the same names and meanings (RFC 7662 section 2.2), so both kinds of token are judged here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from authlib.oauth2.rfc9068.claims import JWTAccessTokenClaimsValidator
from joserfc.errors import ClaimError, ExpiredTokenError, InvalidClaimError

from app.auth.credentials import invalid
from app.auth.principals import Principal
from app.settings import ALL_PERMISSIONS, Permission

LATEST = 253_402_300_799
"""The last second of the year 9999: a time after it is no time but a mistake."""

MAX_NAME_CHARACTERS = 1024
"""Longest subject or scope: they become columns of records and indexes."""

# What neither a log line nor every database takes: control characters and lone surrogates.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")

_REASONS = {
    "aud": "The token is for another audience.",
    "iss": "The token is of another issuer.",
    "iat": "The token is not valid yet, or its times are no whole seconds.",
    "nbf": "The token is not valid yet, or its times are no whole seconds.",
    "exp": "The token has no expiry in whole seconds.",
}


class _Rules(JWTAccessTokenClaimsValidator):
    """Authlib's rules for access tokens, with ours for times and audiences."""

    def validate_aud(self, value: object) -> None:
        """One exact match is enough; whatever else is listed does no harm."""
        accepted = self.options["aud"]["values"]
        given = value if isinstance(value, list) else [value]
        if accepted and not any(isinstance(one, str) and one in accepted for one in given):
            raise InvalidClaimError("aud")

    def validate_exp(self, value: object) -> None:
        super().validate_exp(_whole_seconds("exp", value))

    def validate_nbf(self, value: object) -> None:
        super().validate_nbf(_whole_seconds("nbf", value))

    def validate_iat(self, value: object) -> None:
        super().validate_iat(_whole_seconds("iat", value))


def _whole_seconds(claim: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= LATEST:
        raise InvalidClaimError(claim)
    return value


def check_claims(
    claims: dict[str, Any],
    *,
    audience: Iterable[str],
    now: float,
    leeway: int,
    required: Iterable[str] = (),
) -> None:
    """Raise Unauthenticated unless the times and the audience of `claims` are right.

    `now` and `leeway` are seconds; an empty `audience` accepts every one; `required` names the
    claims that must be there.
    """
    options: dict[str, Any] = {name: {"essential": True} for name in required}
    options["aud"] = {"values": list(audience), **options.get("aud", {})}
    try:
        _Rules(now=int(now), leeway=leeway, **options).validate(claims)
    except ExpiredTokenError:
        raise invalid("The token has expired; get a new one.") from None
    except ClaimError as error:
        raise invalid(_reason(error)) from None


def _reason(error: ClaimError) -> str:
    return _REASONS.get(error.claim, "The token lacks a claim that it needs, or has a wrong one.")


def principal_of(
    claims: dict[str, Any],
    *,
    issuer: str,
    scope_claim: str | None,
    permissions_from: str,
    named_by: str = "sub",
) -> Principal:
    """The principal of verified claims. Raises Unauthenticated when they name none (AHP-R10).

    `named_by` is the claim that names it. Without a `scope_claim` its scope is its own alone.
    """
    name = _text(claims, named_by)
    scope = _text(claims, scope_claim) if scope_claim else _own_scope(issuer, named_by, name)
    return Principal(name, scope, _permissions(claims.get(permissions_from)))


def _own_scope(issuer: str, named_by: str, name: str) -> str:
    """`<issuer>#<subject>`, or `<issuer>?client_id=<client>` for a client without a subject.

    An issuer has no `#` and neither has the second form, so two principals never share a scope.
    """
    return f"{issuer}#{name}" if named_by == "sub" else f"{issuer}?{named_by}={quote(name, '')}"


def _text(claims: dict[str, Any], claim: str) -> str:
    value = claims.get(claim)
    if not isinstance(value, str) or not value.strip():
        raise invalid("The token names no subject or no scope.")
    if len(value) > MAX_NAME_CHARACTERS or _UNFIT.search(value):
        raise invalid("The token names a subject or a scope that cannot be recorded.")
    return value


def _permissions(value: object) -> frozenset[Permission]:
    """The permissions among the names of `value`; what else it lists is for other receivers."""
    names = value.split(" ") if isinstance(value, str) else value
    if not isinstance(names, list):
        return frozenset()
    return frozenset(permission for permission in ALL_PERMISSIONS if permission in names)
