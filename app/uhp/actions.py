"""What each route does to what is stored, as the audit records and the metrics name it.

A route and method that is not here touches nothing that belongs to anybody: what this server is
and can do (discovery, harnesses, models), and what is answered as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SESSION: Final = "/v1/sessions/{session_id}"
_RESPONSE: Final = "/v1/responses/{response_id}"
_CONTAINER: Final = "/v1/containers/{container_id}/files"

ACTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "/v1/files": {"POST": "file.store", "GET": "file.list"},
    "/v1/files/{file_id}": {"GET": "file.inspect", "DELETE": "file.delete"},
    "/v1/files/{file_id}/content": {"GET": "file.read"},
    f"{_CONTAINER}/{{file_id}}/content": {"GET": "artifact.read", "PUT": "artifact.store"},
    f"{_CONTAINER}/{{file_id}}/pdf": {"GET": "preview.read", "PUT": "artifact.store"},
    f"{_CONTAINER}/{{path:any_path}}": {"PUT": "artifact.store"},
    "/v1/sessions": {"POST": "session.create", "GET": "session.list"},
    _SESSION: {"GET": "session.inspect", "DELETE": "session.delete"},
    "/v1/traces/{session_id}": {"DELETE": "session.delete"},
    f"{_SESSION}/turns": {"GET": "session.read"},
    f"{_SESSION}/files": {"GET": "artifact.list"},
    f"{_SESSION}/files/archive": {"GET": "archive.read"},
    f"{_SESSION}/cancel": {"POST": "task.cancel"},
    "/v1/responses": {"POST": "task.begin"},
    _RESPONSE: {"GET": "response.read", "DELETE": "response.delete"},
    f"{_RESPONSE}/input_items": {"GET": "response.read"},
    f"{_RESPONSE}/cancel": {"POST": "task.cancel"},
    "/v1/harnesses/{harness_id}/events": {"GET": "feed.read"},
}
"""Actions by route and method. HEAD does what GET does: it tells of the same things."""


def action_of(route: str, method: str) -> str | None:
    """What a request does; None for nothing that is recorded."""
    return ACTIONS.get(route, {}).get("GET" if method == "HEAD" else method)
