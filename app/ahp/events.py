"""An event as the operator's code gets it, and where that code comes from.

    async def handle(event: Event) -> Effects:
        for attachment in event.attachments:
            async with attachment.open() as stream:
                async for chunk in stream:
                    ...

The handler is named by `event_handler`. What it returns for an `intercept` becomes the reply, once
it is valid; for an `observe` there is nothing to return.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from app.ahp.content import Message, parse_messages
from app.ahp.hook_messages import parse
from app.ahp.hook_slots import slots_of
from app.settings import SettingsError

if TYPE_CHECKING:
    from app.ahp.hook_messages import Delivery
    from app.ahp.hook_slots import Mode
    from app.store.content import Content
    from app.store.events import Attached, Events, StoredEvent

Effects = Iterable[Mapping[str, Any]] | Mapping[str, Any] | None
"""One effect, several in their order, or none: models of the SDK or plain mappings."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Bytes that an event refers to: `size` in bytes, `sha256` as 64 lowercase hex.

    `media_type` is what the event says of them; size and digest are what this receiver verified.
    """

    ref: str
    size: int
    sha256: str
    media_type: str
    _open: Callable[[], AbstractAsyncContextManager[Content]] = field(repr=False, compare=False)

    def open(self) -> AbstractAsyncContextManager[Content]:
        """The bytes, in pieces of at most 1 MiB. May be opened any number of times.

        Also when the reference has ended since: the event keeps its bytes (AHP-R38).
        """
        return self._open()


@dataclass(frozen=True)
class Event:
    """One accepted event.

    `scope` and `principal` are those of the credential that delivered it, `attachments` are in
    document order, one for each reference.
    """

    id: str
    type: str
    mode: Mode
    scope: str
    principal: str
    attachments: tuple[Attachment, ...]
    _message: bytes = field(repr=False)

    @cached_property
    def raw(self) -> dict[str, Any]:
        """The `params` of the message, as they came. A copy: what is changed in it stays here."""
        params: dict[str, Any] = parse(self._message)["params"]
        return params

    @property
    def capabilities(self) -> dict[str, Any]:
        """The effects that the host grants for this event; empty for an `observe`."""
        granted: dict[str, Any] = self.raw.get("capabilities", {})
        return granted

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The event's canonical messages, in document order."""
        return parse_messages(slots_of(self.mode, self.type).messages_in({"params": self.raw}))


Handler = Callable[[Event], Awaitable[Effects]]


def event_of(delivery: Delivery, stored: StoredEvent, events: Events) -> Event:
    """The event that was delivered, with the attachments that the store resolved for it."""
    return Event(
        id=stored.event_id,
        type=stored.type,
        mode=delivery.mode,
        scope=stored.scope,
        principal=stored.principal,
        attachments=tuple(
            _attachment(attached, delivery.media_types[attached.ref], stored, events)
            for attached in stored.attachments
        ),
        _message=stored.message,
    )


def _attachment(
    attached: Attached, media_type: str, stored: StoredEvent, events: Events
) -> Attachment:
    def open_attached() -> AbstractAsyncContextManager[Content]:
        return events.open(stored.scope, stored.event_id, attached.ref)

    return Attachment(attached.ref, attached.size, attached.sha256, media_type, open_attached)


def load_handler(name: str | None) -> Handler | None:
    """The callable that `event_handler` names as `package.module:callable`; None for None.

    Raises SettingsError when it cannot be imported, is not there, or is no async callable.
    """
    if name is None:
        return None
    module, _, path = name.partition(":")
    found: Any = _import(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    if found is None:
        raise SettingsError(f"event_handler: {module} has no {path}")
    if not _is_async(found):
        raise SettingsError(f"event_handler: {name} must be an `async def` with one parameter")
    return found  # type: ignore[no-any-return]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        # It is the operator's own code: what it says of itself is what helps.
        reason = f"{type(error).__name__}: {error}"
        raise SettingsError(
            f"event_handler: {module} cannot be imported ({reason}); install it, or name its "
            "folder in PYTHONPATH"
        ) from error


def _is_async(found: Any) -> bool:
    if not (inspect.iscoroutinefunction(found) or _has_async_call(found)):
        return False
    try:
        inspect.signature(found).bind(None)
    except TypeError:
        return False
    return True


def _has_async_call(found: Any) -> bool:
    call = getattr(type(found), "__call__", None)  # noqa: B004 - the function is what is looked at
    return not isinstance(found, type) and inspect.iscoroutinefunction(call)
