"""The launcher alone: what it reports, what it limits, and that nothing outlives it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from app.harness import launcher
from app.harness.launcher import Plan

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
PATIENCE_SECONDS = 30

SIGNALS_OF_THE_C_LIBRARY = 1 << 31 | 1 << 32
"""32 and 33: no program can set them, and whoever started the tests may have them ignored."""


class Launched:
    """A launcher that runs, and what it reports."""

    def __init__(self, process: subprocess.Popen[bytes], status: int) -> None:
        self.process = process
        self.status = status

    def report(self) -> dict[str, Any]:
        self.process.wait(PATIENCE_SECONDS)
        told = os.read(self.status, 4096)
        return dict(json.loads(told)) if told else {}

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read().decode()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()


@contextmanager
def _launched(folder: Path, argv: list[str], **changes: Any) -> Iterator[Launched]:
    status, tell_status = os.pipe()
    plan = Plan(
        argv=argv,
        parent=os.getpid(),
        status=tell_status,
        folder=str(folder),
        memory_bytes=512 * MIB,
        folder_bytes=64 * MIB,
        processes=20,
        grace_seconds=0.5,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "app.harness.launcher", json.dumps(asdict(plan) | changes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        pass_fds=(tell_status,),
        start_new_session=True,
    )
    os.close(tell_status)
    try:
        with process:
            try:
                yield Launched(process, status)
            finally:
                if process.poll() is None:
                    process.terminate()
    finally:
        os.close(status)


def _shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def _python(script: str) -> list[str]:
    return [sys.executable, "-S", "-c", script]


def _until(condition: Callable[[], bool]) -> None:
    deadline = monotonic() + PATIENCE_SECONDS
    while not condition():
        assert monotonic() < deadline, "it did not happen in time"
        sleep(0.01)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("script", "report"),
    [
        ("exit 0", {"how": "exited", "number": 0}),
        ("exit 3", {"how": "exited", "number": 3}),
        ("kill -9 $$", {"how": "signalled", "number": 9}),
    ],
)
def test_it_tells_how_the_program_ended(
    tmp_path: Path, script: str, report: dict[str, Any]
) -> None:
    with _launched(tmp_path, _shell(script)) as launched:
        assert launched.report() == report


def test_it_passes_the_streams_on(tmp_path: Path) -> None:
    with _launched(tmp_path, ["/bin/cat"]) as launched:
        assert launched.process.communicate(b"through")[0] == b"through"
        assert launched.report() == {"how": "exited", "number": 0}


@pytest.mark.parametrize(
    ("argv", "number"),
    [
        (["/no/such/program"], errno.ENOENT),
        (["/etc/passwd"], errno.EACCES),
        (["/bin/echo", "a\0b"], errno.EINVAL),
    ],
)
def test_it_tells_why_a_program_cannot_start(tmp_path: Path, argv: list[str], number: int) -> None:
    with _launched(tmp_path, argv) as launched:
        assert launched.report() == {"how": "not_started", "number": number}


def test_the_program_inherits_three_descriptors_and_usual_signals(tmp_path: Path) -> None:
    """Also where the server was started to outlast its terminal, as nohup does."""
    script = "ls /proc/self/fd; grep -E 'Sig(Ign|Blk)' /proc/self/status; ulimit -c"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _launched(tmp_path, _shell(script)) as launched:
            *descriptors, blocked, ignored, core = launched.output().split("\n")[:-1]
    finally:
        signal.signal(signal.SIGHUP, before)
    # 3 is the folder that ls reads.
    assert descriptors == ["0", "1", "2", "3"]
    assert blocked == "SigBlk:\t0000000000000000"
    assert int(ignored.removeprefix("SigIgn:"), 16) & ~SIGNALS_OF_THE_C_LIBRARY == 0
    assert core == "0"


def test_what_the_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    daemon = "setsid sh -c 'sleep 1000 & wait' >/dev/null 2>&1 & echo $!"
    with _launched(tmp_path, _shell(daemon)) as launched:
        pid = int(launched.line())
        assert launched.report() == {"how": "exited", "number": 0}
        assert _is_gone(pid)


def test_what_it_adopts_is_reaped_while_the_program_runs(tmp_path: Path) -> None:
    script = "pid=$( (true & echo $!) ); while [ -e /proc/$pid ]; do sleep 0.01; done; echo reaped"
    with _launched(tmp_path, _shell(script)) as launched:
        assert launched.line() == "reaped"
        assert launched.report() == {"how": "exited", "number": 0}


def test_asked_to_end_it_asks_the_program_first(tmp_path: Path) -> None:
    script = "trap 'echo heeded; exit 5' TERM; echo ready; while :; do sleep 0.01; done"
    with _launched(tmp_path, _shell(script), grace_seconds=20) as launched:
        assert launched.line() == "ready"
        launched.process.terminate()
        assert launched.line() == "heeded"
        assert launched.report() == {"how": "ended", "number": 0}


def test_a_program_that_does_not_heed_is_killed_with_all_it_started(tmp_path: Path) -> None:
    script = (
        "trap '' TERM; setsid sh -c \"trap '' TERM; echo \\$\\$; exec sleep 1000\" & "
        "echo $$; exec sleep 1000"
    )
    with _launched(tmp_path, _shell(script), grace_seconds=0.1) as launched:
        pids = [int(launched.line()), int(launched.line())]
        launched.process.terminate()
        assert launched.report() == {"how": "ended", "number": 0}
        assert all(_is_gone(pid) for pid in pids)


def test_the_end_of_the_server_ends_the_program(tmp_path: Path) -> None:
    # A server of its own, so that it can be killed: it starts a launcher and tells the agent's id.
    server = f"""
