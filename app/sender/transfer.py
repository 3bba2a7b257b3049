"""One upload: the octets of a snapshot go to an endpoint, and its receipt comes back.

    POST, the exact URL · raw octets with their length and digest · 201 with a matching receipt

Everything else fails: another status, a redirect, another receipt (AHP-S03 to S05, S14 to S19).
What failed on the way is tried again while the budget lasts, each time as a new upload: whether
a lost answer was a receipt nobody can know, and a reference that was never learned of is nobody's
(AHP-S20). A 201 is no acknowledgement of an event (AHP-S49).
"""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TYPE_CHECKING, Final, Self

import httpx

from app import __version__
from app.sender.budget import Budget
from app.sender.errors import AuthorizationError, SendError, SourceError, TransferError
from app.sender.files import FileRange
from app.sender.receipts import Receipt, read_receipt
from app.sender.sources import Source
from app.sender.spool import Snapshot, Spool, SteadyFile
from app.sender.wire import Shortcut, uploading_client

if TYPE_CHECKING:
    from app.sender.authorization import Authorization
    from app.sender.config import UploadConfiguration

__all__ = ["Progress", "Receipt", "Sender"]

RETRIES: Final = 2
"""How often an upload that failed on the way is made again."""

FIRST_PAUSE_SECONDS: Final = 0.2
"""The pause before the first retry, on average; each further one is twice as long."""

ASK_FIRST_BYTES: Final = 1024 * 1024
"""From here on a request without credential asks before it sends: it is likely to be refused."""

Progress = Callable[[int, int], None]
"""Is told how many bytes of the current attempt have been handed to the network, of how many."""

_HEADER_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?")
_TRY_AGAIN: Final = frozenset({429, 502, 503, 504})
_WITHOUT_TIMEOUTS: Final = {"connect": None, "read": None, "write": None, "pool": None}
_RETRY_AFTER = re.compile(r"[0-9]{1,6}")

_REFUSALS: Final = {
    400: ("framing", "The receiver refused the request as malformed, or the bytes were damaged."),
    404: ("not_found", "The receiver knows no such upload route; correct the endpoint."),
    408: ("too_slow", "The receiver gave up waiting for the bytes; send over a faster line."),
    413: ("too_large", "The receiver takes no body of this size; send less, or raise its limit."),
    429: ("rate_limited", "The receiver has too much to do; send again later."),
    507: ("receiver_full", "The receiver has no room for the bytes; tell its operator."),
}


class Refused(AuthorizationError):
    """A 401: no credential, or one that the receiver does not take. `challenge` is what it asks."""

    def __init__(self, challenge: str) -> None:
        super().__init__(
            "unauthorized", "The receiver does not take this credential; give one for it."
        )
        self.challenge = challenge


