"""The published JSON Schema of the protocol, as a judge of what the server sends."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

_PATH = Path(__file__).parents[1] / "schemas" / "uhp-2026-08-11.schema.json"


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_PATH.read_text(encoding="utf-8"))
    return document


@cache
def _validator(name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/$defs/{name}", "$defs": _document()["$defs"]}
    return Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)


def validate(name: str, value: Any) -> None:
    """Raise jsonschema.ValidationError unless `value` is a valid `name`, such as `File`."""
    _validator(name).validate(value)
