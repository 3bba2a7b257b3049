"""`POST` on an upload path: principal, framing, bytes, commit, receipt.

The order of checks is the order of the statuses: 405 method, 401 and 403 credential, 400 framing,
413 declared length, and only then the body (AHP-R15 to R33, R52). A refusal is decided from the
head alone, so that a client that waits for `100 Continue` never sends its body.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.errors import Disconnected, Forbidden, Refusal, Unauthenticated
from app.http.answers import JSON, PROBLEM, send_early, send_whole
from app.http.bodies import BodyLimits, RequestBody
from app.http.framing import parse_framing
from app.http.middleware import RequestRecord, record_of
from app.http.problems import MethodNotAllowed, headers_of, problem_of, status_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.auth.authenticator import Authenticator
    from app.auth.principals import Principal
    from app.http.metrics import Metrics
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.records import Reference


class UploadEndpoint:
    """The ASGI application of one upload path."""

    def __init__(
        self,
        path: str,
        settings: Settings,
        authenticator: Authenticator,
        store: ContentStore,
        metrics: Metrics,
    ) -> None:
        self._path = path
        self._limit = int(settings.max_upload_bytes)
        self._body_limits = BodyLimits.of(settings)
        self._authenticator = authenticator
        self._store = store
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = RequestBody(scope, receive, self._body_limits)
        record = record_of(scope)
        started = time.perf_counter()
        try:
            reference = await self._receive(scope, body, record)
        except Disconnected as gone:
            self._count(record, gone.code)
        except Refusal as refusal:
            self._count(record, refusal.code)
            await self._refuse(scope, send, body, refusal)
        else:
            record.ref = reference.ref
            self._count(record, "confirmed", reference.size, time.perf_counter() - started)
            await send_whole(send, 201, JSON, receipt_of(reference))
        finally:
            record.received = body.received

    async def _receive(self, scope: Scope, body: RequestBody, record: RequestRecord) -> Reference:
        if scope["method"] != "POST":
            raise MethodNotAllowed("POST")
        headers = scope["headers"]
        principal = await self._authenticate(headers, record)
        declared = parse_framing(headers, limit=self._limit)
        with self._metrics.in_flight.track_inprogress():
            return await self._store.receive(
                aiter(body),
                scope=principal.scope,
                principal=principal.name,
                size=declared.size,
                sha256=declared.sha256,
            )

    async def _authenticate(
        self, headers: list[tuple[bytes, bytes]], record: RequestRecord
    ) -> Principal:
        principal = await self._authenticator.authenticate(headers)
        record.principal = principal.name
        principal.require("ahp.upload")
        return principal

    def _count(
        self, record: RequestRecord, outcome: str, size: int = 0, seconds: float | None = None
    ) -> None:
        self._metrics.count_upload(outcome)
        if seconds is None:
            record.code = outcome
            return
        self._metrics.upload_bytes.inc(size)
        self._metrics.upload_seconds.observe(seconds)

    async def _refuse(self, scope: Scope, send: Send, body: RequestBody, refusal: Refusal) -> None:
        headers = headers_of(refusal)
        if isinstance(refusal, Unauthenticated | Forbidden):
            challenge = self._authenticator.challenge(refusal, resource_path=self._path)
            headers.append((b"www-authenticate", challenge.encode("ascii")))
        await send_early(
            scope, send, body, status_of(refusal), PROBLEM, problem_of(refusal), headers
        )


def receipt_of(reference: Reference) -> bytes:
    """The canonical receipt: exactly `ref`, `size` and `sha256` (AHP-R25)."""
    ref, size, sha256 = reference.ref, reference.size, reference.sha256
    return f'{{"ref":"{ref}","size":{size},"sha256":"{sha256}"}}'.encode("ascii")
