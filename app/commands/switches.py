"""The options of every command, and how it ends. Nothing here imports more than click does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

T = TypeVar("T")

WRONG, FAILED, INTERRUPTED = 2, 1, 130


def configuring(command: Callable[..., T]) -> Callable[..., T]:
    """Give `command` the options `--config` and `--data-dir`."""
    for option in (
        click.option(
            "--data-dir",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Folder of the database, bodies and staging.",
        ),
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Configuration file; consignee.toml in the current folder when not given.",
        ),
    ):
        command = option(command)
    return command
