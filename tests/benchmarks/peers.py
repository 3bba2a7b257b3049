"""The servers that Consignee is measured beside, each in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.e2e.processes import RunningServer, running_server

TOKEN = "bench-token"

BARE_APP = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    more = True
    while more:
        message = await receive()
        more = message.get("more_body", False)
    body = b'{"ref":"ref_0123456789abcdef","size":4096,"sha256":"' + b"0" * 64 + b'"}'
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 201, "headers": headers})
    await send({"type": "http.response.body", "body": body})
"""

SDK_APP = """
import os
from agenthooksprotocol.server.attachments import App

class Files:
    async def commit(self, *, scope, ref, data):
        path = os.path.join(os.environ["BENCH_FOLDER"], ref.replace(":", "_"))
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

async def authorize(credentials):
    return (201, "scope") if credentials == "Bearer bench-token" else (401, None)

app = App(authorize=authorize, storage=Files(), max_bytes=2**31)
"""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until something listens; RuntimeError if the process ends first."""
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen")


@contextlib.contextmanager
def started(
    arguments: list[str], port: int, *, log: Path | None = None, **environment: str
) -> Iterator[int]:
    """A process that listens on `port` and writes what it says to `log`; gives its process id."""
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            arguments, env={**os.environ, **environment}, stdout=output, stderr=output
        )
    try:
        wait_for_port(port, process)
        yield process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def uvicorn_app(
    folder: Path, name: str, source: str, *, logs_requests: bool = False
) -> Iterator[str]:
    """A small application under plain uvicorn; gives its upload URL."""
    (folder / f"{name}.py").write_text(source)
    port = free_port()
    uvicorn = [sys.executable, "-m", "uvicorn", f"{name}:app", "--port", str(port)]
    logging = [] if logs_requests else ["--no-access-log", "--log-level", "warning"]
    arguments = [*uvicorn, "--app-dir", str(folder), *logging]
    with started(arguments, port, log=folder / f"{name}.log", BENCH_FOLDER=str(folder)):
        yield f"http://127.0.0.1:{port}/ahp/uploads"


@contextlib.contextmanager
def bare(folder: Path, *, logs_requests: bool = False) -> Iterator[str]:
    """An application that reads the body and answers fixed JSON.

    With `logs_requests` it is uvicorn as it comes, which writes a line for every request, as
    Consignee does; without, uvicorn's own log is off.
    """
    name = "bare_app" if logs_requests else "silent_app"
    with uvicorn_app(folder, name, BARE_APP, logs_requests=logs_requests) as url:
        yield url


@contextlib.contextmanager
def sdk(folder: Path) -> Iterator[str]:
    """The public SDK's receiver over a storage that writes a file and fsyncs it."""
    with uvicorn_app(folder, "sdk_app", SDK_APP) as url:
        yield url


@contextlib.contextmanager
def nginx_dav(folder: Path) -> Iterator[str]:
    """nginx that stores what is PUT, on the same disk; gives the URL of its folder."""
    port = free_port()
    (folder / "stored").mkdir()
    configuration = folder / "nginx.conf"
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""
    configuration.write_text(
        f"{user} daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}"
        f"http {{ access_log off; {temporary} server {{ listen 127.0.0.1:{port};"
        f"client_max_body_size 0; root {folder}/stored; dav_methods PUT; }} }}"
    )
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    with started([binary, "-p", str(folder), "-c", str(configuration)], port):
        yield f"http://127.0.0.1:{port}/"


@contextlib.contextmanager
def consignee(folder: Path, *arguments: str) -> Iterator[RunningServer]:
    """The receiver, as `serve` runs it: its own data folder, one configured token."""
    configuration = folder / "consignee.toml"
    if not configuration.exists():
        write_configuration(configuration)
    with running_server(
        "--config", str(configuration), "--data-dir", str(folder / "data"), "--migrate",
        *arguments, command="serve",
    ) as server:  # fmt: skip
        yield server


def write_configuration(path: Path, extra: str = "") -> None:
    """A configuration with the benchmark's token and whatever else is asked for."""
    path.write_text(
        'max_upload_bytes = "4GiB"\n'
        f'{extra}\n[[tokens]]\nname = "bench"\ntoken_env = "BENCH_TOKEN"\nscope = "bench"\n'
        'permissions = ["ahp.upload", "ahp.hooks", "uhp", "admin", "artifacts.write"]\n'
    )
    os.environ["BENCH_TOKEN"] = TOKEN


def resident_bytes(pid: int) -> int:
    """The resident memory of a process, shared pages left out."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def get_json(url: str) -> object:
    """A JSON document from a server of this run."""
    with urllib.request.urlopen(url) as answer:
        return json.loads(answer.read())


def run(coroutine: object) -> object:
    """Run a coroutine to its end."""
    return asyncio.run(coroutine)  # type: ignore[arg-type]
