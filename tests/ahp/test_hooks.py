"""The hooks route over a real store, with ASGI by hand."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from agenthooksprotocol.server.hooks import Engine, Handlers
from starlette.types import ASGIApp

from app.ahp import hook_runs
from app.errors import Unavailable
from app.main import create_app
from app.settings import AnonymousSettings, Settings, SettingsError, TokenSettings
from app.store.content import ContentStore
from app.store.events import Arrival, Events, StoredEvent
from app.store.migrations import migrate
from tests import backends
from tests.ahp import hook_operator as operator
from tests.ahp.hook_examples import (
    TEXT,
    attachment,
    event,
    interception,
    message,
    observation,
)
from tests.ahp.test_uploads import stored
from tests.http.messages import (
    DISCONNECT,
    Header,
    Sent,
    chunk,
    http_scope,
    living,
    receive_nothing,
    receiving,
)
from tests.store.stores import put

pytestmark = pytest.mark.anyio

PATH = "/ahp/hooks"
SCOPE = "a"
HANDLER = "tests.ahp.hook_operator:handle"


@pytest.fixture(autouse=True)
def _fresh_operator() -> Iterator[None]:
    operator.reset()
    yield
    operator.reset()


def settings_for(folder: Path, **more: Any) -> Settings:
    settings = Settings(
        data_dir=folder / "data",
        tokens=(
            _token("host", "ahp.hooks"),
            _token("uploader", "ahp.upload"),
            _token("stranger", "ahp.hooks", scope="b"),
            _token("operator", "admin"),
        ),
        **(backends.settings_of(folder / "data") | more),
    )
    migrate(settings)
    return settings


def _token(name: str, permission: Any, scope: str = SCOPE) -> TokenSettings:
    return TokenSettings(
        name=name,
        scope=scope,
        permissions=frozenset({permission}),
        token_sha256=hashlib.sha256(name.encode()).hexdigest(),
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path)


@pytest.fixture
def handled(tmp_path: Path) -> Settings:
    return settings_for(tmp_path, event_handler=HANDLER)


def headers_for(size: int, token: str | None = "host", **more: bytes) -> list[Header]:
    given = {"content_type": b"application/json", "content_length": b"%d" % size, **more}
    headers = [(name.replace("_", "-").encode(), value) for name, value in given.items()]
    if token is not None:
        headers.append((b"authorization", b"Bearer " + token.encode()))
    return headers


async def post(app: ASGIApp, body: Any, *, method: str = "POST", **head: Any) -> Sent:
    octets = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = Sent()
    scope = http_scope(method, PATH, headers_for(len(octets), **head))
    await app(scope, receiving(chunk(octets, more=False)), sent)
    return sent


async def outcomes(app: ASGIApp) -> dict[str, float]:
    """What the metrics say, as an operator sees it."""
    sent = Sent()
    authorized = [(b"authorization", b"Bearer operator")]
    await app(http_scope("GET", "/metrics", authorized), receive_nothing, sent)
    lines = [line for line in sent.body.decode().splitlines() if "events_total{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


async def settled(store: ContentStore, event_id: str = "e") -> StoredEvent:
    """The event, once its outcome is on record."""
    found = await store.events.find(SCOPE, event_id)
    while found.outcome is None:
        await asyncio.sleep(0.01)
        found = await store.events.find(SCOPE, event_id)
    return found


def with_body(ref: str, ident: str = "e") -> Any:
    return event(id=ident, items=[message(TEXT, attachment(ref))])


# Accepting --------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R43")
async def test_an_observation_is_stored_with_what_it_refers_to(settings: Settings) -> None:
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        body = await put(store, b"bytes", SCOPE)
        sent = await post(app, octets := json.dumps(observation(with_body(body.ref))).encode())
        assert (sent.status, sent.body, sent.is_complete) == (204, b"", True)
        assert b"content-length" not in sent.headers
        assert b"content-type" not in sent.headers
        kept = await store.events.find(SCOPE, "e")
        assert (kept.type, kept.mode, kept.principal) == ("turn.start", "observe", "host")
        assert (kept.message, kept.outcome, kept.result) == (octets, None, None)
        assert [(a.ref, a.size, a.sha256) for a in kept.attachments] == [
            (body.ref, 5, hashlib.sha256(b"bytes").hexdigest())
        ]
        assert await outcomes(app) == {"accepted": 1}


@pytest.mark.requirement("AHP-R35")
async def test_an_upload_alone_sets_nothing_in_motion(handled: Settings) -> None:
    """A receipt confirms bytes; it is no event, and no handler hears of it."""
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        sent = Sent()
        head = headers_for(
            5,
            "uploader",
            content_type=b"application/octet-stream",
            ahp_content_sha256=hashlib.sha256(b"bytes").hexdigest().encode(),
        )
        scope = http_scope("POST", "/ahp/uploads", head)
        await app(scope, receiving(chunk(b"bytes", more=False)), sent)
        assert sent.status == 201
        assert await store.events.page(SCOPE) == []
    assert operator.seen == []


async def test_without_a_handler_an_interception_changes_nothing(settings: Settings) -> None:
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        asked = interception(event(id="e"), "deny")
        for outcome in ("accepted", "duplicate"):
            sent = await post(app, asked)
            assert (sent.status, sent.headers[b"content-type"]) == (200, b"application/json")
            assert sent.json == {
                "jsonrpc": "2.0",
                "id": "e",
                "result": {"protocolVersion": "draft", "effects": []},
            }
            assert (await outcomes(app))[outcome] == 1
        assert (await store.events.find(SCOPE, "e")).mode == "intercept"


@pytest.mark.requirement("AHP-R34", "AHP-R36", "AHP-R41", "AHP-R42")
@pytest.mark.parametrize("deliver", [observation, interception])
async def test_unknown_and_foreign_references_refuse_the_whole_event(
    settings: Settings, deliver: Any
) -> None:
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        mine, foreign = await put(store, b"x", SCOPE), await put(store, b"x", "b")
        removed = await put(store, b"x", SCOPE)
        await store.remove(SCOPE, removed.ref)
        answers = set()
        for ref in ("ref_unknown", foreign.ref, removed.ref, "\0"):
            both = [message(attachment(mine.ref), attachment(ref, ident="p3"))]
            sent = await post(app, deliver(event(id="e", items=both)))
            assert (sent.status, sent.json["code"]) == (404, "content_not_found")
            assert sent.headers[b"content-type"] == b"application/problem+json"
            answers.add(sent.body)
        assert len(answers) == 1
        assert await store.events.page(SCOPE) == []
        assert await outcomes(app) == {"content_not_found": 4}
        for ident in ("e", "f"):  # resolving is repeatable
            assert (await post(app, deliver(with_body(mine.ref, ident)))).status in (200, 204)


@pytest.mark.requirement("AHP-R34", "AHP-R38")
async def test_an_expired_reference_refuses_and_a_kept_one_opens(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, retention=timedelta(hours=1), event_handler=HANDLER)
    app = create_app(settings)
    async with living(app), stored(settings) as store:
        body = await put(store, b"bytes", SCOPE)
        assert (await post(app, observation(with_body(body.ref)))).status == 204
        with backends.rows_of(settings.data_dir) as rows:
            rows.execute("update content_refs set expires_at = created_at")
        assert (await store.sweep()).expired == 1
        sent = await post(app, observation(with_body(body.ref, "late")))
        assert (sent.status, sent.json["code"]) == (404, "content_not_found")
        async with operator.seen[0].attachments[0].open() as stream:
            assert b"".join([piece async for piece in stream]) == b"bytes"


async def test_what_looks_like_a_reference_in_opaque_json_is_none(settings: Settings) -> None:
    hidden = attachment("ref_unknown")
    tool = {"name": "t", "origin": "native", "input": {"items": [hidden]}}
    made = event("tool.before", native={"body": {"ref": "ref_unknown"}}, tool=tool)
    app = create_app(settings)
    async with living(app):
        assert (await post(app, observation(made))).status == 204


# Twice ------------------------------------------------------------------------------------------


async def test_an_event_is_kept_and_handled_once(handled: Settings) -> None:
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        for _ in range(2):
            assert (await post(app, observation(event(id="e")))).status == 204
        assert len(operator.seen) == 1
        assert len(await store.events.page(SCOPE)) == 1
        assert (await post(app, observation(event(id="e")), token="stranger")).status == 204
        assert [seen.scope for seen in operator.seen] == [SCOPE, "b"]
        assert await outcomes(app) == {"accepted": 2, "duplicate": 1}


async def test_another_event_of_the_same_id_is_refused(settings: Settings) -> None:
    app = create_app(settings)
    async with living(app):
        await post(app, observation(event(id="e")))
        for other in (observation(event("turn.end", id="e")), interception(event(id="e"))):
            sent = await post(app, other)
            assert (sent.status, sent.json["code"]) == (409, "event_mismatch")


async def test_the_observation_that_ends_an_interception_is_no_second_event(
    handled: Settings,
) -> None:
    """A host tells what became of an event under the same id, with what others changed in it."""
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        await post(app, interception(event(id="e")))
        sent = await post(app, observation(event(id="e", items=[message(TEXT)])))
        assert sent.status == 204
        assert len(operator.seen) == 1
        assert (await store.events.find(SCOPE, "e")).mode == "intercept"
        assert await outcomes(app) == {"accepted": 1, "retold": 1}


async def test_a_second_view_of_an_observed_event_is_no_second_event(handled: Settings) -> None:
    """Two subscriptions of one host may show the same event with different content."""
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        await post(app, observation(event(id="e")))
        sent = await post(app, observation(event(id="e", items=[message(TEXT)])))
        assert sent.status == 204
        assert len(operator.seen) == 1
        assert len(await store.events.page(SCOPE)) == 1


async def test_a_repeated_interception_gets_the_first_answer(handled: Settings) -> None:
    operator.behave(operator.giving([{"type": "deny", "reason": "no"}]))
    app = create_app(handled)
    asked = interception(event(id="e"), "deny")
    async with living(app):
        first = await post(app, asked)
        operator.behave(operator.giving(None))
        second = await post(app, asked)
    assert first.json["result"]["effects"] == [{"type": "deny", "reason": "no"}]
    assert second.body == first.body
    assert len(operator.seen) == 1


async def test_a_repetition_waits_for_the_run_that_has_begun(handled: Settings) -> None:
    gate = operator.Gate({"type": "deny", "reason": "no"})
    operator.behave(gate)
    app = create_app(handled)
    asked = interception(event(id="e"), "deny")
    async with living(app):
        first = asyncio.ensure_future(post(app, asked))
        await gate.entered.wait()
        second = asyncio.ensure_future(post(app, asked))
        await asyncio.sleep(0)
        gate.opened.set()
        bodies = {sent.body for sent in await asyncio.gather(first, second)}
    assert len(bodies) == 1
    assert len(operator.seen) == 1


async def test_a_repetition_waits_for_another_process(handled: Settings) -> None:
    """As far as this process knows, another one has accepted the event and still works on it."""
    app = create_app(handled)
    octets = json.dumps(interception(event(id="e"), "deny")).encode()
    async with living(app), stored(handled) as store:
        await _accepted_elsewhere(store, octets)
        waiting = asyncio.ensure_future(post(app, octets))
        await asyncio.sleep(0.05)
        await store.events.settle(SCOPE, "e", "done", b'{"answer":1}')
        assert (await waiting).body == b'{"answer":1}'
        assert operator.seen == []


async def test_a_repetition_after_the_process_died_has_failed(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, event_handler=HANDLER, event_timeout_seconds=0.01)
    app = create_app(settings)
    octets = json.dumps(interception(event(id="e"), "deny")).encode()
    async with living(app), stored(settings) as store:
        await _accepted_elsewhere(store, octets)
        sent = await post(app, octets)
        assert (sent.status, sent.json["error"]["code"]) == (200, -32004)
        assert (await store.events.find(SCOPE, "e")).outcome is None
        assert operator.seen == []


async def _accepted_elsewhere(store: ContentStore, octets: bytes) -> None:
    arrival = Arrival("e", "turn.start", "intercept", SCOPE, "host", octets, ())
    await store.events.accept(arrival)


# The operator's code ----------------------------------------------------------------------------


async def test_the_handler_gets_the_event_and_its_bytes(handled: Settings) -> None:
    app = create_app(handled)
    read: list[bytes] = []

    async def behaviour(given: Any) -> None:
        async with given.attachments[0].open() as stream:
            read.extend([piece async for piece in stream])

    operator.behave(behaviour)
    async with living(app), stored(handled) as store:
        body = await put(store, b"bytes", SCOPE)
        made = with_body(body.ref)
        assert (await post(app, observation(made))).status == 204
        (given,) = operator.seen
        assert (given.id, given.type, given.mode, given.scope) == (
            "e", "turn.start", "observe", SCOPE,
        )  # fmt: skip
        assert given.raw["event"] == made
        assert given.attachments[0].media_type == "image/png"
        assert read == [b"bytes"]
        assert (await settled(store)).outcome == "done"


@pytest.mark.parametrize(
    ("given", "effects"),
    [
        (None, []),
        ([], []),
        ({"type": "deny", "reason": "no"}, [{"type": "deny", "reason": "no"}]),
        (
            ({"type": "message", "text": "a"}, {"type": "deny", "reason": "b"}),
            [{"type": "message", "text": "a"}, {"type": "deny", "reason": "b"}],
        ),
    ],
)
async def test_effects_become_the_answer(handled: Settings, given: Any, effects: Any) -> None:
    operator.behave(operator.giving(given))
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        sent = await post(app, interception(event(id="e"), "deny", "message"))
        assert sent.status == 200
        assert sent.json["id"] == "e"
        assert sent.json["result"] == {"protocolVersion": "draft", "effects": effects}
        kept = await settled(store)
        assert (kept.outcome, kept.result) == ("done", sent.body)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([{"type": "deny", "reason": "no"}], -32603),  # not granted
        ([{"type": "nonsense"}], -32603),
        ([{"type": "message"}], -32603),
        ([{"type": "message", "text": object()}], -32603),
        ("effects", -32004),
        (7, -32004),
    ],
)
async def test_effects_that_are_not_valid_here_are_no_answer(
    handled: Settings, given: Any, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    operator.behave(operator.giving(given))
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        sent = await post(app, interception(event(id="e"), "message"))
        assert (sent.status, sent.json["error"]["code"]) == (200, code)
        assert "result" not in sent.json
        kept = await settled(store)
        assert (kept.outcome, kept.result) == ("failed", sent.body)
    assert "effects are not valid here" in caplog.text


@pytest.mark.parametrize(
    "error", [RuntimeError("secret"), SystemExit(1), asyncio.CancelledError(), TimeoutError()]
)
async def test_a_handler_that_fails_says_nothing_to_the_host(
    handled: Settings, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    operator.behave(operator.raising(error))
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        sent = await post(app, interception(event(id="e")))
        assert (sent.status, sent.json["error"]) == (
            200, {"code": -32004, "message": "Backend internal error"},
        )  # fmt: skip
        assert (await settled(store)).outcome == "failed"
        assert (await post(app, observation(event(id="f")))).status == 204
        assert (await settled(store, "f")).outcome == "failed"
        assert len(await store.events.page(SCOPE)) == 2
        assert await outcomes(app) == {"accepted": 1, "handler_failed": 1}
    failures = [line for line in caplog.records if line.message == "the handler failed"]
    assert [vars(line)["event"] for line in failures] == ["e", "f"]


async def test_what_a_handler_does_to_its_event_grants_nothing(handled: Settings) -> None:
    async def generous(given: Any) -> Any:
        given.raw["capabilities"]["effects"].append("deny")
        given.raw["event"].clear()
        return [{"type": "deny", "reason": "no"}]

    operator.behave(generous)
    app = create_app(handled)
    async with living(app):
        sent = await post(app, interception(event(id="e"), "message"))
    assert sent.json == {
        "jsonrpc": "2.0", "id": "e", "error": {"code": -32603, "message": "Internal error"},
    }  # fmt: skip


async def test_an_observation_has_no_effects(
    handled: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    operator.behave(operator.giving([]))
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        assert (await post(app, observation(event(id="e")))).status == 204
        assert (await settled(store)).outcome == "failed"
    assert "effects for an observation" in caplog.text


async def test_a_handler_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, event_handler=HANDLER, event_timeout_seconds=0.05)
    app = create_app(settings)
    gate = operator.Gate()
    operator.behave(gate)
    async with living(app), stored(settings) as store:
        sent = await post(app, interception(event(id="e")))
        assert (sent.status, sent.json["error"]["code"]) == (200, -32004)
        assert (await post(app, observation(event(id="f")))).status == 204
        assert (await settled(store)).outcome == "timed_out"
        assert (await settled(store, "f")).outcome == "timed_out"
        assert (await settled(store)).result == sent.body


async def test_a_handler_that_will_not_be_ended_delays_nobody(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, event_handler=HANDLER, event_timeout_seconds=0.05)
    app = create_app(settings)
    cancelled = asyncio.Event()

    async def stubborn(_: Any) -> None:
        while True:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                if cancelled.is_set():
                    raise
                cancelled.set()

    operator.behave(stubborn)
    async with living(app), stored(settings) as store:
        sent = await post(app, interception(event(id="e")))
        assert sent.json["error"]["code"] == -32004
        assert (await settled(store)).outcome == "timed_out"
    assert cancelled.is_set()


async def test_a_slow_observation_is_answered_before_its_handler_ends(
    handled: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_runs, "OBSERVE_SECONDS", 0.01)
    gate = operator.Gate()
    operator.behave(gate)
    app = create_app(handled)
    async with stored(handled) as store:
        async with living(app):
            assert (await post(app, observation(event(id="e")))).status == 204
            assert (await store.events.find(SCOPE, "e")).outcome is None
            gate.opened.set()
        # The end of the application waits for its runs.
        assert (await store.events.find(SCOPE, "e")).outcome == "done"


async def test_an_event_whose_turn_never_comes_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_runs, "MAX_RUNS", 1)
    monkeypatch.setattr(hook_runs, "OBSERVE_SECONDS", 0.01)
    settings = settings_for(tmp_path, event_handler=HANDLER, event_timeout_seconds=0.3)
    app = create_app(settings)

    async def stubborn(_: Any) -> None:
        while not gate.opened.is_set():
            try:
                await gate.opened.wait()
            except asyncio.CancelledError:
                continue

    gate = operator.Gate()
    operator.behave(stubborn)
    async with living(app), stored(settings) as store:
        assert (await post(app, observation(event(id="e")))).status == 204
        assert (await post(app, observation(event(id="f")))).status == 204
        assert [seen.id for seen in operator.seen] == ["e"]
        assert (await settled(store, "f")).outcome == "timed_out"
        gate.opened.set()


async def test_a_host_that_goes_does_not_end_the_handler(handled: Settings) -> None:
    gate = operator.Gate()
    operator.behave(gate)
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        asked = asyncio.ensure_future(post(app, interception(event(id="e"))))
        await gate.entered.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        gate.opened.set()
        kept = await settled(store)
        assert kept.outcome == "done"
        assert json.loads(kept.result or b"")["result"]["effects"] == []


async def test_an_outcome_that_cannot_be_recorded_is_logged(
    handled: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def settle(*_: object) -> None:
        raise Unavailable("database_busy", "Try again.")

    monkeypatch.setattr(Events, "settle", settle)
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        assert (await post(app, interception(event(id="e")))).status == 200
        assert (await store.events.find(SCOPE, "e")).outcome is None
    (line,) = [line for line in caplog.records if "could not be recorded" in line.message]
    assert (line.levelno, vars(line)["code"]) == (logging.WARNING, "database_busy")


@pytest.mark.parametrize("deliver", [observation, interception])
async def test_a_large_event_is_handled_like_any(handled: Settings, deliver: Any) -> None:
    operator.behave(
        operator.giving([{"type": "deny", "reason": "no"}] if deliver is interception else None)
    )
    long = {**TEXT, "text": "x" * 300_000}
    made = event(id="e", items=[message(long)])
    sent_message = interception(made, "deny") if deliver is interception else observation(made)
    app = create_app(handled)
    async with living(app), stored(handled) as store:
        sent = await post(app, sent_message)
        assert sent.status == (200 if deliver is interception else 204)
        assert (await settled(store)).outcome == "done"
        wrong = await post(app, {**sent_message, "jsonrpc": "1.0"})
        assert wrong.json["error"]["code"] == -32600


@pytest.mark.parametrize("name", ["tests.ahp.hook_operator:nothing", "tests.ahp.absent:handle"])
def test_a_handler_that_is_not_there_is_told_at_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="event_handler"):
        create_app(settings_for(tmp_path, event_handler=name))


# Errors -----------------------------------------------------------------------------------------


def wrong_messages() -> list[Any]:
    """Messages that deliver nothing, of every kind that JSON-RPC tells apart."""
    asked, told = interception(event(id="e")), observation(event(id="e"))
    other_version = {**asked["params"], "protocolVersion": "2099-01-01"}
    misplaced = interception(event("turn.end", id="e"))
    return [
        b"", b"{", b"\xff", b'{"a":1,"a":2}', b"[NaN]", [], [asked], 7, {},
        {**asked, "jsonrpc": "1.0"}, {**asked, "method": 7}, {**asked, "id": 1.5},
        {**asked, "id": "other"}, {**asked, "method": "hooks/other"}, misplaced,
        {**asked, "params": other_version}, {**asked, "params": {}},
        {**told, "id": 1}, {**told, "params": {}}, {**told, "method": "hooks/other"},
        {**told, "params": {**told["params"], "protocolVersion": "2099-01-01"}},
        {k: v for k, v in asked.items() if k != "id"},
        {"jsonrpc": "2.0", "id": 1, "method": "hooks/configuration", "params": {}},
        {"jsonrpc": "2.0", "id": 1, "method": "hooks/capabilities", "params": {}},
        {"jsonrpc": "2.0", "method": "hooks/configuration", "params": {}},
    ]  # fmt: skip


async def test_errors_are_those_of_the_sdks_receiver(settings: Settings) -> None:
    app = create_app(settings)
    configuration: Any = {"subscriptions": [{"events": ["*"], "mode": "observe",
                                             "content": {"default": "body"}}]}  # fmt: skip
    engine = Engine(Handlers(), configuration=configuration)
    async with living(app), stored(settings) as store:
        for wrong in wrong_messages():
            octets = wrong if isinstance(wrong, bytes) else json.dumps(wrong).encode()
            expected = await engine.handle(octets)
            sent = await post(app, octets)
            if expected is None:
                assert (sent.status, sent.body) == (204, b""), octets
            else:
                assert (sent.status, sent.json) == (200, expected), octets
                assert "error" in expected
        assert await store.events.page(SCOPE) == []
        counted = await outcomes(app)
        assert set(counted) == {
            "parse_error", "invalid_request", "method_not_found", "invalid_params",
            "unsupported_version", "unsupported_event", "ignored",
        }  # fmt: skip


async def test_a_number_beyond_a_double_is_an_error_of_the_parameters(settings: Settings) -> None:
    app = create_app(settings)
    asked = json.dumps(interception(event(id="e", native="N"))).replace('"N"', "1e999")
    async with living(app):
        assert (await post(app, asked.encode())).json["error"]["code"] == -32602


@pytest.mark.parametrize("params", [[], None, "x"])
async def test_parameters_that_are_no_object_are_an_error(settings: Settings, params: Any) -> None:
    """The SDK's own validator stumbles over them."""
    app = create_app(settings)
    async with living(app):
        sent = await post(app, {**interception(event(id="e")), "params": params})
        assert (sent.status, sent.json["error"]["code"]) == (200, -32602)
        told = await post(app, {**observation(event(id="e")), "params": params})
        assert (told.status, told.body) == (204, b"")


