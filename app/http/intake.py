"""The rest of a long body, received into its reader's own memory instead of through the parser.

On its way through the parser an octet is copied five times before it lies where it is hashed and
written from; a body of a gigabyte spends more time in that than in the network. The parser has
nothing to do there: the head says how many octets follow. So while a reader waits, an `Intake`
takes the place of the connection's protocol, lets the socket be read into the reader's memory, and
gives the place back with every answer. It never asks for an octet behind the body.

Once a reader has had some octets so, the parser has not seen them: `feed` counts what arrives while
nobody waits, and a fresh parser begins behind the body.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message
    from uvicorn.protocols.http.flow_control import FlowControl
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from app.http.protocol import ReceiverProtocol

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Intake(asyncio.BufferedProtocol):
    """Of one request with a declared length: `left` octets are still to come.

    `connection` is the protocol whose place it takes on `wire`; it takes from `left` what it is
    given by the parser or by `feed`. `end_of_body` is called when the last octet is there, unless
    the parser saw it.
    """

    def __init__(
        self,
        connection: ReceiverProtocol,
        wire: asyncio.Transport,
        flow: FlowControl,
        cycle: RequestResponseCycle,
        length: int,
        end_of_body: Callable[[], None],
    ) -> None:
        self.left = length
        self.is_past_parser = False
        self._connection = connection
        self._wire = wire
        self._flow = flow
        # The cycle has the scope, which has this: a circle would keep all three for a while.
        self._cycle: RequestResponseCycle = weakref.proxy(cycle)
        self._end_of_body = end_of_body
        self._space: memoryview | None = None
        self._filled = 0
        self._arrival: asyncio.Future[None]

    async def receive(self, space: memoryview) -> Message:
        """The extension RECEIVE_INTO: as the cycle's own `receive`, but into `space`."""
        cycle = self._cycle
        self._continue()
        filled = 0
        if cycle.body:
            filled = self._take_kept(space)
        elif cycle.more_body and not self._is_gone():
            filled = await self._fill(space)
        if filled:
            more = cycle.more_body or bool(cycle.body)
            return {"type": "http.request", "filled": filled, "more_body": more}
        return {"filled": 0, **await cycle.receive()}

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body while nobody waits for it; the rest is given back."""
        body, rest = data[: self.left], data[self.left :]
        self._connection.on_body(body)
        self._end_if_whole()
        return rest

    def give_back(self) -> None:
        """Let the connection's protocol have its place again, and whoever waits go on.

        Reading pauses until somebody asks for more of the body. Legal twice, and at any time.
        """
        if self._space is None:
            return
        self._space = None
        if not self._wire.is_closing():
            self._flow.pause_reading()
            self._wire.set_protocol(self._connection)
            if self._end_if_whole():
                self._flow.resume_reading()
        self._wake()

    # --- what the event loop calls while a reader waits -----------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next octets go: never more than belong to the body."""
        del sizehint
        assert self._space is not None
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        """So many octets have arrived. More may, until the reader has its turn."""
        assert self._space is not None
        self._filled += nbytes
        self.left -= nbytes
        rest = self._space[nbytes:]
        if rest:
            self._space = rest
            self._wake()
        else:
            self.give_back()

    def eof_received(self) -> bool | None:
        keep = self._connection.eof_received()
        self.give_back()
        return keep

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self.give_back()

    def resume_writing(self) -> None:
        """An answer before this request's has left; nothing else is written meanwhile."""
        self._connection.resume_writing()

    # --------------------------------------------------------------------------------------------

    def _is_gone(self) -> bool:
        return self._cycle.disconnected or self._cycle.response_complete

    def _continue(self) -> None:
        if self._cycle.waiting_for_100_continue and not self._cycle.transport.is_closing():
            self._cycle.transport.write(CONTINUE)
            self._cycle.waiting_for_100_continue = False

    def _take_kept(self, space: memoryview) -> int:
        """What came with the head, or while nobody waited."""
        kept = self._cycle.body
        count = min(len(kept), len(space))
        space[:count] = kept[:count]
        del kept[:count]
        return count

    async def _fill(self, space: memoryview) -> int:
        self._filled = 0
        self._take_place(space[: self.left])
        try:
            await self._arrival
        except asyncio.CancelledError:
            self._cycle.body += space[: self._filled]  # for the next one who asks
            raise
        finally:
            self.give_back()
        return self._filled

    def _take_place(self, space: memoryview) -> None:
        self._space = space
        self._arrival = asyncio.get_running_loop().create_future()
        self.is_past_parser = True
        # A transport chooses how it reads when it begins to.
        self._flow.pause_reading()
        self._wire.set_protocol(self)
        self._flow.resume_reading()

    def _wake(self) -> None:
        if not self._arrival.done():
            self._arrival.set_result(None)

    def _end_if_whole(self) -> bool:
        if self.left:
            return False
        self.is_past_parser = False
        self._end_of_body()
        return True
