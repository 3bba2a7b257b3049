"""Traces: what is told to OpenTelemetry, where that is wanted.

Nothing of OpenTelemetry is imported before `start` finds it wanted, and until then a `span` costs a
look at one variable. What the layers say here holds no credential, no query and no contents.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from app.settings import Settings, SettingsError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

EXTRA: Final = "opentelemetry"
"""The package without which there is nothing to import."""


class RequestSpan(Protocol):
    """The span of one request, as long as it runs."""

    def answered(
        self, *, route: str | None, status: int | None, principal: str | None, seconds: float
    ) -> None:
        """What became of the request. `route` is a pattern, never a path."""
        ...


class Tracing(Protocol):
    """Where spans go."""

    def request(
        self, method: str, scheme: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> AbstractContextManager[RequestSpan]:
        """A span for a request; of the trace that its `traceparent` names, where it has one."""
        ...

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A span within the one that is current here."""
        ...

    def close(self) -> None:
        """Send what is left, and end. May take some seconds."""
        ...


_NOTHING: Final = nullcontext()
_tracing: Tracing | None = None


def active() -> Tracing | None:
    """Where spans go; None when nobody wants them."""
    return _tracing


def span(name: str) -> AbstractContextManager[Any]:
    """A span for the block, where there are spans at all."""
    return _NOTHING if _tracing is None else _tracing.span(name)


def start(settings: Settings, registry: CollectorRegistry) -> Callable[[], None]:
    """Send spans, and what `registry` holds, as `settings` say; gives what ends that.

    Raises SettingsError when it is wanted and the extra is not installed.
    """
    global _tracing
    if not settings.otel:
        return _ended
    _tracing = tracing = _load(settings, registry)

    def end() -> None:
        global _tracing
        if _tracing is tracing:
            _tracing = None
        tracing.close()

    return end


def _ended() -> None:
    """What there is to end where nothing was begun."""


def _load(settings: Settings, registry: CollectorRegistry) -> Tracing:
    try:
        otlp = importlib.import_module("app.telemetry.otlp")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(EXTRA):
            raise
        raise SettingsError(
            "otel: OpenTelemetry is not installed; pip install 'consignee[otel]', or leave it off"
        ) from None
    tracing: Tracing = otlp.OtlpTracing(settings, registry)
    return tracing
