"""Configured bearer tokens: kept as SHA-256 only, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from app.auth.credentials import MAX_TOKEN_BYTES, Credential, read_credential
from app.auth.principals import Principal
from app.errors import Unauthenticated
from app.settings import SettingsError, TokenSettings


class ConfiguredTokens:
    """The principals of the configuration's `[[tokens]]`, by the digest of their token."""

    def __init__(self, tokens: Iterable[TokenSettings], environment: Mapping[str, str]) -> None:
        """Raises SettingsError for a missing or unusable variable and for a repeated token."""
        self._principals: dict[bytes, Principal] = {}
        for settings in tokens:
            digest = _digest(settings, environment)
            if digest in self._principals:
                other = self._principals[digest].name
                raise SettingsError(f"tokens: {other!r} and {settings.name!r} have the same token")
            self._principals[digest] = Principal(
                settings.name, settings.scope, settings.permissions
            )

    async def verify(self, credential: Credential) -> Principal | None:
        """The principal of a configured token; None for every other credential."""
        found = None
        for digest, principal in self._principals.items():
            # No early exit: the time tells nothing of which token, or how much of it, was right.
            if hmac.compare_digest(digest, credential.digest):
                found = principal
        return found


def _digest(settings: TokenSettings, environment: Mapping[str, str]) -> bytes:
    if settings.token_sha256 is not None:
        return bytes.fromhex(settings.token_sha256)
    name = str(settings.token_env)
    token = environment.get(name, "")
    if not token:
        raise SettingsError(
            f"tokens: the variable {name} of token {settings.name!r} is not set; export it"
        )
    if not _can_be_sent(token):
        raise SettingsError(
            f"tokens: the variable {name} of token {settings.name!r} holds no bearer token: "
            f"use letters, digits and -._~+/ only, at most {MAX_TOKEN_BYTES} of them"
        )
    return hashlib.sha256(token.encode("ascii")).digest()


def _can_be_sent(token: str) -> bool:
    """Whether a request that sends exactly `token` would be read as such."""
    try:
        credential = read_credential([(b"authorization", b"Bearer " + token.encode("ascii"))])
    except (UnicodeEncodeError, Unauthenticated):
        return False
    return credential is not None and credential.token == token
