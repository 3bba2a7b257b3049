"""Who stored, read and deleted what: one JSON object a line, and never any contents.

A request's record is written before its answer begins: no byte leaves, and no upload is confirmed,
without one. What ends by itself, and what a command does on this machine, leaves its record once it
is done. A record that cannot be written is reported and counted, and the work goes on.

The lines go to a file of their own, or among the log lines. Any number of processes may append to
one file; each record is one write. Whoever moves the file away, as a log rotation does, need tell
nobody: the next record begins a new one. What is written is in the hands of the operating system;
it outlives the process, not a power cut of the same second.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from app.logs import JsonFormatter
from app.settings import Settings, SettingsError

Fact = str | int | None

NAME: Final = "consignee.audit"

MAX_CHARACTERS: Final = 1024
"""What a client may name can be long; so much of it is recorded."""

_OFF: Final = logging.CRITICAL + 1

_log = logging.getLogger(NAME)
_log.setLevel(_OFF)
_error_log = logging.getLogger("consignee.error")


def is_kept() -> bool:
    """Whether records go anywhere."""
    return _log.isEnabledFor(logging.INFO)


def record(action: str, outcome: str = "done", /, **facts: Fact) -> None:
    """Write one record: `action` is what was done to what, such as `reference.store`.

    `outcome` is `done`, or the code of a refusal. Facts that are None are left out; sizes are in
    bytes, digests 64 lowercase hex.
    """
    if not _log.isEnabledFor(logging.INFO):
        return
    line = logging.LogRecord(NAME, logging.INFO, __file__, 0, "audit", None, None)
    line.__dict__.update(action=action, outcome=outcome)
    line.__dict__.update((name, _bounded(fact)) for name, fact in facts.items())
    _log.handle(line)


def _bounded(fact: Fact) -> Fact:
    return fact[:MAX_CHARACTERS] if isinstance(fact, str) else fact


def _unnoticed() -> None:
    """What nobody wants to hear of."""


@contextmanager
def kept(settings: Settings, on_loss: Callable[[], object] = _unnoticed) -> Iterator[None]:
    """Keep the records of this process as `settings` say, for as long as the block lasts.

    `on_loss` is called for each one that could not be written. Raises SettingsError when the file
    cannot be opened.
    """
    handler = _handler_of(settings, on_loss)
    if settings.audit == "off":
        yield
        return
    level, propagates = _log.level, _log.propagate
    _log.setLevel(logging.INFO)
    _log.propagate = settings.audit == "log"
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        handler.close()
        _log.setLevel(level)
        _log.propagate = propagates


def _handler_of(settings: Settings, on_loss: Callable[[], object]) -> logging.Handler:
    if settings.audit == "file":
        return AuditFile(settings.audit_path, on_loss)
    if settings.audit == "off" or logging.getLogger().hasHandlers():
        return logging.NullHandler()
    handler = logging.StreamHandler(sys.stderr)  # a command has no log of its own
    handler.setFormatter(JsonFormatter())
    return handler


class AuditFile(logging.Handler):
    """Appends each record to the file that has the name `path` at that moment."""

    def __init__(self, path: Path, on_loss: Callable[[], object]) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._path = path
        self._on_loss = on_loss
        self._is_torn = False
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = _open(path)
        except OSError as error:
            raise SettingsError(
                f"audit_file: cannot be opened: {error.strerror}; name a file that this user may "
                "write, or may make"
            ) from None
        self._identity = _identity(os.fstat(self._descriptor))

    def emit(self, record: logging.LogRecord) -> None:
        """Append the line of `record`."""
        try:
            self._follow()
            self._append(self.format(record).encode("ascii") + b"\n")
        except OSError as error:
            self._on_loss()
            reason = {"action": record.__dict__["action"], "reason": error.strerror}
            _error_log.error("an audit record is lost", extra=reason)

    def close(self) -> None:
        """Close the file. Legal twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()

    def _append(self, line: bytes) -> None:
        whole = b"\n" + line if self._is_torn else line
        written = os.write(self._descriptor, whole)
        self._is_torn = written < len(whole)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow(self) -> None:
        """Begin a new file where ours was moved away or removed."""
        try:
            if _identity(os.stat(self._path)) == self._identity:  # noqa: PTH116 - twice as fast
                return
        except FileNotFoundError:
            pass
        descriptor = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._identity = _identity(os.fstat(descriptor))
        self._is_torn = False


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