@pytest.mark.parametrize(("ident", "code"), [("\0", "event_id"), ("x" * 2000, "event_id")])
async def test_an_id_that_cannot_be_recorded_is_refused(
    settings: Settings, ident: str, code: str
) -> None:
    app = create_app(settings)
    async with living(app):
        sent = await post(app, observation(event(id=ident)))
        assert sent.status == 400
        assert sent.json["code"].startswith(code)


# Configuration ----------------------------------------------------------------------------------

ASKED = {
    "jsonrpc": "2.0",
    "id": "c",
    "method": "hooks/configuration",
    "params": {"protocolVersion": "draft"},
}


async def test_the_configuration_tells_where_attachments_go(settings: Settings) -> None:
    app = create_app(settings)
    async with living(app):
        sent = await post(app, ASKED)
        assert sent.status == 200
        assert sent.json["id"] == "c"
        (subscription,) = sent.json["result"]["configuration"]["subscriptions"]
        assert (subscription["events"], subscription["mode"]) == (["*"], "observe")
        assert subscription["upload"] == {
            "endpoint": "http://127.0.0.1:8080/ahp/uploads",
            "timeoutMs": 30_000,
            "maxBytes": 1 << 30,
        }
        assert await outcomes(app) == {"configuration": 1}


async def test_subscriptions_are_those_of_the_settings(tmp_path: Path) -> None:
    chosen: Any = [
        {"events": ["turn.start", "tool.*"], "mode": "intercept", "timeout_ms": 5000,
         "failure_policy": "fail-closed", "content": {"default": "omit", "images": "body"},
         "tool_kinds": ["shell"], "paths": ["/w"], "include_native": True},
        {"events": ["turn.end"], "mode": "observe"},
    ]  # fmt: skip
    settings = settings_for(
        tmp_path, event_subscriptions=chosen, public_url="https://in.test/x", upload_timeout_ms=7,
        max_upload_bytes=5,
    )  # fmt: skip
    app = create_app(settings)
    upload = {"endpoint": "https://in.test/x/ahp/uploads", "timeoutMs": 7, "maxBytes": 5}
    async with living(app):
        sent = await post(app, ASKED)
    assert sent.json["result"]["configuration"]["subscriptions"] == [
        {"events": ["turn.start", "tool.*"], "mode": "intercept", "timeoutMs": 5000,
         "failurePolicy": "fail-closed", "content": {"default": "omit", "images": "body"},
         "includeNative": True, "filters": {"toolKinds": ["shell"], "paths": ["/w"]},
         "upload": upload},
        {"events": ["turn.end"], "mode": "observe", "content": {"default": "body"},
         "includeNative": False, "upload": upload},
    ]  # fmt: skip


