"""Log lines: one JSON object a line for machines, or readable text for a person.

Every line goes to standard error through one handler, whoever wrote it: this project, uvicorn, a
library. A line never holds a credential, a query string, a header or a body: fields that could
are left out by name, and anything that looks like an Authorization value is blotted out of
messages and tracebacks.

The line of a request comes from the logger `consignee.access`, with these fields as `extra`:
`method`, `path`, `status`, `bytes` (received body), `seconds`, and where known `request_id`,
`principal`, `code` (the reason of a refusal).
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from app.settings import Settings

ACCESS = "consignee.access"

_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}
_WITHHELD_FIELDS: Final = frozenset(
    # `color_message` is uvicorn's own copy of its message.
    {
        "authorization",
        "body",
        "color_message",
        "cookie",
        "headers",
        "query",
        "query_string",
        "token",
    }
)
_CREDENTIAL = re.compile(r"\b(bearer|basic)(\s+|%20)[^\s'\",]+", re.IGNORECASE)
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


_LOST: Final = logging.LogRecord(
    "consignee.error", logging.ERROR, __file__, 0, "lines of requests are lost", None, None
)
_SAME: Final = vars(logging.LogRecord(ACCESS, logging.INFO, __file__, 0, "request", None, None))


class RequestLine(logging.LogRecord):
    """The record of one request, with its fields; its time is all that is its own beside them.

    Made as a logger makes it, with a look at where it was called from and much that is the same in
    each, a record costs more than its line. `created` (unix seconds) is when the request ended.
    """

    __slots__ = ("fields",)

    def __init__(self, created: float, **fields: Any) -> None:
        vars(self).update(_SAME, created=created, msecs=created % 1 * 1000, **fields)
        self.fields = fields


# Made once: `json.dumps` makes a new encoder for every call that names a default.
_encode = json.JSONEncoder(default=str, check_circular=False).encode

_RESET = "\x1b[0m"
_COLOURS: Final = {"dim": "\x1b[2m", "green": "\x1b[32m", "yellow": "\x1b[33m", "red": "\x1b[31m"}


def configure(settings: Settings, stream: TextIO | None = None) -> logging.StreamHandler[TextIO]:
    """Send every log line to `stream` (standard error when not given), in the configured form.

    Our own loggers speak from `log_level` on, all others from warnings on. A repeated call
    replaces the handler of the one before.
    """
    handler = _ConfiguredHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(settings, handler.stream))
    root = logging.getLogger()
    for earlier in [h for h in root.handlers if isinstance(h, _ConfiguredHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    logging.getLogger("consignee").setLevel(settings.log_level.upper())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # No line shows them, and they cost a third of a record's making.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    return handler


class _ConfiguredHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure` has set, told from those of others by its class."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the lines of the block leave together, at its end."""
        lines = io.StringIO()
        stream, self.stream = self.stream, lines
        try:
            yield
        finally:
            with self.lock or nullcontext():  # another thread may be in the middle of a line
                self.stream = stream
                self._write(lines.getvalue())

    def _write(self, text: str) -> None:
        if not text:
            return
        try:
            self.stream.write(text)
            self.flush()
        except (OSError, ValueError):  # the second where the stream is closed
            self.handleError(_LOST)  # as for a line that is written alone


@contextmanager
def gathered() -> Iterator[None]:
    """Let the lines that are written in the block leave in one write, at its end."""
    with ExitStack() as entered:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, _ConfiguredHandler):
                entered.enter_context(handler.gathered())
        yield


def _formatter(settings: Settings, stream: TextIO) -> logging.Formatter:
    if settings.log_format == "json":
        return JsonFormatter()
    return TextFormatter(colours=stream.isatty())


def printable(text: str) -> str:
    """`text` on one line: control characters and lone surrogates are written as escapes."""
    return _UNPRINTABLE.sub(lambda match: _escape(match[0]), text)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _without_credentials(text: str) -> str:
    # Looking alone is ten times as fast as replacing nothing.
    return _CREDENTIAL.sub(r"\1 [withheld]", text) if _CREDENTIAL.search(text) else text


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller gave as `extra`, less what a log must never hold."""
    given = record.fields if isinstance(record, RequestLine) else vars(record)
    return {
        name: value
        for name, value in given.items()
        if name not in _STANDARD_FIELDS and name not in _WITHHELD_FIELDS and value is not None
    }


def _traceback(record: logging.LogRecord) -> str | None:
    if not record.exc_info:
        return None
    return _without_credentials(logging.Formatter().formatException(record.exc_info))


@lru_cache(maxsize=8)
def _second(timestamp: int) -> str:
    return datetime.fromtimestamp(timestamp, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (RFC 3339, UTC), `level`, `logger`, `message`, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`, in ASCII, without its line end."""
        line = {
            "time": f"{_second(int(record.created))}.{int(record.created * 1000) % 1000:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _without_credentials(record.getMessage()).strip(),
            **_fields(record),
        }
        if traceback := _traceback(record):
            line["exception"] = traceback
        return _encode(line)


class TextFormatter(logging.Formatter):
    """Lines for a person at a terminal: local time, then what happened."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`, without its line end; a traceback follows on lines of its own."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        text = self._request(record) if record.name == ACCESS else self._event(record)
        lines = [f"{self._paint('dim', time)}  {text}"]
        if traceback := _traceback(record):
            lines.append(traceback)
        return "\n".join(lines)

    def _event(self, record: logging.LogRecord) -> str:
        words = [_without_credentials(record.getMessage()).strip()]
        words += [f"{name}={value}" for name, value in _fields(record).items()]
        text = printable(" ".join(words))
        if record.levelno < logging.WARNING:
            return text
        colour = "red" if record.levelno >= logging.ERROR else "yellow"
        return f"{self._paint(colour, record.levelname.lower())}: {text}"

    def _request(self, record: logging.LogRecord) -> str:
        fields = {
            name: printable(value) if isinstance(value, str) else value
            for name, value in _fields(record).items()
        }
        status = str(fields.get("status", "-"))
        words = [fields.get("method", "-"), fields.get("path", "-")]
        words.append(self._paint(_colour_of_status(status), status))
        if "bytes" in fields:
            words.append(f"{fields['bytes']:,} bytes")
        if "seconds" in fields:
            words.append(f"{fields['seconds'] * 1000:.1f} ms")
        words += [fields[name] for name in ("code", "principal") if name in fields]
        return "  ".join(words)

    def _paint(self, colour: str, text: str) -> str:
        return f"{_COLOURS[colour]}{text}{_RESET}" if self._colours else text


def _colour_of_status(status: str) -> str:
    return {"2": "green", "3": "green", "5": "red"}.get(status[:1], "yellow")
