"""`consignee dev` and `consignee serve`."""

from __future__ import annotations

import functools
import logging
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app import __version__, logs
from app.addresses import is_loopback
from app.commands.options import EVERY_ADDRESS, Source, configured, listening
from app.commands.tokens import digest_of, fresh_token
from app.commands.workers import run_workers
from app.main import create_app
from app.server import (
    ReadyFile,
    bind,
    ended_by_signals,
    ignore_signals,
    reachable_url,
    require_protected,
    run,
)
from app.settings import (
    ALL_PERMISSIONS,
    Settings,
    SettingsError,
    TokenSettings,
)
from app.store.migrations import migrate as migrate_database

if TYPE_CHECKING:
    import socket

logger = logging.getLogger("consignee.server")

_BEARER = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1: no other can be sent
_NAME = re.compile(r"[^\s=\x00-\x1f\x7f]+")


def _parse_tokens(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """NAME=TOKEN pairs by name. A complaint never repeats the value: it is a secret."""
    tokens: dict[str, str] = {}
    for value in values:
        name, _, token = value.partition("=")
        if not _NAME.fullmatch(name) or not _BEARER.fullmatch(token):
            raise click.BadParameter(
                "must be NAME=TOKEN, with a token of letters, digits and -._~+/ only",
                context,
                parameter,
            )
        if name in tokens:
            raise click.BadParameter(f"{name} is given twice", context, parameter)
        tokens[name] = token
    return tokens


@click.command()
@listening
@click.option(
    "--token",
    "tokens",
    multiple=True,
    metavar="NAME=TOKEN",
    callback=_parse_tokens,
    help="A principal NAME with scope NAME and all permissions. Repeatable. A fresh token of "
    "`dev` is made when neither this nor the configuration gives one.",
)
@configured
def dev(
    source: Source,
    host: str | None,
    port: int | None,
    ready_file: Path | None,
    tokens: dict[str, str],
) -> None:
    """Run a receiver on this machine, with no configuration.

    It keeps what it receives in a temporary folder, unless --data-dir or the configuration names
    one. A consignee.toml in the current folder is read only if --config names it.
    """
    with ended_by_signals(), ExitStack() as opened:
        base = source.load(implicit_file=False, host=host, port=port)
        _require_loopback(base)
        listener = opened.enter_context(bind(base.host, base.port))
        known = tokens or ({} if base.tokens else {"dev": fresh_token()})
        is_temporary = "data_dir" not in base.model_fields_set
        folder = opened.enter_context(_temporary_folder()) if is_temporary else base.data_dir
        settings = _dev_settings(source, base, listener, folder, known)
        logs.configure(settings)
        application = create_app(settings)
        migrate_database(settings)
        url = _url(settings, listener)
        banner = Banner(settings, url, known, is_temporary=is_temporary)
        with _announced(banner.show, ready_file, ReadyFile.of(settings, url, known)) as announce:
            run(application, settings, listener, on_started=announce)


def _require_loopback(settings: Settings) -> None:
    if not is_loopback(settings.host):
        raise SettingsError(
            f"host: {settings.host} can be reached from other machines, and dev is for this one "
            "only; listen on 127.0.0.1, or use `consignee serve`"
        )


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="consignee-"))
    try:
        yield folder
    finally:
        ignore_signals()
        shutil.rmtree(folder, ignore_errors=True)


def _dev_settings(
    source: Source,
    base: Settings,
    listener: socket.socket,
    folder: Path,
    tokens: Mapping[str, str],
) -> Settings:
    """`base`, with what only dev knows: where it listens and stores, and whom it lets in."""
    host, port = listener.getsockname()[:2]
    return source.load(
        implicit_file=False,
        host=host,
        port=port,
        data_dir=folder,
        tokens=base.tokens + tuple(_dev_token(*pair) for pair in tokens.items()),
        log_format=base.log_format if "log_format" in base.model_fields_set else "text",
    )


def _dev_token(name: str, token: str) -> TokenSettings:
    return TokenSettings(
        name=name, token_sha256=digest_of(token), scope=name, permissions=ALL_PERMISSIONS
    )


def _url(settings: Settings, listener: socket.socket) -> str:
    return reachable_url(listener, tls=settings.tls_cert_file is not None)


