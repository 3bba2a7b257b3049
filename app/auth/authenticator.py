"""Authorization header -> Principal: the chain of verifiers, and the challenge of a refusal."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from app.auth.audiences import Audiences
from app.auth.credentials import Verifier, invalid, missing, read_credential
from app.auth.introspection import Introspection
from app.auth.metadata import metadata_url
from app.auth.oauth import JwtIssuers
from app.auth.principals import Principal
from app.auth.remote import Remote
from app.auth.tokens import ConfiguredTokens
from app.errors import Forbidden, Unauthenticated
from app.settings import AnonymousSettings, Settings

_log = logging.getLogger("consignee.auth")


class Authenticator:
    """Tells whom a request speaks for (AHP-R10, R13, R29).

    A credential is offered to configured tokens, then to the issuers of JWTs, then to
    introspection; the first that knows it decides.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises SettingsError; `clock` gives seconds since 1970."""
        self._remote = Remote() if settings.issuers or settings.introspection else None
        self._issuers = JwtIssuers(settings, self._remote, clock) if self._remote else None
        self._verifiers = tuple(self._chain(settings, environment, clock))
        self._anonymous = _anonymous_principal(settings.anonymous)
        self._challenges = {
            path: f'Bearer resource_metadata="{metadata_url(settings, path)}"'
            for path in (*settings.upload_paths, *settings.hooks_paths)
        }
        self._default_challenge = self._challenges[settings.upload_paths[0]]

    def _chain(
        self, settings: Settings, environment: Mapping[str, str], clock: Callable[[], float]
    ) -> Iterator[Verifier]:
        yield ConfiguredTokens(settings.tokens, environment)
        if self._issuers is not None:
            yield self._issuers
        if settings.introspection is not None and self._remote is not None:
            table = settings.introspection
            audiences = Audiences.of(table, settings)
            yield Introspection(table, audiences, self._remote, environment, clock)

    async def start(self) -> None:
        """Begin to fetch the keys of the issuers; does not wait for them."""
        if self._issuers is not None:
            self._issuers.start()

    async def close(self) -> None:
        """End what runs in the background and close the connections to the issuers."""
        if self._issuers is not None:
            await self._issuers.close()
        if self._remote is not None:
            await self._remote.close()

    async def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """The principal of a request with these ASGI `headers`.

        Raises Unauthenticated, and Unavailable when an authorization server is needed and does
        not answer. A request with any Authorization header is never anonymous.
        """
        credential = read_credential(headers)
        if credential is None:
            if self._anonymous is None:
                raise missing("Send the credential as `Authorization: Bearer <token>`.")
            return self._anonymous
        try:
            for verifier in self._verifiers:
                principal = await verifier.verify(credential)
                if principal is not None:
                    return principal
            raise invalid("The token is not known to this receiver.")
        except Unauthenticated as refusal:
            _log.info("a token was refused: %s", refusal.message)
            raise

    def challenge(
        self, refusal: Unauthenticated | Forbidden, *, resource_path: str | None = None
    ) -> str:
        """The value of WWW-Authenticate for `refusal` (RFC 6750 section 3, RFC 9728 section 5.1).

        `resource_path` is the path of the protected endpoint that is meant; None, and a path that
        is none, stand for the first one that takes uploads.
        """
        bearer = self._challenges.get(resource_path or "", self._default_challenge)
        if isinstance(refusal, Forbidden):
            return f'{bearer}, error="insufficient_scope", scope="{refusal.permission}"'
        return f'{bearer}, error="invalid_token"' if refusal.token_given else bearer


def _anonymous_principal(settings: AnonymousSettings | None) -> Principal | None:
    if settings is None:
        return None
    return Principal("anonymous", settings.scope, settings.permissions)
