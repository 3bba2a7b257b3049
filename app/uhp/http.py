"""How a handler of this package sees a request, and what it gives back.

A handler is `async (UhpRequest) -> UhpAnswer`. It raises refusals; the endpoint around it renders
them as the envelope, sees to it that an answer reaches a client that is still sending, and never
lets a handler run for a principal without permission.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from app.auth.principals import Principal
from app.errors import Disconnected, Forbidden, Refusal, Unauthenticated
from app.http.answers import JSON, encode_json, send_early
from app.http.bodies import BodyLimits, RequestBody
from app.http.middleware import record_of
from app.http.problems import MethodNotAllowed
from app.uhp.actions import action_of
from app.uhp.errors import UhpError, envelope, internal_error, invalid_input, translate
from app.uhp.json_bodies import read_json
from app.uhp.queries import Query

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from app.audit import Fact
    from app.auth.authenticator import Authenticator
    from app.settings import Permission

error_log = logging.getLogger("consignee.error")

Headers = tuple[tuple[bytes, bytes], ...]

PUBLIC = Principal("public", "", frozenset())
"""Whom a route without authentication serves: a principal that owns nothing and may do nothing."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """A complete answer. A client that is still sending gets it too; see `send_early`."""

    status: int
    body: bytes
    content_type: bytes = JSON
    headers: Headers = ()


UhpAnswer = WholeAnswer | Callable[["Scope", "Receive", "Send"], Awaitable[None]]
"""A complete answer, or an ASGI application that streams one.

