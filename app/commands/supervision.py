"""Several worker processes behind one port: started, replaced, renewed, ended.

The parent holds the listening socket and answers nothing itself. Each worker has that socket, too,
so that a connection which nobody has accepted yet is lost with none of them, and a pipe to the
parent, on which it tells that it serves or why it cannot, and is told to retire.

SIGTERM and SIGINT end all of them in order. SIGHUP renews them one by one: the new one serves
before the old one retires, and the old one has ended before the next begins.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection as pipes
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Final

from app.server import ENDING_SIGNALS, ServerError
from app.settings import SettingsError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

STABLE_SECONDS: Final = 10.0
"""A worker that lived so long did not die of its start; it is replaced at once."""

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
"""Pauses before a worker is replaced begin with the one and double up to the other, for as long as
they die soon after their start."""

START_ATTEMPTS: Final = 5
"""When so many starts have failed in a row and nobody serves, the parent gives up."""

START_SECONDS: Final = 300.0
"""A worker that does not serve after this is killed, and counts as one that cannot start."""

MARGIN_SECONDS: Final = 10.0
"""How much longer than it may take the end of a worker is waited for before it is killed."""

SERVING: Final = "serving"
"""What a worker tells once it answers requests."""

RETIRE: Final = "retire"
"""What it is told when another one has taken its place."""

logger = logging.getLogger("consignee.server")


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Why a worker cannot serve; `wrong` when it is the configuration that is to blame."""

    message: str
    wrong: bool

    def error(self) -> Exception:
        """The same, to be raised."""
        return SettingsError(self.message) if self.wrong else ServerError(self.message)


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process; `link` is the parent's end of its pipe."""

    process: SpawnProcess
    link: Connection
    began: float
    is_serving: bool = False
    is_retiring: bool = False
    failure: StartFailed | None = None
    kill_at: float = float("inf")
    is_told: bool = True

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid or 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What the parent does with its workers.

    `start` starts one, which has the other end of a pipe; `reload` is called before they are
    renewed, and gives what is wrong with the configuration that the new ones would have.
    `on_serving` is called once all serve for the first time, `on_ending` once no more connections
    are to be taken, `on_ended` with the id of each process that is gone.
    """

    count: int
    shutdown_seconds: float
    start: Callable[[Connection], SpawnProcess]
    reload: Callable[[], str | None]
    on_serving: Callable[[], None]
    on_ending: Callable[[], None]
    on_ended: Callable[[int], None]


def supervise(plan: Plan) -> None:
    """Keep `plan.count` workers until a signal ends them.

    Raises ServerError or SettingsError when they cannot be started, or not any more.
    """
    resource_tracker.ensure_running()
    with _signals() as inbox:
        supervisor = Supervisor(plan)
        try:
            supervisor.begin()
            while supervisor.is_needed:
                supervisor.round(inbox)
        finally:
            supervisor.end()


def start_process(target: Callable[..., None], *arguments: object) -> SpawnProcess:
    """A fresh Python process that does `target`; signals wait until it is ready for them."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """A socket on which the numbers of the signals arrive that this module is about."""
    inbox, outbox = socket.socketpair()
    numbers = (*ENDING_SIGNALS, signal.SIGHUP)
    with inbox, outbox:
        inbox.setblocking(False)
        outbox.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        waking = signal.set_wakeup_fd(outbox.fileno(), warn_on_full_buffer=False)
        try:
            yield inbox
        finally:
            signal.set_wakeup_fd(waking)
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True)
class Supervisor:
    """The workers, and what is to be done about them. All of it happens in `round`."""

    plan: Plan
    workers: list[Worker] = field(default_factory=list)
    _missing: list[float] = field(default_factory=list)
    _outgoing: deque[Worker] = field(default_factory=deque)
    _successor: Worker | None = None
    _failures: int = 0
    _is_announced: bool = False
    _is_ending: bool = False
    _end_at: float = float("inf")

    def begin(self) -> None:
        """Start all workers."""
        for _ in range(self.plan.count):
            self._start()

    @property
    def is_needed(self) -> bool:
        """Whether there is anything left to look after."""
        return bool(self.workers) or not self._is_ending

    def round(self, inbox: socket.socket) -> None:
        """Wait until something happens, and see to it."""
        told = {worker.link: worker for worker in self.workers if worker.is_told}
        ended = {worker.process.sentinel: worker for worker in self.workers}
        ready = pipes.wait([inbox, *told, *ended], self._patience())
        if inbox in ready:
            self._heed(inbox)
        for link in told.keys() & ready:
            self._hear(told[link])
        for sentinel in ended.keys() & ready:
            self._bury(ended[sentinel])
        self._do_what_is_due()

    def end(self) -> None:
        """End every worker that is left, whatever it is doing."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + self.plan.shutdown_seconds + MARGIN_SECONDS
        for worker in [*self.workers]:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
            self._forget(worker)

    # --- what happens ---------------------------------------------------------------------------

    def _heed(self, inbox: socket.socket) -> None:
        with suppress(BlockingIOError):
            for number in inbox.recv(256):
                if number == signal.SIGHUP:
                    self._renew()
                else:
                    self._end_in_order(signal.Signals(number))

    def _hear(self, worker: Worker) -> None:
        try:
            said = worker.link.recv()
        except (EOFError, OSError):
            worker.is_told = False  # it ends
            return
        if isinstance(said, StartFailed):
            worker.failure = said
            return
        worker.is_serving, worker.kill_at = True, self._end_at
        if worker is self._successor:
            self._hand_over()
        if not self._is_announced and self._all_serve():
            self._is_announced = True
            self.plan.on_serving()

    def _bury(self, worker: Worker) -> None:
        self._hear_last_words(worker)
        if self._outgoing and worker is self._outgoing[0]:
            self._successor = None  # it replaces the dead
        self._forget(worker)
        if self._is_ending or worker.is_retiring:
            self._take_next()
        elif worker.is_serving:
            self._replace_dead(worker)
        elif worker is self._successor:
            self._give_up_renewal(worker)
        else:
            self._replace_unborn(worker)

    def _hear_last_words(self, worker: Worker) -> None:
        while worker.is_told and worker.link.poll():
            self._hear(worker)

    def _forget(self, worker: Worker) -> None:
        worker.process.join()
        self.workers.remove(worker)
        if worker in self._outgoing:
            self._outgoing.remove(worker)
        worker.link.close()
        self.plan.on_ended(worker.pid)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for worker in self.workers:
            if worker.kill_at <= now:
                logger.error("a worker does not end; it is killed", extra={"worker": worker.pid})
                worker.process.kill()
                worker.kill_at = float("inf")
        due = [at for at in self._missing if at <= now]
        self._missing = [at for at in self._missing if at > now]
        for _ in due:
            self._start()

    def _patience(self) -> float | None:
        """Seconds until something is due."""
        due = min([*self._missing, *(worker.kill_at for worker in self.workers)], default=None)
        if due is None or due == float("inf"):
            return None
        return max(0.0, due - time.monotonic())

    # --- workers that start, and that die -------------------------------------------------------

    def _start(self) -> Worker:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        with theirs:
            process = self.plan.start(theirs)
        now = time.monotonic()
        worker = Worker(process, ours, now, kill_at=now + START_SECONDS)
        self.workers.append(worker)
        return worker

    def _all_serve(self) -> bool:
        serving = [worker for worker in self.workers if worker.is_serving]
        return len(serving) >= self.plan.count

    def _replace_dead(self, worker: Worker) -> None:
        lived = time.monotonic() - worker.began
        self._failures = 0 if lived >= STABLE_SECONDS else self._failures + 1
        logger.error("a worker died", extra=_traces_of(worker))
        if self._is_short():
            self._miss_one()
        self._take_next()

    def _is_short(self) -> bool:
        """Whether nobody has been started, or is about to be, in the place of one that is gone."""
        there = len(self._missing) + sum(not worker.is_retiring for worker in self.workers)
        return there < self.plan.count + (self._successor is not None)

    def _replace_unborn(self, worker: Worker) -> None:
        failure = worker.failure or StartFailed(
            f"a worker ended with status {worker.process.exitcode} while it started", wrong=False
        )
        self._failures += 1
        someone_serves = any(other.is_serving for other in self.workers)
        is_hopeless = self._failures >= START_ATTEMPTS and not someone_serves
        if not self._is_announced or is_hopeless:
            raise failure.error()
        logger.error("a worker cannot start: %s", failure.message, extra=_traces_of(worker))
        self._miss_one()

    def _miss_one(self) -> None:
        pause = 0.0
        if self._failures:
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (self._failures - 1))
        self._missing.append(time.monotonic() + pause)

    # --- all at once ----------------------------------------------------------------------------

    def _end_in_order(self, number: signal.Signals) -> None:
        """Pass the signal on: the first one lets work finish, a second Ctrl-C does not."""
        again = self._is_ending and number == signal.SIGINT
        if not self._is_ending:
            self._is_ending = True
            self._end_at = time.monotonic() + self.plan.shutdown_seconds + MARGIN_SECONDS
            self.plan.on_ending()
        self._missing.clear()
        self._outgoing.clear()
        for worker in self.workers:
            worker.kill_at = min(worker.kill_at, self._end_at)
            os.kill(worker.pid, signal.SIGINT if again else signal.SIGTERM)

    def _renew(self) -> None:
        if self._is_ending or not self._is_announced:
            return
        if (fault := self.plan.reload()) is not None:
            logger.error("the workers stay as they are: %s", fault)
            return
        logger.info("renewing the workers")
        self._outgoing = deque(worker for worker in self.workers if not worker.is_retiring)
        self._take_next()

    def _take_next(self) -> None:
        """Start the next successor, unless one starts or an old one has not ended yet."""
        is_retiring = any(worker.is_retiring for worker in self.workers)
        if self._outgoing and self._successor is None and not is_retiring:
            self._successor = self._start()

    def _hand_over(self) -> None:
        self._successor = None
        if not self._outgoing:
            return  # whom it was to follow has died meanwhile
        old = self._outgoing.popleft()
        old.is_retiring = True
        # Its tasks may take so long, and then what is left of its requests.
        old.kill_at = time.monotonic() + 2 * self.plan.shutdown_seconds + MARGIN_SECONDS
        with suppress(OSError):  # it is dead: that is seen to next
            old.link.send(RETIRE)

    def _give_up_renewal(self, worker: Worker) -> None:
        reason = worker.failure.message if worker.failure else "it ended while it started"
        logger.error("the other workers stay as they are: %s", reason, extra=_traces_of(worker))
        self._successor = None
        self._outgoing.clear()


def _traces_of(worker: Worker) -> dict[str, object]:
    return {"worker": worker.pid, "exit_status": worker.process.exitcode}
