"""The query of a request: each parameter once, of its type and within its bounds, or 400."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from app.uhp.errors import invalid_input

MAX_FIELDS = 100
_INTEGER = re.compile(r"[0-9]{1,18}")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


class Query:
    """The parameters by name; a parameter that nobody asks for is ignored."""

    __slots__ = ("_raw", "_values")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._values: dict[str, list[str]] | None = None

    def text(self, name: str) -> str | None:
        """The value of `name`; None when it is absent. Raises UhpError (`invalid_input`)."""
        values = self._parsed().get(name, [])
        if len(values) > 1:
            raise invalid_input(f"Give {name} once.", param=name)
        return values[0] if values else None

    def integer(self, name: str, *, default: int, least: int, most: int) -> int:
        """The whole number `name` within `least` and `most`. Raises UhpError."""
        value = self.text(name)
        if value is None:
            return default
        if _INTEGER.fullmatch(value) is None or not least <= int(value) <= most:
            raise invalid_input(f"{name} is a whole number from {least} to {most}.", param=name)
        return int(value)

    def flag(self, name: str) -> bool:
        """Whether `name` is set to true. Raises UhpError for anything but true and false."""
        value = self.text(name)
        if value is None:
            return False
        if value not in _FLAGS:
            raise invalid_input(f"{name} is true or false.", param=name)
        return _FLAGS[value]

    def _parsed(self) -> dict[str, list[str]]:
        if self._values is None:
            self._values = _parse(self._raw)
        return self._values


def _parse(raw: bytes) -> dict[str, list[str]]:
    try:
        fields = parse_qsl(
            raw.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_FIELDS,
        )
    except ValueError:
        raise invalid_input("The query is not percent-encoded UTF-8 of a usual size.") from None
    values: dict[str, list[str]] = {}
    for name, value in fields:
        values.setdefault(name, []).append(value)
    return values
