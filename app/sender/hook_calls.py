"""Publishing over HTTP: `hooks/observe` and `hooks/intercept` to each receiver's event endpoint.

    publish = HookCalls(event, {receiver: HookEndpoint(url)}, client)
    settlement = await intercept(delivery, publish)

The event is the host's; the messages, and what else may stand beside them, are the receiver's own
view. Opaque JSON stays out unless the host names it for this receiver, `native` also unless the
receiver asked for it, and what repeats withheld content is taken out even then (AHP-S46, S47). The
credentials here are for events and never reach an upload, nor the reverse (AHP-S10, S48).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import httpx
from agenthooksprotocol.response import response_for_request
from agenthooksprotocol.runtime import ProtocolError, Validator

from app.ahp.content import parse_messages
from app.ahp.opaque import OPAQUE_SLOTS, conceal
from app.errors import Malformed
from app.sender.config import require_endpoint
from app.sender.errors import ConfigurationError
from app.sender.interception import HookFailure, Reply
from app.sender.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.ahp.content import Message
    from app.sender.publication import Publication
    from app.sender.receivers import Receiver

MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
"""What the draft's SDK bounds a message by."""

_MESSAGE_TARGETS: Final = frozenset({"prompt", "request", "response", "output", "content"})
_PART_MEMBERS: Final = frozenset({"kind", "mediaType", "selection"})
_WITHOUT_TIMEOUTS: Final = {"connect": None, "read": None, "write": None, "pool": None}


@cache
def _validator() -> Validator:
    """The SDK's, made once: it compiles its schemas as it meets them."""
    return Validator()


def _nothing(_: Receiver) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Event:
    """An event without its messages, which are put where `slot` says.

    `fields` are the members of the event. `explicit` names, for a receiver, the opaque members
    that the host has projected for it and lets it have; none by default. `capabilities` are what
    an interceptor may do. Raises ConfigurationError `unprojected_content` for a content part in
    `fields`: it would pass by the selection.
    """

    fields: Mapping[str, Any]
    slot: tuple[str, ...] = ("items",)
    explicit: Callable[[Receiver], Collection[str]] = _nothing
    capabilities: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(each.keys() >= _PART_MEMBERS for each in _objects_in(self.fields)):
            raise ConfigurationError(
                "The event holds a content part of its own. Give it to the delivery instead.",
                code="unprojected_content",
            )

    def shown(self, publication: Publication) -> dict[str, Any]:
        """The event as the receiver of `publication` gets it."""
        receiver = publication.receiver
        explicit = set(self.explicit(receiver))
        if not receiver.include_native:
            explicit.discard("native")
        event = conceal(self.fields, publication.withheld, explicit=explicit)
        messages = [message.wire() for message in publication.messages]
        return _placed(event, self.slot, messages)


@dataclass(frozen=True, slots=True)
class HookEndpoint:
    """Where a receiver takes events. `authorization` gives the value of the header, if any."""

    url: str
    authorization: Callable[[], Awaitable[str | None]] | None = field(default=None, repr=False)
    allow_loopback_http: bool = False

    def __post_init__(self) -> None:
        try:
            require_endpoint(self.url, allow_loopback_http=self.allow_loopback_http)
        except ValueError as error:
            raise ConfigurationError(f"The event endpoint {error}.") from None


