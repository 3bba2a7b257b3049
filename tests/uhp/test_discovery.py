"""The discovery document (D-01 to D-05)."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.uhp import discovery
from app.uhp.application import UhpApplication
from tests.http.messages import Sent
from tests.uhp.calling import application_of, call, services_on, settings_for
from tests.uhp.schema import validate

pytestmark = pytest.mark.anyio


@pytest.fixture
def app(tmp_path: Path) -> UhpApplication:
    settings = settings_for(tmp_path, max_upload_bytes=4096, max_request_bytes=8192)
    return application_of(discovery.routes(services_on(settings, None)), settings)


@pytest.mark.requirement("UHP-01")
async def test_it_is_served_to_anyone_and_says_the_same_to_everybody(app: UhpApplication) -> None:
    answers: list[Sent] = [await call(app, "GET", "/v1/uhp", token=token) for token in (None, "x")]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].body == answers[1].body
    assert (await call(app, "HEAD", "/v1/uhp", token=None)).status == 200
    assert (await call(app, "POST", "/v1/uhp", token=None)).headers[b"allow"] == b"GET, HEAD"


@pytest.mark.requirement("UHP-01", "UHP-08")
async def test_it_claims_what_is_served_and_tells_the_limits(app: UhpApplication) -> None:
    document = (await call(app, "GET", "/v1/uhp", token=None)).json
    validate("Discovery", document)
    assert document["versions"] == ["2026-08-11", "2026-09-12"]
    assert document["default_version"] in document["versions"]
    assert document["conformance_class"] == "extended"
    claimed = {name for name, served in document["capabilities"].items() if served}
    assert len(document["capabilities"]) == 10
    assert set(document["capabilities"]) - claimed == {
        "harness_management",
        "session_sharing",
        "plugins",
    }
    assert document["limits"] == {
        "max_file_bytes": 4096,
        "max_request_bytes": 8192,
        "upload_ttl_seconds": 7 * 86400,
    }
