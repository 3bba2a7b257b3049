"""Header values of the form `value; name=token; name="quoted"` (RFC 9110 section 5.6.6).

Read strictly: what does not fit the grammar is refused, and no name appears twice.
"""

from __future__ import annotations

import re
from typing import NamedTuple

TCHARS = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
"""RFC 9110 section 5.6.2."""

_NAME = re.compile(rf"[ \t]*;[ \t]*({TCHARS})=")
_UNQUOTED = re.compile(r'[^\s";]+')
_QUOTED = re.compile(r'"((?:[^"\\\x00-\x08\x0a-\x1f\x7f]|\\["\\]|\\)*)"')
_END = re.compile(r"[ \t]*;?[ \t]*")


class ParameterError(ValueError):
    """The value does not fit the grammar."""


class Parameter(NamedTuple):
    """One value as it was written, without its quotes; escapes inside are left as they are."""

    text: str
    quoted: bool

    def unescaped(self) -> str:
        r"""The value meant: `\"` and `\\` are escapes, any other backslash stands for itself.

        Old clients send Windows paths with bare backslashes; taking those for escapes would
        swallow them (B24).
        """
        return re.sub(r'\\(["\\])', r"\1", self.text) if self.quoted else self.text


def parse_parameters(value: str) -> tuple[str, dict[str, Parameter]]:
    """The leading value in lower case, and the parameters by lower-case name.

    Raises ParameterError.
    """
    head, separator, _ = value.partition(";")
    position = len(head)
    found: dict[str, Parameter] = {}
    while separator and not _END.fullmatch(value, position):
        name, parameter, position = _next(value, position)
        if name in found:
            raise ParameterError(f"{name} is given twice")
        found[name] = parameter
    return head.strip(" \t").lower(), found


def _next(value: str, position: int) -> tuple[str, Parameter, int]:
    name = _NAME.match(value, position)
    if name is None:
        raise ParameterError("a parameter has no name")
    key = name[1].lower()
    quoted = _QUOTED.match(value, name.end())
    if quoted is not None:
        return key, Parameter(quoted[1], quoted=True), quoted.end()
    plain = _UNQUOTED.match(value, name.end())
    if plain is None:
        raise ParameterError(f"{key} has no value")
    return key, Parameter(plain[0], quoted=False), plain.end()
