"""`consignee send` as a person runs it: a process of its own, to real receivers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvicorn
from agenthooksprotocol.server.attachments import App
from anyio.from_thread import start_blocking_portal

from app.sender.authorization import Credentials
from app.sender.config import UploadConfiguration
from app.sender.errors import AuthorizationError, TransferError
from app.sender.sources import Source
from app.sender.transfer import Receipt, Sender
from tests.certificates import write_certificate
from tests.e2e.processes import EXIT_SECONDS, running_server
from tests.e2e.test_dev import surroundings
from tests.e2e.wire import MIB, UPLOADER, Receiver, running_receiver
from tests.sender.receivers import Exchange, hang, scripted

BODIES = {
    "empty.bin": b"",
    "octets.bin": bytes(range(256)) * 40,
    "large.bin": Random(1).randbytes(5 * MIB + 3),
}
SDK_TOKEN = "sdk-token"


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with running_receiver(tmp_path_factory.mktemp("receiver")) as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, body in BODIES.items():
        (tmp_path / name).write_bytes(body)
    return list(BODIES)


def command(endpoint: str, *arguments: str) -> list[str]:
    switches = ["--endpoint", endpoint, "--token-env", "UPLOAD_TOKEN"]
    return [sys.executable, "-m", "app.cli", "send", *arguments, *switches]


def send(
    folder: Path, endpoint: str, *arguments: str, token: str = UPLOADER, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end in `folder`."""
    return subprocess.run(
        command(endpoint, *arguments),
        **surroundings(folder, {"UPLOAD_TOKEN": token, **environment}),
        capture_output=True,
        text=True,
        timeout=EXIT_SECONDS,
    )


