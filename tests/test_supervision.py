"""The parent of several workers: what it does when they start, serve, fail, die and retire.

The workers here are pipes without a process behind them: they say and suffer what a test wants.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

import pytest

from app.commands import supervision
from app.commands.supervision import (
    RETIRE,
    SERVING,
    Plan,
    StartFailed,
    Supervisor,
    Worker,
    start_process,
    supervise,
)
from app.server import ServerError
from app.settings import SettingsError


class Process:
    """A worker process as its parent sees it."""

    def __init__(self, number: int, link: Connection) -> None:
        self.pid = number
        self.link = Connection(os.dup(link.fileno()))
        self.exitcode: int | None = None
        self.signals: list[int] = []
        self.stubborn = False
        self._alive, self._death = Pipe()
        self.sentinel = self._alive.fileno()

    def says(self, what: Any) -> None:
        self.link.send(what)

    def hears(self) -> Any:
        return self.link.recv()

    def dies(self, status: int = -9) -> None:
        self.exitcode = status
        self.link.close()
        self._death.close()

    def terminate(self) -> None:
        self.signalled(signal.SIGTERM)

    def kill(self) -> None:
        self.stubborn = False
        self.signalled(signal.SIGKILL)

    def signalled(self, number: int) -> None:
        self.signals.append(number)
        if not self.stubborn and self.exitcode is None:
            self.dies(-number)

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None or self.exitcode is not None, "this would wait for ever"


class Stage:
    """A supervisor on its stage."""

    def __init__(self, count: int = 2) -> None:
        self.processes: list[Process] = []
        self.ended: list[int] = []
        self.announced = 0
        self.fault: str | None = None
        self.closings = 0
        plan = Plan(
            count=count,
            shutdown_seconds=30,
            start=self._start,
            reload=lambda: self.fault,
            on_serving=self._announce,
            on_ending=self._stop_taking,
            on_ended=self.ended.append,
        )
        self.supervisor = Supervisor(plan)
        self.inbox, self.outbox = socket.socketpair()
        self.inbox.setblocking(False)

    def _start(self, link: Connection) -> Any:
        process = Process(1_000_000 + len(self.processes), link)
        self.processes.append(process)
        return process

    def _announce(self) -> None:
        self.announced += 1

    def _stop_taking(self) -> None:
        self.closings += 1

    def round(self, *signals: int) -> None:
        if signals:
            self.outbox.send(bytes(signals))
        self.supervisor.round(self.inbox)

    def serving(self) -> Stage:
        """With all workers serving."""
        self.supervisor.begin()
        for process in self.processes:
            process.says(SERVING)
        while not self.announced:
            self.round()
        return self

    def serves(self, process: Process) -> None:
        process.says(SERVING)
        self.round()

    def dies(self, process: Process, status: int = -9) -> None:
        process.dies(status)
        while process.pid not in self.ended:
            self.round()

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self.supervisor.workers]

    def close(self) -> None:
        self.supervisor.end()
        self.inbox.close()
        self.outbox.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage()

    def kill(pid: int, number: int) -> None:
        made.processes[pid - 1_000_000].signalled(number)

    monkeypatch.setattr("app.commands.supervision.os.kill", kill)
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.001)
    yield made
    made.close()


def worker_of(stage: Stage, process: Process) -> Worker:
    return next(worker for worker in stage.supervisor.workers if worker.pid == process.pid)


def test_it_is_announced_once_all_serve(stage: Stage) -> None:
    stage.supervisor.begin()
    first, second = stage.processes
    stage.serves(first)
    assert stage.announced == 0
    stage.serves(second)
    assert stage.announced == 1


@pytest.mark.parametrize(("wrong", "error"), [(True, SettingsError), (False, ServerError)])
def test_a_start_that_fails_ends_all(stage: Stage, wrong: bool, error: type[Exception]) -> None:
    stage.supervisor.begin()
    stage.processes[0].says(StartFailed("port: is wrong", wrong=wrong))
    stage.processes[0].dies(1)
    with pytest.raises(error, match="port: is wrong"):
        stage.dies(stage.processes[0], 1)
    stage.supervisor.end()
    assert stage.processes[1].signals == [signal.SIGTERM]
    assert len(stage.ended) == 2


def test_a_start_that_dies_without_a_word_is_told_by_its_status(stage: Stage) -> None:
    stage.supervisor.begin()
    with pytest.raises(ServerError, match="ended with status -11 while it started"):
        stage.dies(stage.processes[0], -11)


def test_a_worker_that_dies_is_replaced(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    first, second = stage.serving().processes
    stage.dies(first)
    stage.round()
    assert stage.pids == [second.pid, stage.processes[2].pid]
    assert "a worker died" in caplog.text
    stage.serves(stage.processes[2])
    assert stage.announced == 1


def test_pauses_grow_while_workers_die_at_once_and_end_with_one_that_lives(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(supervision, "LONGEST_PAUSE_SECONDS", 0.05)
    pauses = []
    stage.serving()
    for _ in range(5):
        stage.dies(stage.processes[-1])
        pauses.append(stage.supervisor._missing[0] - monotonic())
        while len(stage.pids) < 2:
            stage.round()
        stage.serves(stage.processes[-1])
    for pause, most in zip(pauses, (0.01, 0.02, 0.04, 0.05, 0.05), strict=True):
        assert pause <= most
    worker_of(stage, stage.processes[-1]).began -= supervision.STABLE_SECONDS
    stage.dies(stage.processes[-1])
    assert len(stage.pids) == 2, "it is replaced at once"


def test_starts_that_fail_are_tried_again_while_somebody_serves(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "LONGEST_PAUSE_SECONDS", 0.002)
    first, second = stage.serving().processes
    stage.dies(first)
    for _ in range(supervision.START_ATTEMPTS + 1):
        while len(stage.pids) < 2:
            stage.round()
        stage.processes[-1].says(StartFailed("The database is busy.", wrong=False))
        stage.dies(stage.processes[-1], 1)
    assert "a worker cannot start: The database is busy." in caplog.text
    stage.dies(second)
    with pytest.raises(ServerError, match="The database is busy"):
        until_given_up(stage)


def until_given_up(stage: Stage) -> None:
    while True:
        stage.round()
        for process in filter(Process.is_alive, stage.processes):
            process.says(StartFailed("The database is busy.", wrong=False))
            process.dies(1)


def test_one_that_never_serves_is_killed_and_tried_again(stage: Stage) -> None:
    first, _ = stage.serving().processes
    stage.dies(first)
    stage.round()
    hanging = stage.processes[2]
    worker_of(stage, hanging).kill_at = 0
    while hanging.pid not in stage.ended:
        stage.round()
    assert hanging.signals == [signal.SIGKILL]
    while len(stage.pids) < 2:
        stage.round()
    stage.serves(stage.processes[3])
    assert worker_of(stage, stage.processes[3]).kill_at == float("inf")


# Renewing


def test_the_new_one_serves_before_the_old_one_retires(stage: Stage) -> None:
    first, second = stage.serving().processes
    stage.round(signal.SIGHUP)
    third = stage.processes[2]
    assert stage.pids == [first.pid, second.pid, third.pid]
    assert not first.link.poll()
    stage.serves(third)
    assert first.hears() == RETIRE
    assert len(stage.processes) == 3, "one at a time"
    stage.dies(first, 0)
    fourth = stage.processes[3]
    assert not second.link.poll()
    stage.serves(fourth)
    assert second.hears() == RETIRE
    stage.dies(second, 0)
    assert stage.pids == [third.pid, fourth.pid]
    assert (first.signals, second.signals, stage.announced) == ([], [], 1)


def test_a_configuration_that_is_wrong_renews_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.serving().fault = "max_tasks: is wrong"
    stage.round(signal.SIGHUP)
    assert len(stage.processes) == 2
    assert "the workers stay as they are: max_tasks: is wrong" in caplog.text


@pytest.mark.parametrize("says", [StartFailed("No room.", wrong=False), None])
def test_a_successor_that_cannot_start_leaves_the_others(
    stage: Stage, caplog: pytest.LogCaptureFixture, says: StartFailed | None
) -> None:
    first, second = stage.serving().processes
    stage.round(signal.SIGHUP)
    if says is not None:
        stage.processes[2].says(says)
    stage.dies(stage.processes[2], 1)
    assert stage.pids == [first.pid, second.pid]
    assert not first.link.poll()
    reason = "No room." if says else "it ended while it started"
    assert f"the other workers stay as they are: {reason}" in caplog.text
    stage.round(signal.SIGHUP)
    assert len(stage.processes) == 4, "it can be tried again"


@pytest.mark.parametrize("who", [0, 1])
def test_an_old_one_that_dies_while_its_successor_starts_is_replaced_once(
    stage: Stage, who: int
) -> None:
    stage.serving()
    stage.round(signal.SIGHUP)
    stage.dies(stage.processes[who])
    for _ in range(20):
        old = [process for process in stage.processes[:2] if process.is_alive()]
        for process in stage.processes[2:]:
            worker = [w for w in stage.supervisor.workers if w.pid == process.pid]
            if worker and not worker[0].is_serving:
                stage.serves(process)
        for process in old:
            if process.link.poll():
                stage.dies(process, 0)
        if stage.supervisor._missing:
            stage.round()
    assert len(stage.pids) == 2
    assert not {process.pid for process in stage.processes[:2]} & {*stage.pids}


def test_a_signal_before_all_serve_renews_nobody(stage: Stage) -> None:
    stage.supervisor.begin()
    stage.round(signal.SIGHUP)
    assert len(stage.processes) == 2


def test_one_that_dies_as_it_is_told_to_retire_is_no_trouble(stage: Stage) -> None:
    first, _ = stage.serving().processes
    stage.round(signal.SIGHUP)
    first.link.close()
    stage.round()
    stage.serves(stage.processes[2])
    first.exitcode = 0
    first._death.close()
    stage.round()
    assert first.pid in stage.ended


def test_one_that_does_not_retire_is_killed(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = stage.serving().processes
    stage.round(signal.SIGHUP)
    stage.serves(stage.processes[2])
    worker_of(stage, first).kill_at = 0
    stage.round()
    assert first.signals == [signal.SIGKILL]
    assert "a worker does not end; it is killed" in caplog.text


# The end


def test_a_successor_that_serves_too_late_follows_nobody(stage: Stage) -> None:
    stage.serving()
    stage.round(signal.SIGHUP)
    stage.processes[2].stubborn = True
    stage.round(signal.SIGTERM)
    stage.serves(stage.processes[2])
    stage.dies(stage.processes[2], 0)
    while stage.supervisor.is_needed:
        stage.round()
    assert len(stage.ended) == 3


def test_a_signal_is_passed_on_and_the_second_ctrl_c_too(stage: Stage) -> None:
    for process in stage.serving().processes:
        process.stubborn = True
    stage.round(signal.SIGTERM)
    stage.round(signal.SIGINT)
    assert [process.signals for process in stage.processes] == [[15, 2], [15, 2]]
    assert stage.closings == 1
    for process in stage.processes:
        stage.dies(process, 0)
    assert not stage.supervisor.is_needed
    assert len(stage.processes) == 2


def test_what_does_not_end_is_killed_on_the_way_out(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "MARGIN_SECONDS", -1000.0)
    stage.serving().processes[0].stubborn = True
    stage.supervisor.end()
    assert stage.processes[0].signals == [signal.SIGTERM, signal.SIGKILL]
    assert len(stage.ended) == 2


# With real processes


def serve_until_told(link: Connection) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    link.send(SERVING)
    link.recv()


def test_signals_end_real_workers_and_leave_everything_as_it_was() -> None:
    def announce() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def plan(count: int, start: Callable[[Connection], Any]) -> Plan:
        return Plan(count, 5, start, lambda: None, announce, lambda: None, ended.append)

    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    ended: list[int] = []
    supervise(plan(2, lambda link: start_process(serve_until_told, link)))
    assert len(set(ended)) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
