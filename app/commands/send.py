"""`consignee send`: have files confirmed by a receiver, from the command line."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)

from app import logs
from app.commands.switches import FAILED, configuring
from app.sender.authorization import Credentials
from app.sender.config import UploadConfiguration
from app.sender.errors import ConfigurationError, SendError
from app.sender.oauth import Client
from app.sender.sources import Source as Bytes
from app.sender.transfer import Progress as UploadProgress
from app.sender.transfer import Receipt, Sender

AT_ONCE: Final = 4
"""Files that are sent at the same time."""

MAX_BYTES: Final = 1024**3
"""What is sent of one file at most when nothing is said: what a receiver takes by default."""

TIMEOUT_MS: Final = 600_000
"""Time of one file when none is given: ten minutes, so that a large one passes a slow line."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file: a receipt, or why there is none."""

    file: Path
    receipt: Receipt | None = None
    error: SendError | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How the command identifies itself: at most one of a token and a client."""

    token_env: str | None
    token_ref: str | None
    client_id: str | None
    client_secret_env: str | None
    scopes: tuple[str, ...]

    def require_one(self) -> None:
        """Raise click.UsageError for a combination that means nothing."""
        given = [self.token_env, self.token_ref, self.client_id]
        if sum(each is not None for each in given) > 1:
            raise click.UsageError("give only one of --token-env, --token-ref and --client-id")
        if self.client_id is None and (self.client_secret_env or self.scopes):
            raise click.UsageError("--client-secret-env and --scope belong to a --client-id")

    @property
    def auth(self) -> dict[str, Any]:
        """The `auth` member of the upload configuration; none of it for discovery (AHP-S11)."""
        if self.token_env is not None:
            return {"auth": {"type": "bearer", "tokenEnv": self.token_env}}
        if self.token_ref is not None:
            return {"auth": {"type": "bearer", "tokenRef": self.token_ref}}
        return {}

    @property
    def client(self) -> Client | None:
        """Who asks at an authorization server that the endpoint names."""
        if self.client_id is None:
            return None
        return Client(self.client_id, secret_env=self.client_secret_env, scopes=self.scopes)


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE…")
@click.option("--endpoint", required=True, metavar="URL", help="The receiver's exact upload URL.")
@click.option("--token-env", metavar="NAME", help="Environment variable that holds a token.")
@click.option("--token-ref", metavar="FILE", help="File that holds a token.")
@click.option("--client-id", metavar="ID", help="OAuth client, for a receiver that is discovered.")
@click.option("--client-secret-env", metavar="NAME", help="Variable that holds its secret.")
@click.option("--scope", "scopes", multiple=True, metavar="SCOPE", help="Scope it may ask for.")
@click.option("--allow-loopback-http", is_flag=True, help="Take http to this machine, for tests.")
@click.option(
    "--timeout-ms",
    type=click.IntRange(min=1),
    default=TIMEOUT_MS,
    show_default=True,
    help="Time of one file, for credential, transfer and retries together.",
)
@click.option(
    "--max-bytes",
    type=click.IntRange(min=0),
    default=MAX_BYTES,
    show_default=True,
    help="A larger file is not sent.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON receipt a line, on terminals too.")
@configuring
def send(
    files: tuple[Path, ...],
    endpoint: str,
    allow_loopback_http: bool,
    timeout_ms: int,
    max_bytes: int,
    as_json: bool,
    scopes: tuple[str, ...],
    config: Path | None,
    data_dir: Path | None,
    **who: Any,
) -> int:
    """Send files to a receiver, and print what it confirmed.

    The receipts come in the order of the files. A file that failed has a line on standard error
    instead, and the status is then 1.
    """
    del config, data_dir  # every command takes them; this one needs nothing of a receiver
    identity = Identity(scopes=tuple(name for each in scopes for name in each.split()), **who)
    identity.require_one()
    configuration = _configuration(
        {"endpoint": endpoint, "timeoutMs": timeout_ms, "maxBytes": max_bytes} | identity.auth,
        allow_loopback_http=allow_loopback_http,
    )
    if as_json or not (sys.stdout.isatty() and sys.stderr.isatty()):
        outcomes = asyncio.run(_send_all(files, configuration, identity.client, tell=_print_json))
    else:
        with Bars(files) as bars:
            outcomes = asyncio.run(_send_all(files, configuration, identity.client, bars=bars))
        for outcome in outcomes:
            _print_line(outcome)
    return FAILED if any(outcome.error for outcome in outcomes) else 0


class Bars(Progress):
    """A bar for each file, on standard error. Nothing else is printed while they are there."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=Console(stderr=True),
        )
        self._rows = [self.add_task(_shown(file), total=None) for file in files]

    def follow(self, number: int, sent: int, size: int) -> None:
        """`sent` of `size` bytes of the file with this number are on their way."""
        self.update(self._rows[number], completed=sent, total=size)


def _configuration(mapping: dict[str, Any], *, allow_loopback_http: bool) -> UploadConfiguration:
    try:
        return UploadConfiguration.parse(mapping, allow_loopback_http=allow_loopback_http)
    except ConfigurationError as error:
        raise click.UsageError(error.message) from None


async def _send_all(
    files: Sequence[Path],
    configuration: UploadConfiguration,
    client: Client | None,
    *,
    tell: Callable[[Outcome], None] | None = None,
    bars: Bars | None = None,
) -> list[Outcome]:
    """Send all, some at once. `tell` gets each outcome in the order of the files."""
    credentials = Credentials(client=client, resolve_secret=_token_in)
    slots = asyncio.Semaphore(AT_ONCE)
    outcomes = []
    async with Sender(credentials) as sender, asyncio.TaskGroup() as group:

        async def send_one(number: int, file: Path) -> Outcome:
            progress = partial(bars.follow, number) if bars is not None else None
            async with slots:
                return await _send_one(sender, file, configuration, progress)

        tasks = [group.create_task(send_one(*numbered)) for numbered in enumerate(files)]
        for task in tasks:
            outcomes.append(await task)
            if tell is not None:
                tell(outcomes[-1])
    return outcomes


async def _send_one(
    sender: Sender, file: Path, configuration: UploadConfiguration, progress: UploadProgress | None
) -> Outcome:
    try:
        async with Bytes.file(file, in_place=True) as source:
            receipt = await sender.upload(source, configuration, progress=progress)
    except SendError as error:
        return Outcome(file, error=error)
    return Outcome(file, receipt)


async def _token_in(reference: str) -> str:
    """The token in the file that `--token-ref` names."""
    return (await anyio.Path(reference).read_text("ascii")).strip()


def _print_json(outcome: Outcome) -> None:
    if outcome.receipt is None:
        _complain(outcome)
    else:
        click.echo(json.dumps(asdict(outcome.receipt), separators=(",", ":")))


def _print_line(outcome: Outcome) -> None:
    if outcome.receipt is None:
        _complain(outcome)
    else:
        click.echo(f"{logs.printable(outcome.receipt.ref)}  {_shown(outcome.file)}")


def _complain(outcome: Outcome) -> None:
    click.echo(f"consignee: {_shown(outcome.file)}: {outcome.error}", err=True)


def _shown(file: Path) -> str:
    return logs.printable(str(file))
