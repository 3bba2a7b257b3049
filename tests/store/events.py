"""What the tests of events share: arrivals, and reading what an event uses."""

from __future__ import annotations

import json
from typing import Any

from app.store import ContentStore
from app.store.events import Arrival, StoredEvent


def arrival(*refs: str, event_id: str = "evt_1", scope: str = "a", **changes: Any) -> Arrival:
    """An event of the principal `alice` that uses `refs`."""
    given: dict[str, Any] = {
        "type": "turn.start",
        "mode": "observe",
        "principal": "alice",
        "message": json.dumps({"id": event_id, "refs": refs}).encode(),
        **changes,
    }
    return Arrival(event_id=event_id, scope=scope, refs=refs, **given)


async def deliver(store: ContentStore, *refs: str, **changes: Any) -> StoredEvent:
    """Have a new event accepted."""
    event, is_new = await store.events.accept(arrival(*refs, **changes))
    assert is_new
    return event


async def read(
    store: ContentStore, ref: str, event_id: str = "evt_1", scope: str = "a", **bounds: Any
) -> bytes:
    """The bytes of a reference, as the event gives them."""
    async with store.events.open(scope, event_id, ref, **bounds) as content:
        assert content.reference.ref == ref
        return b"".join([chunk async for chunk in content])
