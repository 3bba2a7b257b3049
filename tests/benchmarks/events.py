"""Events under load: 4 KiB with one reference, 16 connections, beside the SDK's own application."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tests.ahp.hook_examples import attachment, event, message, observation
from tests.benchmarks import peers, small
from tests.benchmarks.table import Row

EVENT_BYTES: Final = 4096
EVENTS: Final = 60_000
RUNS: Final = int(os.environ.get("BENCH_RUNS", "3"))
SDK: Final = "the SDK's asgi.App with a handler that does nothing"

SDK_APP = """
from agenthooksprotocol.server.asgi import App
from agenthooksprotocol.server.hooks import Handlers, ObserveHandlers

async def nothing(context):
    return None

app = App(Handlers(observe=ObserveHandlers(any=nothing)))
"""


def measure(folder: Path) -> list[Row]:
    """The one row."""
    row = Row("events of 4 KiB with one reference, 16 connections", "requests/s")
    with contextlib.ExitStack() as stack:
        sdk = stack.enter_context(
            peers.uvicorn_app(folder, "sdk_events", SDK_APP, logs_requests=True)
        )
        peers.write_configuration(folder / "consignee.toml")
        ours = stack.enter_context(peers.consignee(folder))
        reference = confirm(ours.upload_endpoint)
        for _ in range(RUNS):
            row.add(SDK, small.drive(sdk, _deliveries(sdk, reference)))
            url = f"{ours.url}/ahp/hooks"
            row.add("consignee", small.drive(url, _deliveries(url, reference), once=True))
        row.add("events stored, each with its reference", _stored(folder / "data"))
    row.judge("times the SDK", row.median("consignee") / row.median(SDK), least=10)
    return [row]


def confirm(endpoint: str) -> str:
    """Confirm a small body; gives its reference."""
    body = os.urandom(EVENT_BYTES)
    request = urllib.request.Request(endpoint, body, method="POST")
    request.add_header("Authorization", f"Bearer {peers.TOKEN}")
    request.add_header("Content-Type", "application/octet-stream")
    request.add_header("AHP-Content-SHA256", hashlib.sha256(body).hexdigest())
    with urllib.request.urlopen(request) as answer:
        receipt: dict[str, Any] = json.loads(answer.read())
    return str(receipt["ref"])


def _deliveries(url: str, reference: str) -> Iterator[bytes]:
    """Requests that differ in the event's id alone."""
    placeholder = str(uuid.UUID(int=0))
    octets = observation_of(placeholder, reference).encode()
    head = (
        f"POST {urlsplit(url).path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {peers.TOKEN}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(octets)}\r\n\r\n"
    ).encode()
    before, after = (head + octets).split(placeholder.encode())
    for _ in range(EVENTS):
        yield before + str(uuid.uuid4()).encode() + after


def observation_of(event_id: str, reference: str) -> str:
    """An observation of EVENT_BYTES bytes: a turn that starts with words and a picture."""
    text = {"id": "p1", "kind": "text", "mediaType": "text/plain", "selection": "body", "text": ""}
    made = observation(event(id=event_id, items=[message(text, attachment(reference))]))
    text["text"] = "x" * (EVENT_BYTES - len(json.dumps(made)))
    items = [message(text, attachment(reference))]
    return json.dumps(observation(event(id=event_id, items=items)))


def _stored(data: Path) -> float:
    """Events on record that name a stored body; an event without one would be a fault."""
    with contextlib.closing(sqlite3.connect(data / "consignee.db")) as connection:
        (events,) = connection.execute("SELECT count(*) FROM events").fetchone()
        (used,) = connection.execute("SELECT count(*) FROM event_refs").fetchone()
    if events != used:
        raise RuntimeError(f"{events} events are stored, with {used} references")
    return float(events)


def missing() -> str | None:
    """Why this cannot be measured here."""
    return None if shutil.which("wrk") else "wrk is not installed"
