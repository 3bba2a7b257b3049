"""The container image: built from the Dockerfile, run confined, used from outside."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from uuid import uuid4

import pytest

from tests.e2e.images import (
    DATA,
    Podman,
    Served,
    build,
    container,
    is_ready,
    require_podman,
    served,
    volume,
)
from tests.e2e.processes import ROOT

pytestmark = [
    pytest.mark.component("podman"),
    pytest.mark.xdist_group("image"),
    pytest.mark.timeout(600),  # the first build makes its base image, and installs everything
]

TOKEN = "cst_of-the-image-test"
CONFIG = """
public_url = "https://uploads.example.com"
[[tokens]]
name = "ci"
token_env = "UPLOAD_TOKEN"
scope = "ci"
permissions = ["ahp.upload"]
"""
BODY = bytes(range(256)) * 4096  # 1 MiB: larger than what is stored in a row
SECONDS = 60
BLACK_BOX = ("tests/conformance", "tests/e2e/test_framing.py", "tests/e2e/test_uhp_traversal.py")
"""Tests of what a client sees, which are all the same to a container."""


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    require_podman()
    return Podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture(scope="module")
def image(podman: Podman) -> str:
    return build(podman)


@pytest.fixture
def data(podman: Podman) -> Iterator[str]:
    with volume(podman) as name:
        yield f"{name}:{DATA}"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "consignee.toml"
    path.write_text(CONFIG)
    path.chmod(0o644)
    return f"{path}:/etc/consignee/consignee.toml:ro"


@contextmanager
def running(podman: Podman, image: str, *mounts: str, **environment: str) -> Iterator[Served]:
    variables = {"UPLOAD_TOKEN": TOKEN, **environment}
    with served(podman, image, *mounts, environment=variables) as receiver:
        yield receiver


def wait_until_healthy(podman: Podman, name: str) -> None:
    """By the image's own check, which may fail in between where the machine is busy."""
    deadline = monotonic() + SECONDS
    while podman.status("healthcheck", "run", name) != 0:
        assert monotonic() < deadline, podman.log(name)


def wait_until_closed(port: int) -> None:
    """Until nobody listens any more: the receiver has begun to end."""
    deadline = monotonic() + SECONDS
    while is_ready(port):
        assert monotonic() < deadline, "still listening"
        sleep(0.05)


