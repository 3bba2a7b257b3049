"""A foreign program, contained: started without a shell, bounded, and ended with all it started.

Between the server and the program stands `launcher`, one process for each. The program gets a
session of its own, the environment it is given and no descriptor but its three streams. When it
ends, is ended, or the server dies, every process that it started ends with it.

It is no sandbox: the program runs as the user of the server and may read what that user may.
Linux is needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from app.harness import launcher
from app.settings import TASK_FILE_VARIABLE
from app.store.threads import uninterrupted

STDERR_TAIL_BYTES = 16 * 1024
"""How much of the end of standard error is kept."""

PIPE_BYTES = 64 * 1024
"""The most that one read of a stream gives."""

_END_SECONDS = launcher.KILL_SECONDS + 2
"""What the launcher may take to end everything, beside the grace."""

How = Literal[
    "exited", "signalled", "not_started", "ended", "memory", "processes", "folder", "lost"
]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one program with everything that it starts."""

    memory_bytes: int
    folder_bytes: int
    processes: int
    grace_seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a program; `number` is its exit status, signal or errno.

    `lost` means that the launcher was killed before it could tell.
    """

    how: How
    number: int = 0

    @property
    def is_success(self) -> bool:
        """Whether it ended by itself and with status 0."""
        return self.how == "exited" and self.number == 0


class Contained:
    """One running program. End it in every case: `end` is legal twice, and after its own end."""

    def __init__(
        self, process: subprocess.Popen[bytes], status: BinaryIO, grace_seconds: float
    ) -> None:
        self._process = process
        self._status = status
        self._grace_seconds = grace_seconds
        self._loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[Verdict] = self._loop.create_future()
        self._stdout = asyncio.StreamReader(limit=PIPE_BYTES)
        self._stderr = asyncio.StreamReader(limit=PIPE_BYTES)
        self._transports: list[asyncio.ReadTransport] = []
        self._errors = bytearray()
        self._reading_errors = asyncio.create_task(self._read_errors())
        # Watched like a socket: it works on every loop, in every thread, without signals.
        self._exit = os.pidfd_open(process.pid)
        self._loop.add_reader(self._exit, self._has_ended)

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: Path,
        folder: Path,
        environment: Mapping[str, str],
        limits: Limits,
    ) -> Contained:
        """Start `argv` in `cwd` with `stdin` to read; the size of `folder` is watched.

        Raises OSError when not even the launcher can be started.
        """
        receive, send = os.pipe()
        with os.fdopen(send, "wb"):
            status = os.fdopen(receive, "rb", buffering=0)
            plan = launcher.Plan(
                argv=list(argv),
                parent=os.getpid(),
                status=send,
                folder=str(folder),
                memory_bytes=limits.memory_bytes,
                folder_bytes=limits.folder_bytes,
                processes=limits.processes,
                grace_seconds=limits.grace_seconds,
            )
            try:
                process = _spawned(plan, stdin, cwd, environment)
            except OSError:
                status.close()
                raise
        program = cls(process, status, limits.grace_seconds)
        try:
            await uninterrupted(program._connect())
        except BaseException:
            await program.end()
            raise
        return program

    async def _connect(self) -> None:
        for pipe, reader in (
            (self._process.stdout, self._stdout),
            (self._process.stderr, self._stderr),
        ):
            protocol = asyncio.StreamReaderProtocol(reader)
            transport, _ = await self._loop.connect_read_pipe(partial(_same, protocol), pipe)
            self._transports.append(transport)

    async def read(self) -> bytes:
        """What comes next on standard output, at most PIPE_BYTES; empty at the end."""
        return await self._stdout.read(PIPE_BYTES)

    @property
    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        return self._errors.decode("utf-8", "replace")

    async def wait(self) -> Verdict:
        """Wait for its own end, once `read` has come to its; by then no process of it is left."""
        await self._reading_errors
        return await asyncio.shield(self._verdict)

    async def end(self) -> Verdict:
        """Ask it to end, kill what did not within the grace, and take leave of it."""
        return await uninterrupted(self._end())

    async def _end(self) -> Verdict:
        if not self._verdict.done():
            self._process.terminate()
        if not await self._is_over(self._grace_seconds + _END_SECONDS):
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._is_over(_END_SECONDS)
        self._close()
        await self._reading_errors
        return self._verdict.result() if self._verdict.done() else Verdict("lost")

    async def _is_over(self, seconds: float) -> bool:
        await asyncio.wait({self._verdict}, timeout=seconds)
        return self._verdict.done()

    def _has_ended(self) -> None:
        """The launcher is gone, and with it everything, unless it was killed."""
        self._stop_watching()
        self._process.wait()
        verdict = _verdict(self._status.read())
        self._status.close()
        if verdict.how == "lost":
            # What the launcher no longer ends may hold the streams open for ever.
            self._close()
        self._verdict.set_result(verdict)

    def _stop_watching(self) -> None:
        if self._exit >= 0:
            self._loop.remove_reader(self._exit)
            os.close(self._exit)
        self._exit = -1

    def _close(self) -> None:
        """Let go of the streams; whoever still reads them comes to their end."""
        self._stop_watching()
        for transport in self._transports:
            transport.close()
        self._stdout.feed_eof()
        self._stderr.feed_eof()

    async def _read_errors(self) -> None:
        while piece := await self._stderr.read(PIPE_BYTES):
            self._errors += piece
            del self._errors[:-STDERR_TAIL_BYTES]


def _same(protocol: asyncio.StreamReaderProtocol) -> asyncio.StreamReaderProtocol:
    return protocol


def _spawned(
    plan: launcher.Plan, stdin: bytes, cwd: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # Not asyncio's way: its streams are sockets on some loops, which a program cannot open as
    # /dev/stdin or /dev/stdout, and not every loop closes all other descriptors.
    with os.fdopen(os.memfd_create("stdin"), "w+b") as file:
        file.write(stdin)
        file.seek(0)
        return subprocess.Popen(  # noqa: S603 - no shell; the configuration says what runs
            [sys.executable, "-I", "-S", "-B", launcher.__file__, json.dumps(vars(plan))],
            stdin=file,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=cwd,
            env=environment,
            start_new_session=True,
            pass_fds=(plan.status,),
        )


def _verdict(report: bytes | None) -> Verdict:
    """What the launcher reported; it reports nothing when it was killed."""
    if not report:
        return Verdict("lost")
    told = json.loads(report)
    return Verdict(told["how"], told["number"])


def kill_strays(task_file: Path) -> int:
    """Kill every process that was started for the task file at `task_file`; how many. Blocks.

    Every process of a task has its path in the environment. Only a program that kills its
    launcher can leave any.
    """
    mark = os.fsencode(f"{TASK_FILE_VARIABLE}={task_file}")
    killed = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        # Other users' processes cannot be read, and those that just ended are not there.
        with suppress(OSError):
            if mark in Path(entry.path, "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                killed += 1
    return killed
