"""What is put off until a request has its answer: in which order it is done, and when at last."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from app import logs
from app.http import afterwards
from app.http.afterwards import AFTERWARDS, PUT_OFF_AT_ONCE, Afterwards
from app.http.metrics import Metrics
from app.http.middleware import surround
from app.settings import load_settings
from tests.http.messages import LIMITS, Sent, http_scope, receive_nothing
from tests.http.test_middleware import fine

pytestmark = pytest.mark.anyio

PATIENCE = 10


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> Afterwards:
    """For as long as the test lasts nothing is done by itself."""
    monkeypatch.setattr(afterwards, "PUT_OFF_SECONDS", 1000)
    return Afterwards()


@pytest.fixture
def output() -> Iterator[io.StringIO]:
    """The lines of requests."""
    output = io.StringIO()
    root, level = logging.getLogger(), logging.getLogger("consignee").level
    before = list(root.handlers)
    logs.configure(load_settings(implicit_file=False, log_format="json"), output)
    yield output
    root.handlers[:] = before
    logging.getLogger("consignee").setLevel(level)


async def test_what_is_put_off_is_done_in_its_order_and_once(put_off: Afterwards) -> None:
    done: list[int] = []
    for number in range(3):
        put_off.do(lambda number=number: done.append(number))  # type: ignore[misc]
    assert done == []
    put_off.catch_up()
    put_off.catch_up()
    assert done == [0, 1, 2]


async def test_it_is_done_without_anybody_asking() -> None:
    done = asyncio.Event()
    Afterwards().do(done.set)
    async with asyncio.timeout(PATIENCE):
        await done.wait()


async def test_it_is_done_where_another_thread_has_time(put_off: Afterwards) -> None:
    await asyncio.to_thread(put_off.have_time)  # there is nothing to do yet
    done = asyncio.Event()
    put_off.do(done.set)
    await asyncio.to_thread(put_off.have_time)
    async with asyncio.timeout(PATIENCE):
        await done.wait()


def test_who_has_time_when_the_loop_has_ended_is_told_nothing(put_off: Afterwards) -> None:
    async def serve() -> None:
        put_off.do(lambda: None)

    asyncio.run(serve())
    put_off.have_time()


async def test_no_more_is_put_off_than_a_bound(put_off: Afterwards) -> None:
    done: list[None] = []
    for _ in range(PUT_OFF_AT_ONCE - 1):
        put_off.do(lambda: done.append(None))
    assert done == []
    put_off.do(lambda: done.append(None))
    assert len(done) == PUT_OFF_AT_ONCE


async def test_a_fault_of_one_costs_the_others_nothing() -> None:
    done = asyncio.Event()

    def fail() -> None:
        raise RuntimeError("a fault of ours")

    waiting = Afterwards()
    waiting.do(fail)
    waiting.do(done.set)
    with pytest.raises(RuntimeError):
        waiting.catch_up()
    assert not done.is_set()
    async with asyncio.timeout(PATIENCE):
        await done.wait()


async def test_a_request_is_counted_and_logged_behind_its_answer(
    put_off: Afterwards, output: io.StringIO
) -> None:
    metrics = Metrics()
    app = surround(fine, metrics, LIMITS, is_protected=True)
    for path in ("/first", "/second"):
        sent = Sent()
        scope = http_scope(path=path, extensions={AFTERWARDS: {"do": put_off.do}})
        await app(scope, receive_nothing, sent)
        assert sent.status == 201
    assert output.getvalue() == ""
    assert 'status="201"' not in metrics.render().decode()
    put_off.catch_up()
    lines = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [("/first", 201), ("/second", 201)]
    assert 'consignee_requests_total{method="POST",status="201"} 2.0' in metrics.render().decode()


async def test_a_line_tells_when_its_request_ended(
    put_off: Afterwards, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = surround(fine, Metrics(), LIMITS, is_protected=True)
    monkeypatch.setattr("app.http.middleware.time.time", lambda: 1_800_000_000.25)
    extensions = {AFTERWARDS: {"do": put_off.do}}
    await app(http_scope(extensions=extensions), receive_nothing, Sent())
    monkeypatch.setattr("app.http.middleware.time.time", lambda: 1_800_000_009.0)
    put_off.catch_up()
    assert json.loads(output.getvalue())["time"] == "2027-01-15T08:00:00.250Z"
