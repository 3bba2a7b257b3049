"""Group commit: everything that waits becomes one durable transaction."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from app.errors import Refusal, Unavailable
from app.settings import MIB
from app.store.database import Database, refusal_of
from app.store.threads import Workers, settle

T = TypeVar("T")

BATCH_WRITES = 256
"""Most that one transaction takes, so that the first of it does not wait for long."""

BATCH_BYTES = 16 * MIB
"""Most bytes of bodies in one transaction: what it may hold in memory and in the log."""

Row = dict[str, Any]


@dataclass(eq=False, slots=True)
class Write:
    """What one caller wants committed: a blob, a reference to it, `work` of its own, or all three.

    `work` runs in a savepoint: a refusal that it raises undoes this write's work alone. It must
    do nothing but talk to the database.
    """

    blob: Row | None = None
    reference: Row | None = None
    work: Callable[[Connection], Any] | None = None
    done: asyncio.Future[Any] = field(init=False)

    @property
    def weight(self) -> int:
        """Bytes of the body that this write carries."""
        data = self.blob["data"] if self.blob else None
        return len(data) if data else 0


Apply = Callable[[Connection, Sequence[Write]], list[Any]]
"""Runs a batch in a transaction; an outcome for each write, a Refusal where it is refused."""


Committed = tuple[list[Write], list[Any]]
"""A batch, and what each of it is told."""

GATHER_SECONDS = 0.001
"""How long a batch waits for more."""

READING_TURNS = 6
"""Turns of the loop from octets on a socket to a write that waits."""


class Committer:
    """One thread that commits, one transaction at a time, in the order of submission."""

    def __init__(self, database: Database, apply: Apply) -> None:
        self._database = database
        self._apply = apply
        self._thread = Workers(1, name="consignee-commit")
        self._waiting: deque[Write] = deque()
        self._enough = 1
        self._running: asyncio.Future[Committed] | None = None
        self._starts = False
        self._timer: asyncio.Handle | None = None
        self._closed = False

    async def submit(self, write: Write) -> Any:
        """Commit `write`; returns its outcome once it is durable.

        A caller that is cancelled leaves it in its batch: what is submitted later is committed
        later, so a deletion submitted then undoes it.
        """
        if self._closed:
            raise Unavailable("storage_unavailable", "The store is closed.")
        write.done = asyncio.get_running_loop().create_future()
        self._waiting.append(write)
        self._schedule()
        return await write.done

    async def drain(self) -> None:
        """Wait until nothing waits any more."""
        while self._waiting or self._running is not None:
            if self._running is None:
                await asyncio.sleep(0)
            else:
                await settle(self._running)

    async def close(self) -> None:
        """Commit what waits, then end the thread. Legal twice."""
        self._closed = True
        await self.drain()
        self._thread.close()

    def _schedule(self) -> None:
        """Start a batch, at once if enough wait for it, else when no more can be expected.

        Enough are as many as were answered last: they are about to send more, and the first of
        them to come back would otherwise get a transaction of its own, for which all the others
        would wait. (Not in this very turn of the loop: whoever is ready in it gets into the batch.)
        """
        if self._running is not None or self._starts or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if len(self._waiting) >= self._enough:
            self._cancel_timer()
            self._starts = True
            loop.call_soon(self._start)
        elif self._timer is None:
            self._timer = loop.call_later(GATHER_SECONDS, self._start_after, READING_TURNS)

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
        self._running = self._thread.submit(self._commit, batch)
        self._running.add_done_callback(self._finish)

    def _commit(self, batch: list[Write]) -> Committed:
        try:
            with self._database.writer.begin() as connection:
                return batch, self._apply(connection, batch)
        except BaseException as error:  # noqa: BLE001 - each of those who wait is told of it
            return batch, [_outcome_of(error) for _ in batch]

    def _take(self) -> list[Write]:
        batch: list[Write] = []
        weight = 0
        while self._waiting and len(batch) < BATCH_WRITES:
            weight += self._waiting[0].weight
            if batch and weight > BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    def _finish(self, finished: asyncio.Future[Committed]) -> None:
        self._running = None
        batch, outcomes = finished.result()
        self._enough = len(batch)
        for write, outcome in zip(batch, outcomes, strict=True):
            _tell(write.done, outcome)
        self._schedule()


def _tell(done: asyncio.Future[Any], outcome: Any) -> None:
    if done.cancelled():
        return
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _outcome_of(error: BaseException) -> BaseException:
    """What to tell one waiter; each gets a refusal of its own to raise."""
    if not isinstance(error, SQLAlchemyError):
        return error
    refusal = refusal_of(error)
    refusal.__cause__ = error
    return refusal


def in_savepoint(connection: Connection, work: Callable[[Connection], T]) -> T | Refusal:
    """The outcome of `work`; a refusal, or a broken constraint, undoes what it did alone.

    Any other error ends the transaction: SQLite may have rolled it back already.
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
