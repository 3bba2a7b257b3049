"""File names: what is accepted, and how a name is shown in a header, in JSON and in a zip.

A name is text to show, never a path: nothing on this machine is called after it. It is kept as it
was sent, neither normalized nor decoded, or it is refused; a name that was kept can be written in
UTF-8 and holds nothing that breaks a header, a line of a log or a listing.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from app.errors import Malformed

MAX_BYTES = 1024
"""Longest name, in bytes of UTF-8: four times what file systems take, since none has to take it."""

ZIP_COMPONENT_BYTES = 255
"""What file systems take of one component when an archive is unpacked."""

_FORBIDDEN = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters
    "\u2028\u2029"  # line and paragraph separators
    "\u202a-\u202e\u2066-\u2069"  # bidirectional overrides: they show an extension that is not
    "\ud800-\udfff"  # halves of surrogate pairs: they have no UTF-8 form
    "]"
)
_NOT_PLAIN = re.compile(r"[^ !#$&'()+.0-9@A-Z\[\]^_`a-z{}~-]")
_ATTRIBUTE_CHARACTERS = "!#$&+-.^_`|~"  # RFC 8187 section 3.2.1, beside letters and digits
_DRIVE = re.compile(r"(?P<letter>[A-Za-z]):")


def accept(name: str, *, param: str) -> str:
    """The name under which a file that a client calls `name` is kept and shown.

    It is the last component of what was sent: clients send whole paths, of either kind of slash
    (B24). Raises Malformed, which names `param`, for a name of nothing, of dots or of spaces, for
    control characters and the like (B29, B30), and for more than MAX_BYTES (B32).
    """
    if _FORBIDDEN.search(name):
        raise _refusal("holds control, direction or half characters", param)
    shown = re.split(r"[/\\]", name)[-1]
    if shown in (".", "..") or not shown.strip():
        raise _refusal("is empty, or only dots or spaces", param)
    if len(shown.encode("utf-8")) > MAX_BYTES:
        raise _refusal(f"is longer than {MAX_BYTES} bytes of UTF-8", param)
    return shown


def content_disposition(name: str, *, inline: bool = False) -> bytes:
    """The value of Content-Disposition for any `name` whatever (RFC 6266, UHP-20, B02, B29).

    `filename` is a fallback in ASCII without anything that readers take apart in different ways:
    quotes, backslashes, percent signs, slashes, separators. `filename*` is the exact name.
    """
    kind = "inline" if inline else "attachment"
    fallback = _NOT_PLAIN.sub("_", name)
    exact = quote(name, safe=_ATTRIBUTE_CHARACTERS, errors="replace")
    return f"{kind}; filename=\"{fallback}\"; filename*=UTF-8''{exact}".encode("ascii")


class ZipNames:
    """Names for the entries of one archive: relative, safe to unpack, and each of them once."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: set[str] = set()

    def add(self, path: str) -> str:
        """The entry's name for the file at `path`.

        It is `path` itself wherever that is safe and free. A name that is taken by a file or a
        folder, or that lies in what is a file of the archive, gets ` (2)`, ` (3)`, ... before its
        extension, in order of the calls (B58).
        """
        components = _safe_components(path)
        number = 1
        name = "/".join(components)
        while not self._is_free(name):
            number += 1
            name = "/".join(_numbered(components, number, self._files))
        self._files.add(name)
        self._folders.update(_parents(name))
        return name

    def _is_free(self, name: str) -> bool:
        taken = name in self._files or name in self._folders
        return not taken and self._files.isdisjoint(_parents(name))


def _refusal(fault: str, param: str) -> Malformed:
    return Malformed("malformed_name", f"The file name {fault}.", param=param)


def _parents(name: str) -> list[str]:
    return [name[: match.start()] for match in re.finditer("/", name)]


def _safe_components(path: str) -> list[str]:
    safe = _FORBIDDEN.sub("_", path.replace("\\", "_"))
    components = [part for part in safe.split("/") if part not in ("", ".", "..")]
    if not components:
        return ["_"]
    components[0] = _DRIVE.sub(r"\g<letter>_", components[0], count=1)
    return [shortened(part, ZIP_COMPONENT_BYTES) for part in components]


def _numbered(components: list[str], number: int, files: set[str]) -> list[str]:
    """`components` with a number on the first that is a file of the archive, else on the last."""
    ends = range(1, len(components) + 1)
    clash = next((end for end in ends if "/".join(components[:end]) in files), len(components))
    stem, extension = _split(components[clash - 1])
    suffix = f" ({number})"
    room = ZIP_COMPONENT_BYTES - len(suffix.encode())
    stem, extension = _split(shortened(stem + extension, room))
    return [*components[: clash - 1], stem + suffix + extension, *components[clash:]]


def shortened(name: str, limit: int) -> str:
    """`name` in at most `limit` bytes of UTF-8, cut on a character and before its extension."""
    if len(name.encode("utf-8")) <= limit:
        return name
    stem, extension = _split(name)
    tail = extension.encode("utf-8")
    if len(tail) > limit // 2:
        stem, tail = name, b""
    cut = stem.encode("utf-8")[: limit - len(tail)].decode("utf-8", errors="ignore")
    return cut + tail.decode("utf-8")


def _split(name: str) -> tuple[str, str]:
    stem, dot, extension = name.rpartition(".")
    return (stem, dot + extension) if stem else (name, "")
