"""A form with one file in it, multipart/form-data (RFC 7578), read while it arrives.

Nothing is kept but the small text fields: the file's bytes go from the socket to whoever iterates
over `FileForm.content`, and that iteration ends only where the form ended as it must. A form that
is cut, broken or over a limit raises, so what was taken of it is never mistaken for a file (B21).

Where senders differ, this is what holds:

* exactly one part has a filename, and its field is the one that is asked for;
* a plain `filename` is UTF-8; a backslash escapes a quote or a backslash and is itself elsewhere;
  `%22` is a quote, as browsers send one, and no other percent sign means anything (B24, B35);
* `filename*` (RFC 8187) goes before `filename`;
* lines before the first boundary are refused, apart from empty ones; what follows the closing
  boundary is read and dropped.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState

from app.errors import Malformed, TooLarge
from app.http.parameters import Parameter, ParameterError, parse_parameters

MAX_PARTS = 32
"""Parts of one form: a file and a handful of fields."""

MAX_FIELD_BYTES = 64 * 1024
"""Longest text field."""

MAX_HEADERS = 16
"""Header lines of one part."""

MAX_HEADER_BYTES = 8 * 1024
"""Longest header line of one part: a name of a kilobyte, three times over when it is escaped."""

FRAMING_BYTES = 1024 * 1024
"""What a form may hold beside its file: fields, boundaries, what follows the last one."""

_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_CHARSETS = frozenset({"utf-8", "utf8", "us-ascii", "ascii"})
_EXTENDED = re.compile(
    r"(?P<charset>[A-Za-z0-9-]+)'[A-Za-z0-9-]*'(?P<value>[!#$&+.^_`|~0-9A-Za-z%-]*)"
)
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def boundary_of(content_type: str | None) -> bytes:
    """The boundary that a Content-Type header gives.

    Raises Malformed for every other type, and for a boundary that is missing, too long or made of
    anything but the characters of RFC 2046 section 5.1.1 (B28).
    """
    try:
        kind, parameters = parse_parameters(content_type or "")
    except ParameterError:
        kind, parameters = (content_type or "").partition(";")[0].strip().lower(), {}
    if kind != "multipart/form-data":
        raise _malformed("Send the file as multipart/form-data.", param="file")
    boundary = parameters.get("boundary", Parameter("", quoted=False)).text
    if _BOUNDARY.fullmatch(boundary) is None:
        raise _malformed("The Content-Type needs one boundary, of 1 to 70 characters.")
    _require_utf8(parameters)
    return boundary.encode("ascii")


@dataclass(frozen=True, slots=True)
class FilePart:
    """The head of the file's part: names and type as the sender gave them, not judged yet."""

    filename: str
    media_type: str | None


@dataclass(slots=True)
class _Part:
    name: str
    filename: str | None
    media_type: str | None
    value: bytearray


class FileForm:
    """One form. `file` reads to the file's first byte, `content` from there to the form's end.

    `fields` are the text fields that have arrived; the last of a name counts. `file_bytes` bounds
    the file. Every method raises Malformed, TooLarge, and whatever `body` raises.
    """

    def __init__(
        self, body: AsyncIterator[bytes], boundary: bytes, *, field: str, file_bytes: int
    ) -> None:
        self.fields: dict[str, str] = {}
        self._body = body
        self._events = _Events(boundary)
        self._field = field
        self._file_bytes = file_bytes
        self._framing_left = FRAMING_BYTES
        self._file: _Part | None = None

    async def file(self) -> FilePart:
        """The head of the file's part."""
        while self._file is None:
            event = await self._next()
            if event is None:
                raise _malformed(
                    f"The form has no file in a field {self._field!r}.", param=self._field
                )
            self._take(event)
        assert self._file.filename is not None
        return FilePart(self._file.filename, self._file.media_type)

    async def content(self) -> AsyncIterator[memoryview]:
        """The bytes of the file. Ends when the whole form has arrived, and only then."""
        size = 0
        while (event := await self._next()) is not None:
            if isinstance(event, _Data) and event.part is self._file:
                size += len(event.octets)
                if size > self._file_bytes:
                    raise TooLarge(self._file_bytes)
                yield event.octets
            else:
                self._take(event)

    def _take(self, event: _Event) -> None:
        part = event.part
        if isinstance(event, _Data):
            part.value += event.octets
            if len(part.value) > MAX_FIELD_BYTES:
                raise TooLarge(MAX_FIELD_BYTES)
        elif isinstance(event, _End):
            if part is not self._file:
                self.fields[part.name] = _text(bytes(part.value), param=None)
        elif part.filename is not None or part.name == self._field:
            self._begin_file(part)

    def _begin_file(self, part: _Part) -> None:
        if part.name != self._field or self._file is not None:
            raise _malformed(
                f"Send exactly one file, in the field {self._field!r}.", param=self._field
            )
        if part.filename is None:
            raise _malformed("The file's part has no filename.", param=self._field)
        self._file = part

    async def _next(self) -> _Event | None:
        """What comes next in the form, None behind its end."""
        while not (event := self._events.pop()):
            chunk = await anext(self._body, None)
            if chunk is None:
                self._require_end()
                return None
            self._count_framing(self._events.feed(chunk))
        return event

    def _require_end(self) -> None:
        if not self._events.ended:
            raise _malformed("The form ends before its closing boundary.", param=self._field)

    def _count_framing(self, octets: int) -> None:
        self._framing_left -= octets
        if self._framing_left < 0:
            raise TooLarge(self._file_bytes)


