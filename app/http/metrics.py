"""What Prometheus sees of this server; one registry for each application.

Where several processes answer together, each keeps its figures in files of one folder, which
SHARED_VARIABLE names before prometheus_client is imported; what is shown is their sum.
"""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

M = TypeVar("M", Counter, Gauge, Histogram)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)

SHARED_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


def shared_registry(folder: str) -> CollectorRegistry:
    """What all processes that keep their figures in `folder` show together."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=folder)  # type: ignore[no-untyped-call]
    return registry


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
            "consignee_uploads_in_flight",
            "AHP uploads being received",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.events = Counter(
            "consignee_events",
            "AHP messages on the hooks paths by outcome: accepted, duplicate, retold, "
            "ignored, configuration, or the code of the error or refusal",
            ["outcome"],
            registry=self.registry,
        )
        self.stored_bytes = Gauge(
            "consignee_stored_bytes",
            "Octets of all stored bodies",
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self.stored_blobs = Gauge(
            "consignee_stored_blobs",
            "Distinct stored bodies",
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self.references = Gauge(
            "consignee_references",
            "References that are kept",
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self.refusals = Counter(
            "consignee_refusals",
            "Requests that were not done, by the code of the reason",
            ["code"],
            registry=self.registry,
        )
        self.actions = Counter(
            "consignee_actions",
            "What requests did to what is stored, by the action of their audit record and outcome: "
            "done, or the code of the reason why not",
            ["action", "outcome"],
            registry=self.registry,
        )
        self.action_seconds = Histogram(
            "consignee_action_seconds",
            "From the request's head to the end of its answer, by action",
            ["action"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.sent_bytes = Counter(
            "consignee_sent_bytes",
            "Octets of answers' bodies that this process sent itself, by action",
            ["action"],
            registry=self.registry,
        )
        self._prepare_work()
        self._prepare_store()

        self._of_request: dict[tuple[str, int | None], Counter] = {}
        self._of_upload: dict[str, Counter] = {}
        self._of_event: dict[str, Counter] = {}
        self._of_action: dict[tuple[str, str], tuple[Counter, Histogram, Counter]] = {}
        self._children: dict[tuple[int | str, ...], Any] = {}

    def _prepare_work(self) -> None:
        self.tasks = Counter(
            "consignee_tasks",
            "Tasks that ended here, by the status of their response",
            ["outcome"],
            registry=self.registry,
        )
        self.tasks_running = Gauge(
            "consignee_tasks_running",
            "Tasks that run",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.task_seconds = Histogram(
            "consignee_task_seconds",
            "From the acceptance of a task to its end",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.rounds = Counter(
            "consignee_background_rounds",
            "Rounds of work in the background (sweep, upkeep, count) by outcome: done, put_off, "
            "failed",
            ["work", "outcome"],
            registry=self.registry,
        )
        self.round_seconds = Histogram(
            "consignee_background_seconds",
            "How long one round of work in the background took",
            ["work"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.round_success = Gauge(
            "consignee_background_success_timestamp_seconds",
            "When a round of work in the background was last done (unix time)",
            ["work"],
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.swept = Counter(
            "consignee_swept",
            "What sweeps took away: references, events, bodies, bytes, orphans, staging folders",
            ["what"],
            registry=self.registry,
        )
        self.audit_lost = Counter(
            "consignee_audit_lost",
            "Audit records that could not be written",
            registry=self.registry,
        )

    def _prepare_store(self) -> None:
        self.store_seconds = Histogram(
            "consignee_store_operation_seconds",
            "What the database and the blob store were asked to do, and how long it took",
            ["engine", "operation"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.store_failures = Counter(
            "consignee_store_failures",
            "Operations of the database and the blob store that failed, by code",
            ["engine", "operation", "code"],
            registry=self.registry,
        )
        self.sessions = self._gauge("consignee_sessions", "Sessions that are not expired")
        self.files = self._gauge("consignee_files", "Files that count against quotas")
        self.file_bytes = self._gauge("consignee_file_bytes", "Their octets, shared ones not once")
        self.free_bytes = self._gauge(
            "consignee_data_free_bytes", "Octets that are free on the disk of data_dir"
        )

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(
            name, documentation, registry=self.registry, multiprocess_mode="livemostrecent"
        )

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

    def count_event(self, outcome: str) -> None:
        """One AHP message on a hooks path more."""
        counter = self._of_event.get(outcome)
        if counter is None:
            counter = self._of_event[outcome] = self.events.labels(outcome)
        counter.inc()

    def count_refusal(self, code: str) -> None:
        """One request more that was not done."""
        self._labelled(self.refusals, code).inc()

    def count_action(self, action: str, outcome: str, seconds: float, sent: int) -> None:
        """One request more that did something; `sent` is in octets."""
        of_action = self._of_action.get((action, outcome))
        if of_action is None:
            of_action = self._of_action[action, outcome] = (
                self.actions.labels(action, outcome),
                self.action_seconds.labels(action),
                self.sent_bytes.labels(action),
            )
        count, duration, octets = of_action
        count.inc()
        duration.observe(seconds)
        if sent:
            octets.inc(sent)

    def count_task(self, outcome: str, seconds: float) -> None:
        """One task more that ended."""
        self._labelled(self.tasks, outcome).inc()
        self.task_seconds.observe(seconds)

    def count_round(self, work: str, outcome: str, seconds: float) -> None:
        """One round more of work in the background."""
        self._labelled(self.rounds, work, outcome).inc()
        self._labelled(self.round_seconds, work).observe(seconds)
        if outcome == "done":
            self._labelled(self.round_success, work).set_to_current_time()

    def operation(self, engine: str, name: str, seconds: float, failure: str | None) -> None:
        """See app.store.observing.Observer."""
        self._labelled(self.store_seconds, engine, name).observe(seconds)
        if failure is not None:
            self._labelled(self.store_failures, engine, name, failure).inc()

    def _labelled(self, metric: M, *labels: str) -> M:
        """The child of `metric` with these labels. Looking it up costs more than counting does."""
        key: tuple[int | str, ...] = (id(metric), *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    @property
    def shown(self) -> CollectorRegistry:
        """What is shown: the figures of this process, or of all that share a folder."""
        folder = os.environ.get(SHARED_VARIABLE)
        return shared_registry(folder) if folder else self.registry

    def render(self) -> bytes:
        """The text exposition of everything."""
        return generate_latest(self.shown)
