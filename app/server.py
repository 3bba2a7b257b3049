"""The server process: a listening socket, uvicorn over it, and an orderly end.

Everything that uvicorn leaves open is chosen here: the parser that ships, the loop, limits, TLS.
SIGINT and SIGTERM let running requests finish within `shutdown_seconds` and end with success. A
server that retires, because another process has taken its place, lets its tasks finish as well.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from app.addresses import is_loopback
from app.errors import CommandError, Refusal
from app.http.protocol import DRAINING_KEY, RETIRING_KEY, STOPPING_KEY, ReceiverProtocol
from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    import threading
    from types import FrameType

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BACKLOG = 2048  # connections that the kernel queues while the loop is busy
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)

RETIRE_SECONDS = 1.0
"""How long a server that retires still takes requests on connections that it has."""

TICK_SECONDS = 0.1

logger = logging.getLogger("consignee.server")

_LIFESPAN_FAILED = re.compile(r"Application \w+ failed\. Exiting\.")

GARBAGE_THRESHOLDS = (20_000, 50, 100)
"""New objects before the young are looked through, and how often the older ones are: requests leave
hardly any cycles."""


class ServerError(CommandError):
    """The server cannot start, or failed; the message says why and what to do."""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host` and `port` (0 = any free), not listening yet.

    Raises ServerError when the address is unknown, in use, or not of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error.strerror}") from None
    # IPv4 first: `localhost` means 127.0.0.1 to most clients.
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    # The protocol is named because asyncio sets TCP_NODELAY only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, f" on {host} port {port}") from None
    return listener


def _cannot_listen(error: OSError, where: str = "") -> ServerError:
    # uvloop words its errors itself: only the number is sure to be there.
    reason = os.strerror(error.errno) if error.errno else str(error)
    is_taken = error.errno == errno.EADDRINUSE
    hint = "; choose another --port, or 0 for any free one" if is_taken else ""
    return ServerError(f"cannot listen{where}: {reason}{hint}")


def reachable_url(listener: socket.socket, *, tls: bool) -> str:
    """The URL under which this machine itself reaches `listener`, without a trailing slash."""
    host, port = listener.getsockname()[:2]
    address = ip_address(host)
    if address.is_unspecified:
        address = ip_address("127.0.0.1" if address.version == 4 else "::1")
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def require_protected(settings: Settings) -> None:
    """Refuse to listen beyond this machine where credentials would travel in clear (AHP-R05).

    Raises SettingsError.
    """
    if is_loopback(settings.host) or settings.is_protected:
        return
    raise SettingsError(
        f"host: {settings.host} can be reached from other machines, and nothing says that the way "
        "is encrypted; set tls_cert_file and tls_key_file, or set public_url to the https URL of "
        "the proxy in front, or listen on 127.0.0.1"
    )


@dataclass(frozen=True, slots=True)
class ReadyFile:
    """What a program that started the server needs to know, once the port listens."""

    url: str
    upload_endpoint: str
    uhp_base_url: str
    pid: int
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Settings, url: str, tokens: Mapping[str, str]) -> ReadyFile:
        """Describe this process, which listens at `url`."""
        return cls(url, url + settings.upload_paths[0], url, os.getpid(), tokens)

    def write(self, path: Path) -> None:
        """Put it at `path` in one step, readable by this user only: it may hold tokens."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(asdict(self), file, indent=2)
                file.write("\n")
            draft.replace(path)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise ServerError(f"cannot write the ready file {path}: {error.strerror}") from None


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the block as they would a server: at once, and with success.

    What the block has opened is closed on the way out, and a second signal does not disturb that.
    """
    before = {number: signal.signal(number, _interrupt) for number in ENDING_SIGNALS}
    try:
        yield
    except KeyboardInterrupt:
        logger.debug("A signal ended the start.")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From here on there is only cleaning up, which no signal may cut short."""
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    ignore_signals()
    raise KeyboardInterrupt


def run(
    application: ASGIApp,
    settings: Settings,
    listener: socket.socket,
    *,
    on_started: Callable[[], None] = lambda: None,
    retires: threading.Event | None = None,
) -> None:
    """Serve until a signal ends it; `on_started` is called once requests are answered.

    Once `retires` is set, another process accepts connections, and this one ends with its work.

    Raises ServerError when the port was taken since it was bound, or when the application or
    `on_started` fails; SettingsError when the TLS files cannot be used.
    """
    reported = _LifespanReported(application)
    server = Server(configuration(reported, settings), on_started, retires)
    _listen(listener)
    with _one_voice():
        server.run(sockets=[listener])
    failure = server.failure or reported.failure
    if failure is not None:
        raise _server_error(failure) from failure


def _listen(listener: socket.socket) -> None:
    """Listen before the loop does: uvloop does not notice when that fails.

    Who connects now waits until the application has started.
    """
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(error) from None


