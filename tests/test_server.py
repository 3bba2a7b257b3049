"""The server process: what it binds, how it starts, fails and ends."""

from __future__ import annotations

import asyncio
import errno
import gc
import http.client
import json
import logging
import os
import signal
import socket
import ssl
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from app import server as server_module
from app.errors import Unavailable
from app.http.protocol import DRAINING_KEY, STOPPING_KEY
from app.server import (
    ReadyFile,
    Server,
    ServerError,
    bind,
    configuration,
    ended_by_signals,
    reachable_url,
    require_protected,
    run,
)
from app.settings import Settings, SettingsError, load_settings
from tests.certificates import write_certificate

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

WAIT_SECONDS = 30.0


class Echo:
    """An application that tells what the server told it, and can be made to fail or to hang."""

    def __init__(
        self,
        *,
        fail_at_start: Exception | None = None,
        fail_at_end: Exception | None = None,
        answer: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.fail_at_start = fail_at_start
        self.fail_at_end = fail_at_end
        self.answer = answer
        self.requested = threading.Event()
        self.events: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        self.requested.set()
        if self.answer is not None:
            await self.answer()
        body = json.dumps({"client": scope["client"], "scheme": scope["scheme"]}).encode()
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if self.fail_at_start is not None:
            raise self.fail_at_start
        self.events.append("started")
        scope["state"][STOPPING_KEY] = lambda: self.events.append("stopping")
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self.events.append("ended")
        if self.fail_at_end is not None:
            raise self.fail_at_end
        await send({"type": "lifespan.shutdown.complete"})


def settings(**given: Any) -> Settings:
    return load_settings(implicit_file=False, **given)


@contextmanager
def client_of(work: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """What starts `work` in a thread of its own; its failure is the test's failure."""
    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=guarded)
    yield thread.start
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def serve(application: Any, work: Callable[[str], None], **given: Any) -> None:
    """`run` the application, with `work` as its client, until a SIGTERM follows the work."""
    with bind("127.0.0.1", 0) as listener:
        configured = settings(**given)
        url = reachable_url(listener, tls=configured.tls_cert_file is not None)

        def work_and_end() -> None:
            work(url)
            os.kill(os.getpid(), signal.SIGTERM)

        with client_of(work_and_end) as start:
            run(application, configured, listener, on_started=start)


# Listening


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:{}"),
        ("localhost", "http://127.0.0.1:{}"),
        ("::1", "http://[::1]:{}"),
        ("0.0.0.0", "http://127.0.0.1:{}"),
        ("::", "http://[::1]:{}"),
    ],
)
def test_a_bound_socket_has_a_url_that_this_machine_reaches(host: str, url: str) -> None:
    with bind(host, 0) as listener:
        assert reachable_url(listener, tls=False) == url.format(listener.getsockname()[1])


def test_the_url_of_a_tls_server_is_https() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert reachable_url(listener, tls=True).startswith("https://127.0.0.1:")


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ServerError, match=r"cannot listen on no\.such\.invalid: "):
        bind("no.such.invalid", 0)


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        port = first.getsockname()[1]
        reason = os.strerror(errno.EADDRINUSE)
        with pytest.raises(ServerError, match=f"127.0.0.1 port {port}: {reason}; .* --port"):
            bind("127.0.0.1", port)


def test_a_port_taken_between_binding_and_listening_is_a_failed_start() -> None:
    application = Echo()
    with bind("127.0.0.1", 0) as first, bind(*first.getsockname()) as second:
        first.listen()
        with pytest.raises(ServerError, match="cannot listen: Address already in use; "):
            run(application, settings(), second)
    assert application.events == []


@pytest.mark.anyio
@pytest.mark.requirement("AHP-R09")
@pytest.mark.parametrize(
    "anyio_backend",
    [
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
    ],
)
async def test_answers_leave_at_once_on_either_loop() -> None:
    """TCP_NODELAY holds on accepted sockets: no receipt waits 40 ms for an acknowledgement."""
    started = asyncio.Event()
    with bind("127.0.0.1", 0) as listener:
        server = Server(configuration(Echo(), settings()), started.set)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await started.wait()
        async with httpx.AsyncClient(
            trust_env=False, base_url=reachable_url(listener, tls=False)
        ) as client:
            await client.get("/")
            (connection,) = server.server_state.connections
            accepted: Any = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        server.should_exit = True
        await serving


# Serving


def test_it_serves_and_tells_nothing_of_its_making() -> None:
    def work(url: str) -> None:
        response = httpx.get(url, trust_env=False)
        assert response.status_code == 200
        assert "server" not in response.headers
        assert "date" in response.headers

    application = Echo()
    serve(application, work)
    assert application.events == ["started", "stopping", "ended"]


@pytest.mark.parametrize(
    ("trusted", "client", "scheme"),
    [(("127.0.0.1",), "203.0.113.9", "https"), ((), "127.0.0.1", "http")],
)
def test_forwarded_headers_are_believed_of_trusted_proxies_only(
    trusted: tuple[str, ...], client: str, scheme: str
) -> None:
    def work(url: str) -> None:
        forwarded = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}
        told = httpx.get(url, trust_env=False, headers=forwarded).json()
        assert (told["client"][0], told["scheme"]) == (client, scheme)

    serve(Echo(), work, trusted_proxies=trusted)


