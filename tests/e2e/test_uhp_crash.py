"""A server that dies in the middle of a task, and is started again on the same folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.conformance.peer import SECONDS, Site, content_path, running_site, session_of, text_of

pytestmark = pytest.mark.xdist_group("uhp tasks")


def kill(site: Site) -> None:
    os.kill(site.server.process.pid, signal.SIGKILL)
    assert site.server.process.wait(SECONDS) == -signal.SIGKILL


@pytest.mark.timeout(240)
@pytest.mark.requirement("UHP-16", "C-03", "AHP-R38")
def test_a_task_of_a_dead_server_is_failed_and_the_rest_is_there(tmp_path: Path) -> None:
    """What it had said is kept, its session goes on, and earlier files are as they were."""
    options = ("--data-dir", str(tmp_path))
    with running_site(*options) as site:
        first = site.alice.run("Create a file named a.txt containing exactly: a")
        begun = site.alice.run(
            "Count slowly from 1 to 200.", previous_response_id=first["id"], background=True
        )
        path = f"/v1/responses/{begun['id']}"
        with site.alice.stream("GET", f"{path}?stream=true") as events:
            seen = [next(events) for _ in range(8)]
        upload = site.alice.upload("u.txt", b"u")
        kill(site)
    with running_site(*options) as site:
        deadline = monotonic() + SECONDS
        while (response := site.alice.get(path))["status"] == "in_progress":
            assert monotonic() < deadline, "nobody ends the task"
            sleep(0.1)
        assert response["status"] == "failed"
        assert text_of(response).startswith("1\n2\n")
        with site.alice.stream("GET", f"{path}?stream=true") as events:
            again = [event.data for event in events]
        # Events are kept in batches: the last of those that a client has seen may be lost.
        assert again[: len(seen) - 1] == [event.data for event in seen[:-1]]
        assert again[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in again] == list(range(len(again)))
        (file,) = site.alice.artifacts(first)
        assert site.alice.ask("GET", content_path(file)).content == b"a"
        assert site.alice.get(f"/v1/files/{upload['id']}")["bytes"] == 1
        following = site.alice.run("And now?", previous_response_id=begun["id"])
        assert following["status"] == "completed"
        assert session_of(following) == session_of(first)
