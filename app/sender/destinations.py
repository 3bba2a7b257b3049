"""Where discovery may lead: the policy over every URL that a remote document names.

A receiver and an authorization server say where to go next, and neither is trusted to choose: a
URL is contacted only over https, on a host that was known before or that the operator allows, at
addresses that were checked and are then used, and no redirect is followed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import httpx

from app import __version__
from app.addresses import is_loopback
from app.sender.errors import AuthorizationError

MAX_DOCUMENT_BYTES: Final = 1024 * 1024
"""Largest document that is read."""

CONNECT_SECONDS: Final = 5.0
"""Longest that one address is tried, so that a dead one leaves time for the next."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port -> its addresses as text; raises OSError where there are none."""

_VISIBLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9._-]+|[0-9a-f:.]+")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """The addresses that the system's resolver gives for `host`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


@dataclass(frozen=True, slots=True)
class Destinations:
    """What may be contacted on behalf of one upload endpoint.

    `allowed` are hosts that the operator names: they may be reached at private addresses, too.
    """

    endpoint: httpx.URL
    allowed: frozenset[str] = frozenset()

    def admit(self, text: str, *hosts: str) -> httpx.URL:
        """`text` as a URL: https, and on one of `hosts` or an allowed host.

        Raises AuthorizationError `destination_refused`.
        """
        url = _secure(text)
        if host_of(url) not in {*hosts, *self.allowed}:
            raise refused(
                f"The host {host_of(url)} is neither the endpoint's nor the issuer's; "
                "allow it by name if it is trusted."
            )
        return url

    def judge(self, url: httpx.URL, addresses: Sequence[str]) -> None:
        """Refuse `url` if any of its `addresses` is not for it to reach.

        Raises AuthorizationError `destination_refused`.
        """
        if not addresses or not all(self._may_reach(url, address) for address in addresses):
            raise refused(
                f"The host {host_of(url)} has an address that is not public; "
                "allow it by name if it is trusted."
            )

    def _may_reach(self, url: httpx.URL, text: str) -> bool:
        if host_of(url) in self.allowed or _origin(url) == _origin(self.endpoint):
            return True
        address = _effective(ipaddress.ip_address(text))
        if address.is_loopback:
            return is_loopback(host_of(self.endpoint))
        return address.is_global and not address.is_multicast


def host_of(url: httpx.URL) -> str:
    """The host of `url` in ASCII, as it is looked up and compared."""
    return url.raw_host.decode("ascii")


def named_host(text: str) -> str:
    """The host that the URL `text` names; empty where it names none."""
    try:
        return host_of(httpx.URL(text))
    except httpx.InvalidURL:
        return ""


def refused(message: str) -> AuthorizationError:
    """The error of a URL that must not be contacted."""
    return AuthorizationError("destination_refused", message)


def _secure(text: str) -> httpx.URL:
    """`text` as an https URL without user-info and fragment."""
    try:
        url = httpx.URL(text) if _VISIBLE.fullmatch(text) else None
    except httpx.InvalidURL:
        url = None
    if url is None or url.scheme != "https" or not _is_reachable(url):
        raise refused("Discovery leads to what is no https URL.")
    if url.userinfo or "#" in text:
        raise refused("Discovery leads to a URL with user-info or a fragment.")
    return url


def _is_reachable(url: httpx.URL) -> bool:
    return _HOST.fullmatch(host_of(url)) is not None and 0 < _port(url) < 65536


def _origin(url: httpx.URL) -> tuple[str, str, int]:
    return url.scheme, host_of(url), _port(url)


def _port(url: httpx.URL) -> int:
    if url.port is not None:
        return url.port
    return 443 if url.scheme == "https" else 80


def _effective(address: _Address) -> _Address:
    """The IPv4 address that an IPv6 `address` leads to, where it carries one."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


@dataclass(frozen=True, slots=True)
class Answer:
    """A status and a body of at most MAX_DOCUMENT_BYTES."""

    status: int
    body: bytes


class Courier:
    """One exchange at a time: nothing of one, no cookie and no connection, is left for the next.

    `trust` replaces the certificate authorities of httpx (which honours SSL_CERT_FILE). Proxies of
    the environment are not used: behind one, the checked address would not be the one used.
    """

    def __init__(
        self, *, trust: ssl.SSLContext | None = None, resolve: Resolve = resolve_host
    ) -> None:
        self._trust = trust
        self._resolve = resolve

    async def get(self, url: httpx.URL, destinations: Destinations) -> Answer:
        """The document at `url`, an admitted one. Raises AuthorizationError."""
        return await self._deliver(url, destinations, "GET", None, {})

    async def post(
        self,
        url: httpx.URL,
        destinations: Destinations,
        form: dict[str, str],
        headers: dict[str, str],
    ) -> Answer:
        """What `url`, an admitted one, answers to `form`. Raises AuthorizationError."""
        return await self._deliver(url, destinations, "POST", form, headers)

    async def _deliver(
        self,
        url: httpx.URL,
        destinations: Destinations,
        method: str,
        form: dict[str, str] | None,
        headers: dict[str, str],
    ) -> Answer:
        addresses = await self._addresses(url)
        destinations.judge(url, addresses)
        async with self._client() as client:
            requests = [
                client.build_request(
                    method,
                    url.copy_with(host=address),
                    data=form,
                    headers={"Host": url.netloc.decode("ascii"), **headers},
                    extensions={"sni_hostname": host_of(url)},
                )
                for address in addresses
            ]
            return await _first_answer(client, requests, url)

    async def _addresses(self, url: httpx.URL) -> Sequence[str]:
        try:
            return await self._resolve(host_of(url), _port(url))
        except (OSError, UnicodeError):
            raise _unreachable(url, "its name is not known") from None

    def _client(self) -> httpx.AsyncClient:
        if self._trust is None:
            self._trust = httpx.create_ssl_context()
        return httpx.AsyncClient(
            verify=self._trust,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # the budget limits the rest
            headers={
                "User-Agent": f"consignee/{__version__}",
                "Accept": "application/json",
                "Accept-Encoding": "identity",
            },
        )


async def _first_answer(
    client: httpx.AsyncClient, requests: list[httpx.Request], url: httpx.URL
) -> Answer:
    """What the first address that can be connected to answers."""
    *others, last = requests
    for request in others:
        try:
            return await _answer(client, request, url)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
    try:
        return await _answer(client, last, url)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise _unreachable(url, "no connection, or a certificate that does not verify") from None


async def _answer(client: httpx.AsyncClient, request: httpx.Request, url: httpx.URL) -> Answer:
    try:
        response = await client.send(request, stream=True)
        try:
            return Answer(response.status_code, await _bounded(response, url))
        finally:
            await response.aclose()
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise
    except httpx.HTTPError as error:
        raise _unreachable(url, type(error).__name__) from None


async def _bounded(response: httpx.Response, url: httpx.URL) -> bytes:
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _unusable(url, "it is compressed though not asked to be")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_DOCUMENT_BYTES:
            raise _unusable(url, f"it exceeds {MAX_DOCUMENT_BYTES} bytes")
    return bytes(body)


def _unreachable(url: httpx.URL, reason: str) -> AuthorizationError:
    return AuthorizationError("metadata_unavailable", f"No answer from {host_of(url)}: {reason}.")


def _unusable(url: httpx.URL, reason: str) -> AuthorizationError:
    return AuthorizationError(
        "metadata_invalid", f"The answer of {host_of(url)} cannot be used: {reason}."
    )
