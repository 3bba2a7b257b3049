"""Files inline, as `data:` URLs (RFC 2397): exactly the bytes that were meant, or a refusal.

The rules, where senders differ (B90, B91, B92):

* scheme and `;base64` in any case; the media type by the grammar of RFC 9110, quoted parameters
  included, or none, which stands for `text/plain;charset=US-ASCII`;
* base64: percent-encoding is taken off first, then CR, LF, space and tab are removed, and what is
  left must be the standard alphabet of RFC 4648 section 4 with its padding. The URL-safe alphabet,
  missing padding and bits behind the end are refused: a lenient reader would give other bytes;
* without `;base64`: characters of a URI and percent-encoded bytes, nothing else;
* no URL of another scheme is ever fetched.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from app.errors import Malformed, TooLarge
from app.http import media_types
from app.uhp.errors import UhpError, invalid_input

DEFAULT_MEDIA_TYPE = "text/plain;charset=US-ASCII"
"""RFC 2397 section 2."""

PIECE_CHARACTERS = 256 * 1024
"""How much of the text is decoded at once: a file of any size costs this much more memory."""

MAX_HEAD = 1024
"""Longest head that is looked through for its comma, in characters."""

_SCHEME = re.compile(r"data:", re.IGNORECASE)
_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_HEAD = re.compile(r'((?:[^,"]|"(?:[^"\\]|\\.)*")*),', re.DOTALL)
_BASE64 = re.compile(r";base64", re.IGNORECASE)
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/=\r\n \t%]*")
_URI_TEXT = re.compile(r"[A-Za-z0-9%:/?\[\]@!$&'()*+,;=._~-]*")
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_SPACE = re.compile(rb"[\r\n \t]+")
_SPACES = ("\r", "\n", " ", "\t", "%0D", "%0d", "%0A", "%0a", "%20", "%09")
_PADDING = ("=", "%3D", "%3d")


@dataclass(frozen=True, slots=True)
class DataUrl:
    """A data URL whose head was read and whose size is known; nothing of it is decoded yet.

    `size` is in bytes. `param` names the field that it came in.
    """

    media_type: str
    size: int
    param: str
    text: str
    start: int
    base64: bool

    async def pieces(self) -> AsyncIterator[bytes]:
        """The bytes, in pieces. Raises UhpError (`invalid_input`) where they are not exact."""
        for piece in self._decoded():
            yield piece

    def content(self) -> bytes:
        """All the bytes at once, for small ones. Raises UhpError (`invalid_input`)."""
        return b"".join(self._decoded())

    def _decoded(self) -> Iterator[bytes]:
        try:
            if self.base64:
                yield from _base64_decoded(_unescaped(self.text, self.start, _BASE64_TEXT))
            else:
                yield from _unescaped(self.text, self.start, _URI_TEXT)
        except ValueError:
            kind = "standard base64 with its padding" if self.base64 else "percent-encoded"
            message = f"The data of the data URL is not {kind}."
            raise invalid_input(message, param=self.param) from None


def parse_data_url(value: object, *, limit: int, param: str) -> DataUrl:
    """Read the head of a data URL and tell its size; see the module for what is accepted.

    Raises TooLarge for more than `limit` decoded bytes, before any of them is decoded, and
    UhpError (`invalid_input`) that names `param` for everything that is no data URL.
    """
    if not isinstance(value, str):
        raise invalid_input("Send the file as a data URL, a string.", param=param)
    scheme = _SCHEME.match(value)
    if scheme is None:
        raise _no_data_url(value, param)
    head = _HEAD.match(value, scheme.end(), scheme.end() + MAX_HEAD)
    if head is None:
        raise invalid_input("The data URL has no comma before its data.", param=param)
    media_type, is_base64 = _parse_head(head[1], param)
    size = _decoded_size(value, head.end(), is_base64=is_base64)
    if size > limit:
        raise TooLarge(limit)
    return DataUrl(media_type, size, param, value, head.end(), is_base64)


def _no_data_url(value: str, param: str) -> UhpError:
    if _OTHER_SCHEME.match(value):
        message = "URLs are not fetched here; send a data URL, or upload the file and its id."
    else:
        message = "A file inline is a data URL: data:<media type>;base64,<data>."
    return invalid_input(message, param=param)


def _parse_head(head: str, param: str) -> tuple[str, bool]:
    is_base64 = _BASE64.fullmatch(head, len(head) - len(";base64")) is not None
    declared = head[: -len(";base64")] if is_base64 else head
    if not declared:
        return DEFAULT_MEDIA_TYPE, is_base64
    if declared.startswith(";"):
        declared = "text/plain" + declared
    try:
        return media_types.accept(declared, param=param), is_base64
    except Malformed as refusal:
        raise invalid_input(refusal.message, param=param) from None


def _decoded_size(text: str, start: int, *, is_base64: bool) -> int:
    """How many bytes the data stands for; where it is not valid, at least as many as it gives."""
    length = len(text) - start - 2 * text.count("%", start)
    if not is_base64:
        return length
    spaces = sum(text.count(space, start) for space in _SPACES)
    padding = sum(text.count(sign, start) for sign in _PADDING)
    return (length - spaces) * 3 // 4 - padding


def _unescaped(text: str, start: int, allowed: re.Pattern[str]) -> Iterator[bytes]:
    """The text behind `start` with percent-encoding taken off, in pieces. Raises _NotExact."""
    while start < len(text):
        stop = min(start + PIECE_CHARACTERS, len(text))
        while "%" in text[stop - 2 : stop] and stop < len(text):
            stop += 1
        piece = text[start:stop]
        if allowed.fullmatch(piece) is None or _BROKEN_ESCAPE.search(piece):
            raise _NotExact
        yield unquote_to_bytes(piece)
        start = stop


def _base64_decoded(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Decode strictly; the last group is kept back, since only that one may hold padding."""
    rest = b""
    for piece in pieces:
        rest += _SPACE.sub(b"", piece)
        whole = max(len(rest) - 1, 0) // 4 * 4
        if b"=" in rest[:whole]:
            raise _NotExact
        yield binascii.a2b_base64(rest[:whole], strict_mode=True)
        rest = rest[whole:]
    last = binascii.a2b_base64(rest, strict_mode=True)
    if binascii.b2a_base64(last, newline=False) != rest:
        raise _NotExact
    yield last


class _NotExact(ValueError):
    """The data stands for no bytes, or not for these alone; binascii.Error is one as well."""
