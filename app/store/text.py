"""Text that every database takes."""

from __future__ import annotations

from app.errors import Malformed


def is_text(value: str) -> bool:
    """Whether every database takes `value` as text: no NUL, and it can be written as UTF-8."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def require_text(**values: str) -> None:
    """Raise Malformed, with the name of the value at fault, unless all are text."""
    for name, value in values.items():
        if not is_text(value):
            raise Malformed(f"{name}_invalid", f"The {name} must be text without NUL characters.")
