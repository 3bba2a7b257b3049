"""The command line: `consignee COMMAND`.

Every command takes `--config` and `--data-dir`. What goes wrong is one line on standard error:
status 2 says that the command or the configuration is wrong, status 1 that the work failed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import logging
import re
import secrets
import shlex
import shutil
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import click
import httpx

from app import __version__, logs
from app.errors import Refusal
from app.main import create_app
from app.server import (
    ReadyFile,
    ServerError,
    bind,
    configuration,
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
    is_loopback,
    load_settings,
)
from app.store.content import ContentStore
from app.store.migrations import migrate as migrate_database
from app.store.records import StoreError

if TYPE_CHECKING:
    import socket

    from app.store.records import Listed, Reference

T = TypeVar("T")
logger = logging.getLogger("consignee.server")

WRONG, FAILED, INTERRUPTED = 2, 1, 130
TOKEN_BYTES: Final = 32
"""Randomness of a fresh token: 256 bits, so that its bare SHA-256 can be kept."""
PAGE: Final = 1000
"""References that are read at once when all of a scope are listed."""
POLL_SECONDS: Final = 0.2
"""Pause between two questions of `readyz --wait`."""
READYZ_SECONDS: Final = 5.0
"""How long one question of `readyz` may take."""

EVERY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""What means every address of this machine, and the one that it reaches itself by."""

