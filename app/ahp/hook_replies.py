"""The answers of JSON-RPC: what the SDK's engine says, as octets.

The engine judges what is no valid delivery, tells the configuration, and holds the effects of an
interception against what the host granted in that very request. It knows nothing of references or
of storing: what it is given has been accepted before, or never will be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from agenthooksprotocol import Configuration
from agenthooksprotocol.response import response_for_request
from agenthooksprotocol.server import hooks

from app.ahp.hook_configuration import configuration_of
from app.ahp.hook_messages import Validator
from app.ahp.hook_slots import event_types
from app.http.answers import encode_json

if TYPE_CHECKING:
    from app.ahp.events import Effects
    from app.ahp.hook_messages import Delivery
    from app.settings import Settings

LARGE_BYTES = 256 * 1024
"""From this size on a message is worked on in a thread: it would hold up everybody else."""

OUTCOMES: Final[Mapping[int, str]] = {
    -32700: "parse_error",
    -32600: "invalid_request",
    -32601: "method_not_found",
    -32602: "invalid_params",
    -32603: "invalid_effects",
    -32001: "unsupported_version",
    -32002: "unsupported_event",
    -32004: "handler_failed",
}
"""How logs and metrics name the engine's errors. Within a reply, -32603 stands for effects that
are malformed or not granted: everything else of it is valid by then."""

Answered = tuple[bytes | None, str]
"""The octets of an answer, None where a notification gets none, and the name of its outcome."""


class HandlerFailed(Exception):
    """The operator's code has no result for an event: it raised, or took too long."""


class Replies:
    """The engine, for one configuration."""

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError for a subscription that the draft does not have."""
        validator = Validator()
        self._validator = cast("Any", validator)
        configuration = Configuration.from_dict(configuration_of(settings, validator))
        self._engine = hooks.Engine(
            hooks.Handlers(), validator=self._validator, configuration=configuration
        )

    async def answer(self, octets: bytes) -> Answered:
        """The answer to what is no valid event: the configuration, or an error.

        An invalid notification gets none.
        """
        answer = await _aside(self._engine.handle(octets), len(octets))
        return (None, "ignored") if answer is None else _answered(answer, "configuration")

    async def effects(self, delivery: Delivery, given: Effects, size: int) -> Answered:
        """The answer to an interception for which the operator's code gave these effects.

        What is no effect, is none of the event's type, or was not granted gives an error. `size`
        is that of the message, in bytes.
        """
        try:
            effects = _listed(given)
        except (TypeError, ValueError):
            return await self.failure(delivery, size)
        if not effects:
            return no_effects(delivery), "done"
        return await self._reply(delivery, _Reply(delivery, effects), size)

    async def failure(self, delivery: Delivery, size: int) -> Answered:
        """The answer to an interception that has no result; it tells nothing of the reason."""
        return await self._reply(delivery, _Failure(), size)

    async def _reply(self, delivery: Delivery, callback: Any, size: int) -> Answered:
        callbacks = hooks.InterceptHandlers(**{delivery.type.replace(".", "_"): callback})
        engine = hooks.Engine(hooks.Handlers(intercept=callbacks), validator=self._validator)
        return _answered(await _aside(engine.process(delivery.message), size), "done")


def no_effects(delivery: Delivery) -> bytes:
    """The answer to an interception that changes nothing."""
    result = {"protocolVersion": delivery.params["protocolVersion"], "effects": []}
    return encode_json({"jsonrpc": "2.0", "id": delivery.event_id, "result": result})


def _listed(given: Effects) -> list[dict[str, Any]]:
    if given is None:
        return []
    effects = [given] if isinstance(given, Mapping) else given
    return [dict(effect) for effect in effects]


class _Reply:
    """The callback of an event's type: the effects, as the models that the engine wants."""

    def __init__(self, delivery: Delivery, effects: list[dict[str, Any]]) -> None:
        self._delivery = delivery
        self._effects = effects

    def __call__(self, _: object) -> Any:
        event_type = self._delivery.type
        return _REPLIES[event_type](effects=tuple(self._models(event_type)))

    def _models(self, event_type: Any) -> list[Any]:
        result = {"protocolVersion": "draft", "effects": self._effects}
        response: Any = {"jsonrpc": "2.0", "id": self._delivery.event_id, "result": result}
        parsed: Any = response_for_request(event_type, response)
        return parsed["value"]["result"]["effects"] if parsed["ok"] else self._effects


class _Failure:
    """The callback that has no reply."""

    def __call__(self, _: object) -> Any:
        raise HandlerFailed


def _reply_of(event_type: str) -> Any:
    return getattr(hooks, "".join(map(str.capitalize, event_type.split("."))) + "Reply")


_REPLIES: Final[Mapping[str, Any]] = {
    event_type: _reply_of(event_type) for event_type in event_types("intercept")
}


async def _aside(work: Coroutine[Any, Any, Any], size: int) -> Any:
    """What the engine gives for a message of `size` bytes. Nothing in it waits for this loop."""
    return await (work if size < LARGE_BYTES else asyncio.to_thread(asyncio.run, work))


def _answered(answer: dict[str, Any], outcome: str) -> Answered:
    if "error" in answer:
        outcome = OUTCOMES[answer["error"]["code"]]
    return encode_json(answer), outcome
