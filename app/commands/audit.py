"""`consignee audit`: look into the audit records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from app.commands.options import Source, configured


@click.command()
@click.option("--scope", metavar="SCOPE", help="Records of this scope.")
@click.option("--principal", metavar="NAME", help="Records of this principal.")
@click.option("--action", metavar="ACTION", help="Records of this action: reference.read, ….")
@click.option(
    "--about", metavar="ID", help="Records that name this reference, file, session, digest, …."
)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path, dir_okay=False))
@configured
def audit(
    source: Source,
    scope: str | None,
    principal: str | None,
    action: str | None,
    about: str | None,
    files: tuple[Path, ...],
) -> None:
    """The audit records that match, one JSON object a line, as they were written.

    They come from FILES in this order, such as those that were moved away, or else from the file
    that records go to now. Lines that are no records are left out, and counted.
    """
    wanted = {"scope": scope, "principal": principal, "action": action}
    given = {name: value for name, value in wanted.items() if value is not None}
    strange = 0
    for line in _lines(files or (source.load().audit_path,)):
        record = _record(line)
        if record is None:
            strange += 1
        elif _matches(record, given, about):
            click.echo(line)
    if strange:
        click.echo(f"{strange} lines are no records", err=True)


def _lines(files: Iterable[Path]) -> Iterator[str]:
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file)


def _record(line: str) -> dict[str, Any] | None:
    """The record of a line; None where another log line, or a part of one, stands."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "action" in record else None


def _matches(record: Mapping[str, Any], wanted: Mapping[str, str], about: str | None) -> bool:
    if any(record.get(name) != value for name, value in wanted.items()):
        return False
    return about is None or about in record.values()
