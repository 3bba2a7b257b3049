"""What `consignee serve` does with more than one worker; see supervision.py."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from prometheus_client import start_http_server
from prometheus_client.multiprocess import mark_process_dead

from app import logs
from app.commands.supervision import (
    SERVING,
    Plan,
    StartFailed,
    start_process,
    supervise,
)
from app.commands.switches import FAILED
from app.errors import Refusal
from app.http.metrics import SHARED_VARIABLE, shared_registry
from app.main import create_app
from app.server import ENDING_SIGNALS, ServerError, ended_by_signals, run
from app.settings import Settings, SettingsError
from app.store.records import StoreError
from app.store.staging import Staging

if TYPE_CHECKING:
    import socket
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

logger = logging.getLogger("consignee.server")


def run_workers(
    settings: Settings,
    listener: socket.socket,
    *,
    load: Callable[[], Settings],
    on_started: Callable[[], None],
) -> None:
    """Serve with `settings.workers` processes until a signal ends them.

    `load` gives the settings that they have once they are renewed: all but the address and their
    number. Raises as `run` does.
    """
    with ExitStack() as opened:
        figures = opened.enter_context(_shared_figures(settings))
        opened.enter_context(_served_figures(settings, figures))
        crew = Crew(settings, listener, load)
        supervise(
            Plan(
                count=settings.workers,
                shutdown_seconds=settings.shutdown_seconds,
                start=crew.start,
                reload=crew.reload,
                on_serving=on_started,
                on_ending=listener.close,
                on_ended=lambda pid: mark_process_dead(pid, figures),  # type: ignore[no-untyped-call]
            )
        )


class Crew:
    """Starts workers, each with the settings that were loaded last."""

    def __init__(
        self, settings: Settings, listener: socket.socket, load: Callable[[], Settings]
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._load = load

    def reload(self) -> str | None:
        """Load the settings anew; what is wrong with them, where those that there are stay."""
        try:
            self._settings = self._load()
        except SettingsError as error:
            return str(error)
        return None

    def start(self, link: Connection) -> SpawnProcess:
        """A worker process; what its figures are shown on is the parent's."""
        settings = self._settings.model_copy(update={"metrics_port": None})
        return start_process(work, settings, self._listener, link)


@contextmanager
def _shared_figures(settings: Settings) -> Iterator[str]:
    """The folder where the workers keep their figures, which they find in their environment.

    It lies where a dead process leaves nothing behind for long.
    """
    staging = Staging(settings.staging_dir)
    before = os.environ.get(SHARED_VARIABLE)
    try:
        staging.open()
        folder = os.environ[SHARED_VARIABLE] = str(staging.folder("figures"))
        yield folder
    finally:
        os.environ.pop(SHARED_VARIABLE, None)
        if before is not None:
            os.environ[SHARED_VARIABLE] = before
        staging.close()


@contextmanager
def _served_figures(settings: Settings, figures: str) -> Iterator[None]:
    """Answer `/metrics` on a loopback port of its own, where one is configured."""
    port = settings.metrics_port
    if port is None:
        yield
        return
    try:
        server, _ = start_http_server(port, addr="127.0.0.1", registry=shared_registry(figures))
    except OSError as error:
        raise SettingsError(f"metrics_port: cannot listen on {port}: {error.strerror}") from None
    logger.info("metrics", extra={"port": server.server_port})
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def work(settings: Settings, listener: socket.socket, link: Connection) -> None:
    """One worker, from its start to its end; what keeps it from serving is told on `link`."""
    try:
        with ended_by_signals():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
            _serve(settings, listener, link)
    except (SettingsError, ServerError, StoreError, Refusal) as error:
        with suppress(OSError):  # nobody is left to be told
            link.send(StartFailed(str(error), wrong=isinstance(error, SettingsError)))
        sys.exit(FAILED)


def _serve(settings: Settings, listener: socket.socket, link: Connection) -> None:
    logs.configure(settings)
    retires, ended = threading.Event(), threading.Event()
    application = create_app(settings)
    obeying = threading.Thread(target=_obey, args=(link, retires, ended), daemon=True)
    obeying.start()
    try:
        run(
            application,
            settings,
            listener,
            on_started=lambda: link.send(SERVING),
            retires=retires,
        )
    finally:
        ended.set()


def _obey(link: Connection, retires: threading.Event, ended: threading.Event) -> None:
    """Retire when told so; end when the parent is gone."""
    with suppress(EOFError, OSError):
        while link.recv():
            retires.set()
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGTERM)
