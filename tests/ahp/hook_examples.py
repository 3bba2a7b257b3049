"""Events of every type that the draft knows, made from its schemas, and parts to put into them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import urljoin

from app.ahp.hook_slots import MESSAGE_OF, SCHEMAS, Mode, schema_id, slots_of

PNG = {"kind": "attachment", "mediaType": "image/png", "selection": "body"}
TEXT = {"id": "p1", "kind": "text", "mediaType": "text/plain", "selection": "body", "text": "hi"}

_WORKSPACE = {"workspace": {"kind": "cwd", "change": {"cwd": "/w"}}}
# What the schemas say with keywords that nothing here reads.
_BESIDE = {"workspace.change.before": _WORKSPACE, "workspace.change.after": _WORKSPACE}

_KEPT = {"type", "const", "enum", "format", "minItems"}
_FORMATS = {"uri": "urn:example:harness", "date-time": "2026-01-02T03:04:05Z"}


Child = tuple[Any, str]
"""A schema, and the document that it is in."""


def attachment(ref: str = "ref_x", media_type: str = "image/png", ident: str = "p2") -> Any:
    """A part with a body."""
    return {**PNG, "id": ident, "mediaType": media_type, "body": {"ref": ref}}


def message(*parts: Any, ident: str = "m1") -> Any:
    """A canonical message."""
    return {"id": ident, "role": "user", "parts": list(parts)}


def event(event_type: str = "turn.start", **members: Any) -> Any:
    """A valid event of that type: what it must have, and `members`."""
    made = _instance({"$ref": schema_id("event")}, schema_id("event"), event_type)
    return {**made, **copy.deepcopy(_BESIDE.get(event_type, {})), **members}


def observation(event: Any) -> Any:
    """The notification that delivers `event`."""
    params = {"protocolVersion": "draft", "event": event}
    return {"jsonrpc": "2.0", "method": "hooks/observe", "params": params}


def interception(event: Any, *effects: str, **params: Any) -> Any:
    """The request that delivers `event` and grants `effects`."""
    capabilities = {"effects": list(effects)}
    given = {"protocolVersion": "draft", "event": event, "capabilities": capabilities, **params}
    return {"jsonrpc": "2.0", "id": event["id"], "method": "hooks/intercept", "params": given}


def delivered(mode: Mode, event: Any) -> Any:
    """The message that delivers `event` in `mode`."""
    return observation(event) if mode == "observe" else interception(event)


def filled(mode: Mode, event_type: str) -> Any:
    """A valid message with something in every slot of its type that takes messages or parts."""
    made = delivered(mode, event(event_type))
    for path in sorted(slots_of(mode, event_type).parts):
        if path[1] == "event":
            _fill(made, path, event_type)
    for change in made["params"]["event"].get("fileChanges", []):
        change["change"] = "modified"  # a created file has no part before, a deleted none after
    return made


def _fill(made: Any, path: tuple[str, ...], event_type: str) -> None:
    """Put a part at `path`, and the least that a schema asks for around it."""
    schema: Any = {"$ref": schema_id(MESSAGE_OF["observe"])}
    base = schema_id(MESSAGE_OF["observe"])
    spot = made
    for place, step in enumerate(path):
        schema, base = _below(schema, base, step, event_type)
        last = place == len(path) - 1
        child = _part(schema, base) if last else _instance(schema, base, event_type)
        if step == "*":
            if not spot:
                spot.append(child)
            spot = spot[0]
        else:
            if step not in spot or last:
                spot[step] = child
            spot = spot[step]


def _part(schema: Any, base: str) -> Any:
    merged = _flat(schema, base, "")
    text_only = "attachment" not in json.dumps(merged.get("oneOf", merged))
    return copy.deepcopy(TEXT if text_only else attachment())


def _below(schema: Any, base: str, step: str, event_type: str) -> Child:
    merged = _flat(schema, base, event_type)
    if step == "*":
        return cast("Child", merged["items"])
    return cast("Child", merged["properties"][step])


def _flat(schema: Any, base: str, event_type: str) -> dict[str, Any]:
    """One schema out of those that apply at once; its children with the document they are in."""
    flat: dict[str, Any] = {"properties": {}, "required": [], "base": base}
    _merge(flat, schema, base, event_type)
    return flat


def _merge(flat: dict[str, Any], schema: Any, base: str, event_type: str) -> None:
    if "$ref" in schema:
        uri = urljoin(base, schema["$ref"])
        _merge(flat, _resolved(uri), uri.partition("#")[0], event_type)
    for child in _applying(flat, schema, base, event_type):
        _merge(flat, child, base, event_type)
    flat["properties"] |= {name: (child, base) for name, child in _members(schema)}
    flat["required"] += schema.get("required", [])
    flat |= {key: schema[key] for key in _KEPT & schema.keys()}
    if "items" in schema:
        flat["items"] = schema["items"], base


def _members(schema: Any) -> Any:
    return schema.get("properties", {}).items()


def _applying(flat: dict[str, Any], schema: Any, base: str, event_type: str) -> Iterator[Any]:
    for child in schema.get("allOf", ()):
        yield child
        if "then" in child and _applies(child["if"], flat):
            yield child["then"]
    if branches := [*schema.get("oneOf", ()), *schema.get("anyOf", ())]:
        yield _branch(branches, event_type)


def _applies(condition: Any, flat: Mapping[str, Any]) -> bool:
    """Whether the first value of each member that `condition` looks at is one that it takes."""
    for name, wanted in condition.get("properties", {}).items():
        if name not in flat["required"] or name not in flat["properties"]:
            return False
        value = _made(flat["properties"][name], "")
        if value not in wanted.get("enum", [wanted.get("const")]):
            return False
    return bool(condition.get("properties"))


def _branch(branches: list[Any], event_type: str) -> Any:
    named = [branch for branch in branches if f"/{event_type}" in branch.get("$ref", "")]
    file = f"{event_type.replace('.', '-')}.schema.json"
    named += [branch for branch in branches if event_type and branch.get("$ref") == file]
    return (named or branches)[0]


def _resolved(uri: str) -> Any:
    document, _, pointer = uri.partition("#")
    found: Any = SCHEMAS[document]
    for step in pointer.split("/")[1:]:
        found = found[int(step)] if isinstance(found, list) else found[step]
    return found


def _instance(schema: Any, base: str, event_type: str) -> Any:
    """The least that is valid."""
    if schema is True:
        return None
    flat = _flat(schema, base, event_type)
    if "const" in flat:
        return flat["const"]
    if "enum" in flat:
        return flat["enum"][0]
    kind = flat.get("type", "object" if flat["required"] else "null")
    if kind == "object":
        members = dict.fromkeys(flat["required"])
        return {
            name: _made(flat["properties"].get(name, (True, base)), event_type) for name in members
        }
    return _scalar(kind, flat, event_type)


def _made(child: Child, event_type: str) -> Any:
    return _instance(child[0], child[1], event_type)


def _scalar(kind: str, flat: Mapping[str, Any], event_type: str) -> Any:
    if kind == "array":
        count = flat.get("minItems", 0)
        return [_made(flat["items"], event_type) for _ in range(count)]
    if kind == "string":
        return _FORMATS.get(flat.get("format", ""), "x")
    return {"integer": 1, "number": 1, "boolean": False, "null": None}[kind]
