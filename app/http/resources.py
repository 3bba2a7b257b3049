"""Small answers that are read, not uploaded to: one ASGI class for all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

from app.errors import NotFound, Refusal
from app.http.answers import PROBLEM, send_early
from app.http.bodies import BodyLimits, RequestBody
from app.http.middleware import record_of
from app.http.problems import MethodNotAllowed, headers_of, problem_of, status_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    content_type: bytes
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Resource:
    """GET and HEAD on one route; any other method is 405, any refusal a problem document."""

    def __init__(self, answer: Callable[[Scope], Awaitable[Answer]], limits: BodyLimits) -> None:
        self._answer = answer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] not in ("GET", "HEAD"):
                raise MethodNotAllowed("GET", "HEAD")
            answer = await self._answer(scope)
        except Refusal as refusal:
            record_of(scope).code = refusal.code
            answer = refused(refusal)
        unread = RequestBody(scope, receive, self._limits)
        await send_early(
            scope, send, unread, answer.status, answer.content_type, answer.body, answer.headers
        )


def refused(refusal: Refusal, *headers: tuple[bytes, bytes]) -> Answer:
    """The problem document of a refusal, with `headers` beside its own."""
    own = headers_of(refusal)
    return Answer(status_of(refusal), PROBLEM, problem_of(refusal), (*own, *headers))


class UnknownRoute:
    """404 for every path that is no route, whatever the method; never a redirect (AHP-R04, R31)."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = NotFound("route_not_found", "There is no such route on this server.")
        record_of(scope).code = refusal.code
        unread = RequestBody(scope, receive, self._limits)
        await send_early(scope, send, unread, 404, PROBLEM, problem_of(refusal))
