"""Publishing over HTTP: what stands in an event, and which answers count."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any

import httpx
import pytest

from app.sender.attachments import Attachments
from app.sender.errors import ConfigurationError
from app.sender.hook_calls import MAX_REPLY_BYTES, Event, HookCalls, HookEndpoint
from app.sender.interception import Reply, Settlement, Turn, intercept
from app.sender.observation import observe
from app.sender.receivers import Receiver
from tests.sender.deliveries import (
    PIXELS,
    Counted,
    Uploads,
    attached,
    delivery,
    messages_of,
    parts_in,
    receiver,
    refused,
    text,
)
from tests.sender.receivers import JSON, Exchange, Script, answer, reset_after, scripted
from tests.sender.receivers import Receiver as Scripted

pytestmark = pytest.mark.anyio

SHOT = messages_of(text("t1", "look at this"), attached("shot"))
FIELDS = {
    "id": "event-1",
    "source": "urn:example:host",
    "type": "model.request.before",
    "time": "2026-01-01T00:00:00Z",
    "harness": {"name": "host", "version": "1"},
    "model": {"provider": "p", "id": "m"},
    "attempt": {"id": "attempt-1", "number": 1},
    "params": {},
}
MAY_EDIT = {
    "effects": ["deny", "modify"],
    "modify": {"request": {"replace": True, "merge": True}},
}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        headers={"Authorization": "Bearer of-the-client", "X-Own": "1"}, cookies={"c": "1"}
    ) as lent:
        yield lent


def event(**more: Any) -> Event:
    return Event(fields={**FIELDS, **more}, capabilities=MAY_EDIT)


def endpoint(server: Scripted, path: str = "/hooks") -> HookEndpoint:
    return HookEndpoint(server.url + path, allow_loopback_http=True)


def result(*effects: Mapping[str, Any], **more: Any) -> bytes:
    whole = {"protocolVersion": "draft", "effects": list(effects)}
    return json.dumps({"jsonrpc": "2.0", "id": "event-1", "result": whole, **more}).encode()


async def observed(
    one: Receiver, calls: HookCalls, messages: Any = SHOT, sender: Uploads | None = None
) -> Turn:
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(messages, [one], attachments, sender or Uploads()) as running,
    ):
        [turn] = await observe(running, calls)
    return turn


async def settled(one: Receiver, calls: HookCalls) -> Settlement:
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, Uploads()) as running,
    ):
        return await intercept(running, calls)


async def answered(script: Script, client: httpx.AsyncClient) -> Turn:
    """The turn of an interceptor that answers by `script`."""
    one = receiver(mode="intercept")
    async with scripted(script) as server:
        settlement = await settled(one, HookCalls(event(), {one: endpoint(server)}, client))
    return settlement.turns[0]


def sent(exchange: Exchange) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(bytes(exchange.body))
    return message


async def test_ahp_s21_an_observer_gets_the_event_with_its_ready_reference(
    client: httpx.AsyncClient,
) -> None:
    one = receiver()
    async with scripted(answer(204)) as server:
        turn = await observed(one, HookCalls(event(), {one: endpoint(server)}, client))
    assert (turn.error, turn.reply) == (None, None)
    message = sent(server.exchanges[0])
    assert (message["method"], "id" in message) == ("hooks/observe", False)
    assert message["params"]["protocolVersion"] == "draft"
    shown = message["params"]["event"]
    assert shown["items"][0]["parts"][1]["body"] == {"ref": "reference-1"}
    assert {name: shown[name] for name in FIELDS} == FIELDS


async def test_ahp_s48_only_the_credential_for_events_is_sent(client: httpx.AsyncClient) -> None:
    async def credential() -> str:
        return "Bearer for-events"

    one = receiver()
    async with scripted(answer(204)) as server:
        where = HookEndpoint(server.url + "/a?b=%2F", credential, allow_loopback_http=True)
        await observed(one, HookCalls(event(), {one: where}, client))
    exchange = server.exchanges[0]
    assert exchange.header("authorization") == "Bearer for-events"
    assert (exchange.header("cookie"), exchange.header("x-own")) == (None, None)
    assert exchange.target == b"/a?b=%2F"
    assert "for-events" not in repr(where)


async def test_the_clients_own_credential_is_not_sent(client: httpx.AsyncClient) -> None:
    one = receiver()
    async with scripted(answer(204)) as server:
        await observed(one, HookCalls(event(), {one: endpoint(server)}, client))
    assert server.exchanges[0].header("authorization") is None


@pytest.mark.parametrize(
    ("explicit", "include_native", "there"),
    [
        ((), True, False),
        (("native",), False, False),
        (("native",), True, True),
    ],
)
async def test_ahp_s47_native_is_there_only_if_asked_for_and_projected(
    explicit: Collection[str], include_native: bool, there: bool
) -> None:
    native: Any = [1, "any JSON", None]
    one = receiver(include_native=include_native)
    own = Event(fields={**FIELDS, "native": native}, explicit=lambda _: explicit)
    shown = await shown_to(one, own)
    assert shown.get("native", "absent") == (native if there else "absent")
    assert shown["harness"] == FIELDS["harness"]


async def shown_to(
    one: Receiver, own: Event, messages: Any = SHOT, sender: Uploads | None = None
) -> dict[str, Any]:
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(messages, [one], attachments, sender or Uploads()) as running,
    ):
        return own.shown(await running.publication(one))


async def test_ahp_s46_opaque_json_is_dropped_unless_the_host_projects_it() -> None:
    fields = {
        **FIELDS,
        "type": "tool.after",
        "tool": {"name": "t", "input": {"words": "look at this"}, "output": PIXELS.hex()},
        "extensions": {"example.com": "look at this"},
        "params": {"prompt": "look at this"},
    }
    shown = await shown_to(receiver(selection="omit"), Event(fields=fields))
    assert "look at this" not in json.dumps(shown)
    assert shown["tool"] == {"name": "t", "input": {}}


async def test_ahp_s46_a_copy_of_withheld_content_is_dropped_from_what_is_projected() -> None:
    params = {"prompt": "look at this", "deep": ["so: look at this!", {"temperature": 1}]}
    own = Event(fields={**FIELDS, "params": params}, explicit=lambda _: ("params",))
    shown = await shown_to(receiver(selection="omit"), own)
    assert shown["params"] == {"deep": [None, {"temperature": 1}]}
    assert (await shown_to(receiver(), own))["params"] == params


async def test_ahp_s23_bytes_that_could_not_be_uploaded_do_not_come_inline() -> None:
    encoded = base64.b64encode(PIXELS).decode()
    own = Event(
        fields={**FIELDS, "params": {"image": f"data:image/png;base64,{encoded}"}},
        explicit=lambda _: ("params",),
    )
    sender = Uploads({"https://one.example/upload": refused})
    shown = await shown_to(receiver(on_failed="gap"), own, sender=sender)
    assert shown["items"][0]["parts"][1]["gap"] == {"reason": "transfer_failed"}
    assert shown["params"] == {}


async def test_ahp_s31_the_reference_of_another_receiver_is_in_no_opaque_json() -> None:
    one, two = receiver("one"), receiver("two")
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one, two], attachments, Uploads()) as running,
    ):
        refs = [(await running.publication(each)).references["shot"] for each in (one, two)]
        own = Event(fields={**FIELDS, "params": {"refs": refs}}, explicit=lambda _: ("params",))
        shown = [own.shown(await running.publication(each)) for each in (one, two)]
    assert [each["params"]["refs"] for each in shown] == [[refs[0], None], [None, refs[1]]]


async def test_ahp_s46_a_content_part_beside_the_messages_is_refused() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        Event(fields={**FIELDS, "other": [{"parts": [text("t2", "past the selection")]}]})
    assert refusal.value.code == "unprojected_content"


async def test_messages_stand_where_the_event_has_them() -> None:
    fields = {"message": {"channel": "c", "sender": "s"}, "gaps": [{"path": "/a", "reason": "b"}]}
    own = Event(fields=fields, slot=("message", "messages"))
    shown = await shown_to(receiver(), own)
    assert shown["message"]["channel"] == "c"
    assert [part["id"] for part in shown["message"]["messages"][0]["parts"]] == ["t1", "shot"]
    assert "messages" not in fields["message"]


async def test_an_interceptor_answers_with_an_edit(client: httpx.AsyncClient) -> None:
    one = receiver(mode="intercept")
    changed = [{"id": "m1", "role": "user", "parts": [text("t1", "look there")]}]
    added = [{"id": "m2", "role": "tool", "parts": [text("t2", "more")]}]
    replaced = {"type": "modify", "target": "request", "operation": "replace", "value": changed}
    merged = {"type": "modify", "target": "request", "operation": "merge", "value": added}
    async with scripted(answer(200, result(replaced, merged), JSON)) as server:
        settlement = await settled(one, HookCalls(event(), {one: endpoint(server)}, client))
    message = sent(server.exchanges[0])
    assert (message["id"], message["method"]) == ("event-1", "hooks/intercept")
    assert message["params"]["capabilities"] == MAY_EDIT
    assert [part["text"] for part in parts_in(settlement.messages)] == ["look there", "more"]
    assert settlement.ended_by is None


async def test_a_denial_ends_the_chain(client: httpx.AsyncClient) -> None:
    turn = await answered(answer(200, result({"type": "deny", "reason": "no"}), JSON), client)
    assert turn.reply == Reply(
        None, True, {"protocolVersion": "draft", "effects": [{"type": "deny", "reason": "no"}]}
    )


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (answer(200, result(id="event-2"), JSON), "uncorrelated_reply"),
        (answer(200, b"<html>", JSON), "malformed_reply"),
        (answer(200, b"[]", JSON), "malformed_reply"),
        (answer(200, b"7", JSON), "malformed_reply"),
        (answer(200, b"[" * 100_000, JSON), "malformed_reply"),
        (answer(200, result({"type": "unheard-of"}), JSON), "malformed_reply"),
        (
            answer(200, result(result={"protocolVersion": "draft"}), JSON),
            "malformed_reply",
        ),
        (
            answer(
                200, b'{"jsonrpc":"2.0","id":"event-1","error":{"code":-32004,"message":""}}', JSON
            ),
            "receiver_error",
        ),
        (answer(200, result({"type": "message", "text": "t"}), JSON), "effect_not_granted"),
        (answer(404), "event_refused"),
        (answer(307, headers={"Location": "/elsewhere"}), "event_refused"),
        (answer(200, b" " * (MAX_REPLY_BYTES + 1), JSON), "reply_too_large"),
        (reset_after, "unreachable"),
    ],
)
async def test_ahp_s44_an_answer_that_does_not_count_is_a_hook_failure(
    script: Script, code: str, client: httpx.AsyncClient
) -> None:
    turn = await answered(script, client)
    assert turn.error is not None
    assert turn.error.code == code


async def test_an_edit_that_was_not_granted_is_a_hook_failure(client: httpx.AsyncClient) -> None:
    one = receiver(mode="intercept")
    effect = {"type": "modify", "target": "request", "operation": "merge", "value": []}
    own = Event(
        fields=FIELDS,
        capabilities={
            "effects": ["modify"],
            "modify": {"request": {"replace": True, "merge": False}},
        },
    )
    async with scripted(answer(200, result(effect), JSON)) as server:
        settlement = await settled(one, HookCalls(own, {one: endpoint(server)}, client))
    error = settlement.turns[0].error
    assert error is not None
    assert error.code == "effect_not_granted"


async def test_ahp_c14_an_edit_with_content_that_the_document_forbids_is_a_hook_failure(
    client: httpx.AsyncClient,
) -> None:
    """JSON in a spelling that the draft's schema lets through."""
    part = attached("j", "application/x-ndjson", selection="body", body={"ref": "reference-1"})
    effect = {
        "type": "modify",
        "target": "request",
        "operation": "replace",
        "value": [{"id": "m1", "role": "user", "parts": [part]}],
    }
    turn = await answered(answer(200, result(effect), JSON), client)
    assert turn.error is not None
    assert turn.error.code == "malformed_reply"


async def test_an_event_that_the_draft_does_not_know_is_not_sent(
    client: httpx.AsyncClient,
) -> None:
    one = receiver()
    async with scripted(answer(204)) as server:
        calls = HookCalls(event(type="unheard.of"), {one: endpoint(server)}, client)
        turn = await observed(one, calls)
    assert turn.error is not None
    assert (turn.error.code, server.exchanges) == ("invalid_event", [])


@pytest.mark.parametrize(
    "url", ["http://events.example/", "https://user@events.example/", "/hooks", "http://127.0.0.1"]
)
def test_an_event_endpoint_is_https_unless_loopback_is_allowed(url: str) -> None:
    with pytest.raises(ConfigurationError):
        HookEndpoint(url)
