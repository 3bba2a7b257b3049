"""The small program between the server and an agent: starts it, watches it, ends all of it.

    python -I -S launcher.py PLAN        PLAN is the JSON of a `Plan`

It runs beside the server, not in it, for what only a process of its own can do: it adopts
whatever the agent leaves behind (a "child subreaper"), so no daemon survives its task; it is
told when the server dies, however that happens, and then ends everything; it sets limits between
fork and exec without touching a server that has threads. It uses the standard library only, and
nothing of this package.

What became of the agent goes to the descriptor `status`, as one JSON object:

    {"how": "exited", "number": STATUS}        {"how": "signalled", "number": SIGNAL}
    {"how": "not_started", "number": ERRNO}    {"how": "ended"}      by the server's SIGTERM
    {"how": "memory"} {"how": "processes"} {"how": "folder"}         a limit that it went over
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import NoReturn

WATCH_SECONDS = 0.25
"""Pause between two looks at memory and number of processes."""

FOLDER_WATCH_SECONDS = 1.0
"""Least pause between two measurements of the folder; ten times as long as one takes at least."""

INODE_BYTES = 512
"""What an entry counts beside its blocks, so that empty files cannot be made without end."""

KILL_SECONDS = 10.0
"""How long killed processes are waited for; one inside a broken device may never go."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_WATCHED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True)
class Plan:
    """What to run, and within which limits.

    `parent` is the server's process id, `status` a descriptor, `folder` the folder whose size is
    watched; `memory_bytes` holds for each process as its data and for all together as their
    private resident memory.
    """

    argv: list[str]
    parent: int
    status: int
    folder: str
    memory_bytes: int
    folder_bytes: int
    processes: int
    grace_seconds: float


class Supervisor:
    """One agent and everything that it starts."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._agent = 0
        self._agent_status: int | None = None
        self._next_measure = 0.0

    def run(self) -> None:
        """Run the agent to its end, report, and leave no process of it."""
        # Blocked, they wait to be taken one by one; nothing is ever interrupted.
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        _control(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != self._plan.parent:
            return
        _control(_PR_SET_CHILD_SUBREAPER, 1)
        os.set_inheritable(self._plan.status, False)
        try:
            self._start()
        except OSError as error:
            self._report("not_started", error.errno or 0)
            return
        verdict = self._watch()
        end_all()
        self._report(*verdict)

    def _start(self) -> None:
        """Fork and exec; raises the OSError with which exec failed."""
        failure, tell_failure = os.pipe()
        self._agent = os.fork()
        if self._agent == 0:  # pragma: no cover - the fork becomes another program
            self._become_agent(tell_failure)
        os.close(tell_failure)
        _let_go_of_standard_streams()
        number = os.read(failure, 16)
        os.close(failure)
        if number:
            os.waitpid(self._agent, 0)
            raise OSError(int(number), "exec")

    def _become_agent(self, tell_failure: int) -> NoReturn:  # pragma: no cover - only in the fork
        number = errno.EINVAL
        try:
            _control(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _limit(resource.RLIMIT_CORE, 0)
            _limit(resource.RLIMIT_DATA, self._plan.memory_bytes)
            _limit(resource.RLIMIT_FSIZE, self._plan.folder_bytes)
            _heed_every_signal()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvp(self._plan.argv[0], self._plan.argv)  # noqa: S606 - no shell is wanted
        except OSError as error:
            number = error.errno or number
        finally:
            os.write(tell_failure, str(number).encode())
            os._exit(127)

    def _watch(self) -> tuple[str, int]:
        """Wait for the agent, the server's word, or a limit; what came first."""
        while True:
            got = signal.sigtimedwait(_WATCHED, WATCH_SECONDS)
            self._reap()
            if self._agent_status is not None:
                return _how_it_ended(self._agent_status)
            if got is not None and got.si_signo != signal.SIGCHLD:
                self._ask_to_end()
                return "ended", 0
            if (limit := self._limit_passed()) is not None:
                return limit, 0

    def _reap(self) -> None:
        for pid, status in _ended_children():
            if pid == self._agent:
                self._agent_status = status

    def _ask_to_end(self) -> None:
        """SIGTERM for all, and the time to heed it."""
        for pid in descendants():
            _kill(pid, signal.SIGTERM)
        deadline = monotonic() + self._plan.grace_seconds
        while self._agent_status is None and (left := deadline - monotonic()) > 0:
            signal.sigtimedwait((signal.SIGCHLD,), left)
            self._reap()

    def _limit_passed(self) -> str | None:
        running = list(descendants())
        if len(running) > self._plan.processes:
            return "processes"
        if sum(map(private_bytes, running)) > self._plan.memory_bytes:
            return "memory"
        return "folder" if self._is_folder_full() else None

    def _is_folder_full(self) -> bool:
        begun = monotonic()
        if begun < self._next_measure:
            return False
        size = folder_bytes(self._plan.folder, self._plan.folder_bytes)
        took = monotonic() - begun
        self._next_measure = begun + max(FOLDER_WATCH_SECONDS, 10 * took)
        return size > self._plan.folder_bytes

    def _report(self, how: str, number: int) -> None:
        document = json.dumps({"how": how, "number": number}).encode()
        with suppress(BrokenPipeError):  # the server is gone: nobody to tell
            os.write(self._plan.status, document)


