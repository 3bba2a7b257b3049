"""What Prometheus sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from prometheus_client import generate_latest

from app.http.metrics import SHARED_VARIABLE, Metrics, shared_registry


def test_the_exposition_holds_every_metric() -> None:
    metrics = Metrics()
    metrics.uploads.labels("confirmed").inc()
    metrics.requests.labels("POST", "201").inc()
    metrics.upload_bytes.inc(3)
    metrics.upload_seconds.observe(0.01)
    text = metrics.render().decode()
    for line in (
        'consignee_uploads_total{outcome="confirmed"} 1.0',
        'consignee_requests_total{method="POST",status="201"} 1.0',
        "consignee_upload_bytes_total 3.0",
        "consignee_upload_seconds_count 1.0",
        "consignee_uploads_in_flight 0.0",
        "consignee_stored_bytes 0.0",
        "consignee_stored_blobs 0.0",
        "consignee_references 0.0",
    ):
        assert line in text.splitlines()


def test_two_applications_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.upload_bytes.inc(3)
    assert "consignee_upload_bytes_total 0.0" in other.render().decode()


COUNTING = """
import os
from app.http.metrics import Metrics
metrics = Metrics()
metrics.count_upload("confirmed")
metrics.in_flight.inc()
metrics.stored_blobs.set(7)
print(metrics.render().decode())
if os.environ.get("GOES"):
    from prometheus_client.multiprocess import mark_process_dead
    mark_process_dead(os.getpid(), os.environ["PROMETHEUS_MULTIPROC_DIR"])
"""


def counted(folder: Path, **more: str) -> list[str]:
    """What a process shows that has counted together with others."""
    environment = {**os.environ, SHARED_VARIABLE: str(folder), **more}
    done = subprocess.run(
        [sys.executable, "-c", COUNTING],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.splitlines()


def test_processes_that_share_a_folder_show_one_sum(tmp_path: Path) -> None:
    """Counters outlive their process, what is true of a living one does not."""
    counted(tmp_path, GOES="1")
    counted(tmp_path)
    shown = counted(tmp_path)
    assert 'consignee_uploads_total{outcome="confirmed"} 3.0' in shown
    assert "consignee_uploads_in_flight 2.0" in shown
    assert "consignee_stored_blobs 7.0" in shown
    assert not [line for line in shown if "pid=" in line]
    assert generate_latest(shared_registry(str(tmp_path))).decode().splitlines() == shown[:-1]


def lines_after(*counted: Callable[[Metrics], None]) -> list[str]:
    """The exposition of a server that has counted so."""
    metrics = Metrics()
    for count in counted:
        count(metrics)
    return metrics.render().decode().splitlines()


def test_an_action_is_counted_timed_and_its_octets_added_up() -> None:
    lines = lines_after(
        lambda metrics: metrics.count_action("file.read", "done", 0.2, 7),
        lambda metrics: metrics.count_action("file.read", "done", 0.2, 3),
        lambda metrics: metrics.count_action("file.read", "file_not_found", 0.2, 0),
    )
    assert 'consignee_actions_total{action="file.read",outcome="done"} 2.0' in lines
    assert 'consignee_actions_total{action="file.read",outcome="file_not_found"} 1.0' in lines
    assert 'consignee_action_seconds_count{action="file.read"} 3.0' in lines
    assert 'consignee_sent_bytes_total{action="file.read"} 10.0' in lines


def test_what_was_not_done_is_counted_by_its_reason() -> None:
    lines = lines_after(lambda metrics: metrics.count_refusal("quota_exhausted"))
    assert 'consignee_refusals_total{code="quota_exhausted"} 1.0' in lines


def test_a_task_is_counted_by_how_it_ended() -> None:
    lines = lines_after(lambda metrics: metrics.count_task("failed", 2))
    assert 'consignee_tasks_total{outcome="failed"} 1.0' in lines
    assert "consignee_task_seconds_sum 2.0" in lines


def test_the_time_of_a_round_that_was_done_is_kept_and_of_no_other() -> None:
    lines = lines_after(
        lambda metrics: metrics.count_round("sweep", "done", 0.5),
        lambda metrics: metrics.count_round("upkeep", "put_off", 0.5),
    )
    assert 'consignee_background_rounds_total{outcome="done",work="sweep"} 1.0' in lines
    assert 'consignee_background_rounds_total{outcome="put_off",work="upkeep"} 1.0' in lines
    times = [line for line in lines if line.startswith("consignee_background_success")]
    assert len(times) == 1
    assert 'work="sweep"' in times[0]


def test_operations_of_the_store_are_timed_and_their_failures_counted() -> None:
    lines = lines_after(
        lambda metrics: metrics.operation("database", "commit", 0.5, None),
        lambda metrics: metrics.operation("blobs", "publish", 0.5, "storage_unavailable"),
    )
    seconds = "consignee_store_operation_seconds_count"
    assert f'{seconds}{{engine="database",operation="commit"}} 1.0' in lines
    labels = 'code="storage_unavailable",engine="blobs",operation="publish"'
    failures = [line for line in lines if line.startswith("consignee_store_failures_total{")]
    assert failures == [f"consignee_store_failures_total{{{labels}}} 1.0"]