async def test_plain_http_over_a_network_is_not_advertised(tmp_path: Path) -> None:
    app = create_app(settings_for(tmp_path, host="192.0.2.1"))
    async with living(app):
        sent = await post(app, ASKED)
    assert "upload" not in sent.json["result"]["configuration"]["subscriptions"][0]


@pytest.mark.parametrize("name", ["turn.end", "turn.nonsense"])
def test_a_subscription_that_the_draft_does_not_have_is_told_at_start(
    tmp_path: Path, name: str
) -> None:
    chosen: Any = [{"events": [name], "mode": "intercept"}]
    with pytest.raises(SettingsError, match=r"event_subscriptions\.0"):
        create_app(settings_for(tmp_path, event_subscriptions=chosen))


# The head ---------------------------------------------------------------------------------------


@pytest.mark.requirement("AHP-R48", "AHP-R52")
@pytest.mark.parametrize(
    ("method", "head", "status", "code"),
    [
        ("GET", {"token": None}, 405, "method_not_allowed"),
        ("POST", {"token": None}, 401, "missing_credential"),
        ("POST", {"token": "wrong"}, 401, "invalid_credential"),
        ("POST", {"token": "uploader"}, 403, "insufficient_scope"),
        ("POST", {"content_type": b"text/plain"}, 400, "content_type"),
        ("POST", {"content_type": b"application/jsonx"}, 400, "content_type"),
        ("POST", {"content_encoding": b"gzip"}, 400, "content_encoding"),
        ("POST", {"content_length": b"2001"}, 413, "too_large"),
    ],
)
async def test_a_refusal_is_decided_from_the_head_alone(
    tmp_path: Path, method: str, head: dict[str, Any], status: int, code: str
) -> None:
    app = create_app(settings_for(tmp_path, max_event_bytes=2000))
    sent = Sent()

    async def receive() -> Any:
        assert sent.body, "the body was asked for before the answer"
        return chunk(b"", more=False)

    async with living(app):
        await app(http_scope(method, PATH, headers_for(10, **head)), receive, sent)
        assert (sent.status, sent.json["code"]) == (status, code)
        assert sent.headers[b"content-type"] == b"application/problem+json"
        assert sent.is_complete
        assert await outcomes(app) == {code: 1}
    if status in (401, 403):
        challenge = sent.headers[b"www-authenticate"].decode()
        assert "/.well-known/oauth-protected-resource/ahp/hooks" in challenge


