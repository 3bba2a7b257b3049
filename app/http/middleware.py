"""What surrounds every request: pure ASGI, one class for each concern.

What has nothing to wait for hands on what there is to await: each step more that awaits costs every
request about a microsecond.

`surround` folds them over the application; the order in its list is the order in which a request
meets them.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from app import audit, telemetry
from app.addresses import is_loopback
from app.http.afterwards import AFTERWARDS
from app.http.answers import PROBLEM, send_early, send_whole
from app.http.bodies import BodyLimits, RequestBody
from app.http.problems import problem
from app.logs import RequestLine

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from app.http.metrics import Metrics

RECORD_KEY = "consignee.record"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

HTTPS_REQUIRED = "Plain HTTP is served on loopback only; set an https public_url or TLS files."

Rendered = tuple[bytes, bytes, list[tuple[bytes, bytes]]]
"""The media type and the bytes of an answer's body, and headers beside its own."""

# Asking the system for each id would cost more than the line that it stands in.
_numbers = random.Random(secrets.randbits(256))  # noqa: S311 - see new_request_id
os.register_at_fork(after_in_child=lambda: _numbers.seed(secrets.randbits(256)))

_CUT_OFF = frozenset({"disconnected", "internal_error"})

RefusalOf = Callable[["Scope"], Rendered]

access_log = logging.getLogger("consignee.access")
error_log = logging.getLogger("consignee.error")


@dataclass(slots=True)
class RequestRecord:
    """What is logged, counted and audited about one request; layers below fill in what they learn.

    Never a credential, a header's value, a query or a part of a body. `route` is the pattern that
    the path matched, `scope` the authorization scope, `action` what the request does to what is
    stored, `noted` what it does that to; see app/audit.py.
    """

    request_id: str
    status: int | None = None
    principal: str | None = None
    code: str | None = None
    ref: str | None = None
    received: int | None = None
    sent: int = 0
    route: str | None = None
    scope: str | None = None
    action: str | None = None
    noted: dict[str, audit.Fact] = field(default_factory=dict)

    def serve(self, principal: str, scope: str) -> None:
        """Whom the request is served for."""
        self.principal = principal
        self.scope = scope

    def note(self, **facts: audit.Fact) -> None:
        """What the audit record says of what was stored, read or deleted."""
        self.noted.update(facts)

    @property
    def outcome(self) -> str:
        """`done`, or why not; an answer that has begun can still be cut off."""
        if self.status is None or self.status >= HTTPStatus.BAD_REQUEST:
            return self.code or "unanswered"
        return self.code if self.code in _CUT_OFF else "done"


class Ended(NamedTuple):
    """When a request ended, in unix seconds, and how many seconds it took."""

    at: float
    seconds: float


def new_request_id() -> str:
    """An id that no other request has: 16 hex digits. It is a name and no secret."""
    return f"{_numbers.getrandbits(64):016x}"


def record_of(scope: Scope) -> RequestRecord:
    """The record of the request that `scope` belongs to."""
    record: RequestRecord = scope[RECORD_KEY]
    return record