class HookCalls:
    """Posts one event to the receivers it is called with; a `Publish`.

    Nothing of the client's own headers, cookies and auth is sent, and no redirect is followed.
    Time is bounded by whoever calls. Raises HookFailure, and ConfigurationError for an event that
    the draft does not know.
    """

    def __init__(
        self, event: Event, endpoints: Mapping[Receiver, HookEndpoint], client: httpx.AsyncClient
    ) -> None:
        self._event = event
        self._endpoints = endpoints
        self._client = client

    async def __call__(self, publication: Publication) -> Reply | None:
        event = self._event.shown(publication)
        if publication.receiver.mode == "observe":
            await self._observe(publication.receiver, event)
            return None
        return await self._intercept(publication, event)

    async def _observe(self, receiver: Receiver, event: Mapping[str, Any]) -> None:
        message = {"method": "hooks/observe", "params": {"event": event}}
        await self._send(receiver, "observe-notification", message)

    async def _intercept(self, publication: Publication, event: Mapping[str, Any]) -> Reply:
        params = {"event": event, "capabilities": self._event.capabilities}
        message = {"id": event.get("id"), "method": "hooks/intercept", "params": params}
        body = await self._send(publication.receiver, "intercept-request", message)
        response = await in_thread(self._parsed, event["type"], body)
        if response.get("id") != event["id"]:
            raise HookFailure("uncorrelated_reply", "The receiver answered another event.")
        effects = response["result"]["effects"]
        for effect in effects:
            _require_granted(effect, self._event.capabilities)
        return Reply(
            _edited(publication.messages, effects), any(map(_stops, effects)), response["result"]
        )

    async def _send(self, receiver: Receiver, kind: str, message: dict[str, Any]) -> bytes:
        params = {"protocolVersion": "draft", **message["params"]}
        whole = {"jsonrpc": "2.0", **message, "params": params}
        try:
            await in_thread(_validator().validate, kind, whole)
        except ProtocolError as error:
            raise ConfigurationError(
                f"The event is not one of the draft's; correct its fields. {error}",
                code="invalid_event",
            ) from None
        return await self._post(self._endpoints[receiver], json.dumps(whole).encode())

    async def _post(self, endpoint: HookEndpoint, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        credential = await endpoint.authorization() if endpoint.authorization is not None else None
        if credential is not None:
            headers["Authorization"] = credential
        # Built by hand, so that nothing of a lent client's defaults is in it.
        request = httpx.Request(
            "POST",
            endpoint.url,
            headers=headers,
            content=body,
            extensions={"timeout": _WITHOUT_TIMEOUTS},
        )
        try:
            return await self._answer(request)
        except httpx.HTTPError:
            raise HookFailure(
                "unreachable", "The connection to the receiver of events failed."
            ) from None

    async def _answer(self, request: httpx.Request) -> bytes:
        response = await self._client.send(request, stream=True, auth=None, follow_redirects=False)
        try:
            if not response.is_success:
                raise HookFailure(
                    "event_refused", f"The receiver answered the event with {response.status_code}."
                )
            return await _bounded(response)
        finally:
            await response.aclose()

    @staticmethod
    def _parsed(event_type: Any, body: bytes) -> dict[str, Any]:
        """The response, held against the draft. What is wrong with it is the receiver's matter."""
        try:
            response: dict[str, Any] = json.loads(body)
            if "error" in response:
                raise HookFailure("receiver_error", "The receiver answered with an error.")
            _validator().validate("intercept-response", response)
            known: Any = response_for_request(event_type, response)
        except (ValueError, RecursionError, TypeError):
            raise _malformed_reply() from None
        if not known["ok"] or "effects" not in response["result"]:
            raise _malformed_reply()
        return response


async def _bounded(response: httpx.Response) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > MAX_REPLY_BYTES:
            raise HookFailure("reply_too_large", "The receiver's answer is too large.")
    return bytes(body)


def _require_granted(effect: Mapping[str, Any], capabilities: Mapping[str, Any]) -> None:
    granted = effect["type"] in capabilities.get("effects", ())
    if granted and effect["type"] == "modify":
        target = capabilities.get("modify", {}).get(effect["target"], {})
        granted = target.get(effect["operation"]) is True
    if not granted:
        raise HookFailure(
            "effect_not_granted", "The receiver answered with an effect that it was not granted."
        )


def _edited(
    messages: tuple[Message, ...], effects: list[Mapping[str, Any]]
) -> tuple[Message, ...] | None:
    """The messages after the effects that modify them; None if there are none."""
    edited = messages
    edits = [
        each for each in effects if each["type"] == "modify" and each["target"] in _MESSAGE_TARGETS
    ]
    for effect in edits:
        value = _messages_of(effect)
        edited = value if effect["operation"] == "replace" else (*edited, *value)
    return edited if edits else None


def _messages_of(effect: Mapping[str, Any]) -> tuple[Message, ...]:
    try:
        return parse_messages(effect["value"])
    except Malformed:
        raise _malformed_reply() from None


def _stops(effect: Mapping[str, Any]) -> bool:
    return effect["type"] == "deny" or (effect["type"], effect.get("operation")) == ("flow", "stop")


def _malformed_reply() -> HookFailure:
    return HookFailure("malformed_reply", "The receiver's answer is not one of the draft's.")


def _objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in the normalized JSON of an event; opaque members are not looked into."""
    if isinstance(value, Mapping):
        yield value
        for name, member in value.items():
            if name not in OPAQUE_SLOTS:
                yield from _objects_in(member)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _objects_in(item)


def _placed(event: dict[str, Any], slot: tuple[str, ...], value: Any) -> dict[str, Any]:
    """`event` with `value` at `slot`, its objects on the way there copied."""
    name, *rest = slot
    inner = _placed(event.get(name, {}), tuple(rest), value) if rest else value
    return {**event, name: inner}