async def test_content_type_is_said_once(settings: Settings) -> None:
    app = create_app(settings)
    octets = json.dumps(observation(event())).encode()
    for types in ([], [b"application/json", b"application/json"]):
        headers = [h for h in headers_for(len(octets)) if h[0] != b"content-type"]
        headers += [(b"content-type", value) for value in types]
        sent = Sent()
        async with living(app):
            await app(http_scope("POST", PATH, headers), receiving(chunk(octets, more=False)), sent)
        assert (sent.status, sent.json["code"]) == (400, "content_type")


@pytest.mark.parametrize(
    "content_type", [b"application/json; charset=utf-8", b"Application/JSON", b"application/json ;"]
)
async def test_parameters_of_the_content_type_are_tolerated(
    settings: Settings, content_type: bytes
) -> None:
    app = create_app(settings)
    async with living(app):
        sent = await post(app, observation(event()), content_type=content_type)
        assert sent.status == 204


async def test_the_length_is_counted_too(tmp_path: Path) -> None:
    app = create_app(settings_for(tmp_path, max_event_bytes=2000, drain_seconds=0.01))
    headers = [h for h in headers_for(0) if h[0] != b"content-length"]
    headers.append((b"transfer-encoding", b"chunked"))
    sent = Sent()
    async with living(app):
        receive = receiving(chunk(bytes(1500)), chunk(bytes(501)))
        await app(http_scope("POST", PATH, headers), receive, sent)
    assert (sent.status, sent.json["code"]) == (413, "too_large")


