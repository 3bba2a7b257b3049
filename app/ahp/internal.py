"""`GET` and `HEAD` on `/internal/refs/{ref}`: the bytes of a reference, for processors of events.

No part of the protocol, which offers no way to fetch content (AHP-R37): a program of the operator
that handles events in another process reads the bytes here, with a credential of its own that has
the permission `refs.read` and is bound to one scope. Without `internal_refs` there is no such
route. A reference that has ended is served for as long as an event of the scope keeps its bytes.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.routing import Route

from app.errors import Disconnected, Forbidden, Malformed, Refusal, Unauthenticated
from app.http.answers import PROBLEM, send_early
from app.http.bodies import BodyLimits, RequestBody
from app.http.downloads import Download, PreconditionFailed, Representation
from app.http.media_types import OCTET_STREAM
from app.http.middleware import record_of
from app.http.problems import MethodNotAllowed, problem
from app.http.ranges import RangeNotSatisfiable
from app.http.resources import Answer, refused

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.auth.authenticator import Authenticator
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.records import Reference

PATH = "/internal/refs/{ref}"


def internal_routes(
    settings: Settings, authenticator: Authenticator, store: ContentStore
) -> list[Route]:
    """The route where `internal_refs` is set; else none, and the path is unknown like any other."""
    if not settings.internal_refs:
        return []
    return [Route(PATH, InternalContent(BodyLimits.of(settings), authenticator, store))]


class InternalContent:
    """The ASGI application of the route."""

    def __init__(
        self, limits: BodyLimits, authenticator: Authenticator, store: ContentStore
    ) -> None:
        self._limits = limits
        self._authenticator = authenticator
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(scope, receive, self._limits)
        record = record_of(scope)
        record.route, record.action = PATH, "reference.read"
        try:
            download = await self._download(scope, body)
            await download(scope, receive, send)
        except Disconnected as gone:
            record.code = gone.code
        except (Refusal, PreconditionFailed, RangeNotSatisfiable) as error:
            if record.status is not None:
                raise  # in the middle of an answer: cut it, so that nobody takes it for a whole one
            record.code, answer = self._answer(error)
            await send_early(
                scope, send, body, answer.status, answer.content_type, answer.body, answer.headers
            )

    async def _download(self, scope: Scope, body: RequestBody) -> Download:
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodNotAllowed("GET", "HEAD")
        reference = await self._resolve(scope)
        if not body.complete:
            raise Malformed("malformed_body", "This request takes no body.")
        return Download(self._representation(reference))

    async def _resolve(self, scope: Scope) -> Reference:
        record = record_of(scope)
        principal = await self._authenticator.authenticate(scope["headers"])
        record.serve(principal.name, principal.scope)
        principal.require("refs.read")
        ref: str = scope["path_params"]["ref"]
        reference = await self._store.events.resolve(principal.scope, ref)
        record.ref = reference.ref
        record.note(sha256=reference.sha256, bytes=reference.size)
        return reference

    def _representation(self, reference: Reference) -> Representation:
        events = self._store.events
        return Representation(
            size=reference.size,
            sha256=reference.sha256,
            media_type=OCTET_STREAM,
            filename=reference.ref,
            open=lambda start, stop: events.read(reference, start=start, stop=stop),
            link=partial(self._store.link, reference.sha256),
        )

    def _answer(
        self, error: Refusal | PreconditionFailed | RangeNotSatisfiable
    ) -> tuple[str, Answer]:
        if isinstance(error, PreconditionFailed):
            return _precondition_failed()
        if isinstance(error, RangeNotSatisfiable):
            return _range_not_satisfiable(error.size)
        if isinstance(error, Unauthenticated | Forbidden):
            challenge = self._authenticator.challenge(error).encode("ascii")
            return error.code, refused(error, (b"www-authenticate", challenge))
        return error.code, refused(error)


def _precondition_failed() -> tuple[str, Answer]:
    code = "precondition_failed"
    detail = "If-Match names no tag of this content."
    return code, Answer(412, PROBLEM, problem(412, "Precondition failed", code, detail))


def _range_not_satisfiable(size: int) -> tuple[str, Answer]:
    code = "range_not_satisfiable"
    detail = f"The range lies outside the content, which has {size} bytes."
    document = problem(416, "Range not satisfiable", code, detail, size=size)
    return code, Answer(416, PROBLEM, document, ((b"content-range", b"bytes */%d" % size),))
