"""Real clients, each of which sends a whole body whatever the receiver says meanwhile."""

from __future__ import annotations

import asyncio
import http.client
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from agenthooksprotocol import ProtocolError
from agenthooksprotocol.transports.http import HTTPTransport

from tests.components import require_component
from tests.e2e.wire import SECONDS, Wire, head

Uploader = Callable[[str, Mapping[str, str], Path], int]
"""Endpoint, headers, file with the body -> the status that the client saw."""


def by_curl(endpoint: str, headers: Mapping[str, str], body: Path) -> int:
    """curl, told not to wait for 100 Continue."""
    return int(curl("%{http_code}", endpoint, {**headers, "Expect": ""}, body))


def curl(report: str, endpoint: str, headers: Mapping[str, str], body: Path) -> str:
    """What curl reports (its `--write-out` text) of an upload; an empty header is left out."""
    present = shutil.which("curl") is not None
    require_component("curl", present=present, why="install the package curl")
    command = ["curl", "--silent", "--show-error", "--output", "/dev/null", "--write-out", report]
    for name, value in headers.items():
        command += ["--header", f"{name}: {value}".strip()]
    command += ["--data-binary", f"@{body}", endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout


def by_httpx(endpoint: str, headers: Mapping[str, str], body: Path) -> int:
    content = body.read_bytes()
    return httpx.post(endpoint, content=content, headers=headers, timeout=SECONDS).status_code


def by_http_client(endpoint: str, headers: Mapping[str, str], body: Path) -> int:
    parts = urlsplit(endpoint)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=SECONDS)
    try:
        with body.open("rb") as file:
            connection.request("POST", parts.path, body=file, headers=dict(headers))
            return connection.getresponse().status
    finally:
        connection.close()


def by_sdk(endpoint: str, headers: Mapping[str, str], body: Path) -> int:
    """The sender of the protocol's Python SDK."""
    return asyncio.run(_by_sdk(endpoint, headers, body.read_bytes()))


async def _by_sdk(endpoint: str, headers: Mapping[str, str], body: bytes) -> int:
    seen: list[int] = []

    async def note(response: httpx.Response) -> None:
        seen.append(response.status_code)

    hooks = {"response": [note]}
    async with httpx.AsyncClient(event_hooks=hooks, timeout=SECONDS) as client:
        try:
            await HTTPTransport(endpoint, client=client).upload(
                endpoint, body, headers=dict(headers)
            )
        except ProtocolError:  # its verdict on every status other than 201
            assert seen[0] != 201
    (status,) = seen
    return status


def by_raw_socket(endpoint: str, headers: Mapping[str, str], body: Path) -> int:
    """Sends everything, then reads; nothing but one answer may come."""
    line = f"POST {urlsplit(endpoint).path} HTTP/1.1"
    with Wire(endpoint) as wire:
        wire.send(head(headers, line=line), body.read_bytes())
        (response,) = wire.until_closed()
        return response.status


UPLOADERS: dict[str, Uploader] = {
    "curl": by_curl,
    "httpx": by_httpx,
    "http.client": by_http_client,
    "sdk": by_sdk,
    "raw socket": by_raw_socket,
}

CLIENTS = [
    pytest.param(name, marks=pytest.mark.component("curl") if name == "curl" else ())
    for name in UPLOADERS
]
"""The names of all, for `parametrize`."""