async def test_a_host_that_goes_in_the_middle_leaves_nothing(settings: Settings) -> None:
    app = create_app(settings)
    octets = json.dumps(observation(event(id="e"))).encode()
    async with living(app), stored(settings) as store:
        sent = Sent()
        receive = receiving(chunk(octets[:-1]), DISCONNECT)
        await app(http_scope("POST", PATH, headers_for(len(octets))), receive, sent)
        assert sent.messages == []
        assert await store.events.page(SCOPE) == []
        assert await outcomes(app) == {"disconnected": 1}


@pytest.mark.requirement("AHP-R48")
async def test_each_endpoint_has_a_path_and_a_permission_of_its_own(tmp_path: Path) -> None:
    anonymous = AnonymousSettings(scope="guests", permissions=frozenset({"ahp.upload"}))
    app = create_app(settings_for(tmp_path, anonymous=anonymous, hooks_paths=("/in/events",)))
    octets = json.dumps(observation(event())).encode()
    async with living(app):
        for path, status in (("/in/events", 403), ("/ahp/hooks", 404)):
            sent = Sent()
            headers = headers_for(len(octets), token=None)
            await app(http_scope("POST", path, headers), receiving(chunk(octets, more=False)), sent)
            assert sent.status == status
        sent = Sent()
        headers = headers_for(0, token="host")
        await app(http_scope("POST", "/ahp/uploads", headers), receive_nothing, sent)
        assert (sent.status, sent.json["code"]) == (403, "insufficient_scope")


async def test_a_body_is_in_no_log(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(settings)
    secret = {**TEXT, "text": "do not log this"}
    asked = interception(event(id="e", items=[message(secret)]))
    caplog.set_level(logging.DEBUG)
    async with living(app):
        await post(app, asked)
        await post(app, {**copy.deepcopy(asked), "id": "other"})
    assert "do not log this" not in caplog.text
    assert "do not log this" not in repr([vars(line) for line in caplog.records])
