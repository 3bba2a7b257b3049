"""Group commit: everything that waits becomes one durable transaction."""

from __future__ import annotations

import asyncio
import time
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

GATHER_STEPS = 10
GATHER_STEP_SECONDS = 0.0001
"""A batch waits a millisecond at the most, a third of what its sync takes on a usual disk."""


class Committer:
    """One thread that commits, one transaction at a time, in the order of submission."""

    def __init__(self, database: Database, apply: Apply) -> None:
        self._database = database
        self._apply = apply
        self._thread = Workers(1, name="consignee-commit")
        self._waiting: deque[Write] = deque()
        self._last = 1
        self._running: asyncio.Future[Committed] | None = None
        self._scheduled = False
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
        # Not at once: whoever is ready in this turn of the loop gets into the same batch.
        if self._running is None and not self._scheduled and self._waiting:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._start)

    def _start(self) -> None:
        self._scheduled = False
        self._running = self._thread.submit(self._commit)
        self._running.add_done_callback(self._finish)

    def _commit(self) -> Committed:
        self._gather()
        batch = self._take()
        try:
            with self._database.writer.begin() as connection:
                return batch, self._apply(connection, batch)
        except BaseException as error:  # noqa: BLE001 - each of those who wait is told of it
            return batch, [_outcome_of(error) for _ in batch]

    def _gather(self) -> None:
        """Wait for those who were answered last: what they send next belongs into one batch.

        Without it, the first of them to come back would get a transaction of its own, and all the
        others would wait for it.
        """
        for _ in range(GATHER_STEPS):
            if len(self._waiting) >= self._last:
                return
            time.sleep(GATHER_STEP_SECONDS)

    def _take(self) -> list[Write]:
        batch: list[Write] = []
        weight = 0
        while self._waiting and len(batch) < BATCH_WRITES:
            weight += self._waiting[0].weight
            if batch and weight > BATCH_BYTES:
                break
            batch.append(self._waiting.popleft())
        self._last = len(batch)
        return batch

    def _finish(self, finished: asyncio.Future[Committed]) -> None:
        self._running = None
        for write, outcome in zip(*finished.result(), strict=True):
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
