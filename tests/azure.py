"""A real server of Azure Blob Storage (Azurite), one for a test process; each test has a prefix."""

from __future__ import annotations

import atexit
import base64
import hmac
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from email.utils import formatdate
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlencode

import httpx

from tests.components import require_component
from tests.npm import NODE, is_installable, modules

SOURCE = Path(__file__).parent / "azurite"
CONTAINER = "consignee-tests"

ACCOUNT = "depot"
KEY = base64.b64encode(secrets.token_bytes(64)).decode("ascii")

CREDENTIALS = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}

START_SECONDS = 60
POLL_SECONDS = 0.05

_LISTENS = re.compile(r"listens on http://(127\.0\.0\.1:\d+)")


@dataclass(frozen=True, slots=True)
class AzureServer:
    """A server that listens, as HOST:PORT."""

    address: str

    def blob_url(self, prefix: str | None = None, *, address: str | None = None) -> str:
        """A `blob_url` with a prefix of its own, reached directly or by a proxy at `address`."""
        options = {"endpoint": self.endpoint(address)}
        return f"az://{CONTAINER}/{prefix or secrets.token_hex(8)}?{urlencode(options)}"

    def endpoint(self, address: str | None = None) -> str:
        """Where the account is: in the path, for want of a host name of its own."""
        return f"http://{address or self.address}/{ACCOUNT}"


@cache
def azure_server() -> AzureServer:
    """The server of this process, started when the first test asks; it ends with this process."""
    require_component("azurite", present=is_installable(), why="it needs node 22 or newer and npm")
    script = modules("azurite", SOURCE) / "azurite" / "dist" / "src" / "blob" / "main.js"
    folder = tempfile.mkdtemp(prefix="consignee-azure-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    log = Path(folder, "log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(script),
            cwd=folder,
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=output,
            stderr=output,
        )
    atexit.register(_end, process)
    server = AzureServer(_address(process, log))
    _create_container(server)
    return server


def _command(script: Path) -> list[str]:
    return [
        str(NODE / "bin" / "node"),
        str(script),
        "--inMemoryPersistence",
        "--silent",
        "--disableTelemetry",
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        "0",
    ]


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where the server listens: it says so once it does."""
    deadline = monotonic() + START_SECONDS
    while (found := _LISTENS.search(shown := log.read_text(encoding="utf-8"))) is None:
        assert process.poll() is None, f"the Azure server ended at start:\n{shown[-2000:]}"
        assert monotonic() < deadline, f"the Azure server is not ready in time:\n{shown[-2000:]}"
        sleep(POLL_SECONDS)
    return found[1]


def _create_container(server: AzureServer) -> None:
    """By hand: `obstore` has no call for it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    signed = (
        "PUT"
        + "\n" * 12  # the standard headers, none of which has a value
        + "".join(f"{name}:{value}\n" for name, value in headers.items())
        + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), "sha256"))
    headers["authorization"] = f"SharedKey {ACCOUNT}:{signature.decode()}"
    url = f"{server.endpoint()}/{CONTAINER}?restype=container"
    with httpx.Client(trust_env=False) as client:
        client.put(url, headers=headers).raise_for_status()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it has nothing to keep
    process.wait()
