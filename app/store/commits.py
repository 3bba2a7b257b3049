"""Group commit: everything that waits becomes one durable transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from app.errors import Refusal, Unavailable
from app.settings import MIB
from app.store.database import Database
from app.store.database_errors import DATABASE_ERRORS, refusal_of
from app.store.threads import settle

T = TypeVar("T")

BATCH_WRITES = 256
"""Most that one transaction takes, so that the first of it does not wait for long."""

BATCH_BYTES = 16 * MIB
"""Most bytes of bodies in one transaction: what it may hold in memory and in the log."""

Row = dict[str, Any]

Joint = Callable[[Connection, Sequence[Any]], list[Any]]
"""Work that is done at once for many: an outcome for each item, a Refusal where it is refused."""


@dataclass(eq=False, slots=True)
class Write:
    """What one caller wants committed: a blob, a reference to it, `work` of its own, or all three.

    `work` runs in a savepoint: a refusal that it raises undoes this write's work alone. It must
    do nothing but talk to the database: it is run again when a transaction is.

    Or an `item` of `joint` work, which is run once for all items of a batch, without a savepoint:
    it must write nothing for an item that it refuses. `size` is the bytes that the item holds.
    """

    blob: Row | None = None
    reference: Row | None = None
    work: Callable[[Connection], Any] | None = None
    joint: Joint | None = None
    item: Any = None
    size: int = 0
    done: asyncio.Future[Any] = field(init=False)

    @property
    def weight(self) -> int:
        """Bytes of the body or the item that this write carries."""
        data = self.blob["data"] if self.blob else None
        return len(data) if data else self.size

    @property
    def looks(self) -> bool:
        """Whether it looks at rows before it writes: then nobody may change them meanwhile."""
        return self.work is not None or self.joint is not None


Apply = Callable[[Connection, Sequence[Write]], list[Any]]
"""Runs a batch in a transaction; an outcome for each write, a Refusal where it is refused."""


GATHER_SECONDS = 0.001
"""How long a batch waits for more."""

READING_TURNS = 6
"""Turns of the loop from octets on a socket to a write that waits."""


class Committer:
    """Commits what is submitted, in that order, as many at a time as the database allows.

    A batch in which some write has work of its own is alone: it begins when all before it have
    ended, and ends before any behind it begins. Blobs and references alone are in nobody's way.
    """

    def __init__(self, database: Database, apply: Apply) -> None:
        self._database = database
        self._apply = apply
        self._waiting: deque[Write] = deque()
        self._enough = 1
        self._running: set[asyncio.Future[list[Any]]] = set()
        self._is_alone = False
        self._starts = False
        self._timer: asyncio.Handle | None = None
        self._closed = False

    async def submit(self, write: Write) -> Any:
        """Commit `write`; returns its outcome once it is durable.

        A caller that is cancelled leaves it in its batch: what is submitted later is committed
        later, so a deletion submitted then (which is work) undoes it.
        """
        if self._closed:
            raise _closed()
        write.done = asyncio.get_running_loop().create_future()
        self._waiting.append(write)
        self._schedule()
        return await write.done

    async def drain(self) -> None:
        """Wait until nothing waits any more."""
        while self._waiting or self._running:
            if self._running:
                await settle(*self._running)
            else:
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Commit what waits, and take no more. Legal twice."""
        self._closed = True
        await self.drain()

    def _schedule(self) -> None:
        """Start a batch, at once if enough wait for it, else when no more can be expected.

        Enough are those that were answered last, who are about to send more: the first to come back
        would otherwise get a transaction of its own, for which all the others would wait. And,
        where one transaction waits for the other, those that waited then: two halves that take
        turns get in each other's way, for what a transaction costs hardly depends on how many are
        in it. (Not in this very turn of the loop: whoever is ready in it gets into the batch.)
        """
        if self._starts or not self._waiting or not self._may_start():
            return
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._enough:
            self._cancel_timer()
            self._starts = True
            loop.call_soon(self._start)
        elif self._timer is None:
            self._timer = loop.call_later(GATHER_SECONDS, self._start_after, READING_TURNS)

    def _may_start(self) -> bool:
        """Whether the next batch is in the way of none that runs."""
        if not self._running:
            return True
        if self._is_alone or len(self._running) >= self._database.parallel:
            return False
        return not self._waiting[0].looks

    def _start_after(self, turns: int) -> None:
        """Let the loop read first what has come: a timer that is due comes before that."""
        if turns:
            self._timer = asyncio.get_running_loop().call_soon(self._start_after, turns - 1)
        else:
            self._start()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self) -> None:
        self._timer = None
        self._starts = False
        batch = self._take()
        self._is_alone = any(write.looks for write in batch)
        running = self._database.write(
            lambda connection: self._apply(connection, batch), alone=self._is_alone
        )
        self._running.add(running)
        running.add_done_callback(lambda finished: self._finish(batch, finished))
        self._schedule()

    def _take(self) -> list[Write]:
        """The next batch; beside others that run, only what may be beside them."""
        batch: list[Write] = []
        weight = 0
        while self._waiting and len(batch) < BATCH_WRITES:
            write = self._waiting[0]
            weight += write.weight
            if (batch and weight > BATCH_BYTES) or (self._running and write.looks):
                break
            batch.append(self._waiting.popleft())
        return batch

    def _finish(self, batch: list[Write], finished: asyncio.Future[list[Any]]) -> None:
        self._running.discard(finished)
        self._enough = len(batch)
        if self._database.parallel == 1:
            self._enough += len(self._waiting)
        for write, outcome in zip(batch, _outcomes_of(batch, finished), strict=True):
            _tell(write.done, outcome)
        self._schedule()


def _outcomes_of(batch: list[Write], finished: asyncio.Future[list[Any]]) -> list[Any]:
    """What to tell each of those who wait for a batch."""
    if finished.cancelled():  # the event loop is ending
        return [_closed() for _ in batch]
    error = finished.exception()
    return finished.result() if error is None else [_outcome_of(error) for _ in batch]


def _closed() -> Unavailable:
    return Unavailable("storage_unavailable", "The store is closed.")


def _tell(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.cancelled():
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _outcome_of(error: BaseException) -> BaseException:
    """What to tell one waiter; each gets a refusal of its own to raise."""
    if not isinstance(error, DATABASE_ERRORS):
        return error
    refusal = refusal_of(error)
    refusal.__cause__ = error
    return refusal


def in_savepoint(connection: Connection, work: Callable[[Connection], T]) -> T | Refusal:
    """The outcome of `work`; a refusal, or a broken constraint, undoes what it did alone.

    Any other error ends the transaction: the database may have rolled it back already.
    """
    savepoint = connection.begin_nested()
    try:
        outcome = work(connection)
    except Refusal as refusal:
        savepoint.rollback()
        return refusal
    except IntegrityError as error:
        savepoint.rollback()
        return refusal_of(error)
    savepoint.commit()
    return outcome