def test_a_websocket_is_not_spoken(caplog: pytest.LogCaptureFixture) -> None:
    def work(url: str) -> None:
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert httpx.get(url, trust_env=False, headers=upgrade).status_code == 200

    serve(Echo(), work)
    assert "WebSocket library" not in caplog.text


def test_tls_is_its_own_when_configured(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path)
    trust = ssl.create_default_context(cafile=certificate)

    def work(url: str) -> None:
        assert url.startswith("https://")
        assert httpx.get(url, trust_env=False, verify=trust).json()["scheme"] == "https"

    serve(Echo(), work, tls_cert_file=certificate, tls_key_file=key)


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match="tls_cert_file, tls_key_file: cannot be used: "):
        configuration(Echo(), settings(tls_cert_file=file, tls_key_file=file))


# Ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_a_running_request_finish(number: signal.Signals) -> None:
    signalled = threading.Event()

    async def answer() -> None:
        await asyncio.get_running_loop().run_in_executor(None, signalled.wait, WAIT_SECONDS)

    application = Echo(answer=answer)
    statuses: list[int] = []

    def request() -> None:
        statuses.append(httpx.get(url, trust_env=False, timeout=WAIT_SECONDS).status_code)

    def work() -> None:
        requesting = threading.Thread(target=request)
        requesting.start()
        assert application.requested.wait(WAIT_SECONDS)
        os.kill(os.getpid(), number)
        signalled.set()
        requesting.join(WAIT_SECONDS)

    with bind("127.0.0.1", 0) as listener, client_of(work) as start:
        url = reachable_url(listener, tls=False)
        run(application, settings(), listener, on_started=start)
    assert statuses == [200]
    assert application.events == ["started", "stopping", "ended"]


class Retiring:
    """A server whose place another one takes, and a client that keeps its connection."""

    def __init__(self, work: Callable[[Retiring], None], **given: Any) -> None:
        self.drained, self.answers, self.retires = (threading.Event() for _ in range(3))
        self.application = Draining(self.answers, self.drained)
        with bind("127.0.0.1", 0) as self.listener, client_of(lambda: work(self)) as start:
            self.address = self.listener.getsockname()
            run(
                self.application,
                settings(**given),
                self.listener,
                on_started=start,
                retires=self.retires,
            )

    def connected(self) -> http.client.HTTPConnection:
        host, port = self.address
        return http.client.HTTPConnection(host, port, timeout=WAIT_SECONDS)


class Draining(Echo):
    """Answers when `answers` is set, and has drained when `drained` is."""

    def __init__(self, answers: threading.Event, drained: threading.Event) -> None:
        super().__init__(answer=lambda: waited(answers))
        self.asked = threading.Event()
        self._drained = drained

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"][DRAINING_KEY] = self._drain
        await super()._live(scope, receive, send)

    async def _drain(self) -> None:
        self.asked.set()
        await waited(self._drained)


async def waited(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.01)


def test_a_server_that_retires_answers_what_is_sent_and_waits_for_its_work() -> None:
    """A request under way, one on a connection that is kept, one on a connection without any."""

    def work(server: Retiring) -> None:
        server.answers.set()
        kept, fresh = server.connected(), server.connected()
        fresh.connect()
        kept.request("GET", "/")
        assert kept.getresponse().read()
        server.answers.clear()
        server.application.requested.clear()
        running = server.connected()
        running.request("GET", "/")
        assert server.application.requested.wait(WAIT_SECONDS)
        server.retires.set()
        while is_listening(server):
            pass
        kept.request("GET", "/")
        fresh.request("GET", "/")
        server.answers.set()
        for connection in (running, kept, fresh):
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (200, "close")
            answer.read()
            connection.close()
        assert "stopping" not in server.application.events
        server.drained.set()

    server = Retiring(work)
    assert server.application.events == ["started", "stopping", "ended"]


def test_a_request_that_outlasts_all_other_work_is_waited_for() -> None:
    def work(server: Retiring) -> None:
        running = server.connected()
        running.request("GET", "/")
        assert server.application.requested.wait(WAIT_SECONDS)
        server.drained.set()
        server.retires.set()
        assert server.application.asked.wait(WAIT_SECONDS)
        server.answers.set()
        assert running.getresponse().status == 200
        running.close()

    server = Retiring(work)
    assert server.application.events == ["started", "stopping", "ended"]


def is_listening(server: Retiring) -> bool:
    return server.listener.fileno() >= 0


@pytest.mark.parametrize("is_signalled", [True, False])
def test_a_server_that_retires_waits_for_work_no_longer_than_it_may(is_signalled: bool) -> None:
    """Not beyond `shutdown_seconds`, and not when a signal ends it."""

    def work(server: Retiring) -> None:
        server.retires.set()
        if is_signalled:
            while is_listening(server):
                pass
            os.kill(os.getpid(), signal.SIGTERM)

    server = Retiring(work, shutdown_seconds=30 if is_signalled else 1)
    assert server.application.events == ["started", "stopping", "ended"]
    assert not server.drained.is_set()


