"""Spans and metrics by OTLP over HTTP. Imported only where that is configured.

The standard variables of OpenTelemetry count wherever a setting does not say otherwise:
`OTEL_EXPORTER_OTLP_*`, `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
`OTEL_BSP_*`, `OTEL_METRIC_EXPORT_INTERVAL`, `OTEL_PROPAGATORS`, `OTEL_SDK_DISABLED`, and `none` for
`OTEL_TRACES_EXPORTER` and `OTEL_METRICS_EXPORTER`.

Metrics are those that Prometheus sees, under the same names, of a histogram its sum and count; and
`http.server.request.duration` as the semantic conventions have it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.propagate import extract
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode

from app import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

    from app.settings import Settings

OUR_NAME: Final = "consignee"

_UNNAMED: Final = "unknown_service"
_PROPAGATED: Final = frozenset({b"traceparent", b"tracestate", b"baggage"})
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)


class OtlpTracing:
    """What sends spans and metrics of this process."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        resource = _resource(settings)
        self._tracers = TracerProvider(sampler=_sampler(settings), resource=resource)
        if _is_wanted("OTEL_TRACES_EXPORTER"):
            exporter = OTLPSpanExporter(_endpoint(settings, "traces"))
            self._tracers.add_span_processor(BatchSpanProcessor(exporter))
        self._meters = MeterProvider(_readers(settings), resource)
        meter = self._meters.get_meter(OUR_NAME, __version__)
        self._tracer = self._tracers.get_tracer(OUR_NAME, __version__)
        self._durations = _durations(meter)
        observe_registry(meter, registry)

    @contextmanager
    def request(
        self, method: str, scheme: str, headers: Iterable[tuple[bytes, bytes]]
    ) -> Iterator[RequestInHand]:
        """See Tracing."""
        carrier = {k.decode(): v.decode("latin-1") for k, v in headers if k in _PROPAGATED}
        with self._tracer.start_as_current_span(
            method,
            context=extract(carrier) if carrier else None,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.scheme": scheme},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield RequestInHand(span, self._durations, method, scheme)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """See Tracing. It tells that something went wrong in the block; what, is in the log."""
        with self._tracer.start_as_current_span(
            name, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except Exception:
                span.set_status(StatusCode.ERROR)
                raise

    def close(self) -> None:
        """See Tracing."""
        self._tracers.shutdown()
        self._meters.shutdown()


class RequestInHand:
    """See RequestSpan."""

    def __init__(self, span: Span, durations: Histogram, method: str, scheme: str) -> None:
        self._span = span
        self._durations = durations
        self._method = method
        self._scheme = scheme

    def answered(
        self, *, route: str | None, status: int | None, principal: str | None, seconds: float
    ) -> None:
        """See RequestSpan."""
        told: dict[str, str | int] = {}
        if route is not None:
            told["http.route"] = route
            self._span.update_name(f"{self._method} {route}")
        if status is not None:
            told["http.response.status_code"] = status
        self._span.set_attributes(told)
        if principal is not None:
            self._span.set_attribute("enduser.id", principal)
        if status is None or status >= 500:
            self._span.set_status(StatusCode.ERROR)
        basic = {"http.request.method": self._method, "url.scheme": self._scheme}
        self._durations.record(seconds, {**basic, **told})


def observe_registry(meter: Meter, registry: CollectorRegistry) -> None:
    """Let `meter` tell what `registry` holds, whenever it is asked."""
    for family in registry.collect():
        if family.type == "histogram":
            for suffix in ("_count", "_sum"):
                name = family.name + suffix
                meter.create_observable_counter(name, _told_by(registry, name))
            continue
        create = (
            meter.create_observable_counter
            if family.type == "counter"
            else meter.create_observable_gauge
        )
        sample = f"{family.name}_total" if family.type == "counter" else family.name
        create(family.name, _told_by(registry, sample), "", family.documentation)


def _told_by(
    registry: CollectorRegistry, sample: str
) -> Sequence[Callable[[CallbackOptions], Iterable[Observation]]]:
    def observations(_: CallbackOptions) -> Iterable[Observation]:
        families: Iterable[Metric] = registry.restricted_registry([sample]).collect()
        for one in chain.from_iterable(family.samples for family in families):
            yield Observation(one.value, dict(one.labels))

    return [observations]


def _durations(meter: Meter) -> Histogram:
    return meter.create_histogram(
        "http.server.request.duration",
        "s",
        "From a request's head to the end of its answer",
        explicit_bucket_boundaries_advisory=_SECONDS,
    )


def _readers(settings: Settings) -> list[MetricReader]:
    if not _is_wanted("OTEL_METRICS_EXPORTER"):
        return []
    return [PeriodicExportingMetricReader(OTLPMetricExporter(_endpoint(settings, "metrics")))]


def _is_wanted(variable: str) -> bool:
    return os.environ.get(variable, "otlp").strip().lower() != "none"


def _endpoint(settings: Settings, signal: str) -> str | None:
    base = settings.otel_endpoint
    return None if base is None else f"{base.rstrip('/')}/v1/{signal}"


def _sampler(settings: Settings) -> Sampler | None:
    ratio = settings.otel_sample_ratio
    return None if ratio is None else ParentBased(TraceIdRatioBased(ratio))


def _resource(settings: Settings) -> Resource:
    own = {SERVICE_INSTANCE_ID: str(uuid.uuid4()), "service.version": __version__}
    said = str(Resource.create().attributes[SERVICE_NAME])
    name = settings.otel_service_name or (OUR_NAME if said.startswith(_UNNAMED) else said)
    return Resource.create({**own, SERVICE_NAME: name})