def _control(option: int, value: int) -> None:
    """The system call prctl, which Python does not offer."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _limit(which: int, value: int) -> None:  # pragma: no cover - only in the fork
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _let_go_of_standard_streams() -> None:
    """Keep no end of the agent's pipes: their end is how the server knows that all is said."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def _ended_children() -> Iterator[tuple[int, int]]:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _how_it_ended(status: int) -> tuple[str, int]:
    if os.WIFSIGNALED(status):
        return "signalled", os.WTERMSIG(status)
    return "exited", os.WEXITSTATUS(status)


def descendants() -> Iterator[int]:
    """Every process below this one; a parent before its children."""
    waiting = children(os.getpid())
    while waiting:
        pid = waiting.pop()
        yield pid
        waiting += children(pid)


def children(pid: int) -> list[int]:
    """The children of `pid`; none when it is gone."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.scandir(f"/proc/{pid}/task"):
            with open(f"{thread.path}/children", "rb") as file:  # noqa: PTH123
                found += map(int, file.read().split())
    return found


def private_bytes(pid: int) -> int:
    """The resident memory of `pid` that it shares with nobody's files; 0 when it is gone."""
    with suppress(OSError):
        with open(f"/proc/{pid}/statm", "rb") as file:  # noqa: PTH123
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * _PAGE_BYTES
    return 0


def folder_bytes(folder: str, enough: int) -> int:
    """What `folder` takes on disk, links not followed; counting stops above `enough`."""
    total = 0
    waiting = [folder]
    while waiting and total <= enough:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                total += INODE_BYTES
                with suppress(OSError):
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return total


def end_all() -> None:
    """Kill every process below this one and reap it, again until there is none."""
    deadline = monotonic() + KILL_SECONDS
    while monotonic() < deadline:
        for pid in descendants():
            _kill(pid, signal.SIGKILL)
        if _is_alone():
            return
        signal.sigtimedwait((signal.SIGCHLD,), 0.01)


def _is_alone() -> bool:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return False
    return True


def _heed_every_signal() -> None:  # pragma: no cover - only in the fork
    """Undo what Python ignores, and what whoever started the server did: nohup ignores SIGHUP."""
    for number in signal.valid_signals():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def main(plan: str) -> None:
    """Run the plan in `plan`."""
    Supervisor(Plan(**json.loads(plan))).run()


if __name__ == "__main__":
    main(sys.argv[1])