def test_a_second_interrupt_waits_for_nobody() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    application = Echo(answer=never)

    def work() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert application.requested.wait(WAIT_SECONDS)
            server.handle_exit(signal.SIGINT, None)
            server.handle_exit(signal.SIGINT, None)
            connection.recv(1)

    with bind("127.0.0.1", 0) as listener, client_of(work) as start:
        server = Server(configuration(application, settings()), start)
        server.run(sockets=[listener])
    assert server.force_exit


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_serving_ends_the_block_with_its_cleaning_up(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    steps = []
    with ended_by_signals():
        try:
            signal.raise_signal(number)
            steps.append("went on")
        finally:
            signal.raise_signal(number)
            steps.append("cleaned up")
    assert steps == ["cleaned up"]
    assert signal.getsignal(number) is before


# Failing to start


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (Unavailable("database_busy", "The database is busy."), r"The database is busy\."),
        (SettingsError("run `consignee migrate`"), "run `consignee migrate`"),
        (
            OSError(errno.EACCES, "Permission denied", "/secret"),
            "PermissionError: Permission denied",
        ),
        (RuntimeError("oops"), "the server failed: RuntimeError: oops"),
    ],
)
def test_a_failed_start_is_one_error_and_no_line_of_its_own(
    failure: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with bind("127.0.0.1", 0) as listener, pytest.raises(ServerError, match=f"{message}$"):
        run(Echo(fail_at_start=failure), settings(), listener)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_failed_end_is_an_error_too(caplog: pytest.LogCaptureFixture) -> None:
    application = Echo(fail_at_end=Unavailable("busy", "The store is busy."))
    with pytest.raises(ServerError, match="The store is busy"):
        serve(application, lambda url: None)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("raises", [True, False])
def test_an_application_that_reports_its_failure_itself_is_understood(raises: bool) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        report: Message = {"type": "lifespan.startup.failed", "message": "Traceback …"}
        await send(report)
        if raises:
            raise RuntimeError("reason")

    expected = "RuntimeError: reason" if raises else "the application's startup failed"
    with bind("127.0.0.1", 0) as listener, pytest.raises(ServerError, match=expected):
        run(application, settings(), listener)


def test_a_start_that_cannot_be_told_is_taken_back() -> None:
    application = Echo()

    def on_started() -> None:
        raise ServerError("cannot write the ready file")

    told = pytest.raises(ServerError, match="cannot write the ready file")
    with bind("127.0.0.1", 0) as listener, told:
        run(application, settings(), listener, on_started=on_started)
    assert application.events == ["started", "stopping", "ended"]


# The ready file


def test_the_ready_file_is_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    ready = ReadyFile.of(settings(), "http://127.0.0.1:1", {"alice": "s3cret"})
    ready.write(path)
    assert json.loads(path.read_text()) == {
        "url": "http://127.0.0.1:1",
        "upload_endpoint": "http://127.0.0.1:1/ahp/uploads",
        "uhp_base_url": "http://127.0.0.1:1",
        "pid": os.getpid(),
        "tokens": {"alice": "s3cret"},
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["ready.json"]
    assert "s3cret" not in repr(ready)


def test_a_public_url_does_not_change_where_tests_connect() -> None:
    ready = ReadyFile.of(settings(public_url="https://x.example"), "http://127.0.0.1:1", {})
    assert ready.upload_endpoint == "http://127.0.0.1:1/ahp/uploads"


@pytest.mark.parametrize("target", ["missing/ready.json", "folder"])
def test_a_ready_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    ready = ReadyFile.of(settings(), "http://127.0.0.1:1", {})
    with pytest.raises(ServerError, match=r"cannot write the ready file .*: "):
        ready.write(tmp_path / target)
    assert os.listdir(tmp_path) == ["folder"]


# Protection


@pytest.mark.requirement("AHP-R05")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
@pytest.mark.parametrize("public_url", [None, "http://127.0.0.1:8080"])
def test_listening_beyond_this_machine_needs_an_encrypted_way(
    host: str, public_url: str | None
) -> None:
    with pytest.raises(SettingsError, match="tls_cert_file and tls_key_file, or set public_url"):
        require_protected(settings(host=host, public_url=public_url))


@pytest.mark.requirement("AHP-R05")
@pytest.mark.parametrize(
    "given",
    [
        {"host": "127.0.0.1"},
        {"host": "localhost"},
        {"host": "::1"},
        {"host": "0.0.0.0", "public_url": "https://x.example"},
        {"host": "0.0.0.0", "tls_cert_file": Path("c.pem"), "tls_key_file": Path("k.pem")},
    ],
)
def test_loopback_or_an_encrypted_way_may_be_listened_on(given: dict[str, Any]) -> None:
    configured = settings(**given)
    require_protected(configured)
    assert configured.host == given["host"]


def test_what_lives_as_long_as_the_process_is_no_garbage() -> None:
    before = gc.get_threshold()
    try:
        server_module._settle_memory()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == server_module.GARBAGE_THRESHOLDS
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
