"""The bearer credential of a request, read from its head and from nowhere else (RFC 6750)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from app.auth.principals import Principal
from app.errors import Unauthenticated

MAX_TOKEN_BYTES = 16 * 1024
"""Longest token that is looked at: far above what servers issue, far below what costs time."""

_TOKEN = re.compile(rb"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1, b64token


class Credential(NamedTuple):
    """One bearer token as it was sent, and its SHA-256 (32 bytes)."""

    token: str
    digest: bytes

    def __repr__(self) -> str:
        return "Credential(...)"  # a token must not reach a log by way of a repr


class Verifier(Protocol):
    """One way to tell whom a credential speaks for."""

    async def verify(self, credential: Credential) -> Principal | None:
        """The principal; None when the credential is not of this verifier's kind.

        Raises Unauthenticated when it is of this kind and does not verify, and Unavailable when
        that cannot be told now.
        """
        ...


def missing(message: str) -> Unauthenticated:
    """A refusal for a request that brings no bearer token at all (RFC 6750 section 3.1)."""
    return Unauthenticated("missing_credential", message, token_given=False)


def invalid(message: str) -> Unauthenticated:
    """A refusal for a bearer token that was given and does not verify."""
    return Unauthenticated("invalid_credential", message, token_given=True)


def read_credential(headers: Iterable[tuple[bytes, bytes]]) -> Credential | None:
    """The bearer token among ASGI `headers`, or None when there is no Authorization header.

    Raises Unauthenticated for every other header than one well-formed `Bearer <token>`, so that
    a broken credential is never taken for none (AHP-R13, R29).
    """
    values = [value for name, value in headers if name.lower() == b"authorization"]
    if not values:
        return None
    if len(values) > 1:
        raise invalid("Send one Authorization header; this request has several.")
    return _parse(values[0])


def _parse(value: bytes) -> Credential:
    scheme, _, rest = value.strip(b" \t").partition(b" ")
    token = rest.strip(b" ")
    if scheme.lower() != b"bearer":
        raise missing("Send the credential as `Authorization: Bearer <token>`.")
    if not token:
        raise missing("The Authorization header holds no token after `Bearer`.")
    if len(token) > MAX_TOKEN_BYTES:
        raise invalid(f"The token is longer than {MAX_TOKEN_BYTES} bytes.")
    if _TOKEN.fullmatch(token) is None:
        raise invalid("The token has characters that no bearer token has (RFC 6750).")
    return Credential(token.decode("ascii"), hashlib.sha256(token).digest())
