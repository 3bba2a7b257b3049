"""The server and the tasks that the checks look at: each made once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.peer import Event, Peer, Site, running_site

REPLY = "Reply with exactly: ok"
CREATE = "Create a file named conformance.txt containing exactly: artifact-ok"
RESERVED = {
    "tools": [
        {"type": "function", "name": "look_up", "parameters": {"type": "object"}},
        {"type": "mcp", "server_label": "tools", "server_url": "https://tools.example/mcp"},
    ],
    "include": ["reasoning.encrypted_content"],
}


@pytest.fixture(scope="package")
def site() -> Iterator[Site]:
    with running_site() as running:
        yield running


@pytest.fixture(scope="package")
def peer(site: Site) -> Peer:
    return site.alice


@pytest.fixture(scope="package")
def stranger(site: Site) -> Iterator[Peer]:
    """A client without a credential."""
    with Peer(site.server.uhp_base_url, None) as nobody:
        yield nobody


@pytest.fixture(scope="package")
def harness_id(peer: Peer) -> str:
    harness: str = peer.get("/v1/harnesses")["harnesses"][0]["id"]
    return harness


@pytest.fixture(scope="package")
def response(peer: Peer, harness_id: str) -> dict[str, Any]:
    """A task that was waited for."""
    return peer.run(REPLY, metadata={"harness_id": harness_id}, stream=False)


@pytest.fixture(scope="package")
def events(peer: Peer, harness_id: str) -> list[Event]:
    """The same task as a stream."""
    return peer.events(REPLY, metadata={"harness_id": harness_id})


@pytest.fixture(scope="package")
def reserved(peer: Peer, harness_id: str) -> dict[str, Any]:
    """A task that sends what this server reads past."""
    return peer.run(REPLY, metadata={"harness_id": harness_id}, **RESERVED)


@pytest.fixture(scope="package")
def artifact(peer: Peer, harness_id: str) -> dict[str, Any]:
    """The one file that a task has written, as the session lists it."""
    made = peer.run(CREATE, metadata={"harness_id": harness_id})
    (listed,) = peer.artifacts(made)
    return listed
