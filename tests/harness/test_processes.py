"""A contained program as the server sees it, on both event loops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from app.harness import processes
from app.harness.processes import Contained, Limits, Verdict, kill_strays
from app.settings import TASK_FILE_VARIABLE
from tests.loops import ON_BOTH_LOOPS

pytestmark = [pytest.mark.anyio, ON_BOTH_LOOPS]

LIMITS = Limits(memory_bytes=1 << 30, folder_bytes=1 << 30, processes=50, grace_seconds=0.2)


async def _start(folder: Path, script: str, stdin: bytes = b"", /, **environment: str) -> Contained:
    return await Contained.start(
        ["/bin/sh", "-c", script],
        stdin=stdin,
        cwd=folder,
        folder=folder,
        environment={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"} | environment,
        limits=LIMITS,
    )


@asynccontextmanager
async def _started(
    folder: Path, script: str, stdin: bytes = b"", /, **environment: str
) -> AsyncIterator[Contained]:
    program = await _start(folder, script, stdin, **environment)
    try:
        yield program
    finally:
        await program.end()


async def _output(program: Contained) -> str:
    said = b""
    while piece := await program.read():
        said += piece
    return said.decode()


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def _until_gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while not _is_gone(pid):
            await asyncio.sleep(0.01)


async def test_a_program_gets_its_input_and_says_its_output(tmp_path: Path) -> None:
    script = "cat /dev/stdin; pwd > /dev/stdout; echo oops > /dev/stderr; exit 4"
    async with _started(tmp_path, script, b"x" * 1_000) as program:
        assert await _output(program) == "x" * 1_000 + f"{tmp_path}\n"
        verdict = await program.wait()
        assert verdict == Verdict("exited", 4)
        assert not verdict.is_success
        assert program.errors == "oops\n"
        assert await program.end() == verdict


async def test_much_input_becomes_much_output(tmp_path: Path) -> None:
    async with _started(tmp_path, "cat", b"x" * 5_000_000) as program:
        assert len(await _output(program)) == 5_000_000
        assert (await program.wait()).is_success


async def test_a_program_need_not_read(tmp_path: Path) -> None:
    async with _started(tmp_path, "echo done", b"x" * 5_000_000) as program:
        assert await _output(program) == "done\n"
        assert (await program.wait()).is_success


async def test_only_the_end_of_standard_error_is_kept(tmp_path: Path) -> None:
    script = "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo end >&2"
    async with _started(tmp_path, script) as program:
        await program.wait()
        assert len(program.errors) == processes.STDERR_TAIL_BYTES
        assert program.errors.endswith("xend\n")


@pytest.mark.requirement("B89")
async def test_nothing_of_this_process_is_inherited(tmp_path: Path) -> None:
    with socket.socket() as listener, (tmp_path / "lock").open("w"):
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with _started(tmp_path, "ls -l /proc/$$/fd; env; ps -o sid= -p $$") as program:
            said = await _output(program)
    assert "socket:" not in said
    assert "lock" not in said
    descriptors = [
        line.split(" -> ")[0].rsplit(" ", 1)[1] for line in said.split("\n") if "->" in line
    ]
    assert descriptors == ["0", "1", "2"]
    assert sorted(line.split("=")[0] for line in said.split("\n") if "=" in line) == [
        "LANG",
        "PATH",
        "PWD",
    ]
    assert int(said.split()[-1]) != os.getsid(0)


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    program = await Contained.start(
        ["/no/such"], stdin=b"", cwd=tmp_path, folder=tmp_path, environment={}, limits=LIMITS
    )
    assert await program.wait() == Verdict("not_started", 2)
    await program.end()


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await _start(tmp_path / "missing", "true")
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_ending_ends_everything(tmp_path: Path) -> None:
    program = await _start(tmp_path, "trap '' TERM; setsid sleep 1000 & echo $!; exec sleep 1000")
    pid = int(await program.read())
    assert await program.end() == Verdict("ended")
    assert await program.end() == Verdict("ended")
    assert _is_gone(pid)


async def test_ending_one_that_talks_without_end(tmp_path: Path) -> None:
    program = await _start(tmp_path, "yes")
    await program.read()
    assert await program.end() == Verdict("ended")


async def test_a_cancelled_end_is_still_an_end(tmp_path: Path) -> None:
    program = await _start(tmp_path, "trap '' TERM; echo $$; exec sleep 1000")
    pid = int(await program.read())
    ending = asyncio.create_task(program.end())
    await asyncio.sleep(0.01)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert _is_gone(pid)


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    starting = asyncio.create_task(_start(tmp_path, "sleep 1000"))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert set(psutil.Process().children()) <= before


async def test_a_cancelled_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    starting = asyncio.create_task(_start(tmp_path / "missing", "sleep 1000"))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises((asyncio.CancelledError, FileNotFoundError)):
        await starting
    await asyncio.sleep(0)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_program_that_kills_its_launcher_is_lost_and_found(tmp_path: Path) -> None:
    task_file = tmp_path / "task.json"
    script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!; kill -9 $PPID; sleep 1000"
    async with _started(tmp_path, script, **{TASK_FILE_VARIABLE: str(task_file)}) as program:
        pid = int((await _output(program)).split()[0])
        assert await program.wait() == Verdict("lost")
    assert not _is_gone(pid)
    kill_strays(tmp_path / "other.json")
    assert not _is_gone(pid)
    kill_strays(task_file)
    await _until_gone(pid)


async def test_a_launcher_that_hangs_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_END_SECONDS", 0.2)
    program = await _start(tmp_path, "echo $PPID $$; exec sleep 1000")
    launcher, agent = map(int, (await program.read()).split())
    os.kill(launcher, signal.SIGSTOP)
    assert await program.end() == Verdict("lost")
    await _until_gone(agent)


async def test_many_programs_leave_no_descriptor_and_no_process(tmp_path: Path) -> None:
    children = psutil.Process().children()  # servers of other tests, which live for a session
    async with _started(tmp_path, "true") as program:
        await program.wait()
    before = len(os.listdir("/proc/self/fd"))
    for script in ("true", "echo x; exit 1", "sleep 1000", "no-such-program"):
        async with _started(tmp_path, script):
            await asyncio.sleep(0)
    async with asyncio.timeout(30):
        while len(os.listdir("/proc/self/fd")) > before:
            await asyncio.sleep(0.01)
    assert psutil.Process().children() == children
