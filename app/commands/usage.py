"""`consignee usage`: what each scope keeps."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Final

import click

from app import logs
from app.commands.options import Source, audit_command, configured, in_store, timestamp
from app.store.accounts import ScopeUsage
from app.store.content import ContentStore

COLUMNS: Final = (
    "scope",
    "references",
    "files",
    "sessions",
    "events",
    "logical_bytes",
    "stored_bytes",
    "oldest",
    "newest",
)


@click.command()
@click.option("--scope", metavar="SCOPE", help="Only this scope; every one when not given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@configured
def usage(source: Source, scope: str | None, as_json: bool) -> None:
    """What each scope keeps, one a line.

    Logical bytes are those of references and files, each for itself. Stored bytes are those of the
    distinct bodies that a scope uses: what it keeps twice counts once, what two scopes keep counts
    for both.
    """
    found = in_store(source, lambda store: _accounts(store, scope))
    if not as_json:
        click.echo("\t".join(COLUMNS))
    for one in found:
        click.echo(_line(one, as_json=as_json))


async def _accounts(store: ContentStore, scope: str | None) -> list[ScopeUsage]:
    audit_command("usage.read", scope=scope)
    return await store.accounts.of_scopes(scope)


def _line(one: ScopeUsage, *, as_json: bool) -> str:
    facts = _facts(one)
    if as_json:
        return json.dumps(facts)
    return "\t".join(logs.printable(str(_shown(facts[name]))) for name in COLUMNS)


def _facts(one: ScopeUsage) -> dict[str, Any]:
    return asdict(one) | {"oldest": timestamp(one.oldest), "newest": timestamp(one.newest)}


def _shown(fact: Any) -> Any:
    return "-" if fact is None else fact
