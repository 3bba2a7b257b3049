"""The JSON of an event that the schema does not look into, and what a view withholds. Pure, no I/O.

Selection and authorization hold for copies of a body in `native`, `input`, `output` and other
opaque JSON as they do for the content slots (AHP-CONTENT-002, AHP-S46). Nobody recognizes every
copy, so such JSON stays out of an event unless its producer projected it itself; and what is
recognized as a copy of withheld content is taken out even then.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from app.ahp.content import Withheld

OPAQUE_SLOTS = frozenset({"extensions", "input", "mcpServers", "native", "output", "params"})
"""The members of an event that hold JSON of the producer's own."""

_REQUIRED_SLOTS = frozenset({"input", "params"})
"""The slots that the schema wants wherever it has them."""

MIN_CONTAINED_CHARACTERS = 8
"""From this length on, withheld content is also looked for inside longer strings. Shorter text
stands in too many strings by chance and is found only where it is the whole string."""

MAX_OPAQUE_DEPTH = 64
"""Opaque JSON that is nested deeper is not looked through, and so counts as a duplicate."""

_GONE: Final = object()


def conceal(
    event: Mapping[str, Any], withheld: Iterable[Withheld], *, explicit: Collection[str] = ()
) -> dict[str, Any]:
    """`event` without what its opaque JSON could disclose past a selection (AHP-S46, S47).

    The members of OPAQUE_SLOTS are left out, at any depth, or an empty object where the schema
    wants one, unless the producer projected them itself and names them in `explicit`; `native` is
    one of them. In those, whatever repeats withheld content is left out, null in a list. The
    normalized content slots stay as they are: put the projected messages there before.
    """
    return _Opaque(_Sieve(withheld), explicit).members(event)


def find_duplicates(value: Any, withheld: Iterable[Withheld]) -> tuple[str, ...]:
    """Where JSON of any kind repeats withheld content, as RFC 6901 pointers in document order.

    Found are strings and member names that are the text, the reference or octets of the digest,
    also in Base64; that contain the text or reference, also as JSON writes it; and structure that
    the text is the serialization of. A reworded or otherwise encoded copy is not recognized.
    """
    sieve = _Sieve(withheld)
    sieve.sift(value)
    return tuple(sieve.found)


class _Opaque:
    """Walks the normalized part of an event and decides about each opaque slot in it."""

    def __init__(self, sieve: _Sieve, explicit: Collection[str]) -> None:
        self._sieve = sieve
        self._explicit = explicit

    def members(self, value: Mapping[str, Any]) -> dict[str, Any]:
        kept = ((name, self._member(name, member)) for name, member in value.items())
        return {name: member for name, member in kept if member is not _GONE}

    def _member(self, name: str, value: Any) -> Any:
        if name not in OPAQUE_SLOTS:
            return self._value(value)
        kept = self._sieve.sift(value) if name in self._explicit else _GONE
        return {} if kept is _GONE and name in _REQUIRED_SLOTS else kept

    def _value(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self.members(value)
        return [self._value(item) for item in value] if isinstance(value, list) else value


class _Sieve:
    """Copies JSON without what repeats withheld content, and notes where that was."""

    def __init__(self, withheld: Iterable[Withheld]) -> None:
        self._traces = _Traces(withheld)
        self.found: list[str] = []

    def sift(self, value: Any, pointer: str = "", depth: int = 0) -> Any:
        if depth > MAX_OPAQUE_DEPTH or self._traces.are_in(value):
            self.found.append(pointer)
            return _GONE
        if isinstance(value, dict):
            return self._members(value, pointer, depth + 1)
        if isinstance(value, list):
            return self._items(value, pointer, depth + 1)
        return value

    def _members(self, value: dict[str, Any], pointer: str, depth: int) -> dict[str, Any]:
        kept = {}
        for name, member in value.items():
            where = f"{pointer}/{_escape(name)}"
            if self._traces.are_in(name):
                self.found.append(where)
                continue
            kept[name] = self.sift(member, where, depth)
        return {name: member for name, member in kept.items() if member is not _GONE}

    def _items(self, value: list[Any], pointer: str, depth: int) -> list[Any]:
        kept = [self.sift(item, f"{pointer}/{i}", depth) for i, item in enumerate(value)]
        return [None if item is _GONE else item for item in kept]


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class _Traces:
    """By what withheld content is recognized."""

    def __init__(self, withheld: Iterable[Withheld]) -> None:
        self._whole: set[str] = set()
        self._contained: set[str] = set()
        self._digests: set[str] = set()
        self._structures: list[Any] = []
        for item in withheld:
            self._add(item)

    def are_in(self, value: Any) -> bool:
        if isinstance(value, str):
            return self._are_in_string(value)
        return isinstance(value, (dict, list)) and value in self._structures

    def _add(self, withheld: Withheld) -> None:
        if withheld.sha256 is not None:
            self._digests.add(withheld.sha256)
        for content in filter(None, (withheld.text, withheld.ref)):
            self._add_content(content)
        if withheld.text:
            self._digests.add(_sha256(withheld.text.encode()))
            self._structures.extend(_structures_in(withheld.text))

    def _add_content(self, content: str) -> None:
        self._whole.add(content)
        if len(content) >= MIN_CONTAINED_CHARACTERS:
            self._contained.update(_spellings(content))

    def _are_in_string(self, value: str) -> bool:
        return (
            value in self._whole
            or any(content in value for content in self._contained)
            or bool(self._digests and not self._digests.isdisjoint(_digests_of(value)))
        )


def _spellings(content: str) -> Iterator[str]:
    yield content
    yield json.dumps(content)[1:-1]
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield base64.b64encode(content.encode()).decode("ascii").rstrip("=")
    yield base64.urlsafe_b64encode(content.encode()).decode("ascii").rstrip("=")


def _structures_in(text: str) -> Iterator[Any]:
    """The object or list that `text` is the serialization of, if it is one and not empty."""
    if text.lstrip()[:1] not in ("{", "["):
        return
    try:
        structure = json.loads(text)
    except (ValueError, RecursionError):
        return
    if structure:
        yield structure


def _digests_of(value: str) -> Iterator[str]:
    """Of the string as UTF-8 and, where it can be Base64, of what it encodes."""
    yield _sha256(value.encode("utf-8", "surrogatepass"))
    encoded = value.rpartition(",")[2] if value.startswith("data:") else value
    octets = _decoded(encoded)
    if octets is not None:
        yield _sha256(octets)


def _decoded(encoded: str) -> bytes | None:
    standard = "".join(encoded.split()).rstrip("=").translate(_URL_SAFE)
    try:
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except ValueError:
        return None


_URL_SAFE = str.maketrans("-_", "+/")


def _sha256(octets: bytes) -> str:
    return hashlib.sha256(octets).hexdigest()
