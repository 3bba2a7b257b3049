"""`consignee send`: have files confirmed by a receiver, from the command line.

The digest of a file goes before its bytes, so that everything waits for the hashing. It begins
here, once the command is understood, and goes on while what the sending needs is imported.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from app.commands.switches import FAILED, configuring
from app.sender.files import FileReading, HeadStart

AT_ONCE: Final = 4
"""Files that are sent at the same time."""

MAX_BYTES: Final = 1024**3
"""What is sent of one file at most when nothing is said: what a receiver takes by default."""

TIMEOUT_MS: Final = 600_000
"""Time of one file when none is given: ten minutes, so that a large one passes a slow line."""


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
    upload = {"endpoint": endpoint, "timeoutMs": timeout_ms, "maxBytes": max_bytes} | identity.auth
    shows_bars = not as_json and sys.stdout.isatty() and sys.stderr.isatty()
    readings = [FileReading(file) for file in files]
    with ExitStack() as opened:
        for reading in readings:
            opened.callback(reading.close)
        with HeadStart(readings[:AT_ONCE], max_bytes):
            sending = import_module("app.commands.sending")
            bars = import_module("app.commands.bars").Bars(files) if shows_bars else None
            configuration = sending.configuration_of(
                upload, allow_loopback_http=allow_loopback_http
            )
        outcomes = sending.run(files, readings, configuration, sending.client_of(identity), bars)
    return FAILED if any(outcome.error for outcome in outcomes) else 0