class Sender:
    """Uploads to any number of receivers, at once or one after another.

    `authorization` gives the credential of each endpoint. Without `client` each upload has a
    client of its own, which uses no proxy of the environment, keeps no connection, and notices an
    early answer while it sends; `trust` are its certificate authorities. A `client` that is lent
    is not closed; its own headers, cookies and auth never reach an upload (AHP-S48).
    """

    def __init__(
        self,
        authorization: Authorization,
        *,
        client: httpx.AsyncClient | None = None,
        trust: ssl.SSLContext | None = None,
        retries: int = RETRIES,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
    ) -> None:
        self._authorization = authorization
        self._lent = client
        self._trust = trust
        self._retries = retries
        self._first_pause = first_pause_seconds

    async def upload(
        self,
        source: Source | Snapshot,
        configuration: UploadConfiguration,
        *,
        budget: Budget | None = None,
        progress: Progress | None = None,
    ) -> Receipt:
        """Have `source` confirmed by one receiver, within the configured time and `budget`.

        A source is read here if nobody has, and stays open: whoever made it closes it. Raises
        SendError; a cancelled upload sends no further byte.
        """
        seconds = configuration.timeout_ms / 1000
        own = Budget(seconds) if budget is None else budget.part(seconds)
        async with own.limit():
            snapshot = await _snapshot_of(source, configuration.max_bytes, own)
            upload = _Upload(snapshot, configuration, progress)
            return await self._authorized(upload, own)

    async def aclose(self) -> None:
        """Nothing is open between uploads, so that there is nothing to close. Legal twice."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _authorized(self, upload: _Upload, budget: Budget) -> Receipt:
        """With the first credential, and after a 401 with at most one other (AHP-S11)."""
        authorize = self._authorization.credential
        try:
            credential = await authorize(upload.configuration, None, budget)
            return await self._with_retries(upload, credential, budget)
        except Refused as refused:
            challenge = refused.challenge
        credential = await authorize(upload.configuration, challenge, budget)
        if credential is None:
            raise Refused(challenge)
        return await self._with_retries(upload, credential, budget)

    async def _with_retries(
        self, upload: _Upload, credential: str | None, budget: Budget
    ) -> Receipt:
        pause = self._first_pause
        for _ in range(self._retries):
            try:
                return await self._attempt(upload, credential)
            except TransferError as error:
                wait = error.retry_after or pause * random.uniform(0.5, 1.5)  # noqa: S311
                if not error.transient or wait >= budget.remaining():
                    raise
            await asyncio.sleep(wait)
            pause *= 2
        return await self._attempt(upload, credential)

    async def _attempt(self, upload: _Upload, credential: str | None) -> Receipt:
        if self._lent is not None:
            return await upload.attempt(self._lent, credential, Shortcut())
        # One client for each: httpcore keeps the connection of a request that was cancelled in
        # the wrong moment, and closes it with its client.
        shortcut = Shortcut()
        async with uploading_client(self._trust_for(upload.configuration), shortcut) as client:
            return await upload.attempt(client, credential, shortcut)

    def _trust_for(self, configuration: UploadConfiguration) -> ssl.SSLContext:
        if self._trust is None and not configuration.is_encrypted:
            return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # trusts nobody, and is not asked
        if self._trust is None:  # reading all the authorities takes its time
            self._trust = httpx.create_ssl_context()
        return self._trust


class _Upload:
    """The same bytes for the same endpoint, as often as it takes."""

    def __init__(
        self,
        snapshot: Snapshot,
        configuration: UploadConfiguration,
        progress: Progress | None,
    ) -> None:
        self.configuration = configuration
        self._snapshot = snapshot
        self._progress = progress

    async def attempt(
        self, client: httpx.AsyncClient, credential: str | None, shortcut: Shortcut
    ) -> Receipt:
        """One request, and its receipt. Raises TransferError, SourceError, AuthorizationError."""
        body = _Body(self._snapshot, self._progress, shortcut)
        request = self._request(body, credential)
        try:
            # Built by hand, so that nothing of a lent client's defaults is in it.
            response = await client.send(request, stream=True, auth=None, follow_redirects=False)
            try:
                return await self._confirmed(response, body)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise _on_the_way(error) from None
        finally:
            await body.aclose()

    def _request(self, body: _Body, credential: str | None) -> httpx.Request:
        url = httpx.URL(self.configuration.endpoint)
        extensions: dict[str, object] = {"timeout": _WITHOUT_TIMEOUTS}
        if url.raw_path != self.configuration.target:  # httpx tidies what must stay as it is
            extensions["target"] = self.configuration.target
        return httpx.Request(
            "POST", url, headers=self._headers(credential), stream=body, extensions=extensions
        )

    def _headers(self, credential: str | None) -> list[tuple[str, str]]:
        size = self._snapshot.size
        headers = [
            ("Host", self.configuration.host),
            ("User-Agent", f"consignee/{__version__}"),
            ("Accept", "application/json"),
            ("Content-Type", "application/octet-stream"),
            ("Content-Length", str(size)),
            ("AHP-Content-SHA256", self._snapshot.sha256),
        ]
        if credential is not None:
            headers.append(("Authorization", _require_header_value(credential)))
        elif size >= ASK_FIRST_BYTES:
            headers.append(("Expect", "100-continue"))
        return headers

    async def _confirmed(self, response: httpx.Response, body: _Body) -> Receipt:
        if response.status_code != 201:
            raise _refusal(response)
        if not body.complete:
            raise TransferError(
                "early_receipt",
                "The receiver confirmed bytes that it had not been sent yet; tell its operator.",
                status=201,
            )
        receipt = await read_receipt(response, self._snapshot)
        await body.require_unchanged()
        return receipt


class _Body(httpx.AsyncByteStream):
    """The octets of one request, and whether all of them were handed to the network."""

    def __init__(self, snapshot: Snapshot, progress: Progress | None, shortcut: Shortcut) -> None:
        self.complete = False
        self._snapshot = snapshot
        self._pieces: AsyncGenerator[FileRange | bytes, None] | None = None
        self._in_place: SteadyFile | None = None
        self._size = snapshot.size
        self._progress = progress
        self._shortcut = shortcut
        self._sent = 0

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._progress is not None:
            self._progress(self._sent, self._size)
        if self._pieces is None:  # only now, with the head sent, is known which way they can go
            self._pieces = self._begun()
        try:
            part = await anext(self._pieces)
        except StopAsyncIteration:
            self._require(self._sent == self._size)
            self.complete = True
            raise
        piece = self._shortcut.stand_in(part) if isinstance(part, FileRange) else part
        self._sent += len(piece)
        self._require(self._sent <= self._size)
        return piece

    def _require(self, as_declared: bool) -> None:
        if not as_declared:
            raise SourceError(
                "changed", "The source gave other bytes than it was hashed with; send it again."
            )

    def _begun(self) -> AsyncGenerator[FileRange | bytes, None]:
        snapshot = self._snapshot
        if not self._shortcut.is_open:
            return snapshot.read()
        if isinstance(snapshot, Spool):
            return snapshot.parts()
        if isinstance(snapshot, SteadyFile) and snapshot.is_settled:
            self._in_place = snapshot
            return snapshot.parts()
        return snapshot.read()

    async def require_unchanged(self) -> None:
        """Raise SourceError for a file that was written to while the network took its bytes."""
        if self._in_place is not None:
            await self._in_place.require_unchanged()

    async def aclose(self) -> None:
        """Give up what is still to be read."""
        if self._pieces is not None:
            await self._pieces.aclose()


async def _snapshot_of(source: Source | Snapshot, max_bytes: int, budget: Budget) -> Snapshot:
    if isinstance(source, Source):
        return await source.snapshot(max_bytes=max_bytes, budget=budget)
    if source.size > max_bytes:
        raise SourceError(
            "too_large", f"This receiver is configured for at most {max_bytes} bytes (maxBytes)."
        )
    return source


def _require_header_value(credential: str) -> str:
    """AHP-S33: a line break in it would begin another header."""
    if not _HEADER_VALUE.fullmatch(credential):
        raise AuthorizationError(
            "credential_invalid", "The credential holds characters that no header may have."
        )
    return credential


def _refusal(response: httpx.Response) -> SendError:
    status = response.status_code
    if status == 401:
        return Refused(response.headers.get("www-authenticate", ""))
    if status == 403:
        return AuthorizationError(
            "forbidden", "The receiver knows this credential, and does not let it upload."
        )
    code, message = _REFUSALS.get(status) or _unexpected(response)
    transient = status in _TRY_AGAIN
    return TransferError(
        code, message, status=status, transient=transient, retry_after=_retry_after(response)
    )


def _unexpected(response: httpx.Response) -> tuple[str, str]:
    status = response.status_code
    if 300 <= status <= 399:
        return "redirected", "The receiver answered with a redirect; configure its exact endpoint."
    if response.is_success:
        return "not_confirmed", f"The receiver answered {status}, which confirms nothing."
    return "unexpected_status", f"The receiver answered {status}; tell its operator."


def _retry_after(response: httpx.Response) -> float | None:
    value = response.headers.get("retry-after", "")
    return float(value) if _RETRY_AFTER.fullmatch(value) else None


def _on_the_way(error: httpx.TransportError) -> TransferError:
    if _is_certificate_failure(error):
        return TransferError(
            "certificate", "The receiver's certificate does not verify; nothing was sent to it."
        )
    if isinstance(error, httpx.ConnectError):
        return TransferError("unreachable", "The receiver cannot be reached.", transient=True)
    return TransferError(
        "connection_lost",
        "The connection ended before the receiver's answer; the bytes are not confirmed.",
        transient=True,
    )


def _is_certificate_failure(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
