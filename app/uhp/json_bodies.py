"""A request body as JSON, strictly: what two parsers could read in two ways is refused.

UTF-8 without a byte order mark, no name twice in one object, no NaN and no number beyond a
double, no lone surrogate (it has no UTF-8 form, and would fail later, in a listing: B30), bounded
in depth and in the number of values.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

from app.uhp.errors import invalid_input

if TYPE_CHECKING:
    from app.http.bodies import RequestBody

MAX_DEPTH = 100
"""Nested arrays and objects: far above what any request of the protocol has."""

MAX_VALUES = 1_000_000
"""Values of one body: a small body of very many values would cost a hundred times its memory."""

LARGE_BYTES = 256 * 1024
"""Bodies from this size on are parsed on a thread."""


async def read_json(body: RequestBody, limit: int) -> Any:
    """The rest of `body`, of at most `limit` bytes, as JSON.

    Raises TooLarge as soon as the limit is passed, UhpError (`invalid_input`, with `param` where
    a field is at fault), Disconnected, TooSlow.
    """
    octets = await body.whole(limit)
    if len(octets) >= LARGE_BYTES:
        return await asyncio.to_thread(parse_json, octets)
    return parse_json(octets)


def parse_json(octets: bytes) -> Any:
    """`octets` as JSON. Raises UhpError (`invalid_input`)."""
    if sum(octets.count(mark) for mark in b",[{") > MAX_VALUES:
        raise invalid_input(f"The body holds more than {MAX_VALUES} values; send text as a file.")
    try:
        value = json.loads(
            octets.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number
        )
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise invalid_input(f"The body is not valid JSON: {_reason(error)}.") from None
    _check(value)
    return value


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    if isinstance(error, _Refused):
        return str(error)
    return "a number has too many digits"


class _Refused(ValueError):
    """Valid for the parser, not for us; the text is safe to show."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Refused("an object holds the same name twice")
    return value


def _no_number(_: str) -> float:
    raise _Refused("NaN and Infinity are no numbers of JSON")


def _check(root: Any) -> None:
    """Refuse what cannot be kept and given back: lone surrogates, infinities, great depth."""
    pending: list[tuple[Any, tuple[str | int, ...]]] = [(root, ())]
    while pending:
        value, path = pending.pop()
        if len(path) > MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, dict):
            for name in value:
                _check_text(name, path)
            pending.extend((item, (*path, name)) for name, item in value.items())
        elif isinstance(value, list):
            pending.extend((item, (*path, index)) for index, item in enumerate(value))
        else:
            _check_scalar(value, path)


def _check_scalar(value: Any, path: tuple[str | int, ...]) -> None:
    if isinstance(value, str):
        _check_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise invalid_input("A number is beyond the range of a double.", param=_dotted(path))


def _check_text(text: str, path: tuple[str | int, ...]) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        message = "A text holds half of a surrogate pair, which is no character."
        raise invalid_input(message, param=_dotted(path)) from None


def _dotted(path: tuple[str | int, ...]) -> str | None:
    """The path as `input.0.content`, without names of the client's that are no usual ones."""
    names = [str(step) for step in path]
    if not all(name.isascii() and name.isprintable() and len(name) <= 64 for name in names):
        return None
    return ".".join(names) or None


def _too_deep() -> Exception:
    return invalid_input(f"The body is nested deeper than {MAX_DEPTH} levels.")
