"""The work of `consignee send`, with all that it imports: what the hashing need not wait for."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import click

from app import logs
from app.commands.send import AT_ONCE, Identity
from app.sender.authorization import Credentials
from app.sender.config import UploadConfiguration
from app.sender.errors import ConfigurationError, SendError
from app.sender.files import FileReading
from app.sender.oauth import Client
from app.sender.sources import Source
from app.sender.transfer import Progress as UploadProgress
from app.sender.transfer import Receipt, Sender

# What was imported is in use to the end: without this the interpreter, when it goes, spends longer
# on looking through all of it than a small file takes.
atexit.register(gc.freeze)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file: a receipt, or why there is none."""

    file: Path
    receipt: Receipt | None = None
    error: SendError | None = None


class Bars(AbstractContextManager[object], Protocol):
    """Shows how far each file is, while it is entered: app.commands.bars has them."""

    def follow(self, number: int, sent: int, size: int) -> None:
        """`sent` of `size` bytes of the file with this number are on their way."""
        ...


def configuration_of(
    mapping: Mapping[str, Any], *, allow_loopback_http: bool
) -> UploadConfiguration:
    """What the options say. Raises click.UsageError."""
    try:
        return UploadConfiguration.parse(mapping, allow_loopback_http=allow_loopback_http)
    except ConfigurationError as error:
        raise click.UsageError(error.message) from None


def client_of(identity: Identity) -> Client | None:
    """Who asks at an authorization server that the endpoint names."""
    if identity.client_id is None:
        return None
    return Client(identity.client_id, secret_env=identity.client_secret_env, scopes=identity.scopes)


def run(
    files: Sequence[Path],
    readings: Sequence[FileReading],
    configuration: UploadConfiguration,
    client: Client | None,
    bars: Bars | None,
) -> list[Outcome]:
    """Send all and print what became of them: at once, or with `bars` when all have ended."""
    sending = partial(_send_all, files, readings, configuration, client)
    if bars is None:
        return asyncio.run(sending(tell=_print_json))
    with bars:
        outcomes = asyncio.run(sending(bars=bars))
    for outcome in outcomes:
        _print_line(outcome)
    return outcomes


async def _send_all(
    files: Sequence[Path],
    readings: Sequence[FileReading],
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

        async def send_one(number: int, file: Path, reading: FileReading) -> Outcome:
            progress = partial(bars.follow, number) if bars is not None else None
            async with slots:
                try:
                    receipt = await _send_one(sender, reading, configuration, progress)
                except SendError as error:
                    return Outcome(file, error=error)
                return Outcome(file, receipt)

        tasks = [
            group.create_task(send_one(number, *pair))
            for number, pair in enumerate(zip(files, readings, strict=True))
        ]
        for task in tasks:
            outcomes.append(await task)
            if tell is not None:
                tell(outcomes[-1])
    return outcomes


async def _send_one(
    sender: Sender,
    reading: FileReading,
    configuration: UploadConfiguration,
    progress: UploadProgress | None,
) -> Receipt:
    async with Source.reading(reading) as source:
        return await sender.upload(source, configuration, progress=progress)


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
        click.echo(f"{logs.printable(outcome.receipt.ref)}  {logs.printable(str(outcome.file))}")


def _complain(outcome: Outcome) -> None:
    click.echo(f"consignee: {logs.printable(str(outcome.file))}: {outcome.error}", err=True)