@contextmanager
def _announced(
    show: Callable[[], None], path: Path | None, ready: ReadyFile
) -> Iterator[Callable[[], None]]:
    """What tells that the server is ready: a person first, then programs, until the block ends."""
    with ExitStack() as published:

        def announce() -> None:
            show()
            if path is not None:
                ready.write(path)
                published.callback(path.unlink, missing_ok=True)

        yield announce


@dataclass(frozen=True, slots=True)
class Banner:
    """What a person wants to know of a development server, on standard output."""

    settings: Settings
    url: str
    tokens: Mapping[str, str]
    is_temporary: bool

    def show(self) -> None:
        """Print it, at once also into a pipe."""
        click.secho(f"\nConsignee {__version__} is ready\n", bold=True)
        for name, value in self._rows():
            click.echo(f"  {click.style(f'{name:<17}', dim=True)} {value}")
        click.secho("\nTo upload a file:\n", dim=True)
        click.echo(f"{self.curl()}\n")
        click.secho("Ctrl-C ends it.\n", dim=True)
        sys.stdout.flush()

    def _rows(self) -> Iterator[tuple[str, str]]:
        settings = self.settings
        yield "URL", click.style(self.url, fg="green")
        if settings.public_url is not None:
            yield "Public URL", settings.public_url
        for path in settings.upload_paths:
            yield "Upload endpoint", self.url + path
        for path in settings.hooks_paths:
            yield "Event endpoint", self.url + path
        for name, token in self.tokens.items():
            yield f"Token of {name}", click.style(token, fg="cyan")
        for configured_token in settings.tokens[: len(settings.tokens) - len(self.tokens)]:
            yield f"Token of {configured_token.name}", "as configured"
        yield "Data folder", f"{settings.data_dir}{self._fate_of_folder()}"
        limit = settings.max_upload_bytes
        yield "Size limit", f"{limit.human_readable()} ({limit:,} bytes) an upload"

    def _fate_of_folder(self) -> str:
        return " (temporary, removed at exit)" if self.is_temporary else ""

    def curl(self) -> str:
        """A command line for bash that uploads a small file which every machine has."""
        token = next(iter(self.tokens.values()), "$TOKEN")
        certificate = self.settings.tls_cert_file
        trust = f"--cacert {shlex.quote(str(certificate))} " if certificate else ""
        return (
            f'curl -sS {trust}-H "Authorization: Bearer {token}" '
            '-H "Content-Type: application/octet-stream" '
            "-H \"AHP-Content-SHA256: $(sha256sum /etc/hosts | cut -d' ' -f1)\" "
            f"--data-binary @/etc/hosts {self.url}{self.settings.upload_paths[0]}"
        )


@click.command()
@listening
@click.option("--migrate", "migrates", is_flag=True, help="Bring the database up to date first.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Processes that answer on the port. SIGHUP renews them one by one, with what the "
    "configuration says then.",
)
@configured
def serve(
    source: Source,
    host: str | None,
    port: int | None,
    ready_file: Path | None,
    migrates: bool,
    workers: int | None,
) -> None:
    """Run the receiver as its configuration says."""
    with ended_by_signals():
        base = source.load(host=host, port=port, workers=workers)
        require_protected(base)
        logs.configure(base)
        with bind(base.host, base.port) as listener:
            load = functools.partial(
                source.load,
                host=base.host,
                port=listener.getsockname()[1],
                workers=base.workers,
            )
            settings = load()
            application = create_app(settings) if settings.workers == 1 else None
            if migrates:
                migrate_database(settings)
            url = _url(settings, listener)
            show = functools.partial(_log_start, settings, url)
            with _announced(show, ready_file, ReadyFile.of(settings, url, {})) as announce:
                if application is None:
                    run_workers(settings, listener, load=load, on_started=announce)
                else:
                    run(application, settings, listener, on_started=announce)


def _log_start(settings: Settings, url: str) -> None:
    endpoints = " ".join(settings.upload_endpoints)
    logger.info("listening", extra={"url": url, "upload_endpoints": endpoints})
    if settings.public_url is None and settings.host in EVERY_ADDRESS:
        logger.warning("public_url is not set: clients are told a URL that they cannot reach")
