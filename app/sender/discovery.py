"""From a refused upload to the authorization server that can help.

Protected resource metadata (RFC 9728) names the server, its own metadata (RFC 8414, or OpenID
Connect Discovery) names its endpoints. Both are untrusted: app.sender.destinations decides what
is contacted, and each document must say the very identifier that it was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.sender.destinations import Courier, Destinations, host_of, named_host, refused
from app.sender.errors import AuthorizationError

RESOURCE: Final = "/.well-known/oauth-protected-resource"
SERVER: Final = "/.well-known/oauth-authorization-server"
OPENID: Final = "/.well-known/openid-configuration"


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


_Kind = TypeVar("_Kind", bound=_Document)


class ResourceMetadata(_Document):
    """What RFC 9728 section 2 says of an upload endpoint, as far as it is used."""

    resource: str
    authorization_servers: tuple[str, ...] = Field(min_length=1)
    bearer_methods_supported: tuple[str, ...] = ("header",)


class IssuerMetadata(_Document):
    """What RFC 8414 section 2 says of an authorization server, as far as it is used."""

    issuer: str
    token_endpoint: str
    authorization_endpoint: str | None = None
    grant_types_supported: tuple[str, ...] = ("authorization_code", "implicit")
    code_challenge_methods_supported: tuple[str, ...] = ()
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False


class Discovery:
    """Reads the documents, in the order that MCP gives to their places."""

    def __init__(self, courier: Courier) -> None:
        self._courier = courier

    async def resource(
        self, endpoint: str, pointer: str | None, destinations: Destinations
    ) -> ResourceMetadata:
        """The metadata of `endpoint`: at `pointer` where its challenge has one, else well known.

        Raises AuthorizationError, also when the document speaks of another resource.
        """
        places = [pointer] if pointer is not None else _resource_places(destinations.endpoint)
        document = await self._first(
            [destinations.admit(place, host_of(destinations.endpoint)) for place in places],
            destinations,
            ResourceMetadata,
        )
        if document.resource != resource_of(endpoint):
            raise AuthorizationError(
                "resource_mismatch", "The resource metadata is not about the upload endpoint."
            )
        if "header" not in document.bearer_methods_supported:
            raise AuthorizationError(
                "metadata_invalid", "The endpoint does not take a token in the header."
            )
        return document

    async def issuer(self, issuer: str, destinations: Destinations) -> IssuerMetadata:
        """The metadata of `issuer`, with endpoints that may be contacted.

        Raises AuthorizationError, also when the document is of another issuer.
        """
        url = _issuer_url(issuer, destinations)
        document = await self._first(_issuer_places(url), destinations, IssuerMetadata)
        if document.issuer != issuer:
            raise AuthorizationError(
                "issuer_mismatch", "The metadata is not that of the issuer that was asked for."
            )
        return document

    async def _first(
        self, places: Sequence[httpx.URL], destinations: Destinations, kind: type[_Kind]
    ) -> _Kind:
        """The document of the first place that has one; only a 4xx leads on to the next."""
        status = 0
        for place in places:
            answer = await self._courier.get(place, destinations)
            if answer.status == httpx.codes.OK:
                return _read(answer.body, place, kind)
            status = answer.status
            if not httpx.codes.is_client_error(status):
                break
        raise AuthorizationError(
            "metadata_unavailable",
            f"There is no metadata at {host_of(places[0])}: status {status}.",
        )


def resource_of(endpoint: str) -> str:
    """The resource identifier of `endpoint`: itself, without its query."""
    return endpoint.partition("?")[0]


def _resource_places(endpoint: httpx.URL) -> list[str]:
    """Between host and path first, then at the root (RFC 9728 section 3.1)."""
    origin = f"{endpoint.scheme}://{endpoint.netloc.decode('ascii')}"
    path = endpoint.raw_path.decode("ascii").partition("?")[0]
    path = "" if path == "/" else path
    return list(dict.fromkeys([origin + RESOURCE + path, origin + RESOURCE]))


def _issuer_url(issuer: str, destinations: Destinations) -> httpx.URL:
    url = destinations.admit(issuer, named_host(issuer))
    if "?" in issuer:
        raise refused("Discovery leads to an issuer with a query.")
    return url


def _issuer_places(issuer: httpx.URL) -> list[httpx.URL]:
    """RFC 8414 section 3.1 first, then OpenID Connect in both spellings (RFC 8414 section 5)."""
    path = issuer.raw_path.decode("ascii").rstrip("/")
    places = [SERVER + path, OPENID + path, path + OPENID]
    return [issuer.copy_with(raw_path=place.encode("ascii")) for place in dict.fromkeys(places)]


def _read(body: bytes, place: httpx.URL, kind: type[_Kind]) -> _Kind:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False, include_context=False)
        at = ".".join(str(part) for part in faults[0]["loc"]) or "its JSON"
        raise AuthorizationError(
            "metadata_invalid", f"The metadata at {host_of(place)} cannot be used: see {at}."
        ) from None