_BEARER = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750 section 2.1: no other can be sent
_NAME = re.compile(r"[^\s=\x00-\x1f\x7f]+")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a command finds its settings: what `--config` and `--data-dir` say."""

    config: Path | None
    data_dir: Path | None

    def load(self, **given: Any) -> Settings:
        """The settings, with what the command line itself has `given` on top."""
        return load_settings(self.config, **({"data_dir": self.data_dir} | given))


def configured(command: Callable[..., T]) -> Callable[..., T]:
    """Give `command` the options `--config` and `--data-dir`, as its first argument `source`."""

    @click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file; consignee.toml in the current folder when not given.",
    )
    @click.option(
        "--data-dir",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Folder of the database, bodies and staging.",
    )
    @functools.wraps(command)
    def with_source(config: Path | None, data_dir: Path | None, **options: Any) -> T:
        return command(Source(config, data_dir), **options)

    return with_source


def listening(command: Callable[..., T]) -> Callable[..., T]:
    """Give `command` the options of what listens."""
    for option in (
        click.option("--host", help="Address to listen on.", metavar="HOST"),
        click.option("--port", type=click.IntRange(0, 65535), help="Port; 0 = any free one."),
        click.option(
            "--ready-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="JSON that says where the server is, written once the port listens.",
        ),
    ):
        command = option(command)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong."""
    try:
        status = cli.main(arguments, prog_name="consignee", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG
    except click.Abort:
        return _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (StoreError, ServerError, Refusal) as error:
        return _complain(str(error), FAILED)
    except SettingsError as error:
        return _complain(str(error), WRONG)
    except OSError as error:
        return _complain(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    return status or 0


def _complain(message: str, status: int) -> int:
    click.echo(f"consignee: {logs.printable(message)}", err=True)
    return status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """A receiver for what agents send: verified uploads, opaque references, nothing lost."""


# Serving


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


@cli.command()
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
        known = tokens or ({} if base.tokens else {"dev": _fresh_token()})
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
        name=name, token_sha256=_digest(token), scope=name, permissions=ALL_PERMISSIONS
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


@cli.command()
@listening
@click.option("--migrate", "migrates", is_flag=True, help="Bring the database up to date first.")
@configured
def serve(
    source: Source,
    host: str | None,
    port: int | None,
    ready_file: Path | None,
    migrates: bool,
) -> None:
    """Run the receiver as its configuration says."""
    with ended_by_signals():
        base = source.load(host=host, port=port)
        require_protected(base)
        logs.configure(base)
        with bind(base.host, base.port) as listener:
            settings = source.load(host=base.host, port=listener.getsockname()[1])
            application = create_app(settings)
            if migrates:
                migrate_database(settings)
            url = _url(settings, listener)
            show = functools.partial(_log_start, settings, url)
            with _announced(show, ready_file, ReadyFile.of(settings, url, {})) as announce:
                run(application, settings, listener, on_started=announce)


def _log_start(settings: Settings, url: str) -> None:
    endpoints = " ".join(settings.upload_endpoints)
    logger.info("listening", extra={"url": url, "upload_endpoints": endpoints})
    if settings.public_url is None and settings.host in EVERY_ADDRESS:
        logger.warning("public_url is not set: clients are told a URL that they cannot reach")


# Looking after it


@cli.command()
@configured
def migrate(source: Source) -> None:
    """Bring the database up to date; creates it when it is missing."""
    migrate_database(source.load())
    click.echo("The database is up to date.")


@cli.command()
@configured
def check(source: Source) -> None:
    """Check the configuration, and print the settings in force without their secrets."""
    settings = source.load()
    require_protected(settings)
    configuration(create_app(settings), settings)
    for name, value in _presentable(settings).items():
        click.echo(f"{name} = {'not set' if value is None else json.dumps(value)}")


def _presentable(settings: Settings) -> dict[str, Any]:
    shown = settings.model_dump(mode="json", exclude={"tokens": {"__all__": {"token_sha256"}}})
    shown |= {"database_url": _hidden(settings.database), "blob_url": _hidden(settings.blobs)}
    return shown


def _hidden(url: str) -> str:
    """`url` without its password, and without a query, which may hold one, too."""
    without_query = url.partition("?")[0]
    return re.sub(r"(?<=://)([^:/@]*):[^/]*@", r"\1:***@", without_query)


@cli.command()
@click.option("--wait", is_flag=True, help="Ask until it is ready.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long --wait asks.",
)
@click.option("--url", metavar="URL", help="URL of the server; as configured when not given.")
@configured
def readyz(source: Source, wait: bool, timeout: float, url: str | None) -> None:
    """Ask a running server whether it is ready: status 0 if it is, 1 if not."""
    target, trust = _readiness_target(source, url)
    deadline = time.monotonic() + timeout
    # Asked directly: a proxy of the environment knows nothing of this machine's loopback.
    with httpx.Client(verify=trust, trust_env=False, timeout=READYZ_SECONDS) as client:
        while (trouble := _trouble(client, target)) is not None:
            if not wait or time.monotonic() >= deadline:
                raise click.ClickException(f"{target} is not ready: {trouble}")
            time.sleep(POLL_SECONDS)
    click.echo("ready")


def _readiness_target(source: Source, url: str | None) -> tuple[str, ssl.SSLContext]:
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise click.UsageError("--url must be an absolute http(s) URL")
        return f"{url.rstrip('/').removesuffix('/readyz')}/readyz", ssl.create_default_context()
    settings = source.load()
    if settings.port == 0:
        raise click.UsageError("the configured port is 0, any free one: say which with --url")
    host = EVERY_ADDRESS.get(settings.host, settings.host)
    local = settings.model_copy(update={"host": host, "public_url": None})
    return f"{local.base_url}/readyz", _own_certificate(settings)


def _own_certificate(settings: Settings) -> ssl.SSLContext:
    """Trust in exactly the configured certificate, which is made out to the public name."""
    if settings.tls_cert_file is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=settings.tls_cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _trouble(client: httpx.Client, target: str) -> str | None:
    """Why the server at `target` is not ready; None when it is."""
    try:
        status = client.get(target).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return None if status == httpx.codes.OK else f"status {status}"


def _in_store(source: Source, work: Callable[[ContentStore], Awaitable[T]]) -> T:
    """Open the store, do `work`, close it."""
    settings = source.load()

    async def work_in_store() -> T:
        store = await ContentStore.start(settings)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(work_in_store())


@cli.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@configured
def gc(source: Source, dry_run: bool) -> None:
    """Remove what has expired, and bytes that no reference needs. Legal while a server runs."""
    report = _in_store(source, lambda store: store.sweep(dry_run=dry_run))
    click.echo(
        f"{'would remove' if dry_run else 'removed'}: {report.expired} expired references, "
        f"{report.blobs} bodies ({report.bytes} bytes), {report.orphans} orphans, "
        f"{report.staging} abandoned staging folders; "
        f"kept: {report.kept} orphans of unknown age"
    )


@cli.command()
@configured
def fsck(source: Source) -> int:
    """Read every stored body again and report each fault; changes nothing.

    Status 1 says that a confirmed body is damaged. Orphans are named, but they are no damage:
    `consignee gc` removes them when they are old enough.
    """
    damages = _in_store(source, _report_findings)
    click.echo(f"{damages} damaged" if damages else "no damage")
    return FAILED if damages else 0


async def _report_findings(store: ContentStore) -> int:
    damages = 0
    async for finding in store.verify():
        damages += finding.kind != "orphan"
        named = finding.sha256 or finding.location or "-"
        hit = f" ({finding.references} references)" if finding.references else ""
        click.echo(f"{finding.kind}\t{named}\t{finding.detail}{hit}")
    return damages


# References


@cli.group()
def refs() -> None:
    """Look at confirmed references, or end them."""


scope_option = click.option(
    "--scope", required=True, metavar="SCOPE", help="The authorization scope that owns them."
)


@refs.command("list")
@scope_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, with its facts.")
@configured
def list_references(source: Source, scope: str, as_json: bool) -> None:
    """Every reference of a scope, one a line, in the order of confirmation."""

    async def print_each(store: ContentStore) -> None:
        async for reference in _references(store, scope):
            click.echo(json.dumps(_facts(reference)) if as_json else reference.ref)

    _in_store(source, print_each)


async def _references(store: ContentStore, scope: str) -> AsyncIterator[Listed]:
    after = 0
    while page := await store.references(scope, after=after, limit=PAGE):
        for reference in page:
            yield reference
        after = page[-1].position


def _facts(reference: Reference) -> dict[str, Any]:
    facts = asdict(reference)
    facts.pop("position", None)
    return facts | {
        "created_at": _time(reference.created_at),
        "expires_at": _time(reference.expires_at),
    }


def _time(seconds: int | None) -> str | None:
    """Unix seconds as RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


@refs.command()
@scope_option
@click.argument("ref")
@configured
def show(source: Source, scope: str, ref: str) -> None:
    """What is known of one reference, as JSON."""
    reference = _in_store(source, lambda store: store.resolve(scope, ref))
    click.echo(json.dumps(_facts(reference), indent=2))


@refs.command()
@scope_option
@click.argument("ref")
@configured
def cat(source: Source, scope: str, ref: str) -> None:
    """The bytes of one reference, on standard output."""

    async def copy(store: ContentStore) -> None:
        async with store.open(scope, ref) as content:
            with click.open_file("-", "wb") as output:
                async for piece in content:
                    output.write(piece)
                output.flush()

    _in_store(source, copy)


@refs.command()
@scope_option
@click.argument("ref")
@configured
def remove(source: Source, scope: str, ref: str) -> None:
    """End one reference: nobody can resolve it any more."""
    _in_store(source, lambda store: store.remove(scope, ref))
    click.echo(f"removed {ref}")


# Tokens


@cli.group()
def token() -> None:
    """Bearer tokens for the configuration."""


@token.command()
@click.option("--name", default="example", show_default=True, help="Its principal and scope.")
@configured
def new(source: Source, name: str) -> None:
    """Make a token, and print it with what the configuration needs of it.

    Nothing keeps the token: only its SHA-256 belongs in the configuration.
    """
    del source
    made = _fresh_token()
    quoted = json.dumps(name, ensure_ascii=False)  # a JSON string is a TOML basic string, too
    click.echo(
        f"token:   {made}\n"
        f"SHA-256: {_digest(made)}\n\n"
        "[[tokens]]\n"
        f"name = {quoted}\n"
        f'token_sha256 = "{_digest(made)}"\n'
        f"scope = {quoted}\n"
        'permissions = ["ahp.upload"]'
    )


def _fresh_token() -> str:
    return f"cst_{secrets.token_urlsafe(TOKEN_BYTES)}"


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode("ascii")).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