class Identified:
    """Gives the request its id; traces it, records it, and logs and counts it when it ends."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = scope[RECORD_KEY] = RequestRecord(new_request_id())
        started = time.perf_counter()
        tracing = telemetry.active()
        if tracing is None:
            await self._serve(scope, record, started, receive, send)
            return
        with tracing.request(_bounded(scope["method"]), scope["scheme"], scope["headers"]) as span:
            try:
                await self._serve(scope, record, started, receive, send)
            finally:
                span.answered(
                    route=record.route,
                    status=record.status,
                    principal=record.principal,
                    seconds=time.perf_counter() - started,
                )

    async def _serve(
        self, scope: Scope, record: RequestRecord, started: float, receive: Receive, send: Send
    ) -> None:
        request_id = (b"x-request-id", record.request_id.encode("ascii"))

        def send_identified(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), request_id]
                audit_request(scope, record)
            else:
                record.sent += len(message.get("body", b"")) + message.get("count", 0)
            return send(message)

        try:
            await self._app(scope, receive, send_identified)
        finally:
            if record.status is None:
                audit_request(scope, record)
            ended = Ended(time.time(), time.perf_counter() - started)
            report = partial(self._report, scope["method"], scope["path"], record, ended)
            putting_off = scope.get("extensions", {}).get(AFTERWARDS)
            if putting_off is None:
                report()
            else:
                putting_off["do"](report)

    def _report(self, method: str, path: str, record: RequestRecord, ended: Ended) -> None:
        self._metrics.count_request(_bounded(method), record.status)
        outcome = record.outcome
        if outcome != "done":
            self._metrics.count_refusal(outcome)
        if record.action is not None:
            self._metrics.count_action(record.action, outcome, ended.seconds, record.sent)
        if access_log.isEnabledFor(logging.INFO):
            log_request(method, path, record, ended)


def _bounded(method: str) -> str:
    """The method, of a bounded number of names."""
    return method if method in _METHODS else "other"


def audit_request(scope: Scope, record: RequestRecord) -> None:
    """Leave the audit record of a request that does something for a principal."""
    if record.action is None or record.scope is None or not audit.is_kept():
        return
    client = scope.get("client")
    facts: dict[str, audit.Fact] = {
        "principal": record.principal,
        "scope": record.scope,
        "request_id": record.request_id,
        "address": client[0] if client else None,
        "method": scope["method"],
        "status": record.status,
    }
    named = scope.get("path_params", {}) | record.noted
    audit.record(record.action, record.outcome, **(named | facts))


def log_request(method: str, path: str, record: RequestRecord, ended: Ended) -> None:
    """Write the line of one request."""
    access_log.handle(
        RequestLine(
            ended.at,
            request_id=record.request_id,
            method=method,
            path=path,
            status=record.status,
            seconds=round(ended.seconds, 6),
            principal=record.principal,
            code=record.code,
            ref=record.ref,
            bytes=record.received,
        )
    )


class Contained:
    """Answers an unexpected error with the request's id and nothing else of it.

    After the answer has begun there is nothing to say any more: the error goes on to the server,
    which cuts the connection, so that a short answer is never taken for a whole one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            if scope["type"] != "http":
                raise
            record = record_of(scope)
            record.code = "internal_error"
            error_log.exception("unexpected error", extra={"request_id": record.request_id})
            if record.status is not None:
                raise
            detail = f"Something failed here; its request id is {record.request_id}."
            body = problem(500, "Internal error", "internal_error", detail)
            await send_whole(send, 500, PROBLEM, body, [(b"connection", b"close")])


class SafeHeaders:
    """Headers that hold for everything that this server sends."""

    _ALWAYS = (b"x-content-type-options", b"nosniff")
    _UNLESS_SAID = (b"cache-control", b"no-store")

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        def send_safe(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), self._ALWAYS]
                if b"cache-control" not in [name for name, _ in headers]:
                    headers.append(self._UNLESS_SAID)
                message["headers"] = headers
            return send(message)

        return self._app(scope, receive, send_safe)


def https_required(scope: Scope) -> Rendered:
    """The refusal of plain HTTP as a problem document."""
    del scope
    return PROBLEM, problem(403, "HTTPS required", "https_required", HTTPS_REQUIRED), []


class Confidential:
    """Refuses plain HTTP that did not arrive over the loopback interface (AHP-R05).

    For when neither TLS of its own nor an https `public_url` says that the way is protected:
    credentials would cross a network in clear. `refusal` is how the protocol of a request says so.
    """

    def __init__(self, app: ASGIApp, limits: BodyLimits, refusal: RefusalOf) -> None:
        self._app = app
        self._limits = limits
        self._refusal = refusal
        self._known: dict[str, bool] = {}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http" or self._is_local(scope):
            return self._app(scope, receive, send)
        return self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).code = "https_required"
        content_type, body, headers = self._refusal(scope)
        unread = RequestBody(scope, receive, self._limits)
        await send_early(scope, send, unread, 403, content_type, body, headers)

    def _is_local(self, scope: Scope) -> bool:
        host, port = scope.get("server") or ("", None)
        if port is None:
            return True
        if host not in self._known:
            self._known[host] = is_loopback(host)
        return self._known[host]


def surround(
    app: ASGIApp,
    metrics: Metrics,
    limits: BodyLimits,
    *,
    is_protected: bool,
    refusal: RefusalOf = https_required,
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Fold the middleware over `app`."""
    if not is_protected:
        app = Confidential(app, limits, refusal)
    return Identified(SafeHeaders(Contained(app)), metrics)
