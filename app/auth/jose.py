"""The border to joserfc: reading a JWT, importing keys, checking a signature (RFC 7515 to 7519)."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from joserfc import jwk, jws
from joserfc.errors import JoseError, UnsupportedAlgorithmError

from app.auth.credentials import MAX_TOKEN_BYTES
from app.auth.remote import strict_json

ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
    "ES256", "ES384", "ES512", "Ed25519", "EdDSA",
)  # fmt: skip
"""Every signature that can be configured: public keys only, no HMAC, no `none`."""

MAX_KEYS = 64
"""Keys of one set that are looked at: an issuer in the middle of a rotation has two or three."""

MAX_CANDIDATES = 8
"""Keys that one token is tried with: it bounds the work that a token without `kid` can cause."""

MIN_RSA_BITS = 2048  # RFC 7518 section 3.3
MAX_RSA_BITS = 16384

_COMPACT = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]+)")
_PUBLIC_MEMBERS = ("kty", "kid", "alg", "use", "key_ops", "n", "e", "crv", "x", "y")


class _Registry(jws.JWSRegistry):
    """joserfc's rules for a JWS, without its limit of 512 bytes for a header.

    Unknown header members are ignored, as RFC 7515 section 4 asks; `crit` is refused before.
    """

    max_header_length = max_payload_length = MAX_TOKEN_BYTES
    max_signature_length = 4 * MAX_RSA_BITS // 8

    def __init__(self) -> None:
        super().__init__(algorithms=ALGORITHMS, strict_check_header=False)

    def get_alg(self, name: str) -> Any:
        """The algorithm, without the warning that joserfc gives for the older name of EdDSA."""
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError("this algorithm is not accepted here")
        return self.algorithms[name]


_REGISTRY = _Registry()


@dataclass(frozen=True, slots=True, repr=False)
class Jwt:
    """A JWT as it was sent. Nothing of it may be believed before its signature is checked."""

    text: str
    header: dict[str, Any]
    claims: dict[str, Any]


def read_jwt(token: str) -> Jwt | None:
    """The parts of a signed JWT in compact form; None when `token` is something else."""
    parts = _COMPACT.fullmatch(token)
    if parts is None:
        return None
    try:
        header, claims = (strict_json(_decode(part)) for part in parts.group(1, 2))
    except ValueError:
        return None
    if not isinstance(header, dict) or not isinstance(claims, dict):
        return None
    return Jwt(token, header, claims)


def _decode(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """One public key of an issuer, and the algorithms that it may be used with."""

    kid: str | None
    thumbprint: str
    algorithms: frozenset[str]
    key: jwk.Key = field(compare=False, repr=False)

    def may_have_signed(self, kid: str | None, algorithm: str) -> bool:
        """Whether a token with this `kid` and `alg` can be of this key."""
        named = kid is None or self.kid is None or kid == self.kid
        return named and algorithm in self.algorithms

    def signed(self, token: Jwt) -> bool:
        """Whether the signature of `token` is of this key."""
        try:
            jws.deserialize_compact(token.text, self.key, registry=_REGISTRY)
        except (JoseError, ValueError):
            return False
        return True


@dataclass(frozen=True)
class KeySet:
    """The keys that an issuer published together (RFC 7517 section 5)."""

    keys: tuple[VerificationKey, ...]

    def signed(self, token: Jwt, kid: str | None, algorithm: str) -> bool:
        """Whether one of these keys signed `token`, whose header names `kid` and `algorithm`."""
        candidates = [key for key in self.keys if key.may_have_signed(kid, algorithm)]
        return any(key.signed(token) for key in candidates[:MAX_CANDIDATES])


def read_key_set(document: dict[str, Any]) -> KeySet:
    """The usable keys of a JWK Set; keys of other kinds, uses and strengths are left out."""
    entries = document.get("keys")
    if not isinstance(entries, list):
        return KeySet(())
    return KeySet(tuple(_usable(entries[:MAX_KEYS])))


def _usable(entries: Iterable[Any]) -> Iterable[VerificationKey]:
    for entry in entries:
        if isinstance(entry, dict) and (key := _import(entry)) is not None:
            yield key


def _import(entry: dict[str, Any]) -> VerificationKey | None:
    public = {name: entry[name] for name in _PUBLIC_MEMBERS if name in entry}
    try:
        if public.get("kty") == "RSA" and not _has_fair_size(public["n"]):
            return None
        key = jwk.import_key(public)
        found = frozenset(name for name in ALGORITHMS if _suits(key, name))
        # Only a key that can verify is of use; this asks it by its own rules.
        key.check_key_op("verify")
        return VerificationKey(key.kid, key.thumbprint(), found, key) if found else None
    except (JoseError, UnsupportedAlgorithm, ValueError, TypeError, KeyError):
        return None


def _has_fair_size(modulus: str) -> bool:
    return MIN_RSA_BITS <= int.from_bytes(_decode(modulus), "big").bit_length() <= MAX_RSA_BITS


def _suits(key: jwk.Key, algorithm: str) -> bool:
    try:
        _REGISTRY.get_alg(algorithm).check_key(key)
    except JoseError:
        return False
    return algorithm != "EdDSA" or key.get("crv") in ("Ed25519", "Ed448")
