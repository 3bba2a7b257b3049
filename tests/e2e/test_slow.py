"""Senders that stop, trickle, or are merely slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from threading import Event

import pytest

from tests.e2e.wire import KIB, MIB, Receiver, running_receiver, upload

IDLE = 2.0  # far above the pauses that a busy machine makes by itself
LIMITS = {
    "CONSIGNEE_HEAD_TIMEOUT_SECONDS": "0.5",
    "CONSIGNEE_IDLE_TIMEOUT_SECONDS": str(IDLE),
    "CONSIGNEE_MIN_RATE_BYTES_PER_SECOND": "2000",
    "CONSIGNEE_DRAIN_SECONDS": "0.5",
}
SENDERS = 500


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("impatient")
    with running_receiver(folder, environment=LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    with running_receiver(tmp_path_factory.mktemp("receiver")) as running:
        yield running


def pause(seconds: float) -> None:
    """Be slow on purpose."""
    Event().wait(seconds)


@pytest.mark.requirement("B16")
@pytest.mark.parametrize("data", [b"P", b"POST /ahp/uploads HTTP/1.1\r\nHost: a\r\nX-"])
def test_half_a_head_and_silence(impatient: Receiver, data: bytes) -> None:
    (response,) = impatient.talk(data)
    assert (response.status, response.code) == (408, "too_slow")


@pytest.mark.requirement("B16")
def test_a_head_that_trickles(impatient: Receiver) -> None:
    """The time of the head is one for all of it, whatever arrives meanwhile."""
    with impatient.connect() as wire:
        wire.send(b"POST /ahp/uploads HTTP/1.1\r\n")
        for _ in range(8):
            wire.send(b"X-A: b\r\n")
            pause(0.05)
        assert wire.response().status == 408


@pytest.mark.requirement("B16", "AHP-R46")
@pytest.mark.parametrize("size", [5, 3 * MIB])
def test_a_body_that_stops(impatient: Receiver, size: int) -> None:
    with impatient.keeps_nothing():
        (response,) = impatient.talk(upload(bytes(size))[:-2])
    assert (response.status, response.code) == (408, "too_slow")


@pytest.mark.requirement("B16")
def test_a_body_that_trickles_below_the_minimum_rate(impatient: Receiver) -> None:
    """Something arrives all the time, and far too little of it."""
    with impatient.keeps_nothing(), impatient.connect() as wire:
        wire.send(upload(bytes(MIB))[: -MIB // 2])
        while not wire.has_arrived(within=IDLE / 20):
            wire.send(b"\x00")
        assert wire.response().status == 408


@pytest.mark.requirement("B16", "AHP-R47")
def test_a_slow_honest_upload_succeeds(impatient: Receiver) -> None:
    """It takes longer than any limit, and each of its pauses is shorter than the idle limit."""
    body = bytes(112 * KIB)
    data = upload(body)
    with impatient.connect() as wire:
        for start in range(0, len(data), 4 * KIB):
            wire.send(data[start : start + 4 * KIB])
            pause(IDLE / 20)
        assert wire.response().json["size"] == len(body)


@pytest.mark.requirement("B16", "B97")
def test_many_trickling_senders_do_not_hinder_an_upload(receiver: Receiver) -> None:
    before = receiver.usage().references
    with ExitStack() as opened:
        wires = [opened.enter_context(receiver.connect()) for _ in range(SENDERS)]
        unfinished = upload(bytes(256 * KIB))[: -128 * KIB]
        for wire in wires:
            wire.send(unfinished)
        for wire in wires:
            wire.send(b"\x00")
        (response,) = receiver.talk(upload(b"abc", b"Connection: close"))
        assert response.status == 201
        assert not any(wire.has_arrived(within=0) for wire in wires)
    receiver.wait_until_nothing_is_staged()
    assert receiver.usage().references == before + 1