def confirmed(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def configuration(endpoint: str, token_variable: str = "UPLOAD_TOKEN") -> UploadConfiguration:
    mapping = {
        "endpoint": endpoint,
        "timeoutMs": 60_000,
        "maxBytes": 1 << 30,
        "auth": {"type": "bearer", "tokenEnv": token_variable},
    }
    return UploadConfiguration.parse(mapping, allow_loopback_http=True)


async def upload(endpoint: str, body: bytes, token: str) -> Receipt:
    credentials = Credentials(environment={"UPLOAD_TOKEN": token})
    async with Sender(credentials) as sender, Source.memory(body) as source:
        return await sender.upload(source, configuration(endpoint))


@pytest.mark.requirement("AHP-S14", "AHP-S17")
def test_what_was_sent_is_what_the_receiver_keeps(
    receiver: Receiver, tmp_path: Path, files: list[str]
) -> None:
    receipts = confirmed(send(tmp_path, receiver.endpoint, *files, "--allow-loopback-http"))
    for body, receipt in zip(BODIES.values(), receipts, strict=True):
        assert set(receipt) == {"ref", "size", "sha256"}
        assert receiver.content(receipt["ref"]) == body
        assert (receipt["size"], receipt["sha256"]) == (
            len(body),
            hashlib.sha256(body).hexdigest(),
        )


@pytest.mark.requirement("AHP-S11", "AHP-S32")
def test_a_wrong_token_is_refused_while_the_bytes_go_out(receiver: Receiver) -> None:
    body = Random(2).randbytes(64 * MIB)
    with receiver.keeps_nothing(), pytest.raises(AuthorizationError):
        asyncio.run(upload(receiver.endpoint, body, "wrong"))


@pytest.mark.anyio
async def test_a_wrong_route_is_said_to_be_one(receiver: Receiver) -> None:
    with pytest.raises(TransferError) as caught:
        await upload(f"{receiver.server.url}/nowhere", b"abc", UPLOADER)
    assert caught.value.code == "not_found"


def test_a_failure_is_a_line_and_the_status(receiver: Receiver, tmp_path: Path) -> None:
    (tmp_path / "body").write_bytes(b"abc")
    done = send(tmp_path, receiver.endpoint, "body", "--allow-loopback-http", token="wrong")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("consignee: body: ")
    assert done.stderr.count("\n") == 1
    assert send(tmp_path, receiver.endpoint, "body").returncode == 2


@pytest.mark.requirement("AHP-S06")
def test_ahp_s06_a_receiver_with_tls_is_verified(tmp_path: Path, files: list[str]) -> None:
    certificate, key = write_certificate(tmp_path)
    configured = tmp_path / "consignee.toml"
    digest = hashlib.sha256(b"tls-token").hexdigest()
    configured.write_text(
        f'tls_cert_file = "{certificate}"\ntls_key_file = "{key}"\n'
        f'[[tokens]]\nname = "a"\nscope = "a"\ntoken_sha256 = "{digest}"\n'
    )
    arguments = ("--config", str(configured), "--data-dir", str(tmp_path / "data"), "--migrate")
    with running_server(*arguments, command="serve") as server:
        refused = send(tmp_path, server.upload_endpoint, *files, token="tls-token")
        assert refused.returncode == 1
        assert refused.stderr.count("certificate does not verify") == len(files)
        trusted = {"SSL_CERT_FILE": str(certificate)}
        done = send(tmp_path, server.upload_endpoint, *files, token="tls-token", **trusted)
        assert [receipt["size"] for receipt in confirmed(done)] == [*map(len, BODIES.values())]


def test_a_terminal_shows_bars(receiver: Receiver, tmp_path: Path, files: list[str]) -> None:
    ours, theirs = pty.openpty()
    line = command(receiver.endpoint, *files, "--allow-loopback-http")
    options = surroundings(tmp_path, {"UPLOAD_TOKEN": UPLOADER, "TERM": "xterm", "COLUMNS": "100"})
    with subprocess.Popen(line, stdout=theirs, stderr=theirs, **options) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # so a terminal ends
            while piece := os.read(ours, 65536):
                shown += piece
        os.close(ours)
        assert process.wait(EXIT_SECONDS) == 0
    assert b"100%" in shown
    assert re.findall(r"ref_\S+  (\S+)\r\n", shown.decode()) == files


def test_an_interrupt_ends_it_at_once(tmp_path: Path) -> None:
    taken = threading.Event()

    async def take(exchange: Exchange) -> None:
        taken.set()
        await hang(exchange)

    (tmp_path / "body").write_bytes(bytes(MIB))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(scripted(take)) as hanging,
    ):
        line = command(f"{hanging.url}/u", "body", "--allow-loopback-http")
        options = surroundings(tmp_path, {"UPLOAD_TOKEN": "x"})
        with subprocess.Popen(line, stderr=subprocess.PIPE, **options) as process:
            assert taken.wait(EXIT_SECONDS)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=EXIT_SECONDS)
    assert process.returncode == 130
    assert said.strip() == b"consignee: interrupted"


# The SDK's receiver


class Memory:
    """A storage of the SDK's receiver."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}

    async def commit(self, *, scope: object, ref: str, data: bytes) -> None:
        assert scope == "scope"
        self.stored[ref] = data


@contextlib.asynccontextmanager
async def sdk_receiver(memory: Memory) -> AsyncIterator[str]:
    """The public SDK's receiver under uvicorn."""

    async def authorize(credentials: str | None) -> tuple[int, str | None]:
        return (201, "scope") if credentials == f"Bearer {SDK_TOKEN}" else (401, None)

    application = App(authorize=authorize, storage=memory, max_bytes=8 * MIB)
    server = uvicorn.Server(uvicorn.Config(application, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/upload"
        finally:
            server.should_exit = True
            await serving


@pytest.mark.requirement("AHP-S14", "AHP-S17", "AHP-S18")
@pytest.mark.anyio
async def test_the_sdks_receiver_takes_what_is_sent() -> None:
    memory = Memory()
    async with sdk_receiver(memory) as endpoint:
        for body in BODIES.values():
            receipt = await upload(endpoint, body, SDK_TOKEN)
            assert memory.stored[receipt.ref] == body


@pytest.mark.anyio
async def test_the_sdks_receiver_refuses_as_it_should() -> None:
    memory = Memory()
    async with sdk_receiver(memory) as endpoint:
        with pytest.raises(AuthorizationError):
            await upload(endpoint, b"abc", "wrong")
        with pytest.raises(TransferError) as caught:
            await upload(endpoint, bytes(8 * MIB + 1), SDK_TOKEN)
    assert caught.value.code == "too_large"
    assert memory.stored == {}
