"""The Dockerfile built and run by podman, on a machine that can pull no image."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.components import require_component
from tests.e2e.processes import ROOT

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


def require_podman() -> None:
    """Skip (or fail, where every component is required) without podman, or without root."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    why = f"Debian packages {' '.join(missing)}" if missing else "debootstrap needs root"
    require_component("podman", present=not missing and os.geteuid() == 0, why=why)


@dataclass(frozen=True, slots=True)
class Podman:
    """podman with a configuration of its own; `folder` holds it."""

    folder: Path

    def __call__(self, *arguments: str) -> str:
        """Run one command; returns what it printed."""
        done = subprocess.run(
            ["podman", *arguments],
            env=self._environment(),
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
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        ).stdout

    def status(self, *arguments: str) -> int:
        """Run one command that may fail; returns its exit status."""
        line = ["podman", *arguments]
        quiet = subprocess.DEVNULL
        environment = self._environment()
        return subprocess.run(line, env=environment, stdout=quiet, stderr=quiet).returncode

    def started(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Begin a command that the test goes on beside."""
        return subprocess.Popen(
            ["podman", *arguments], env=self._environment(), stdout=subprocess.DEVNULL
        )

    def inspect(self, name: str) -> dict[str, Any]:
        """All that podman knows of an image or a container."""
        found: list[dict[str, Any]] = json.loads(self("inspect", name))
        return found[0]

    def _environment(self) -> dict[str, str]:
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
    confined = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all"]
    confined += ["--security-opt=no-new-privileges", "--network=host"]
    variables = [f"--env={key}={value}" for key, value in environment.items()]
    volumes = [f"--volume={mount}" for mount in mounts]
    podman("run", "--detach", f"--name={name}", *confined, *variables, *volumes, image, *command)
    try:
        yield name
    finally:
        podman("rm", "--force", "--time=10", name)
