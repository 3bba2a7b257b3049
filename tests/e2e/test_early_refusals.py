"""A refusal that is decided from the head arrives as its status while the client still sends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from tests.e2e.processes import ROOT
from tests.e2e.uploaders import CLIENTS, UPLOADERS, curl
from tests.e2e.wire import (
    MIB,
    READER,
    SECONDS,
    UPLOADER,
    Receiver,
    Wire,
    configuration,
    digest,
    head,
    running_receiver,
    upload_headers,
)

SIZE = 64 * MIB
RUNS = int(os.environ.get("EARLY_REFUSAL_RUNS", "10"))
"""How often each client is refused; more of them tell a rare loss."""

SETTINGS = f"max_upload_bytes = {SIZE - 1}\n"

REFUSALS = {
    "a wrong credential": 401,
    "no permission": 403,
    "no such route": 404,
    "malformed framing": 400,
    "too large": 413,
}


def request_for(refusal: str, endpoint: str) -> tuple[str, dict[str, str]]:
    """The endpoint and headers of an upload of SIZE zeros that is refused for this reason."""
    headers = ZEROS_HEADERS | {"Authorization": f"Bearer {UPLOADER}"}
    if refusal == "a wrong credential":
        headers["Authorization"] = "Bearer wrong"
    if refusal == "no permission":
        headers["Authorization"] = f"Bearer {READER}"
    if refusal == "no such route":
        endpoint += "/"
    if refusal == "malformed framing":
        headers["Content-Encoding"] = "identity"
    return endpoint, headers


ZEROS_HEADERS = upload_headers(bytes(SIZE), token=None)


@pytest.fixture(scope="module")
def zeros(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("body") / "zeros"
    path.write_bytes(bytes(SIZE))
    return path


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with running_receiver(tmp_path_factory.mktemp("receiver"), SETTINGS) as running:
        yield running


@pytest.fixture(scope="module", params=["httptools", "h11"])
def stock(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The endpoint of the same application under `uvicorn app.main:app`, with uvicorn's parsers."""
    folder = tmp_path_factory.mktemp("stock")
    settings = SETTINGS + f'data_dir = "{folder / "data"}"\n'
    with stock_uvicorn(configuration(folder, settings), request.param) as url:
        yield f"{url}/ahp/uploads"


@contextmanager
def stock_uvicorn(config: Path, parser: str) -> Iterator[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CONSIGNEE_")}
    environment |= {"CONSIGNEE_CONFIG": str(config), "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "app.cli", "migrate"]
    subprocess.run(run, env=environment, cwd=config.parent, check=True, capture_output=True)
    serve = [sys.executable, "-m", "uvicorn", "app.main:app", "--port", "0", "--http", parser]
    with subprocess.Popen(serve, env=environment, cwd=config.parent) as process:
        try:
            yield f"http://127.0.0.1:{_port_of(process)}"
        finally:
            process.terminate()


def _port_of(process: subprocess.Popen[bytes]) -> int:
    """Where it listens, once it does."""
    deadline = monotonic() + SECONDS
    while process.poll() is None and monotonic() < deadline:
        for connection in psutil.Process(process.pid).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr[1])
        sleep(0.02)
    raise AssertionError(f"it does not listen; status {process.poll()}")


def statuses(endpoint: str, client: str, body: Path, runs: int) -> list[tuple[str, int]]:
    """Refuse `client` so many times, for each reason in turn."""
    found = []
    for refusal in islice(cycle(REFUSALS), runs):
        target, headers = request_for(refusal, endpoint)
        found.append((refusal, UPLOADERS[client](target, headers, body)))
    return found


@pytest.mark.requirement("AHP-R51", "AHP-R09", "B13")
@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_sees_the_refusal(receiver: Receiver, zeros: Path, client: str) -> None:
    with receiver.keeps_nothing():
        found = statuses(receiver.endpoint, client, zeros, RUNS)
    assert found == [(refusal, REFUSALS[refusal]) for refusal, _ in found]


@pytest.mark.requirement("AHP-R51", "B13", "B06")
@pytest.mark.parametrize("client", CLIENTS)
def test_the_application_alone_is_enough(stock: str, zeros: Path, client: str) -> None:
    found = statuses(stock, client, zeros, max(2, RUNS // 5))
    assert found == [(refusal, REFUSALS[refusal]) for refusal, _ in found]


@pytest.mark.requirement("AHP-R17", "AHP-R21", "B06")
@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Length: 3", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked",),
        (b"Content-Length: 3", b"Content-Length: 5"),
        (b"Content-Length: +3",),
        (),
    ],
)
def test_framing_holds_under_every_parser(stock: str, lines: tuple[bytes, ...]) -> None:
    headers = upload_headers(b"abc") | {"Content-Length": None}
    with Wire(stock) as wire:
        wire.send(head(headers, *lines), b"3\r\nabc\r\n0\r\n\r\n")
        assert wire.response().status == 400


@pytest.mark.requirement("AHP-R51", "AHP-R52", "B13")
def test_no_octet_of_a_refused_body_is_stored(receiver: Receiver) -> None:
    """While the client is still sending, the answer is there and the disk is untouched."""
    with receiver.keeps_nothing(), receiver.connect() as wire:
        headers = ZEROS_HEADERS | {"Authorization": "Bearer wrong"}
        wire.send(head(headers), bytes(SIZE // 2))
        assert wire.response().status == 401
        assert receiver.staged() == []
        wire.send(bytes(SIZE // 2))
        assert wire.until_closed() == []


@pytest.mark.requirement("B13")
def test_the_drain_is_bounded_in_bytes(tmp_path: Path) -> None:
    settings = f"drain_bytes = {MIB}\n"
    with running_receiver(tmp_path, settings) as receiver, receiver.connect() as wire:
        wire.send(_endless())
        assert wire.response().status == 413
        assert _send_until_refused(wire) < SIZE  # the kernel's buffers come on top


@pytest.mark.requirement("B13")
def test_the_drain_is_bounded_in_time(tmp_path: Path) -> None:
    with (
        running_receiver(tmp_path, "drain_seconds = 0.2\n") as receiver,
        receiver.connect() as wire,
    ):
        wire.send(_endless())
        assert wire.response().status == 413
        assert wire.until_closed() == []
        _send_until_refused(wire)


def _endless() -> bytes:
    """The head of an upload that would go on for ever."""
    headers = {"Content-Length": str(10**18), "AHP-Content-SHA256": digest(b"")}
    return head(ZEROS_HEADERS | headers | {"Authorization": f"Bearer {UPLOADER}"})


def _send_until_refused(wire: Wire) -> int:
    """Send until the receiver has closed; how much that took, in bytes."""
    sent = 0
    deadline = monotonic() + SECONDS
    while monotonic() < deadline:
        try:
            sent += wire.socket.send(bytes(MIB))
        except ConnectionError:
            return sent
    raise AssertionError(f"still taking after {sent} bytes")


@pytest.mark.component("curl")
@pytest.mark.requirement("AHP-R51", "B15")
def test_curl_that_waits_sends_nothing(receiver: Receiver, zeros: Path) -> None:
    """curl waits for 100 Continue before a large body, and sees the refusal instead."""
    headers = ZEROS_HEADERS | {"Authorization": "Bearer wrong", "Expect": "100-continue"}
    report = "%{http_code} %{size_upload}"
    assert curl(report, receiver.endpoint, headers, zeros) == "401 0"
