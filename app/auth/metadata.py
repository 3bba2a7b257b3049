"""Protected resource metadata (RFC 9728): how a client finds out where to get a token.

Everything comes from the configuration, nothing from the Host or X-Forwarded headers of a
request (AHP-R08).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from app.settings import Permission, Settings

WELL_KNOWN = "/.well-known/oauth-protected-resource"


def metadata_url(settings: Settings, path: str) -> str:
    """The absolute URL of the metadata of the protected endpoint at `path`.

    The well-known part goes between the host and the path (RFC 9728 section 3.1), also where
    `public_url` has a path of its own.
    """
    base = urlsplit(settings.base_url)
    return f"{base.scheme}://{base.netloc}{WELL_KNOWN}{base.path}{path}"


def documents(settings: Settings) -> dict[str, dict[str, Any]]:
    """Request path -> metadata document, for every upload path and every hooks path.

    Each endpoint is a resource of its own: a client asks for a token for exactly this one, and
    what opens uploads does not open events (AHP-R48, RFC 8707).

    Where `public_url` has a path, each document is there twice: under the path that the metadata
    URL names, and without that prefix, for a proxy that takes it off.
    """
    prefix = urlsplit(settings.base_url).path
    found: dict[str, dict[str, Any]] = {}
    for path, permission in _endpoints(settings):
        document = _document(settings, path, permission)
        found[WELL_KNOWN + path] = found[WELL_KNOWN + prefix + path] = document
    return found


def _endpoints(settings: Settings) -> Iterator[tuple[str, Permission]]:
    for path in settings.upload_paths:
        yield path, "ahp.upload"
    for path in settings.hooks_paths:
        yield path, "ahp.hooks"


def _document(settings: Settings, path: str, permission: Permission) -> dict[str, Any]:
    document: dict[str, Any] = {
        "resource": settings.base_url + path,
        "bearer_methods_supported": ["header"],
        "scopes_supported": [permission],
    }
    servers = _authorization_servers(settings)
    if servers:  # an empty list is not allowed (RFC 9728 section 3.2)
        document["authorization_servers"] = servers
    return document


def _authorization_servers(settings: Settings) -> list[str]:
    servers = [issuer.issuer for issuer in settings.issuers]
    if settings.introspection is not None and settings.introspection.issuer is not None:
        servers.append(settings.introspection.issuer)
    return list(dict.fromkeys(servers))
