"""The Dockerfile built and run by podman, on a machine that can pull no image."""

from __future__ import annotations

import http.client
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from tests.components import require_component
from tests.e2e.confinement import CONFINED
from tests.e2e.processes import ROOT

DATA = "/var/lib/consignee"
READY_SECONDS = 60
PROGRAMS = ("podman", "buildah", "runc", "debootstrap")
SECONDS = 540
"""For one podman command; only a build that installs everything anew takes more than a few."""

# crun refuses the cgroups of many build machines, and a bridge needs rights that they withhold.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""

# What makes pip work on this machine must make it work in a build, without becoming a part of it.
HOST_FILES = ("/etc/ssl/certs", "/etc/pip.conf")


def dockerfile() -> list[tuple[str, str]]:
    """The instructions in order, without the options of FROM, RUN and COPY."""
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines())]


def final_stage() -> dict[str, str]:
    """The last instruction of each name after the last FROM."""
    instructions = dockerfile()
    start = max(index for index, (name, _) in enumerate(instructions) if name == "FROM")
    return dict(instructions[start:])


def require_podman() -> None:
    """Skip (or fail, where every component is required) without podman, or without root."""
    why = podman_is_missing()
    require_component("podman", present=why is None, why=str(why))


def podman_is_missing() -> str | None:
    """Why no image can be built here; None where one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"Debian packages {' '.join(missing)}"
    return None if os.geteuid() == 0 else "debootstrap needs root"


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with a configuration of its own; `folder` holds it."""

    folder: Path

    def __call__(self, *arguments: str) -> str:
        """Run one command; returns what it printed."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr}"
        return done.stdout.strip()

    def log(self, name: str) -> str:
        """All that a container has printed and logged."""
        line = ["podman", "logs", name]
        return subprocess.run(
            line,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        ).stdout

    def status(self, *arguments: str) -> int:
        """Run one command that may fail; returns its exit status."""
        line = ["podman", *arguments]
        quiet = subprocess.DEVNULL
        environment = self.environment()
        return subprocess.run(line, env=environment, stdout=quiet, stderr=quiet).returncode

    def started(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Begin a command that the test goes on beside."""
        return subprocess.Popen(
            ["podman", *arguments], env=self.environment(), stdout=subprocess.DEVNULL
        )

    @contextmanager
    def every_one_removed(self, label: str) -> Iterator[None]:
        """Afterwards there is no container with that label, whoever has started it."""
        try:
            yield
        finally:
            for name in self("ps", "--all", "--quiet", f"--filter=label={label}").split():
                self("rm", "--force", "--volumes", "--time=10", name)

    def inspect(self, name: str) -> dict[str, Any]:
        """All that podman knows of an image or a container."""
        found: list[dict[str, Any]] = json.loads(self("inspect", name))
        return found[0]

    def environment(self) -> dict[str, str]:
        """Our own variables, and the one that names its configuration."""
        configuration = self.folder / "containers.conf"
        configuration.write_text(CONFIGURATION)
        return {**os.environ, "CONTAINERS_CONF": str(configuration)}


def base_image(podman: Podman) -> str:
    """A bare Debian with Python, made once and kept among podman's images."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    name = f"localhost/consignee-test-base:{suite}"
    if podman.status("image", "exists", name) != 0:
        with tempfile.TemporaryDirectory(prefix="debootstrap-") as folder:
            podman("import", str(_debian(suite, Path(folder))), name)
    return name


def _debian(suite: str, folder: Path) -> Path:
    root, archive = folder / "root", folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    make = ["debootstrap", "--variant=minbase", packages, suite, str(root)]
    pack = ["tar", "-C", str(root), "--exclude=./var/cache/apt", "--exclude=./var/lib/apt"]
    for line in (make, [*pack, "-cf", str(archive), "."]):
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
    return archive


def build(podman: Podman) -> str:
    """Build the project's Dockerfile; steps that did not change come from podman's cache."""
    base, name = base_image(podman), "localhost/consignee-test:latest"
    mounts = [f"--volume={path}:{path}:ro" for path in HOST_FILES if Path(path).exists()]
    options = ["--pull=never", "--format=docker", f"--build-arg=BASE_IMAGE={base}", *mounts]
    podman("build", *options, f"--tag={name}", str(ROOT))
    return name


@contextmanager
def volume(podman: Podman) -> Iterator[str]:
    """A named volume that is gone after the block."""
    name = podman("volume", "create", f"consignee-test-{uuid4().hex}")
    try:
        yield name
    finally:
        podman("volume", "rm", "--force", name)


@contextmanager
def container(
    podman: Podman,
    image: str,
    *command: str,
    environment: Mapping[str, str],
    mounts: tuple[str, ...] = (),
) -> Iterator[str]:
    """Run the image as confined as it can be until the block ends; gives the container's name."""
    name = f"consignee-test-{uuid4().hex}"
    variables = [f"--env={key}={value}" for key, value in environment.items()]
    volumes = [f"--volume={mount}" for mount in mounts]
    podman("run", "--detach", f"--name={name}", *CONFINED, *variables, *volumes, image, *command)
    try:
        yield name
    finally:
        podman("rm", "--force", "--volumes", "--time=10", name)


@dataclass(frozen=True, slots=True)
class Served:
    """A container that answers on `port` of this machine; `start_seconds` from asking to ready."""

    name: str
    port: int
    start_seconds: float


@contextmanager
def served(
    podman: Podman, image: str, *mounts: str, environment: Mapping[str, str] | None = None
) -> Iterator[Served]:
    """Run the image until the block ends, once it is ready."""
    port = _free_port()
    # The network is the machine's own.
    where = {"CONSIGNEE_HOST": "127.0.0.1", "CONSIGNEE_PORT": str(port)}
    began = monotonic()
    variables = where | dict(environment or {})
    with container(podman, image, environment=variables, mounts=mounts) as name:
        _wait_until_ready(podman, name, port)
        yield Served(name, port, monotonic() - began)


def is_ready(port: int) -> bool:
    """Whether the receiver at this port says so."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_SECONDS)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(podman: Podman, name: str, port: int) -> None:
    deadline = monotonic() + READY_SECONDS
    while not is_ready(port):
        assert monotonic() < deadline, podman.log(name)
        assert podman.inspect(name)["State"]["Running"], podman.log(name)
        sleep(0.02)
