"""The README's tables of settings, made from `app.settings`: `python -m tests.reference`."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from app.settings import (
    AnonymousSettings,
    HarnessSettings,
    IntrospectionSettings,
    IssuerSettings,
    Settings,
    SubscriptionSettings,
    TokenSettings,
)

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"(<!-- settings: .*? -->\n).*?(<!-- /settings -->)", re.DOTALL)

TABLES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Settings", Settings),
    ("`[[event_subscriptions]]`", SubscriptionSettings),
    ("`[[tokens]]`", TokenSettings),
    ("`[[issuers]]`", IssuerSettings),
    ("`[introspection]`", IntrospectionSettings),
    ("`[anonymous]`", AnonymousSettings),
    ("`[[harnesses]]`", HarnessSettings),
)


def settings_reference() -> str:
    """All tables, as Markdown."""
    return "\n".join(_table(title, model) for title, model in TABLES)


def updated(readme: str) -> str:
    """The README with its block of settings as it must be."""
    reference = settings_reference()
    return BLOCK.sub(lambda block: f"{block[1]}{reference}{block[2]}", readme)


def _table(title: str, model: type[BaseModel]) -> str:
    rows = [
        f"| `{name}` | {_default(field)} | {field.description} |"
        for name, field in model.model_fields.items()
    ]
    return "\n".join([f"**{title}**\n", "| key | default | meaning |", "|---|---|---|", *rows, ""])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return _shown(field.default)


def _shown(value: Any) -> str:
    match value:
        case None | ():
            return ""
        case ByteSize():
            return f"`{value.human_readable().replace('.0', '')}`"
        case timedelta():
            return f"`{value.days}d`"
        case Path():
            return f"`{value}`"
        case dict():
            return f"`{json.dumps(value)}`"
        case frozenset() | tuple():
            return f"`{json.dumps(sorted(value) if isinstance(value, frozenset) else value)}`"
        case bool():
            return f"`{str(value).lower()}`"
    return f"`{value}`"


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
