"""Whether a message is a valid delivery: the draft's schemas, and what the document adds to them.

The schemas, their catalogue of events and the errors are the SDK's. Its own validator is too slow
to stand in front of every event, so the same schemas are compiled here once, for a validator in
Rust; a test holds the verdicts of both against each other.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from typing import Any, Final, NamedTuple

import jsonschema_rs
from agenthooksprotocol.runtime import ProtocolError
from jsonschema import FormatChecker

from app.ahp.content import PENDING_REF, is_attachment_type, parse_parts
from app.ahp.hook_slots import MESSAGE_OF, SCHEMAS, Mode, schema_id, slots_of
from app.errors import Malformed

_MODES: Final[Mapping[str, Mode]] = {
    "hooks/observe": "observe",
    "hooks/intercept": "intercept",
}
_MODE_OF_MESSAGE = {name: mode for mode, name in MESSAGE_OF.items()}

_CHECKER: Final = FormatChecker()

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a surrogate: half of a pair, or a half that has no other."""

_REMEMBERED_LENGTH: Final = 255
"""Longer values are judged anew each time: senders choose them, and memory is not theirs."""

_remembered_type = lru_cache(maxsize=1024)(is_attachment_type)


class Delivery(NamedTuple):
    """A valid event on its way in; `media_types` is that of each reference, in document order."""

    mode: Mode
    event_id: str
    type: str
    params: dict[str, Any]
    message: dict[str, Any]
    media_types: dict[str, str]

    @property
    def refs(self) -> tuple[str, ...]:
        """Every body reference, each once, in document order."""
        return tuple(self.media_types)


def parse(octets: bytes) -> Any:
    """Octets as JSON, strictly. Raises ValueError and RecursionError.

    A name twice in one object, NaN, and a number beyond a double are refused: two readers could
    take them for two different messages.
    """
    return _decoder.decode(octets.decode("utf-8"))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return value


def _no_number(_: str) -> float:
    raise ValueError("no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is beyond a double")
    return value


# Made once: `json.loads` makes a new decoder for every call that names a hook.
_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite
)


def read_delivery(octets: bytes) -> Delivery | None:
    """The event in `octets`; None for everything that is no valid delivery of one."""
    try:
        message = parse(octets)
    except (ValueError, RecursionError):
        return None
    delivery = delivery_of(message)
    if delivery is None or not _has_surrogate(octets) or _is_text(delivery):
        return delivery
    return None


def _has_surrogate(octets: bytes) -> bool:
    # Most messages have no escape at all, which is seen twenty times as fast.
    return b"\\" in octets and _SURROGATE.search(octets) is not None


def _is_text(delivery: Delivery) -> bool:
    """Whether the parts of a delivery hold nothing that has no form in UTF-8."""
    try:
        parse_parts(slots_of(delivery.mode, delivery.type).parts_in(delivery.message))
    except Malformed:
        return False
    return True


def delivery_of(message: Any) -> Delivery | None:
    """The event that a decoded `message` delivers, or None where it is not valid."""
    mode = _mode_of(message)
    if mode is None or not _schema(MESSAGE_OF[mode]).is_valid(message):
        return None
    event = message["params"]["event"]
    if mode == "intercept" and message["id"] != event["id"]:
        return None
    media_types = _media_types(slots_of(mode, event["type"]).parts_in(message))
    if media_types is None:
        return None
    return Delivery(mode, event["id"], event["type"], message["params"], message, media_types)


def _mode_of(message: Any) -> Mode | None:
    method = message.get("method") if isinstance(message, dict) else None
    return _MODES.get(method) if isinstance(method, str) else None


def _media_types(parts: list[Any]) -> dict[str, str] | None:
    """Reference -> media type, for the bodies of `parts`; None when one is no attachment.

    A text, or JSON, in whatever spelling, is none (AHP-C14), and a body that its sender has not
    uploaded yet has no reference.
    """
    found: dict[str, str] = {}
    for part in parts:
        if part["kind"] != "attachment":
            continue
        judge = _remembered_type if _is_short(part["mediaType"]) else is_attachment_type
        if not judge(part["mediaType"]):
            return None
        if "body" in part:
            found.setdefault(part["body"]["ref"], part["mediaType"])
    return None if PENDING_REF in found else found


@cache
def _schema(name: str) -> jsonschema_rs.Draft202012Validator:
    return jsonschema_rs.Draft202012Validator(
        {"$ref": schema_id(name)},
        registry=_registry(),
        formats={kind: partial(_conforms, kind) for kind in _CHECKER.checkers},
        validate_formats=True,
    )


@cache
def _registry() -> jsonschema_rs.Registry:
    return jsonschema_rs.Registry(SCHEMAS.items(), draft=jsonschema_rs.Draft202012)


def _conforms(kind: str, value: object) -> bool:
    """Whether `value` has the format `kind`. A harness is the source of many events: it repeats."""
    if isinstance(value, str) and _is_short(value):
        return _remembered_format(kind, value)
    return _CHECKER.conforms(value, kind)


@lru_cache(maxsize=4096)
def _remembered_format(kind: str, value: str) -> bool:
    return _CHECKER.conforms(value, kind)


def _is_short(value: str) -> bool:
    return len(value) <= _REMEMBERED_LENGTH


class Validator:
    """What the SDK's engine asks for its verdicts, in place of the SDK's own validator."""

    def __init__(self) -> None:
        for name in MESSAGE_OF.values():
            _schema(name)  # now, not while the first event waits

    def validate(self, kind: str, value: Any) -> Any:
        """`value`, when it is a valid `kind` such as `intercept-request`.

        Raises the SDK's ProtocolError when it is not.
        """
        if not _is_finite(value) or not self._is_valid(kind, value):
            raise ProtocolError(f"The value is no valid {kind}.")
        return value

    def _is_valid(self, kind: str, value: Any) -> bool:
        mode = _MODE_OF_MESSAGE.get(kind)
        return _schema(kind).is_valid(value) if mode is None else delivery_of(value) is not None


def _is_finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
