"""`consignee events`: look at the events that were delivered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from functools import partial
from typing import Any, Final

import click

from app import logs
from app.commands.options import (
    PAGE,
    Source,
    audit_command,
    configured,
    every,
    in_store,
    json_option,
    scope_option,
    timestamp,
)
from app.store.content import ContentStore
from app.store.events import ListedEvent, StoredEvent

POLL_SECONDS: Final = 0.5
"""Pause between two looks of `tail`."""

UNSETTLED: Final = "unsettled"
"""What a line says of an event that is being handled, or whose handling was cut short."""


@click.group()
def events() -> None:
    """Look at the events that were delivered."""


@events.command("list")
@scope_option
@json_option
@configured
def list_events(source: Source, scope: str, as_json: bool) -> None:
    """Every event of a scope, one a line, in the order of arrival.

    A line is the id, the type, `observe` or `intercept`, the outcome (`done`, `failed`, `timed_out`
    or `unsettled`) and the time of arrival, with tabs between them.
    """

    async def print_each(store: ContentStore) -> None:
        audit_command("event.list", scope=scope)
        async for event in every(partial(_page, store, scope)):
            click.echo(_line(event, as_json=as_json))

    in_store(source, print_each)


@events.command()
@scope_option
@click.argument("event_id")
@configured
def show(source: Source, scope: str, event_id: str) -> None:
    """One event as JSON, with its message and what an intercept was answered."""

    async def find(store: ContentStore) -> StoredEvent:
        event = await store.events.find(scope, event_id)
        audit_command("event.read", scope=scope, event_id=event_id, bytes=len(event.message))
        return event

    click.echo(json.dumps(_whole(in_store(source, find)), indent=2))


@events.command()
@scope_option
@json_option
@click.option(
    "--lines",
    "-n",
    type=click.IntRange(0, PAGE),
    default=10,
    show_default=True,
    metavar="N",
    help="How many of the last events come first.",
)
@click.option(
    "--follow/--no-follow", default=True, show_default=True, help="Go on until interrupted."
)
@configured
def tail(source: Source, scope: str, as_json: bool, lines: int, follow: bool) -> None:
    """The last events of a scope, and each one that arrives, as `list` prints them."""

    async def print_each(store: ContentStore) -> None:
        audit_command("event.list", scope=scope)
        async for event in _tail(store, scope, lines, follow=follow):
            click.echo(_line(event, as_json=as_json))

    in_store(source, print_each)


async def _tail(
    store: ContentStore, scope: str, lines: int, *, follow: bool
) -> AsyncIterator[ListedEvent]:
    last = await store.events.latest(scope, max(lines, 1))
    for event in last if lines else ():
        yield event
    position = last[-1].position if last else 0
    while follow:
        async for event in every(partial(_page, store, scope), position):
            position = event.position
            yield event
        await asyncio.sleep(POLL_SECONDS)


async def _page(store: ContentStore, scope: str, after: int, limit: int) -> list[ListedEvent]:
    return await store.events.page(scope, after=after, limit=limit)


def _line(event: ListedEvent, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(_facts(event))
    columns = (
        event.event_id,
        event.type,
        event.mode,
        event.outcome or UNSETTLED,
        str(timestamp(event.received_at)),
    )
    return "\t".join(map(logs.printable, columns))


def _facts(event: ListedEvent) -> dict[str, Any]:
    return asdict(event) | {"received_at": timestamp(event.received_at)}


def _whole(event: StoredEvent) -> dict[str, Any]:
    """The facts, with the documents that are stored as octets."""
    result = None if event.result is None else json.loads(event.result)
    return _facts(event) | {"result": result, "message": json.loads(event.message)}