@dataclass(frozen=True, slots=True)
class _Begin:
    part: _Part


@dataclass(frozen=True, slots=True)
class _Data:
    part: _Part
    octets: memoryview


@dataclass(frozen=True, slots=True)
class _End:
    part: _Part


_Event = _Begin | _Data | _End


class _Events:
    """The parser's callbacks as a queue: what one chunk gave, in order."""

    def __init__(self, boundary: bytes) -> None:
        self._queue: deque[_Event] = deque()
        self._parts = 0
        self._content = 0
        self._name = bytearray()
        self._value = bytearray()
        self._headers: dict[str, str] = {}
        self._part: _Part | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def pop(self) -> _Event | None:
        """The next event that has arrived."""
        return self._queue.popleft() if self._queue else None

    def feed(self, chunk: bytes) -> int:
        """Parse `chunk`; how many of its octets are not of the file."""
        before = self._content
        try:
            self._parser.write(chunk)
        except FormParserError:
            raise _malformed("The form's boundaries or part headers are broken.") from None
        return len(chunk) - (self._content - before)

    @property
    def ended(self) -> bool:
        """Whether the closing boundary has arrived."""
        return self._parser.state == MultipartState.END

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise _malformed(f"The form has more than {MAX_PARTS} parts.")
        self._headers = {}

    def _header_name(self, data: bytes, start: int, stop: int) -> None:
        self._name += data[start:stop]

    def _header_value(self, data: bytes, start: int, stop: int) -> None:
        self._value += data[start:stop]

    def _end_header(self) -> None:
        name = self._name.decode("ascii").lower()
        if name in self._headers:
            raise _malformed(f"A part has two {name} headers.")
        self._headers[name] = _text(bytes(self._value), param="file").strip(" \t")
        self._name.clear()
        self._value.clear()

    def _end_headers(self) -> None:
        self._part = _part(self._headers)
        self._queue.append(_Begin(self._part))

    def _data(self, data: bytes, start: int, stop: int) -> None:
        assert self._part is not None
        if self._part.filename is not None:
            self._content += stop - start
        self._queue.append(_Data(self._part, memoryview(data)[start:stop]))

    def _end_part(self) -> None:
        assert self._part is not None
        self._queue.append(_End(self._part))


def _part(headers: dict[str, str]) -> _Part:
    try:
        kind, parameters = parse_parameters(headers.get("content-disposition", ""))
    except ParameterError as fault:
        raise _malformed(f"A part's Content-Disposition is broken: {fault}.") from None
    if kind != "form-data" or "name" not in parameters:
        raise _malformed('A part needs Content-Disposition: form-data; name="...".')
    filename = _filename(parameters)
    media_type = headers.get("content-type") or None
    if filename is None and media_type is not None:
        _require_utf8(_parameters_of(media_type))
    return _Part(_unescaped(parameters["name"]), filename, media_type, bytearray())


def _filename(parameters: dict[str, Parameter]) -> str | None:
    extended = parameters.get("filename*")
    if extended is not None:
        return _extended(extended.text)
    plain = parameters.get("filename")
    return None if plain is None else _unescaped(plain)


def _unescaped(parameter: Parameter) -> str:
    return parameter.unescaped().replace("%22", '"')


def _extended(value: str) -> str:
    """The value of RFC 8187 section 3.2."""
    match = _EXTENDED.fullmatch(value)
    if match is None or match["charset"].lower() != "utf-8" or _BROKEN_ESCAPE.search(value):
        raise _malformed("The filename* parameter is not UTF-8''percent-encoded.", param="file")
    return _text(unquote_to_bytes(match["value"]), param="file")


def _parameters_of(media_type: str) -> dict[str, Parameter]:
    try:
        return parse_parameters(media_type)[1]
    except ParameterError as fault:
        raise _malformed(f"A part's Content-Type is broken: {fault}.") from None


def _require_utf8(parameters: dict[str, Parameter]) -> None:
    charset = parameters.get("charset")
    if charset is not None and charset.text.lower() not in _CHARSETS:
        raise _malformed("Text in a form is UTF-8; this one names another charset.")


def _text(octets: bytes, *, param: str | None) -> str:
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError:
        raise _malformed("A name or a text field is not UTF-8.", param=param) from None


def _malformed(message: str, *, param: str | None = None) -> Malformed:
    return Malformed("malformed_form", message, param=param)
