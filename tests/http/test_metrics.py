"""What Prometheus sees."""

from __future__ import annotations

from app.http.metrics import Metrics


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
