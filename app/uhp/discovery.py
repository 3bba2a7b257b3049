"""`GET /v1/uhp`: what this server can do, for anyone who asks (Lifecycle section 2, D-01 to D-05).

The same for everybody: nothing in it belongs to a principal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app import __version__
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.versions import DEFAULT_VERSION, VERSIONS

if TYPE_CHECKING:
    from app.uhp.services import Services

CAPABILITIES = {
    "streaming": True,
    "sessions": True,
    "cancellation": True,
    "files_input": True,
    "files_output": True,
    "session_listing": True,
    "idempotency": True,
    "harness_management": False,
    "session_sharing": False,
    "plugins": False,
}


def document() -> dict[str, Any]:
    """The discovery document (UHP-01, UHP-08)."""
    return {
        "object": "uhp.discovery",
        "protocol": "uhp",
        "versions": list(VERSIONS),
        "default_version": DEFAULT_VERSION,
        "conformance_class": "extended",
        "capabilities": dict(CAPABILITIES),
        "implementation": {"name": "Consignee", "version": __version__},
    }


def routes(services: Services) -> list[UhpRoute]:
    """The one route without authentication."""
    settings = services.settings
    limits = {
        "max_file_bytes": int(settings.max_upload_bytes),
        "max_request_bytes": int(settings.max_request_bytes),
        "upload_ttl_seconds": int(settings.upload_ttl.total_seconds()),
    }
    answer = json_answer({**document(), "limits": limits})

    async def discover(_: UhpRequest) -> UhpAnswer:
        return answer

    return [UhpRoute("/v1/uhp", {"GET": discover, "HEAD": discover}, public=True)]
