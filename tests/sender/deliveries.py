"""What tests of deliveries share: messages, receivers, counted sources, and a sender's stand-in."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from app.ahp.content import Message, parse_messages, parse_selection
from app.sender.attachments import Attachments
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.delivery import Bounds, Delivery
from app.sender.errors import SourceError, TransferError
from app.sender.receivers import Receiver
from app.sender.sources import Snapshot, Source
from app.sender.transfer import Receipt

PIXELS = bytes(range(256)) * 8
LONG = 60.0
"""Seconds that no test uses up."""

Behaviour = Callable[[], Awaitable[None]]


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def text(part_id: str, words: str, **more: Any) -> dict[str, Any]:
    return {
        "id": part_id,
        "kind": "text",
        "mediaType": "text/plain",
        "selection": "body",
        "text": words,
        **more,
    }


def attached(part_id: str, media_type: str = "image/png", **more: Any) -> dict[str, Any]:
    return {
        "id": part_id,
        "kind": "attachment",
        "mediaType": media_type,
        "selection": "metadata",
        **more,
    }


def messages_of(*parts: Mapping[str, Any]) -> tuple[Message, ...]:
    """One message of the user with `parts`."""
    return parse_messages([{"id": "m1", "role": "user", "parts": list(parts)}])


def edited(messages: Sequence[Message], *parts: Mapping[str, Any]) -> tuple[Message, ...]:
    """The first of `messages` with `parts` instead of its own."""
    return parse_messages([{**messages[0].wire(), "parts": list(parts)}])


def parts_in(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The parts of `messages` as JSON."""
    return [part.wire() for message in messages for part in message.parts]


def configuration(
    endpoint: str = "https://files.example/upload",
    *,
    timeout_ms: int = 60_000,
    max_bytes: int = 1_000_000,
    **more: Any,
) -> UploadConfiguration:
    return UploadConfiguration.parse(
        {"endpoint": endpoint, "timeoutMs": timeout_ms, "maxBytes": max_bytes, **more}
    )


def receiver(name: str = "one", selection: Any = "body", **more: Any) -> Receiver:
    """A receiver that may have everything, with an endpoint and a scope of its own."""
    chosen = {"default": selection} if isinstance(selection, str) else selection
    settings: dict[str, Any] = {
        "permission": True,
        "scope": name,
        "upload": configuration(f"https://{name}.example/upload"),
    }
    return Receiver(name=name, selection=parse_selection(chosen), **(settings | more))


class Counted:
    """A source of `body` that counts how often it was read and closed."""

    def __init__(self, body: bytes = PIXELS, before: Behaviour | None = None, **more: Any) -> None:
        self.reads = 0
        self.closed = 0
        self._body = body
        self._before = before
        self.source = Source.stream(self._read, self._close, **more)

    async def _read(self) -> AsyncIterator[bytes]:
        self.reads += 1
        if self._before is not None:
            await self._before()
        yield self._body

    async def _close(self) -> None:
        self.closed += 1


class Uploads:
    """Confirms what it is sent, with a fresh reference each time, unless told otherwise.

    `behaviours` by endpoint are awaited before the bytes are read.
    """

    def __init__(self, behaviours: Mapping[str, Behaviour] | None = None) -> None:
        self.bodies: list[tuple[str, bytes]] = []
        self.started: list[str] = []
        self.running = self.most = 0
        self.budgets: list[float] = []
        self._behaviours = dict(behaviours or {})

    def behave(self, endpoint: str, behaviour: Behaviour) -> None:
        self._behaviours[endpoint] = behaviour

    async def upload(
        self, source: Snapshot, configuration: UploadConfiguration, *, budget: Budget | None = None
    ) -> Receipt:
        assert budget is not None
        self.started.append(configuration.endpoint)
        self.budgets.append(budget.remaining())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            async with budget.limit():
                return await self._confirmed(source, configuration)
        finally:
            self.running -= 1

    async def _confirmed(self, source: Snapshot, configuration: UploadConfiguration) -> Receipt:
        if source.size > configuration.max_bytes:
            raise SourceError("too_large", "over maxBytes")
        behaviour = self._behaviours.get(configuration.endpoint)
        if behaviour is not None:
            await behaviour()
        body = b"".join([piece async for piece in source.read()])
        self.bodies.append((configuration.endpoint, body))
        return Receipt(f"reference-{len(self.bodies)}", source.size, source.sha256)


async def refused() -> None:
    raise TransferError("unexpected_status", "The receiver answered 500; tell its operator.")


async def forever() -> None:
    await asyncio.Event().wait()


def delivery(
    messages: Sequence[Message],
    receivers: Sequence[Receiver],
    attachments: Attachments,
    sender: Uploads,
    *,
    seconds: float = LONG,
    bounds: Bounds | None = None,
) -> Delivery:
    return Delivery(messages, receivers, attachments, sender, budget=Budget(seconds), bounds=bounds)
