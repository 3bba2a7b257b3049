"""What Prometheus sees of this server; one registry for each application."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The counters, by name; see the README's operation section for what each one tells."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "consignee_requests",
            "Requests by method and status",
            ["method", "status"],
            registry=self.registry,
        )
        self.uploads = Counter(
            "consignee_uploads",
            "AHP uploads by outcome: confirmed, disconnected, or the code of the refusal",
            ["outcome"],
            registry=self.registry,
        )
        self.upload_bytes = Counter(
            "consignee_upload_bytes", "Octets of confirmed AHP uploads", registry=self.registry
        )
        self.upload_seconds = Histogram(
            "consignee_upload_seconds",
            "From the request's head to the receipt of a confirmed AHP upload",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "consignee_uploads_in_flight", "AHP uploads being received", registry=self.registry
        )
        self.stored_bytes = Gauge(
            "consignee_stored_bytes", "Octets of all stored bodies", registry=self.registry
        )
        self.stored_blobs = Gauge(
            "consignee_stored_blobs", "Distinct stored bodies", registry=self.registry
        )
        self.references = Gauge(
            "consignee_references", "References that are kept", registry=self.registry
        )

        self._of_request: dict[tuple[str, int | None], Counter] = {}
        self._of_upload: dict[str, Counter] = {}

    def count_request(self, method: str, status: int | None) -> None:
        """One request more; `status` is None where nobody was left to answer."""
        counter = self._of_request.get((method, status))
        if counter is None:
            counter = self.requests.labels(method, str(status or "none"))
            self._of_request[method, status] = counter
        counter.inc()

    def count_upload(self, outcome: str) -> None:
        """One AHP upload more."""
        counter = self._of_upload.get(outcome)
        if counter is None:
            counter = self._of_upload[outcome] = self.uploads.labels(outcome)
        counter.inc()

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.registry)
