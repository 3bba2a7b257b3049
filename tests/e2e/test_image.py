"""The container image: built from the Dockerfile, run confined, used from outside."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import pytest

from tests.e2e.images import Podman, build, container, require_podman, volume

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


@dataclass(frozen=True, slots=True)
class Running:
    """A container of the image that is ready."""

    name: str
    port: int
    start_seconds: float


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
        yield f"{name}:/var/lib/consignee"


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "consignee.toml"
    path.write_text(CONFIG)
    path.chmod(0o644)
    return f"{path}:/etc/consignee/consignee.toml:ro"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(podman: Podman, image: str, *mounts: str) -> Iterator[Running]:
    port = free_port()
    environment = {
        "CONSIGNEE_HOST": "127.0.0.1",  # the test's network is the machine's own
        "CONSIGNEE_PORT": str(port),
        "UPLOAD_TOKEN": TOKEN,
    }
    began = monotonic()
    with container(podman, image, environment=environment, mounts=mounts) as name:
        wait_until_ready(podman, name, port)
        yield Running(name, port, monotonic() - began)


def wait_until_ready(podman: Podman, name: str, port: int) -> None:
    deadline = monotonic() + SECONDS
    while not is_ready(port):
        assert monotonic() < deadline, podman.log(name)
        assert podman.inspect(name)["State"]["Running"], podman.log(name)
        sleep(0.05)


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


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
    print(f"{facts['Size'] / 1e6:.0f} MB, base included")

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
        print(f"ready after {receiver.start_seconds:.1f} s")


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


@pytest.mark.requirement("AHP-R05")
def test_the_image_does_not_listen_without_being_told_that_the_way_is_protected(
    podman: Podman, image: str
) -> None:
    with container(podman, image, environment={}) as name:
        status = podman("wait", name)

        assert status == "2"
        assert "public_url" in podman.log(name)
