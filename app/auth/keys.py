"""The keys of one issuer: found, cached, refreshed, and kept through an outage (B78, B79).

A token whose key is known never waits for the network. The key set is fetched

* at the start, and again for a request that finds none (at most once a second);
* in the background, when it is older than `jwks_refresh_seconds`;
* for a token that no known key signed, at most once in `jwks_cooldown_seconds`.

All that wait share one fetch. A fetch that fails, or brings no usable key, changes nothing: the
known keys stay in use until they are older than `jwks_stale_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from app.auth.jose import KeySet, read_key_set
from app.auth.remote import Remote, RemoteFault
from app.errors import Unavailable
from app.settings import IssuerSettings, require_secure_url

COLD_RETRY_SECONDS = 1
"""Pause between two fetches while no key is known: an issuer that is back is noticed soon."""

_log = logging.getLogger("consignee.auth")


class KeyRing:
    """The current keys of one issuer."""

    def __init__(
        self, settings: IssuerSettings, remote: Remote, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._remote = remote
        self._clock = clock
        self._jwks_url = settings.jwks_url
        self._keys: KeySet | None = None
        self._fetched_at = 0.0
        self._tried_at: float | None = None
        self._demanded_at: float | None = None
        self._flight: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to fetch the keys."""
        self._take_off()

    async def close(self) -> None:
        """End a fetch that is under way."""
        if self._flight is not None:
            self._flight.cancel()
            await asyncio.wait({self._flight})

    def current(self) -> KeySet | None:
        """The keys that may be used now, if there are any; never waits.

        The same object is returned until the issuer publishes other keys.
        """
        now = self._clock()
        if self._keys is None or now - self._fetched_at > self._settings.jwks_stale_seconds:
            return None
        aged = self._is_over(self._fetched_at, self._settings.jwks_refresh_seconds)
        if aged and self._is_over(self._tried_at, self._settings.jwks_cooldown_seconds):
            self._take_off()
        return self._keys

    async def ready(self) -> KeySet:
        """The keys that may be used now, fetched when there are none. Raises Unavailable."""
        keys = self.current()
        if keys is None:
            if self._is_over(self._tried_at, COLD_RETRY_SECONDS):
                self._take_off()
            await self._landing()
            keys = self.current()
        if keys is None:
            raise Unavailable(
                "issuer_unavailable",
                "The keys of the token's issuer cannot be fetched now; try again.",
                retry_after=COLD_RETRY_SECONDS,
            )
        return keys

    async def renewed(self) -> KeySet | None:
        """The keys after a refresh, for a token that no current key signed.

        They are the same object as before when the issuer has no other keys, does not answer, or
        was asked less than a cool-down ago.
        """
        if self._is_over(self._demanded_at, self._settings.jwks_cooldown_seconds):
            self._demanded_at = self._clock()
            self._take_off()
        await self._landing()
        return self._keys

    def _is_over(self, since: float | None, seconds: float) -> bool:
        """Whether `seconds` have passed; a clock that was turned back ends every pause."""
        return since is None or not 0 <= self._clock() - since < seconds

    def _take_off(self) -> None:
        if self._flight is None:
            self._tried_at = self._clock()
            self._flight = asyncio.create_task(self._refresh())

    async def _landing(self) -> None:
        if self._flight is not None:
            # wait() leaves the fetch alone when the request that waits for it is cancelled.
            await asyncio.wait({self._flight})

    async def _refresh(self) -> None:
        began = self._clock()
        try:
            self._accept(await self._download(), began)
        except RemoteFault as fault:
            self._jwks_url = self._settings.jwks_url  # the issuer may have moved its keys
            _log.warning("the keys of %s were not refreshed: %s", self._settings.issuer, fault)
        finally:
            self._flight = None

    def _accept(self, document: dict[str, Any], began: float) -> None:
        found = read_key_set(document)
        if not found.keys:
            raise RemoteFault("its key set has no usable key", answered=True)
        self._fetched_at = began
        if found != self._keys:
            self._keys = found
            _log.info("%s has %d usable key(s) now", self._settings.issuer, len(found.keys))

    async def _download(self) -> dict[str, Any]:
        if self._jwks_url is None:
            self._jwks_url = await self._discover()
        return await self._get(self._jwks_url)

    async def _discover(self) -> str:
        """The URL of the key set, from the first metadata document that is really the issuer's."""
        reasons = []
        for url in metadata_urls(self._settings.issuer):
            try:
                return self._key_set_url(await self._get(url))
            except RemoteFault as fault:
                if not fault.answered:
                    raise
                reasons.append(f"{urlsplit(url).path}: {fault}")
        raise RemoteFault("; ".join(reasons), answered=True)

    def _key_set_url(self, document: dict[str, Any]) -> str:
        if document.get("issuer") != self._settings.issuer:  # RFC 8414 section 3.3
            raise RemoteFault("its metadata names another issuer", answered=True)
        url = document.get("jwks_uri")
        try:
            return require_secure_url(url if isinstance(url, str) else "")
        except ValueError as error:
            raise RemoteFault(f"its jwks_uri {error}", answered=True) from None

    async def _get(self, url: str) -> dict[str, Any]:
        return await self._remote.get(url, seconds=self._settings.timeout_seconds)


def metadata_urls(issuer: str) -> list[str]:
    """Where the metadata of `issuer` may be, in the order in which it is looked for.

    RFC 8414 section 3 puts the well-known part before the path of the issuer, OpenID Connect
    Discovery behind it; RFC 8414 section 5 names a third place.
    """
    parts = urlsplit(issuer)
    host, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    urls = [
        f"{host}/.well-known/oauth-authorization-server{path}",
        f"{host}{path}/.well-known/openid-configuration",
        f"{host}/.well-known/openid-configuration{path}",
    ]
    return list(dict.fromkeys(urls))
