"""A receiver as its users run it: a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tests import backends
from tests.e2e import confinement

ROOT = Path(__file__).resolve().parents[2]

# Both are far above what a start or a drained shutdown takes, also on a busy machine under
# coverage: they only keep a hanging server from hanging the tests.
READY_SECONDS = 60
EXIT_SECONDS = 60
POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens; the fields are those of its ready file.

    A test that ends `process` itself and waits for it judges the exit status itself, too.
    """

    url: str
    upload_endpoint: str
    uhp_base_url: str
    tokens: Mapping[str, str]
    process: subprocess.Popen[bytes]
    scratch: Path

    @property
    def token(self) -> str:
        """The first of `tokens`, for tests that need just one."""
        return next(iter(self.tokens.values()))

    def stdout(self) -> str:
        """What the process has printed so far."""
        return _read(self.scratch / "stdout")

    def stderr(self) -> str:
        """What the process has logged so far."""
        return _read(self.scratch / "stderr")

    def log_with(self, last: str) -> str:
        """The same once `last` is in it: the line of a request follows its answer."""
        deadline = monotonic() + READY_SECONDS
        while last not in (log := self.stderr()):
            assert monotonic() < deadline, f"{last} was not logged:\n{log}"
            sleep(POLL_SECONDS)
        return log


@contextmanager
def running_server(
    *arguments: str, environment: Mapping[str, str] | None = None, command: str = "dev"
) -> Iterator[RunningServer]:
    """Run `consignee COMMAND --port 0 ARGUMENTS…` until the block ends, then stop it by SIGTERM.

    The process has an empty working directory and temporary folder of its own, and of the
    `CONSIGNEE_*` variables only those in `environment`, and those that name the back ends of the
    tests. Raises AssertionError with the log when it does not get ready, or does not end with
    status 0.
    """
    with tempfile.TemporaryDirectory(prefix="consignee-e2e-") as folder:
        scratch = Path(folder)
        ready_file = scratch / "ready.json"
        data_dir = _data_dir_in(arguments)
        chosen = backend_environment(arguments, scratch) | dict(environment or {})
        line = confinement.program(filter(None, (scratch, data_dir)), arguments, chosen)
        line += [command, "--port", "0", "--ready-file", str(ready_file), *arguments]
        with _started(line, scratch, chosen) as process:
            ready = _wait_until_ready(process, ready_file)
            yield RunningServer(
                url=ready["url"],
                upload_endpoint=ready["upload_endpoint"],
                uhp_base_url=ready["uhp_base_url"],
                tokens=ready["tokens"],
                process=process,
                scratch=scratch,
            )
            _stop(process, scratch)


def backend_environment(arguments: Sequence[str], scratch: Path) -> dict[str, str]:
    """The back ends of a command line: those of the data folder that it names, else `scratch`'s."""
    return backends.environment_of(_data_dir_in(arguments) or scratch)


def _data_dir_in(arguments: Sequence[str]) -> Path | None:
    """The data folder that a command line names."""
    if "--data-dir" not in arguments:
        return None
    return Path(arguments[arguments.index("--data-dir") + 1])


@contextmanager
def _started(
    line: list[str], scratch: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The process, killed if the block leaves it running, its log kept in `scratch`."""
    for name in ("tmp", "cwd"):
        (scratch / name).mkdir()
    with (scratch / "stdout").open("wb") as stdout, (scratch / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            line,
            cwd=scratch / "cwd",
            env={**_environment(scratch / "tmp"), **environment},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _environment(temporary: Path) -> dict[str, str]:
    """Ours, less every setting of the receiver, which would refuse those it does not know."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CONSIGNEE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return inherited | {"PYTHONPATH": path, "TMPDIR": str(temporary)}


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path) -> dict[str, Any]:
    deadline = monotonic() + READY_SECONDS
    while not ready_file.exists():
        assert monotonic() < deadline, f"not ready in time:\n{_log(ready_file.parent)}"
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_SECONDS)
            raise AssertionError(f"ended with {status} at start:\n{_log(ready_file.parent)}")
    ready: dict[str, Any] = json.loads(ready_file.read_bytes())
    return ready


def _stop(process: subprocess.Popen[bytes], scratch: Path) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        status = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after SIGTERM:\n{_log(scratch)}") from None
    assert status == 0, f"ended with {status} after SIGTERM:\n{_log(scratch)}"


def _log(scratch: Path) -> str:
    return _read(scratch / "stdout") + _read(scratch / "stderr")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
