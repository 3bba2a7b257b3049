"""What every protected `POST` endpoint of the protocol does alike.

The order of checks is the order of the statuses: 405 method, 401 and 403 credential, and then
what the endpoint itself looks at, head before body (AHP-R15, R29, R30, R52). A refusal is decided
from the head alone where it can be, so that a client that waits for `100 Continue` never sends
its body.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from app.errors import Disconnected, Forbidden, Refusal, Unauthenticated
from app.http.answers import PROBLEM, send_early, send_whole
from app.http.bodies import BodyLimits, RequestBody
from app.http.middleware import RequestRecord, record_of
from app.http.problems import MethodNotAllowed, headers_of, problem_of, status_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.auth.authenticator import Authenticator
    from app.auth.principals import Principal
    from app.http.resources import Answer
    from app.settings import Permission, Settings

NO_CONTENT = 204


class Request(NamedTuple):
    """A request whose principal is known; `started` is when its head was there (perf_counter)."""

    headers: list[tuple[bytes, bytes]]
    principal: Principal
    body: RequestBody
    record: RequestRecord
    started: float


class Endpoint(ABC):
    """The ASGI application of one path that takes `POST` from whoever has `permission`.

    A subclass answers, and counts what was refused. Each path is a protected resource of its own:
    the challenge of a refusal names the metadata of exactly this one (AHP-R08).
    """

    permission: ClassVar[Permission]
    action: ClassVar[str]
    """What the audit records say of it."""

    def __init__(self, path: str, settings: Settings, authenticator: Authenticator) -> None:
        self._path = path
        self._body_limits = BodyLimits.of(settings)
        self._authenticator = authenticator

    @abstractmethod
    async def answer(self, request: Request) -> Answer:
        """The answer to a request of somebody who may send it. Raises Refusal."""
        ...

    @abstractmethod
    def count(self, outcome: str) -> None:
        """One request more that ended with the refusal of this code."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(scope, receive, self._body_limits)
        record = record_of(scope)
        record.route, record.action = self._path, self.action
        try:
            answer = await self.answer(await self._admitted(scope, body, record))
        except Disconnected as gone:
            self._count(record, gone)
        except Refusal as refusal:
            self._count(record, refusal)
            await self._refuse(scope, send, body, refusal)
        else:
            await _send(send, answer)
        finally:
            record.received = body.received

    async def _admitted(self, scope: Scope, body: RequestBody, record: RequestRecord) -> Request:
        """The request of somebody who may send it. Raises Refusal."""
        started = time.perf_counter()
        if scope["method"] != "POST":
            raise MethodNotAllowed("POST")
        headers = scope["headers"]
        principal = await self._authenticator.authenticate(headers)
        record.serve(principal.name, principal.scope)
        principal.require(self.permission)
        return Request(headers, principal, body, record, started)

    def _count(self, record: RequestRecord, refusal: Refusal) -> None:
        record.code = refusal.code
        self.count(refusal.code)

    async def _refuse(self, scope: Scope, send: Send, body: RequestBody, refusal: Refusal) -> None:
        headers = headers_of(refusal)
        if isinstance(refusal, Unauthenticated | Forbidden):
            challenge = self._authenticator.challenge(refusal, resource_path=self._path)
            headers.append((b"www-authenticate", challenge.encode("ascii")))
        await send_early(
            scope, send, body, status_of(refusal), PROBLEM, problem_of(refusal), headers
        )


async def _send(send: Send, answer: Answer) -> None:
    if answer.status != NO_CONTENT:
        await send_whole(send, answer.status, answer.content_type, answer.body, answer.headers)
        return
    # Neither a type nor a length belongs to it (RFC 9110 section 8.6).
    await send({"type": "http.response.start", "status": NO_CONTENT, "headers": []})
    await send({"type": "http.response.body", "body": b""})