@contextmanager
def begun_upload(port: int, sent: int) -> Iterator[http.client.HTTPConnection]:
    """A connection on which the head and the first `sent` bytes of BODY have left."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.putrequest("POST", "/ahp/uploads")
        connection.putheader("Authorization", f"Bearer {TOKEN}")
        connection.putheader("Content-Type", "application/octet-stream")
        connection.putheader("AHP-Content-SHA256", hashlib.sha256(BODY).hexdigest())
        connection.putheader("Content-Length", str(len(BODY)))
        connection.endheaders(BODY[:sent])
        yield connection
    finally:
        connection.close()


def finish(connection: http.client.HTTPConnection, sent: int) -> str:
    """Send the rest; returns the reference that the receipt names."""
    connection.send(BODY[sent:])
    answer = connection.getresponse()
    assert answer.status == 201
    receipt = json.loads(answer.read())
    assert receipt["size"] == len(BODY)
    return str(receipt["ref"])


def test_the_image_says_how_it_is_run(podman: Podman, image: str) -> None:
    facts = podman.inspect(image)
    configuration = facts["Config"]

    assert configuration["User"] == "10001:10001"
    assert configuration["StopSignal"] == "SIGTERM"
    assert configuration["Volumes"] == {"/var/lib/consignee": {}}
    assert facts["Healthcheck"]["Test"] == ["CMD", "consignee", "readyz"]


def test_the_image_holds_nothing_to_build_or_install_with(podman: Podman, image: str) -> None:
    look = "import importlib.util as u; print([m for m in ('pip', 'hatchling') if u.find_spec(m)])"
    found = podman(
        "run", "--rm", "--network=none", "--entrypoint=/opt/consignee/bin/python", image, "-c", look
    )

    assert found == "[]"


def test_the_image_serves_with_a_root_that_it_cannot_write_to(
    podman: Podman, image: str, data: str, config: str
) -> None:
    with running(podman, image, data, config) as receiver:
        with begun_upload(receiver.port, sent=0) as connection:
            reference = finish(connection, sent=0)
        stored = podman("exec", receiver.name, "consignee", "refs", "show", "--scope=ci", reference)

        assert json.loads(stored)["sha256"] == hashlib.sha256(BODY).hexdigest()
        assert podman("exec", receiver.name, "id", "-u") == "10001"
        wait_until_healthy(podman, receiver.name)


def test_what_was_confirmed_is_there_in_the_next_container(
    podman: Podman, image: str, data: str, config: str
) -> None:
    with (
        running(podman, image, data, config) as first,
        begun_upload(first.port, sent=0) as connection,
    ):
        reference = finish(connection, sent=0)
    with running(podman, image, data, config) as second:
        stored = podman("exec", second.name, "consignee", "refs", "list", "--scope=ci")

        assert stored.split() == [reference]
        assert podman("exec", second.name, "consignee", "fsck") == "no damage"


def test_stopping_lets_a_running_upload_finish(
    podman: Podman, image: str, data: str, config: str
) -> None:
    half = len(BODY) // 2
    with running(podman, image, data, config) as receiver:
        with begun_upload(receiver.port, sent=half) as connection:
            stopping = podman.started("stop", "--time=60", receiver.name)
            wait_until_closed(receiver.port)
            finish(connection, sent=half)

        assert stopping.wait(SECONDS) == 0
        assert podman.inspect(receiver.name)["State"]["ExitCode"] == 0


def test_a_reload_renews_the_workers_and_lets_a_running_upload_finish(
    podman: Podman, image: str, data: str, config: str
) -> None:
    half = len(BODY) // 2
    with running(podman, image, data, config, CONSIGNEE_WORKERS="2") as receiver:
        wait_until_logged(podman, receiver.name, "listening", 1)
        with begun_upload(receiver.port, sent=half) as connection:
            podman("kill", "--signal=HUP", receiver.name)
            wait_until_logged(podman, receiver.name, "stopping", 1)
            finish(connection, sent=half)
        wait_until_logged(podman, receiver.name, "stopping", 2)

        assert is_ready(receiver.port)


def wait_until_logged(podman: Podman, name: str, message: str, times: int) -> None:
    """Until so many lines of the container's log say it."""
    deadline = monotonic() + SECONDS
    while podman.log(name).count(f'"message": "{message}"') < times:
        assert monotonic() < deadline, podman.log(name)
        sleep(0.1)


def test_a_client_sees_no_difference_to_a_receiver_from_the_sources(
    podman: Podman, image: str, tmp_path: Path
) -> None:
    label = f"consignee-test-{uuid4().hex}"
    inherited = {k: v for k, v in podman.environment().items() if not k.startswith("PYTEST_")}
    with podman.every_one_removed(label):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
             f"--basetemp={tmp_path / 'tests'}", *BLACK_BOX],
            cwd=ROOT,
            env=inherited | {"TEST_SERVER_IMAGE": image, "TEST_SERVER_LABEL": label},
            capture_output=True,
            text=True,
            timeout=540,
        )  # fmt: skip

    assert done.returncode == 0, done.stdout
    outcome = re.search(r"^(\d+) passed in", done.stdout, re.MULTILINE)
    assert outcome is not None, done.stdout
    assert int(outcome[1]) > 150


@pytest.mark.requirement("AHP-R05")
def test_the_image_does_not_listen_without_being_told_that_the_way_is_protected(
    podman: Podman, image: str
) -> None:
    with container(podman, image, environment={}) as name:
        status = podman("wait", name)

        assert status == "2"
        assert "public_url" in podman.log(name)
