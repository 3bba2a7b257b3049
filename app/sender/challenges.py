"""What a 401 asks for: the WWW-Authenticate header (RFC 9110 section 11.6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_END = r"[ \t]*(?:,|$)"
_PARAMETER = re.compile(
    rf"(?P<name>{_NAME})[ \t]*=[ \t]*"
    rf'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>{_NAME})){_END}'
)
_BASE64 = r"[A-Za-z0-9._~+/-]+=*"
_SCHEME = re.compile(rf"(?P<scheme>{_NAME})(?:{_END}|[ \t]+(?:{_BASE64}{_END})?)")
_GAP = re.compile(r"[ \t,]*")


@dataclass(frozen=True, slots=True)
class Challenge:
    """One scheme and its parameters; both names in lower case."""

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict)


def parse_challenges(value: str) -> list[Challenge]:
    """Every challenge of a WWW-Authenticate `value`, several header lines joined by commas.

    Raises ValueError where it is malformed, a parameter said twice included.
    """
    found: list[Challenge] = []
    for match in _items(value):
        if match.re is _SCHEME:
            found.append(Challenge(match["scheme"].lower()))
        else:
            _add(found, match)
    return found


def bearer_parameters(value: str) -> Mapping[str, str]:
    """The parameters of the bearer challenge in `value`: of the one that points to metadata first.

    Empty where there is none. Raises ValueError as `parse_challenges`.
    """
    bearer = [c.parameters for c in parse_challenges(value) if c.scheme == "bearer"]
    bearer.sort(key=lambda parameters: "resource_metadata" not in parameters)
    return bearer[0] if bearer else {}


def _items(value: str) -> Iterator[re.Match[str]]:
    """Schemes and parameters in their order."""
    position = _after_gap(value, 0)
    while position < len(value):
        match = _PARAMETER.match(value, position) or _SCHEME.match(value, position)
        if match is None:
            raise ValueError("not a list of challenges")
        yield match
        position = _after_gap(value, match.end())


def _after_gap(value: str, position: int) -> int:
    gap = _GAP.match(value, position)
    return gap.end() if gap else position


def _add(found: list[Challenge], match: re.Match[str]) -> None:
    name = match["name"].lower()
    if not found or name in found[-1].parameters:
        raise ValueError("a parameter without a scheme, or said twice")
    quoted = match["quoted"]
    found[-1].parameters[name] = (
        match["plain"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
    )