import json, os, subprocess, sys
r, w = os.pipe()
plan = {{"argv": ["/bin/sh", "-c", "setsid sleep 1000 & echo $!; exec sleep 1000"],
        "parent": os.getpid(), "status": w, "folder": {str(tmp_path)!r},
        "memory_bytes": 1 << 30, "folder_bytes": 1 << 30, "processes": 20, "grace_seconds": 0.1}}
subprocess.Popen([sys.executable, "-m", "app.harness.launcher", json.dumps(plan)],
                 pass_fds=(w,), start_new_session=True)
os.read(0, 1)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", server], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not _is_gone(pid)
        process.kill()
    _until(lambda: _is_gone(pid))


def test_a_launcher_whose_server_is_gone_already_starts_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    with _launched(tmp_path, ["/bin/touch", str(made)], parent=1) as launched:
        assert launched.report() == {}
    assert not made.exists()


def test_the_end_of_the_launcher_ends_the_program(tmp_path: Path) -> None:
    with _launched(tmp_path, _shell("echo $$; exec sleep 1000")) as launched:
        pid = int(launched.line())
        launched.process.kill()
        assert launched.report() == {}
    _until(lambda: _is_gone(pid))


def test_one_process_cannot_take_more_memory(tmp_path: Path) -> None:
    with _launched(tmp_path, _python("bytearray(1 << 30)")) as launched:
        assert launched.report() == {"how": "exited", "number": 1}


def test_many_processes_cannot_take_more_memory_together(tmp_path: Path) -> None:
    script = (
        "import os, time\nany(os.fork() == 0 for _ in range(8))\n"
        "hoard = b'x' * (80 << 20)\ntime.sleep(1000)"
    )
    with _launched(tmp_path, _python(script)) as launched:
        assert launched.report()["how"] == "memory"


def test_it_cannot_start_more_processes_than_allowed(tmp_path: Path) -> None:
    script = "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; wait"
    with _launched(tmp_path, _shell(script), processes=5) as launched:
        assert launched.report()["how"] == "processes"


def test_it_cannot_fill_the_disk(tmp_path: Path) -> None:
    script = "for i in 1 2 3 4 5; do head -c 20000000 /dev/zero > $i; done; sleep 1000"
    with _launched(tmp_path, _shell(f"cd {tmp_path}; {script}")) as launched:
        assert launched.report()["how"] == "folder"


def test_it_cannot_write_one_file_that_is_larger(tmp_path: Path) -> None:
    script = f"head -c 200000000 /dev/zero > {tmp_path}/x; echo $?"
    with _launched(tmp_path, _shell(script)) as launched:
        assert launched.line() == str(128 + signal.SIGXFSZ)
    assert (tmp_path / "x").stat().st_size == 64 * MIB


def test_the_size_of_a_folder_counts_what_is_on_disk_and_every_entry(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"x" * 100_000)
    (tmp_path / "link").symlink_to("/usr")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    size = launcher.folder_bytes(str(tmp_path), 1 << 50)
    assert 100_000 <= size < 200_000
    for number in range(1000):
        (tmp_path / f"{number}").touch()
    assert launcher.folder_bytes(str(tmp_path), 1 << 50) >= size + 1000 * launcher.INODE_BYTES
    assert launcher.folder_bytes(str(tmp_path / "missing"), 1 << 50) == 0


def test_a_folder_is_not_measured_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(b"x" * 100_000)
    plan = Plan(["x"], 1, 1, str(tmp_path), MIB, 1000, 1, 1)
    supervisor = launcher.Supervisor(plan)
    monkeypatch.setattr(launcher, "FOLDER_WATCH_SECONDS", 1000.0)
    assert supervisor._is_folder_full()
    assert not supervisor._is_folder_full()


def test_a_process_that_is_gone_has_no_children_and_no_memory() -> None:
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    assert launcher.children(gone.pid) == []
    assert launcher.private_bytes(gone.pid) == 0


def test_processes_that_do_not_go_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "KILL_SECONDS", 0)
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        launcher.end_all()
        assert child.poll() is None


def test_this_process_has_memory_and_its_children() -> None:
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in launcher.children(os.getpid())
        assert launcher.private_bytes(os.getpid()) > MIB
