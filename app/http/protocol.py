"""The HTTP/1.1 parser that ships: uvicorn's httptools protocol, made strict at its edges.

What stays uvicorn's: parsing, the ASGI cycle, keep-alive, pipelining. What this adds is what an
application cannot see from inside ASGI:

* a request head that never becomes whole, or never ends, is refused;
* bytes that are no request, behind a complete one, do not cost that request its answer: the answer
  leaves, the bytes are thrown away, the connection closes (AHP-R17, B07);
* a body that ends early is answered with 400, and a client that half-closes behind a whole
  request still gets its answer;
* what is left to do for a request that has ended is put off (`AFTERWARDS`);
* a long body arrives straight in the memory of whoever reads it (`RECEIVE_INTO`);
* the kernel sends a file (`ZERO_COPY`);
* every answer that ends a connection is followed by the closing in stages of RFC 9112
  section 9.6: send FIN, read on within `drain_bytes` and `drain_seconds`, close. Closing on unread
  bytes would reset the connection, and the answer would be lost with it (AHP-R51, B13).

It runs under `consignee dev`, `consignee serve`, and
`uvicorn app.main:app --http app.http.protocol:ReceiverProtocol`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from app.http.afterwards import AFTERWARDS
from app.http.answers import PROBLEM, STAGED_CLOSE
from app.http.bodies import ALL_THERE, RECEIVE_INTO, announces_body
from app.http.intake import Intake
from app.http.middleware import access_log, new_request_id
from app.http.outflow import Outflow
from app.http.problems import problem
from app.http.streams import ZERO_COPY

if TYPE_CHECKING:
    from asyncio.events import TimerHandle
    from collections.abc import Callable

    from uvicorn._types import ASGI3Application
    from uvicorn.config import Config
    from uvicorn.server import ServerState

LIMITS_KEY = "connection_limits"

STOPPING_KEY = "stopping"
"""Where the lifespan state has what is called when the server begins to stop: what would hold its
requests up to the end of `shutdown_seconds` ends then."""

DRAINING_KEY = "draining"
"""Where it has what waits for all work that no connection waits for."""

RETIRING_KEY = "retiring"
"""Set in it when another process takes over: an answer is the last one of its connection then."""

AFTERWARDS_KEY = "afterwards"
"""Where it has what takes work that is left to do for a request that has ended."""

SENDING_KEY = "file_sending"
"""Where it has the executor whose threads send files; without one nothing is sent so."""

LONG_BYTES = 64 * 1024
"""From here on a body can be received past the parser: shorter ones mostly come with their head."""

HELD_BYTES = 4096
"""The largest write that waits for the next one: longer than any head that this server sends."""

LINGER_SECONDS = 1.0
"""How long a stopping server waits for a client that has its answer to close as well: long enough
for the answer to arrive before a reset could overtake it."""

_TITLES = {400: "Malformed request", 408: "Request too slow", 431: "Request head too large"}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Bounds of one connection, found in the lifespan state under LIMITS_KEY."""

    head_seconds: float = 30.0
    head_bytes: int = 64 * 1024
    drain_bytes: int = 256 * 1024 * 1024
    drain_seconds: float = 30.0


class ReceiverProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits: ConnectionLimits = app_state.get(LIMITS_KEY, ConnectionLimits())
        self._extensions = _extensions(app_state)
        self._wire: asyncio.Transport
        self._outlet: _Outlet
        self._answering: RequestResponseCycle | None = None
        self._head_open = False
        self._head_bytes = 0
        self._fault: str | None = None
        # Of the request that is being read, where its body is a long one.
        self._intake: Intake | None = None
        self._head_timer: TimerHandle | None = None
        # From here on nothing that arrives is taken for a request.
        self._is_over = False
        self._peer_is_done = False
        self._is_stopping = False
        self._discard_left = self._limits.drain_bytes
        self._close_timer: TimerHandle | None = None

    # --- what the event loop calls --------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._wire = transport
        self._outlet = _Outlet(transport, self.loop, self._close_in_stages)
        super().connection_made(self._outlet)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._close_timer is not None:
            self._close_timer.cancel()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        self._wire.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            self._discard(len(data))
            return
        if self._intake is not None and self._intake.is_past_parser:
            self._unset_keepalive_if_required()
            data = self._intake.feed(data)
        was_open = self._head_open
        if data:
            super().data_received(data)
        self._watch_head(len(data) if was_open else 0)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The peer sends no more. True keeps the connection until the answer has left.

        A client that has read the beginning of its answer and then ends its side has gone: a
        stream with nothing to say would learn of it by its next sign of life only.
        """
        self._peer_is_done = True
        answering = self._answering
        if answering is not None and answering.response_started and not self._is_idle():
            self._disconnect()
            return None
        if not self._is_over and not self._is_idle():
            self._take_no_more(400, "malformed_body", "The body ended before its declared length.")
        # Neither event loop can keep one half of a TLS connection open.
        keep = not self._is_idle() and not self.transport.is_closing() and self.scheme == "http"
        if not keep:
            self._outlet.release()
        return keep

    def retire(self) -> None:
        """Let the answer that is under way be the last; one that is still to come will be.

        A connection without any stays for a moment: a request may be on its way.
        """
        if not self._is_idle():
            self.cycle.keep_alive = False

    # --- what the parser calls ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._head_open = True
        super().on_message_begin()
        self.scope["extensions"] = self._extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer is no header: merged, it could pass for one that was judged (RFC 9110
        # section 6.5.1). White space around a value is no part of it (section 5.5), and the
        # parser takes off only what leads.
        if self._head_open:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._head_bytes = 0
        self._stop_head_timer()
        self._fault = self._fault_of_head()
        if self._fault is not None:
            raise ValueError(self._fault)  # the parser turns it into `send_400_response`
        super().on_headers_complete()
        if self.parser.should_upgrade():
            # The offer is declined; what follows it in the same segment is lost to the parser.
            self.cycle.keep_alive = False
        if RETIRING_KEY in self.app_state:
            self.cycle.keep_alive = False
        self._offer_intake()

    def on_body(self, body: bytes) -> None:
        if self._intake is not None:
            self._intake.left -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope["extensions"] = {**self.scope["extensions"], ALL_THERE: {}}

    def _offer_intake(self) -> None:
        """Let a long body of a declared length be received past the parser."""
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self._intake = None
        if length >= LONG_BYTES:
            self._intake = Intake(
                self, self._wire, self.flow, self.cycle, length, self._end_body_past_parser
            )
            into: dict[object, object] = {"into": self._intake.receive}
            self.scope["extensions"] = self._extensions | {RECEIVE_INTO: into}

    def _end_body_past_parser(self) -> None:
        """Go on behind a body that the parser has not seen: it would take a request for that."""
        self.on_message_complete()
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _fault_of_head(self) -> str | None:
        """What is wrong with a head that the parser lets pass."""
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            return "Use HTTP/1.1 or HTTP/1.0."
        names = [name for name, _ in self.headers]
        if version == "1.1" and names.count(b"host") != 1:  # RFC 9112 section 3.2
            return "Send exactly one Host header."
        if self.parser.should_upgrade() and announces_body(self.headers):
            # The parser would take the body for the other protocol, or for a next request.
            return "Offer no other protocol (Upgrade) with a request that has a body."
        return None

    # --- what uvicorn calls ---------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request; the requests before it have their own answers first."""
        del msg
        message = self._fault or "This is no well-formed request of HTTP/1.1."
        self._take_no_more(400, "malformed_request", message)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        if cycle.scope["method"] == "GET":
            app = self._offer_outflow(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _offer_outflow(
        self, cycle: RequestResponseCycle, app: ASGI3Application
    ) -> ASGI3Application:
        """Let the answer to a GET be sent from a file; TLS would have to see what is sent."""
        threads = self.app_state.get(SENDING_KEY)
        if threads is None or self._wire.get_extra_info("sslcontext") is not None:
            return app
        outflow = Outflow(cycle, self._wire, self._outlet.release, threads)
        cycle.scope["extensions"] = {**cycle.scope["extensions"], ZERO_COPY: {}}

        async def sending_files(scope: Any, receive: Any, send: Any) -> None:
            del send
            sending: Any = outflow.send
            await app(scope, receive, sending)

        return sending_files

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.debug("An offer to switch protocols is ignored.")  # RFC 9110 section 7.8

    def shutdown(self) -> None:
        self._is_stopping = True
        if self._is_idle() or self.transport.is_closing():
            self._close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    # --- the head -------------------------------------------------------------------------------

    def _watch_head(self, more: int) -> None:
        """Bound the head that is being read in bytes, of which there are so many more, and time.

        The segment that it begins in is not counted: a request before it may fill most of that.
        """
        if self._is_over:
            return
        if self._head_open:
            self._head_bytes += more
        if self._head_bytes > self._limits.head_bytes:
            most = self._limits.head_bytes
            self._take_no_more(431, "head_too_large", f"Keep the head under {most} bytes.")
        elif self._head_timer is None and (self._head_open or self._is_idle()):
            # Blank lines count as the beginning of a head: they stop the keep-alive timer.
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_seconds, self._head_timed_out)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self) -> None:
        if self._head_open:
            self._take_no_more(408, "too_slow", "The request's head did not arrive in time.")
        else:
            self._close()

    # --- the end --------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        """Whether every request that was read has its answer."""
        newest = self._newest()
        return newest is None or newest.response_complete

    def _newest(self) -> RequestResponseCycle | None:
        return self.cycle  # None before the first request, whatever its annotation says

    def _take_no_more(self, status: int, code: str, message: str) -> None:
        """Read no further request, and refuse the unfinished one once its turn has come.

        Only the request that is being answered can get the refusal: behind others it would pass
        for an answer to one of them, so there the connection closes after theirs.
        """
        self._is_over = True
        self._stop_head_timer()
        last = None if self._is_idle() else self._last_whole()
        if last is not None:
            last.keep_alive = False
            self.flow.pause_reading()
            return
        if self._is_idle() or not self.cycle.response_started:
            self._refuse(status, code, message)
        self._disconnect()
        self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer past the ASGI cycle, which never learns of what is no request."""
        request_id = new_request_id()
        extra = {"request_id": request_id, "status": status, "code": code}
        access_log.info("request", extra=extra)
        self.transport.write(_answer(status, code, message, request_id))

    def _last_whole(self) -> RequestResponseCycle | None:
        """The newest request that is there in full; an unfinished one in the queue is dropped."""
        if not self.cycle.more_body:
            return self.cycle
        if self.cycle is self._answering:
            return None
        self.pipeline.popleft()
        return self.pipeline[0][0] if self.pipeline else self._answering

    def _disconnect(self) -> None:
        """Tell the application that the rest of the body will not come."""
        if not self._is_idle():
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._give_back()

    def _give_back(self) -> None:
        if self._intake is not None:
            self._intake.give_back()

    def _close(self) -> None:
        self._outlet.release()
        self._wire.close()

    def _close_in_stages(self) -> None:
        self._give_back()
        if self._wire.is_closing():
            return
        self._is_over = True
        self._stop_head_timer()
        if self._peer_is_done:
            self._close()
            return
        self._close_timer = self.loop.call_later(self._patience(), self._close)
        self.flow.resume_reading()
        self._send_fin()

    def _patience(self) -> float:
        """How long to read on. A server that stops does not wait for clients that only linger."""
        newest = self._newest()
        if self._is_stopping and (newest is None or not newest.more_body):
            return min(LINGER_SECONDS, self._limits.drain_seconds)
        return self._limits.drain_seconds

    def _send_fin(self) -> None:
        try:
            if self._wire.can_write_eof():
                self._wire.write_eof()
        except OSError:  # the peer has reset the connection meanwhile
            self._wire.abort()

    def _discard(self, count: int) -> None:
        self._discard_left -= count
        if self._discard_left < 0:
            self._close()


class _Outlet(asyncio.Transport):
    """The transport as the ASGI cycle sees it.

    `close` begins the closing, and no more. A small write is held for the one that follows in the
    same turn of the loop, so that the head and the body of an answer leave in one segment.
    """

    def __init__(
        self,
        wire: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        begin_closing: Callable[[], None],
    ) -> None:
        super().__init__()
        self._wire = wire
        self._loop = loop
        self._begin_closing = begin_closing
        self._is_closing = False
        self._held: bytes | bytearray | memoryview | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:  # behind FIN there is no writing
            return
        if self._held is not None:
            held, self._held = self._held, None
            self._wire.writelines((held, data))
        elif len(data) > HELD_BYTES:
            self._wire.write(data)
        else:
            self._held = data
            self._loop.call_soon(self.release)

    def release(self) -> None:
        """Write what is held. Who closes the wire does this first: the answer would be lost."""
        if self._held is not None:
            held, self._held = self._held, None
            self._wire.write(held)

    def close(self) -> None:
        if not self._is_closing:
            self.release()
            self._is_closing = True
            self._begin_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self._is_closing or self._wire.is_closing()

    def pause_reading(self) -> None:
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._wire.resume_reading()


def _extensions(app_state: dict[str, Any]) -> dict[str, dict[object, object]]:
    """What every request of a server with this lifespan state offers beside ASGI's own."""
    putting_off = app_state.get(AFTERWARDS_KEY)
    offered: dict[str, dict[object, object]] = {STAGED_CLOSE: {}}
    return offered if putting_off is None else offered | {AFTERWARDS: {"do": putting_off}}


def _answer(status: int, code: str, message: str, request_id: str) -> bytes:
    """A whole answer with a problem document, as it goes over the wire."""
    body = problem(status, _TITLES[status], code, message)
    headers = {
        b"content-type": PROBLEM,
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
        b"x-content-type-options": b"nosniff",
        b"cache-control": b"no-store",
        b"x-request-id": request_id.encode("ascii"),
    }
    lines = [b"%s: %s\r\n" % pair for pair in headers.items()]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", body])
