"""deploy/compose.yaml as data: every key that it may have, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from tests.e2e.processes import ROOT

DEPLOY = ROOT / "deploy"
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z_0-9]+)(?::\?[^}]*)?\}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Dependency(_Part):
    """What has to be so of another service first."""

    condition: Literal["service_healthy", "service_completed_successfully"]


class Healthcheck(_Part):
    """How a service is asked whether it is well."""

    test: list[str]
    interval: str
    timeout: str
    start_period: str
    start_interval: str


class Service(_Part):
    """One service. What has no default has to be said of each."""

    image: str
    build: str | None = None
    entrypoint: list[str] = []
    command: list[str] = []
    user: str | None = None
    restart: Literal["unless-stopped", "on-failure"]
    depends_on: dict[str, Dependency] = {}
    environment: dict[str, str]
    volumes: list[str]
    tmpfs: list[str] = []
    shm_size: str | None = None
    ports: list[str] = []
    networks: list[str]
    healthcheck: Healthcheck | None = None
    stop_grace_period: str | None = None
    read_only: Literal[True]
    cap_drop: list[Literal["ALL"]]
    cap_add: list[Literal["NET_BIND_SERVICE", "DAC_OVERRIDE"]] = []
    security_opt: list[Literal["no-new-privileges:true"]]

    def files(self) -> dict[str, str]:
        """What it mounts of this repository: path from deploy/ -> path in the container."""
        parts = (volume.split(":") for volume in self.volumes)
        return {part[0]: part[1] for part in parts if part[0].startswith(".")}

    def named_volumes(self) -> list[str]:
        """What it keeps."""
        names = (volume.split(":")[0] for volume in self.volumes)
        return [name for name in names if not name.startswith(".")]


class Network(_Part):
    """A network of its own for some of the services."""

    internal: bool = False


class Composition(_Part):
    """The whole file, without what only its anchors need."""

    name: str
    services: dict[str, Service]
    networks: dict[str, Network | None]
    volumes: dict[str, None]


def composition(variables: Mapping[str, str] | None = None) -> Composition:
    """The file, with `variables` in the place of those of .env; as it is when not given."""
    text = (DEPLOY / "compose.yaml").read_text()
    if variables is not None:
        text = VARIABLE.sub(lambda match: variables[match["name"]], text)
    document: dict[str, Any] = yaml.safe_load(text)
    return Composition(**{key: value for key, value in document.items() if key[:2] != "x-"})


def variables_asked_for() -> set[str]:
    """The names of all that .env has to say."""
    return {match["name"] for match in VARIABLE.finditer((DEPLOY / "compose.yaml").read_text())}


def variables_shown() -> dict[str, str]:
    """compose/env.example: names and values, which are empty where there is nothing to propose."""
    lines = (DEPLOY / "compose" / "env.example").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
