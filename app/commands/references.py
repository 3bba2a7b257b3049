"""`consignee refs`: look at confirmed references, or end them."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from app.commands.options import (
    Source,
    audit_command,
    configured,
    every,
    in_store,
    json_option,
    scope_option,
    timestamp,
)
from app.errors import NotFound
from app.store.content import ContentStore
from app.store.records import Listed, Reference


@click.group()
def refs() -> None:
    """Look at confirmed references, or end them."""


@refs.command("list")
@scope_option
@json_option
@configured
def list_references(source: Source, scope: str, as_json: bool) -> None:
    """Every reference of a scope, one a line, in the order of confirmation."""

    async def print_each(store: ContentStore) -> None:
        audit_command("reference.list", scope=scope)
        async for reference in every(partial(_page, store, scope)):
            click.echo(json.dumps(_facts(reference)) if as_json else reference.ref)

    in_store(source, print_each)


async def _page(store: ContentStore, scope: str, after: int, limit: int) -> list[Listed]:
    return await store.references(scope, after=after, limit=limit)


def _facts(reference: Reference) -> dict[str, Any]:
    facts = asdict(reference)
    facts.pop("position", None)
    return facts | {
        "created_at": timestamp(reference.created_at),
        "expires_at": timestamp(reference.expires_at),
    }


@refs.command()
@scope_option
@click.argument("ref")
@configured
def show(source: Source, scope: str, ref: str) -> None:
    """What is known of one reference and of the events that use it, as JSON."""
    facts = in_store(source, lambda store: _known_facts(store, scope, ref))
    click.echo(json.dumps(facts, indent=2))


async def _known_facts(store: ContentStore, scope: str, ref: str) -> dict[str, Any]:
    try:
        facts = _facts(await store.resolve(scope, ref))
    except NotFound:
        kept = await store.events.resolve(scope, ref)
        facts = {"ref": ref, "size": kept.size, "sha256": kept.sha256, "scope": scope}
        facts["ended"] = True
    audit_command("reference.inspect", scope=scope, ref=ref)
    return facts | {"events": await store.events.using(scope, ref)}


@refs.command()
@scope_option
@click.argument("ref")
@configured
def cat(source: Source, scope: str, ref: str) -> None:
    """The bytes of one reference, on standard output."""

    async def copy(store: ContentStore) -> None:
        async with store.open(scope, ref) as content:
            kept = content.reference
            digest, size = kept.sha256, kept.size
            audit_command("reference.read", scope=scope, ref=ref, sha256=digest, bytes=size)
            with click.open_file("-", "wb") as output:
                async for piece in content:
                    output.write(piece)
                output.flush()

    in_store(source, copy)


@refs.command()
@scope_option
@click.argument("ref")
@configured
def remove(source: Source, scope: str, ref: str) -> None:
    """End one reference: nobody can resolve it any more."""

    async def end(store: ContentStore) -> None:
        await store.remove(scope, ref)
        audit_command("reference.remove", scope=scope, ref=ref)

    in_store(source, end)
    click.echo(f"removed {ref}")
