"""What every command shares: where its settings come from, its options, the open store."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import click

from app import audit
from app.commands.switches import configuring
from app.settings import Settings, load_settings
from app.store.content import ContentStore

T = TypeVar("T")

EVERY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""What means every address of this machine, and the one that it reaches itself by."""
PAGE: Final = 1000
"""Records that are read at once when all of a scope are listed."""


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

    @configuring
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


def in_store(source: Source, work: Callable[[ContentStore], Awaitable[T]]) -> T:
    """Open the store, do `work`, close it. What the work does is audited as configured."""
    settings = source.load()

    async def work_in_store() -> T:
        store = await ContentStore.start(settings)
        try:
            return await work(store)
        finally:
            await store.close()

    with audit.kept(settings):
        return asyncio.run(work_in_store())


def audit_command(action: str, /, **facts: audit.Fact) -> None:
    """Leave an audit record of what a command does; `operator` is the user that runs it."""
    audit.record(action, operator=os.getuid(), **facts)


scope_option = click.option(
    "--scope", required=True, metavar="SCOPE", help="The authorization scope that owns them."
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object a line, with its facts."
)


class Placed(Protocol):
    """A record that has a position in a list."""

    @property
    def position(self) -> int: ...


P = TypeVar("P", bound=Placed)


async def every(
    page: Callable[[int, int], Awaitable[Sequence[P]]], after: int = 0
) -> AsyncIterator[P]:
    """Every record behind the position `after`; `page` gives so many from behind a position."""
    while found := await page(after, PAGE):
        for record in found:
            yield record
        after = found[-1].position


def timestamp(seconds: int | None) -> str | None:
    """Unix seconds as RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
