"""Everything under /v1 as one ASGI application: the routes, the version, the envelope.

Unknown routes and methods and unexpected errors are answered in here, so that there is no non-2xx
under /v1 that is not the envelope, and no answer without `UHP-Version` (UHP-31).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route, Router

from app.http.answers import JSON, send_whole
from app.http.bodies import BodyLimits, RequestBody
from app.http.cors import CrossOrigin
from app.http.middleware import HTTPS_REQUIRED, Rendered, record_of
from app.uhp.errors import UhpError, envelope, route_not_found
from app.uhp.http import Admission, Endpoint, UhpRoute, error_answer, send_whole_answer
from app.uhp.versions import DEFAULT_VERSION, HEADER, negotiate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Message, Receive, Scope, Send

    from app.auth.authenticator import Authenticator

PREFIX = "/v1"


def is_uhp(path: str) -> bool:
    """Whether a decoded request path belongs to this application."""
    return path == PREFIX or path.startswith(PREFIX + "/")


def https_required() -> Rendered:
    """The refusal of plain HTTP from another machine, as every refusal under /v1 is."""
    error = UhpError("consignee_https_required", HTTPS_REQUIRED)
    return JSON, envelope(error), [(HEADER, DEFAULT_VERSION.encode("ascii"))]


class UhpApplication:
    """The routes of UHP. A path that is no route is 404, with and without a trailing slash."""

    def __init__(
        self,
        routes: Iterable[UhpRoute],
        *,
        authenticator: Authenticator,
        body_limits: BodyLimits,
        admission: Admission | None = None,
        cors_origins: Iterable[str] = (),
    ) -> None:
        self._cross_origin = CrossOrigin(cors_origins)
        self._body_limits = body_limits
        self._router = Router(
            [
                Route(route.path, Endpoint(route, authenticator, body_limits, admission))
                for route in routes
            ],
            redirect_slashes=False,
        )
        self._router.default = self._unknown_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        versioned = _Versioned(send, DEFAULT_VERSION, self._cross_origin.headers(scope))
        preflight = self._cross_origin.preflight(scope)
        if preflight is not None:
            await send_whole(versioned, 200, b"text/plain", b"", preflight)
            return
        try:
            versioned.version = scope["uhp_version"] = negotiate(scope["headers"])
        except UhpError as error:
            await self._refuse(scope, receive, versioned, error)
        else:
            await self._router(scope, receive, versioned)

    async def _unknown_route(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._refuse(scope, receive, send, route_not_found())

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: UhpError) -> None:
        record_of(scope).code = error.code
        body = RequestBody(scope, receive, self._body_limits)
        await send_whole_answer(scope, send, body, error_answer(error))


class _Versioned:
    """Says on every answer which version it is in (Lifecycle section 1, V-01), and `headers`."""

    def __init__(self, send: Send, version: str, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self.version = version
        self._headers = headers

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            version = (HEADER, self.version.encode("ascii"))
            message["headers"] = [*message.get("headers", ()), version, *self._headers]
        await self._send(message)
