"""`POST` on an upload path: principal, framing, bytes, commit, receipt.

After method and credential come 400 for the framing and 413 for the declared length, and only
then the body (AHP-R15 to R33, R52).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from app.ahp.endpoints import Endpoint, Request
from app.http.answers import JSON
from app.http.framing import parse_framing
from app.http.resources import Answer

if TYPE_CHECKING:
    from app.auth.authenticator import Authenticator
    from app.http.metrics import Metrics
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.records import Reference


class UploadEndpoint(Endpoint):
    """The ASGI application of one upload path."""

    permission = "ahp.upload"
    action = "reference.store"

    def __init__(
        self,
        path: str,
        settings: Settings,
        authenticator: Authenticator,
        store: ContentStore,
        metrics: Metrics,
    ) -> None:
        super().__init__(path, settings, authenticator)
        self._limit = int(settings.max_upload_bytes)
        self._store = store
        self._metrics = metrics

    async def answer(self, request: Request) -> Answer:
        """Store the body and give its receipt. Raises Refusal."""
        declared = parse_framing(request.headers, limit=self._limit)
        with self._metrics.in_flight.track_inprogress():
            reference = await self._store.receive(
                request.body,
                scope=request.principal.scope,
                principal=request.principal.name,
                size=declared.size,
                sha256=declared.sha256,
            )
        request.record.ref = reference.ref
        request.record.note(ref=reference.ref, sha256=reference.sha256, bytes=reference.size)
        self._confirm(reference.size, time.perf_counter() - request.started)
        return Answer(201, JSON, receipt_of(reference))

    def count(self, outcome: str) -> None:
        """One upload more that ended so."""
        self._metrics.count_upload(outcome)

    def _confirm(self, size: int, seconds: float) -> None:
        self.count("confirmed")
        self._metrics.upload_bytes.inc(size)
        self._metrics.upload_seconds.observe(seconds)


def receipt_of(reference: Reference) -> bytes:
    """The canonical receipt: exactly `ref`, `size` and `sha256` (AHP-R25)."""
    ref, size, sha256 = reference.ref, reference.size, reference.sha256
    return f'{{"ref":"{ref}","size":{size},"sha256":"{sha256}"}}'.encode("ascii")
