"""Where the draft's schemas put messages and parts into a delivered event.

The places are found by walking the schemas that the SDK carries, so a new version of them brings
its places along. Whatever looks like a part elsewhere, in `native`, `input` or `extensions`, is
JSON of the producer's own: nothing there is a reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal
from urllib.parse import urljoin

Mode = Literal["observe", "intercept"]
Path = tuple[str, ...]

EACH: Final = "*"
"""The step of a path that stands for every item of an array."""

MESSAGE_OF: Final[Mapping[Mode, str]] = {
    "observe": "observe-notification",
    "intercept": "intercept-request",
}
"""The name of the schema of each mode's message."""

_PART_MEMBERS = {"kind", "mediaType", "selection"}
_MESSAGE_MEMBERS = {"role", "parts"}
_EVENT = ("params", "event")
_TYPE_OF_EVENT = ("properties", "event", "properties", "type", "const")


def _read_schemas() -> dict[str, Any]:
    bundle = json.loads(files("agenthooksprotocol").joinpath("schemas.json").read_bytes())
    return {schema["$id"]: schema for schema in bundle}


SCHEMAS: Final[Mapping[str, Any]] = _read_schemas()
"""The draft's schemas by their `$id`."""


def schema_id(name: str) -> str:
    """The `$id` of the schema of that name, such as `observe-notification`."""
    return next(uri for uri in SCHEMAS if uri.endswith(f"/{name}.schema.json"))


@dataclass(slots=True)
class Tree:
    """Paths, as a tree: the next step -> what is below it; `ends` where a path does."""

    below: dict[str, Tree] = field(default_factory=dict)
    ends: bool = False

    def add(self, path: Path) -> None:
        """Let the tree hold one path more."""
        tree = self
        for step in path:
            tree = tree.below.setdefault(step, Tree())
        tree.ends = True

    def find(self, value: Any, found: list[Any]) -> None:
        """Append to `found` what is at the paths in `value`, in the order of the document."""
        if self.ends:
            found.append(value)
        elif isinstance(value, list):
            each = self.below.get(EACH)
            if each is not None:
                for item in value:
                    each.find(item, found)
        elif isinstance(value, dict):
            for name, member in value.items():
                below = self.below.get(name)
                if below is not None:
                    below.find(member, found)


@dataclass(frozen=True, slots=True)
class Slots:
    """The paths, from the JSON-RPC message on, of the parts of one event type and its messages.

    Parts are those of the whole delivery, messages those of the event itself.
    """

    parts: frozenset[Path]
    messages: frozenset[Path]
    part_tree: Tree
    message_tree: Tree

    def parts_in(self, message: Any) -> list[Any]:
        """The parts of a valid message, in order."""
        found: list[Any] = []
        self.part_tree.find(message, found)
        return found

    def messages_in(self, message: Any) -> list[Any]:
        """The canonical messages of a valid message, in order."""
        found: list[Any] = []
        self.message_tree.find(message, found)
        return found


@cache
def slots_of(mode: Mode, event_type: str) -> Slots:
    """The slots of an event of `event_type` that is delivered in `mode`.

    For an interception they cover the state that other receivers have left in the request, too.
    """
    walk = _Walk(event_type)
    uri = schema_id(MESSAGE_OF[mode])
    walk.visit(SCHEMAS[uri], uri, (), frozenset())
    parts = frozenset(walk.parts)
    messages = frozenset(path for path in walk.messages if path[:2] == _EVENT)
    return Slots(parts, messages, _tree(parts), _tree(messages))


def _tree(paths: frozenset[Path]) -> Tree:
    tree = Tree()
    for path in sorted(paths):
        tree.add(path)
    return tree


class _Walk:
    """One way through the schema of a message, for one type of event."""

    def __init__(self, event_type: str) -> None:
        self.parts: set[Path] = set()
        self.messages: set[Path] = set()
        self._event_type = event_type

    def visit(self, schema: Any, base: str, path: Path, seen: frozenset[str]) -> None:
        """Note what `schema`, found in the document `base`, has at `path` and below."""
        if not isinstance(schema, dict):
            return
        if "$ref" in schema:
            self._follow(urljoin(base, schema["$ref"]), path, seen)
        members = schema.get("properties", {})
        if members.keys() >= _PART_MEMBERS:
            self.parts.add(path)
            return
        if members.keys() >= _MESSAGE_MEMBERS:
            self.messages.add(path)
        for child in self._branches(schema, base):
            self.visit(child, base, path, seen)
        for name, child in members.items():
            self.visit(child, base, (*path, name), seen)
        self.visit(schema.get("items"), base, (*path, EACH), seen)

    def _follow(self, uri: str, path: Path, seen: frozenset[str]) -> None:
        if uri not in seen:
            self.visit(_resolve(uri), uri.partition("#")[0], path, seen | {uri})

    def _branches(self, schema: Mapping[str, Any], base: str) -> Iterator[Any]:
        """The schemas that apply to the same value, less those of other types of events."""
        yield from schema.get("allOf", ())
        for child in (*schema.get("oneOf", ()), *schema.get("anyOf", ())):
            names = _event_types(child, base)
            if not names or self._event_type in names:
                yield child
        named = _at(schema.get("if"), _TYPE_OF_EVENT)
        if named is None or named == self._event_type:
            yield schema.get("then")
        yield schema.get("else")


def _resolve(uri: str) -> Any:
    document, _, pointer = uri.partition("#")
    found = SCHEMAS[document]
    for step in pointer.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def _at(schema: Any, path: Path) -> Any:
    for step in path:
        schema = schema.get(step) if isinstance(schema, dict) else None
    return schema


def _event_types(schema: Any, base: str) -> frozenset[str]:
    """The types that an event of this schema may have; none where it is no event's schema."""
    if not isinstance(schema, dict):
        return frozenset()
    found: set[str] = set()
    named = _at(schema, ("properties", "type", "const"))
    if isinstance(named, str) and "source" in schema["properties"]:
        found.add(named)
    if "$ref" in schema:
        uri = urljoin(base, schema["$ref"])
        found |= _event_types(_resolve(uri), uri.partition("#")[0])
    for child in (*schema.get("allOf", ()), *schema.get("oneOf", ())):
        found |= _event_types(child, base)
    return frozenset(found)


@cache
def event_types(mode: Mode) -> frozenset[str]:
    """The types of events that the catalogue lets a host deliver in `mode`."""
    uri = schema_id(MESSAGE_OF[mode])
    event = SCHEMAS[uri]["allOf"][1]["properties"]["params"]["properties"]["event"]
    known = _event_types({"$ref": event["$ref"]}, uri)
    return known & _event_types({"oneOf": event["oneOf"]}, uri) if "oneOf" in event else known