def _server_error(failure: Exception) -> ServerError:
    if isinstance(failure, ServerError):
        return failure
    logger.debug("The server failed.", exc_info=failure)
    if isinstance(failure, Refusal | SettingsError):
        return ServerError(str(failure))
    reason = failure.strerror if isinstance(failure, OSError) else failure
    return ServerError(f"the server failed: {type(failure).__name__}: {reason}")


@contextmanager
def _one_voice() -> Iterator[None]:
    """Drop uvicorn's own lines about a failed lifespan: `run` raises the reason itself."""

    def is_news(record: logging.LogRecord) -> bool:
        return not _LIFESPAN_FAILED.fullmatch(record.getMessage())

    uvicorn_logger = logging.getLogger("uvicorn.error")
    uvicorn_logger.addFilter(is_news)
    try:
        yield
    finally:
        uvicorn_logger.removeFilter(is_news)


def configuration(application: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Every choice that uvicorn leaves open, made.

    Raises SettingsError when the TLS files cannot be used.
    """
    config = uvicorn.Config(
        application,
        http=ReceiverProtocol,
        loop="auto",
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
        backlog=BACKLOG,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        workers=1,
    )
    try:
        config.load()
    except OSError as error:  # an SSLError is one
        reason = error.strerror or error
        raise SettingsError(f"tls_cert_file, tls_key_file: cannot be used: {reason}") from None
    return config


def _settle_memory() -> None:
    """Spare the garbage collector what lives as long as the process: modules, tables, settings.

    It would look through all of that again and again; a tenth of what a small upload costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


class Server(uvicorn.Server):
    """uvicorn's server, which says when it listens, and for which a signal is no failure."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        retires: threading.Event | None = None,
    ) -> None:
        super().__init__(config)
        self.failure: ServerError | None = None
        self._on_started = on_started
        self._retires = retires
        self._is_signalled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, listen, and tell; what fails is kept in `failure`."""
        try:
            await super().startup(sockets)
            _settle_memory()
            self._on_started()
        except SystemExit:  # uvicorn's answer to an application that does not start
            self.should_exit = True
        except ServerError as error:
            self.failure = error
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether it is time to end."""
        is_over = await super().on_tick(counter)
        return is_over or (self._retires is not None and self._retires.is_set())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say what is waited for, then let it finish within `shutdown_seconds`."""
        if self.failure is None:
            logger.info("stopping", extra={"running_requests": len(self.server_state.tasks)})
        if self._retires is not None and self._retires.is_set():
            await self._retire(sockets or [])
        self.lifespan.state.get(STOPPING_KEY, _nothing)()
        await super().shutdown(sockets)
        await self._cut_what_is_left()

    async def _retire(self, sockets: list[socket.socket]) -> None:
        """Take no more connections, and let all work end by itself, within `shutdown_seconds`."""
        for server in self.servers:
            server.close()
        for listener in sockets:
            listener.close()
        self.lifespan.state[RETIRING_KEY] = True
        for connection in self._connections():
            connection.retire()
        work = asyncio.create_task(self._all_work())
        for _ in range(round((self.config.timeout_graceful_shutdown or 0) / TICK_SECONDS)):
            if work.done() or self._is_signalled:
                break
            await asyncio.wait([work], timeout=TICK_SECONDS)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _all_work(self) -> None:
        """Return once no request is being answered and nothing else runs.

        Not before RETIRE_SECONDS: what was sent on a connection before its client could know is
        still answered.
        """
        drained = self.lifespan.state.get(DRAINING_KEY, _drained)
        await asyncio.sleep(RETIRE_SECONDS)
        await drained()
        while self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks))
            await drained()

    def _connections(self) -> list[ReceiverProtocol]:
        return [c for c in self.server_state.connections if isinstance(c, ReceiverProtocol)]

    async def _cut_what_is_left(self) -> None:
        """Close the connections that nobody waits for any more, before the loop does."""
        left = self._connections()
        for connection in left:
            connection.abort()
        if left:
            await asyncio.sleep(0)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order; a second Ctrl-C waits for nobody.

        Unlike uvicorn's own, this does not keep the signal to raise it again afterwards.
        """
        del frame
        self._is_signalled = True
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def _nothing() -> None:
    """What an application does that has nothing to end early."""


async def _drained() -> None:
    """What an application waits for that has no work but requests."""


class _LifespanReported:
    """Keeps the reason of a failed lifespan, which uvicorn would only print as a traceback."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self.failure: Exception | None = None

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._live(scope, receive, send)
        return self._application(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        phase = "startup"

        async def send_reported(message: Message) -> None:
            nonlocal phase
            if message["type"].endswith(".failed"):
                self.failure = ServerError(f"the application's {phase} failed")
                message = {"type": message["type"]}
            phase = "shutdown"
            await send(message)

        try:
            await self._application(scope, receive, send_reported)
        except Exception as error:  # noqa: BLE001 - kept, and raised by `run`
            if self.failure is None:
                await send({"type": f"lifespan.{phase}.failed"})
            self.failure = error