A streaming answer may raise a refusal until it has sent `http.response.start`; what it raises
after that cuts the connection, so that a short answer is never taken for a whole one. Its
`receive` gives `http.disconnect` when the client goes, and nothing else.
"""


def json_answer(value: Any, *, status: int = 200, headers: Headers = ()) -> WholeAnswer:
    """`value` as a JSON answer."""
    return WholeAnswer(status, encode_json(value), JSON, headers)


def error_answer(error: UhpError, headers: Headers = ()) -> WholeAnswer:
    """The envelope of `error`, with `headers` beside its own."""
    return WholeAnswer(error.status, envelope(error), JSON, (*error.headers, *headers))


class UhpRequest:
    """One request of an authenticated principal."""

    __slots__ = ("asgi", "body", "path", "principal", "query", "version")

    def __init__(self, asgi: Scope, body: RequestBody, principal: Principal, version: str) -> None:
        self.asgi = asgi
        self.body = body
        self.principal = principal
        self.version = version
        self.path: Mapping[str, str] = asgi.get("path_params", {})
        self.query = Query(asgi.get("query_string", b""))

    @property
    def method(self) -> str:
        """The method, in upper case."""
        method: str = self.asgi["method"]
        return method

    @property
    def scope(self) -> str:
        """The authorization scope that owns what this request touches."""
        return self.principal.scope

    def header(self, name: bytes) -> str | None:
        """The value of the header `name` (lower case), None when it is absent.

        Raises UhpError (`invalid_input`) when it is given more than once.
        """
        values = [value for known, value in self.asgi["headers"] if known == name]
        if len(values) > 1:
            raise invalid_input(f"Send one {name.decode()} header; this request has several.")
        return values[0].decode("latin-1") if values else None

    def refuse_content_coding(self) -> None:
        """Raise UhpError when the body is content-coded: it is read as it is, or not at all."""
        coding = self.header(b"content-encoding")
        if coding is not None and coding.strip().lower() != "identity":
            raise invalid_input("Send the body without a Content-Encoding.")

    def note(self, facts: Mapping[str, Fact]) -> None:
        """What the audit record says of what this request stores, reads or deletes."""
        record_of(self.asgi).note(**facts)

    async def json(self, limit: int) -> Any:
        """The body as JSON, of at most `limit` bytes.

        Raises TooLarge, UhpError (`invalid_input`), and what reading the body raises.
        """
        self.refuse_content_coding()
        media_type = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        if media_type not in ("", "application/json"):
            raise invalid_input("Send the body as JSON, with Content-Type: application/json.")
        return await read_json(self.body, limit)


Handler = Callable[[UhpRequest], Awaitable[UhpAnswer]]


class Admission(Protocol):
    """Who may make a request now; see limits.py."""

    async def admit(self, principal: Principal) -> None:
        """Raise RateLimited when `principal` makes too many requests."""
        ...


@dataclass(frozen=True, slots=True)
class UhpRoute:
    """One path of the API (Starlette's syntax, from /v1 on) and its methods.

    HEAD is given where it is served. `permissions` names what a method needs where it is not
    `uhp`. With `public` nobody is authenticated. With `conceals` any other method is answered as
    an unknown file is, 404, and not 405: a pattern that every path fits says nothing (UHP-30).
    """

    path: str
    methods: Mapping[str, Handler]
    permissions: Mapping[str, Permission] | None = None
    public: bool = False
    conceals: bool = False

    def permission(self, method: str) -> Permission:
        """What `method` needs."""
        return (self.permissions or {}).get(method, "uhp")

    def handler(self, method: str) -> Handler:
        """The handler of `method`; raises MethodNotAllowed, or UhpError where it `conceals`."""
        handler = self.methods.get(method)
        if handler is not None:
            return handler
        if self.conceals:
            raise UhpError("file_not_found", "There is no such file.")
        raise MethodNotAllowed(*self.methods)


class Endpoint:
    """The ASGI application of one route."""

    def __init__(
        self,
        route: UhpRoute,
        authenticator: Authenticator,
        body_limits: BodyLimits,
        admission: Admission | None = None,
    ) -> None:
        self._route = route
        self._authenticator = authenticator
        self._body_limits = body_limits
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(scope, receive, self._body_limits)
        answering = Answering(send)
        record = record_of(scope)
        record.route, record.action = self._route.path, action_of(self._route.path, scope["method"])
        try:
            await self._answer(scope, receive, answering, body)
        except Disconnected as gone:
            record.code = gone.code
        except Refusal as refusal:
            if answering.started:
                raise
            await self._refuse(scope, send, body, refusal)
        except Exception:
            if answering.started:
                raise
            error_log.exception("unexpected error", extra={"request_id": record.request_id})
            await self._refuse(scope, send, body, internal_error(record.request_id))
        finally:
            record.received = body.received

    async def _answer(self, scope: Scope, receive: Receive, send: Send, body: RequestBody) -> None:
        handler = self._route.handler(scope["method"])
        principal = await self._authenticate(scope)
        answer = await handler(UhpRequest(scope, body, principal, scope["uhp_version"]))
        if isinstance(answer, WholeAnswer):
            await send_whole_answer(scope, send, body, answer)
        else:
            await self._stream(answer, scope, receive, send, body)

    @staticmethod
    async def _stream(
        answer: ASGIApp, scope: Scope, receive: Receive, send: Send, body: RequestBody
    ) -> None:
        await body.drain()
        if not body.complete:
            raise invalid_input("This request takes no body.")

        async def gone() -> Message:
            while (message := await receive())["type"] != "http.disconnect":
                pass
            return message

        await answer(scope, gone, send)

    async def _authenticate(self, scope: Scope) -> Principal:
        if self._route.public:
            return PUBLIC
        principal = await self._authenticator.authenticate(scope["headers"])
        record_of(scope).serve(principal.name, principal.scope)
        principal.require(self._route.permission(scope["method"]))
        if self._admission is not None:
            await self._admission.admit(principal)
        return principal

    async def _refuse(self, scope: Scope, send: Send, body: RequestBody, refusal: Refusal) -> None:
        error = translate(refusal)
        record_of(scope).code = error.code
        challenge: Headers = ()
        if isinstance(refusal, Unauthenticated | Forbidden):
            value = self._authenticator.challenge(refusal)
            challenge = ((b"www-authenticate", value.encode("ascii")),)
        await send_whole_answer(scope, send, body, error_answer(error, challenge))


async def send_whole_answer(
    scope: Scope, send: Send, body: RequestBody, answer: WholeAnswer
) -> None:
    """Send `answer`, and see it arrive while the client may still be sending."""
    await send_early(
        scope, send, body, answer.status, answer.content_type, answer.body, answer.headers
    )


class Answering:
    """Knows whether the answer has begun: from then on nothing can be refused any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def __call__(self, message: Message) -> None:
        self.started = self.started or message["type"] == "http.response.start"
        await self._send(message)
