"""A receiver of OTLP over HTTP, which stands in for a collector: it decodes what it is sent."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class OtlpReceiver:
    """What arrived: spans with their resource, and the newest data points of each metric."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.resources: list[dict[str, str]] = []
        self.raw = b""
        self._turn = threading.Lock()

    def take(self, path: str, body: bytes) -> bytes:
        """Take one export; the answer to it."""
        with self._turn:
            self.raw += body
            return self._traces(body) if path == "/v1/traces" else self._metrics(body)

    def named(self, name: str) -> list[Any]:
        """The spans of that name."""
        return [span for span in self.spans if span.name == name]

    def points(self, name: str) -> list[tuple[dict[str, str], float]]:
        """The newest data points of a counter or gauge: attributes and value."""
        metric = self.metrics[name]
        points = metric.sum.data_points or metric.gauge.data_points
        return [(attributes_of(point), point.as_double or point.as_int) for point in points]

    def _traces(self, body: bytes) -> bytes:
        request = ExportTraceServiceRequest.FromString(body)
        for one in request.resource_spans:
            self.resources.append(attributes_of(one.resource))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]
        answer: bytes = ExportTraceServiceResponse().SerializeToString()
        return answer

    def _metrics(self, body: bytes) -> bytes:
        request = ExportMetricsServiceRequest.FromString(body)
        for one in request.resource_metrics:
            self.resources.append(attributes_of(one.resource))
            for scope in one.scope_metrics:
                self.metrics |= {metric.name: metric for metric in scope.metrics}
        answer: bytes = ExportMetricsServiceResponse().SerializeToString()
        return answer


def attributes_of(holder: Any) -> dict[str, str]:
    """Attributes as text."""
    return {
        pair.key: str(getattr(pair.value, pair.value.WhichOneof("value")))
        for pair in holder.attributes
    }


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of this machine, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = receiver.take(self.path, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
