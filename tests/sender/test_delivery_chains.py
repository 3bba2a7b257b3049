"""Interception and observation: the order of calls, edits, policies, and what is never a gate."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from app.ahp.content import Message, parse_messages
from app.sender.attachments import Attachments
from app.sender.edits import EditRefused, accept_edit
from app.sender.interception import HookFailure, Reply, Settlement, intercept
from app.sender.observation import Observations, observe
from app.sender.publication import Publication, PublicationState
from app.sender.receivers import Receiver
from tests.sender.deliveries import (
    Counted,
    Uploads,
    attached,
    delivery,
    edited,
    forever,
    messages_of,
    parts_in,
    receiver,
    refused,
    text,
)

pytestmark = pytest.mark.anyio

SHOT = messages_of(text("t1", "look at this"), attached("shot"))


def interceptor(name: str, **more: Any) -> Receiver:
    return receiver(name, mode="intercept", **more)


class Host:
    """A publish callback that notes who was called with what, and answers as told."""

    def __init__(self, **replies: Any) -> None:
        self.called: list[str] = []
        self.seen: dict[str, Publication] = {}
        self.running = self.most = 0
        self._replies = replies

    async def __call__(self, publication: Publication) -> Reply | None:
        name = publication.receiver.name
        self.called.append(name)
        self.seen[name] = publication
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0)
            reply = self._replies.get(name)
            return await reply(publication) if callable(reply) else reply
        finally:
            self.running -= 1


async def settled(
    receivers: Sequence[Receiver],
    host: Host,
    sender: Uploads,
    messages: Sequence[Message] = SHOT,
    **more: Any,
) -> Settlement:
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(messages, receivers, attachments, sender, **more) as running,
    ):
        return await intercept(running, host)


def replies_with(*parts: Any) -> Any:
    async def reply(publication: Publication) -> Reply:
        shown = {part["id"]: part for part in parts_in(publication.messages)}
        chosen = [shown[part] if isinstance(part, str) else part for part in parts]
        return Reply(edited(publication.messages, *chosen))

    return reply


async def test_ahp_s26_s27_uploads_are_at_once_and_interceptors_in_turn() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    names = ["a", "b", "c"]
    sender = Uploads({f"https://{name}.example/upload": wait for name in names})
    host = Host()
    settling = asyncio.create_task(settled([interceptor(name) for name in names], host, sender))
    while sender.running < 3:
        await asyncio.sleep(0)
    assert host.called == []
    release.set()
    await settling
    assert host.called == names
    assert (sender.most, host.most) == (3, 1)


async def test_ahp_s27_a_later_failure_policy_is_applied_at_its_turn_only() -> None:
    sender = Uploads({"https://b.example/upload": refused})
    receivers = [
        interceptor("a"),
        interceptor("b", failure_policy="fail-closed"),
        interceptor("c"),
    ]
    host = Host()
    settlement = await settled(receivers, host, sender)
    assert host.called == ["a"]
    assert [turn.publication.state for turn in settlement.turns] == [
        PublicationState.READY,
        PublicationState.FAILED,
    ]
    assert settlement.ended_by is receivers[1]


async def test_ahp_s27_an_interceptor_that_ends_the_chain_hides_later_failures() -> None:
    sender = Uploads({"https://b.example/upload": refused})
    receivers = [interceptor("a"), interceptor("b", failure_policy="fail-closed")]
    settlement = await settled(receivers, Host(a=Reply(stop=True)), sender)
    assert settlement.ended_by is receivers[0]
    assert len(settlement.turns) == 1


async def test_ahp_s22_a_failed_delivery_that_fails_open_is_passed_over() -> None:
    sender = Uploads({"https://a.example/upload": refused})
    host = Host()
    settlement = await settled([interceptor("a"), interceptor("b")], host, sender)
    assert (host.called, settlement.ended_by) == (["b"], None)


async def test_ahp_s22_a_suppressed_delivery_is_no_failure() -> None:
    sender = Uploads({"https://a.example/upload": refused})
    one = interceptor("a", on_failed="suppress", failure_policy="fail-closed")
    settlement = await settled([one], Host(), sender)
    assert settlement.ended_by is None
    assert settlement.turns[0].failed is False


async def test_ahp_s29_a_later_interceptor_does_not_get_what_an_earlier_one_removed() -> None:
    host, sender = Host(a=replies_with("t1")), Uploads()
    settlement = await settled([interceptor("a"), interceptor("b")], host, sender)
    assert len(sender.bodies) == 2
    assert host.seen["a"].references.keys() == {"shot"}
    assert host.seen["b"].references == {}
    assert [part["id"] for part in parts_in(settlement.messages)] == ["t1"]


async def test_ahp_c15_an_edit_carries_references_and_each_receiver_gets_its_own() -> None:
    host, sender = Host(a=replies_with("shot", text("t1", "edited"))), Uploads()
    settlement = await settled([interceptor("a"), interceptor("b")], host, sender)
    shown = parts_in(host.seen["b"].messages)
    assert [part["id"] for part in shown] == ["shot", "t1"]
    assert shown[1]["text"] == "edited"
    assert host.seen["a"].references != host.seen["b"].references
    assert parts_in(settlement.messages)[0] == attached("shot")


async def test_ahp_c15_a_reference_in_a_part_of_another_id_is_still_its_attachment() -> None:
    async def quote(publication: Publication) -> Reply:
        shot = parts_in(publication.messages)[1]
        return Reply(edited(publication.messages, shot, {**shot, "id": "quoted"}))

    host, sender = Host(a=quote), Uploads()
    await settled([interceptor("a"), interceptor("b")], host, sender)
    assert host.seen["b"].references.keys() == {"shot", "quoted"}
    assert len(set(host.seen["b"].references.values())) == 1
    assert len(sender.bodies) == 2


READY = {"selection": "body"}


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([attached("new", **READY, body={"ref": "made-up"})], "reference_unknown"),
        ([attached("shot", **READY, body={"ref": "made-up"})], "reference_unknown"),
        ([attached("shot", "image/gif", **READY, body={"ref": "REF"})], "reference_rebound"),
        ([attached("song", "image/png", **READY, body={"ref": "REF"})], "reference_rebound"),
        ([attached("shot", category="x", **READY, body={"ref": "REF"})], "category_changed"),
        ([attached("shot")], "attachment_changed"),
        ([attached("shot", **READY, gap={"reason": "because"})], "attachment_changed"),
        ([attached("unheard-of")], "attachment_changed"),
        ([text("shot", "words")], "category_changed"),
    ],
)
async def test_ahp_c15_an_edit_that_rebinds_invents_or_changes_an_attachment_is_refused(
    parts: list[dict[str, Any]], code: str
) -> None:
    async def edit(publication: Publication) -> Reply:
        ref = publication.references["shot"]
        own = json.loads(json.dumps(parts).replace('"REF"', json.dumps(ref)))
        return Reply(edited(publication.messages, *own))

    host, sender = Host(a=edit), Uploads()
    one = interceptor("a", failure_policy="fail-closed")
    messages = messages_of(attached("shot"), attached("song", "audio/ogg"))
    async with (
        Attachments({"shot": Counted().source, "song": Counted(b"la").source}) as attachments,
        delivery(messages, [one], attachments, sender) as running,
    ):
        settlement = await intercept(running, host)
    error = settlement.turns[0].error
    assert isinstance(error, EditRefused)
    assert error.code == code
    assert settlement.messages == messages
    assert settlement.ended_by is one


async def test_ahp_c15_text_under_the_id_of_an_attachment_is_refused() -> None:
    """Also where the receiver was not shown that attachment, or an earlier edit removed it."""
    host = Host(a=replies_with("t1"), b=replies_with(text("shot", "words")))
    settlement = await settled([interceptor("a"), interceptor("b")], host, Uploads())
    error = settlement.turns[1].error
    assert error is not None
    assert error.code == "attachment_changed"


async def test_ahp_c15_an_edit_cannot_take_over_the_part_of_another_attachment() -> None:
    async def take_over(publication: Publication) -> Reply:
        shot = parts_in(publication.messages)[0]
        return Reply(edited(publication.messages, {**shot, "id": "hidden"}))

    one = interceptor("a")
    shown, hidden = messages_of(attached("shot")), Counted(b"other")
    async with (
        Attachments({"shot": Counted().source, "hidden": hidden.source}) as attachments,
        delivery(shown, [one], attachments, Uploads()) as running,
    ):
        settlement = await intercept(running, Host(a=take_over))
    error = settlement.turns[0].error
    assert error is not None
    assert (error.code, hidden.reads) == ("reference_rebound", 0)


async def test_what_a_receiver_could_not_see_is_not_lost_to_the_next() -> None:
    blind = interceptor("a", selection={"default": "omit", "reasoning": "metadata"})
    messages = messages_of(
        text("t1", "because", category="reasoning"), text("t2", "so"), attached("shot")
    )
    host = Host(a=replies_with("t2", "t1", "shot", text("t3", "added")))
    await settled([blind, interceptor("b")], host, Uploads(), messages)
    assert "because" not in json.dumps(parts_in(host.seen["a"].messages))
    shown = parts_in(host.seen["b"].messages)
    assert [part.get("text") for part in shown] == ["so", "because", None, "added"]
    assert host.seen["b"].references.keys() == {"shot"}


async def test_ahp_s44_a_hook_failure_is_not_a_transfer_failure() -> None:
    async def fail(publication: Publication) -> Reply:
        raise HookFailure("event_refused", "The receiver answered the event with 500.")

    sender = Uploads({"https://b.example/upload": refused})
    receivers = [interceptor("a"), interceptor("b")]
    settlement = await settled(receivers, Host(a=fail), sender)
    hook, transfer = settlement.turns
    assert isinstance(hook.error, HookFailure)
    assert (hook.publication.state, hook.failed) == (PublicationState.READY, True)
    assert transfer.error is None
    assert (transfer.publication.state, transfer.failed) == (PublicationState.FAILED, True)


async def test_what_a_callback_raises_is_the_failure_of_that_hook() -> None:
    async def fail(publication: Publication) -> Reply:
        raise ValueError("a detail that stays here")

    one = interceptor("a", failure_policy="fail-closed")
    settlement = await settled([one], Host(a=fail), Uploads())
    error = settlement.turns[0].error
    assert isinstance(error, HookFailure)
    assert "detail" not in error.message
    assert settlement.ended_by is one


async def test_ahp_s43_the_time_of_an_interceptor_starts_when_it_is_called() -> None:
    async def slowly() -> None:
        await asyncio.sleep(0.1)

    async def hang(publication: Publication) -> Reply:
        await forever()
        return Reply()

    sender = Uploads({"https://a.example/upload": slowly})
    host = Host(b=hang)
    receivers = [interceptor("a", timeout_seconds=0.05), interceptor("b", timeout_seconds=0.05)]
    settlement = await settled(receivers, host, sender)
    answered, hanging = settlement.turns
    assert answered.error is None
    assert hanging.error is not None
    assert hanging.error.code == "hook_timed_out"


async def test_ahp_s43_the_budget_of_the_hook_call_ends_a_chain() -> None:
    async def hang(publication: Publication) -> Reply:
        await forever()
        return Reply()

    receivers = [interceptor("a", timeout_seconds=60), interceptor("b", timeout_seconds=60)]
    settlement = await settled(receivers, Host(a=hang, b=hang), Uploads(), seconds=0.1)
    codes = [turn.error.code for turn in settlement.turns if turn.error]
    assert codes == ["hook_timed_out", "hook_timed_out"]


async def test_observers_have_no_turn_in_a_chain_and_interceptors_none_in_an_observation() -> None:
    receivers, host = [interceptor("a"), receiver("b")], Host()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, receivers, attachments, Uploads()) as running,
    ):
        await intercept(running, host)
        assert host.called == ["a"]
        await observe(running, host)
    assert host.called == ["a", "b"]


async def test_an_unauthorized_interceptor_is_not_called() -> None:
    host = Host()
    settlement = await settled([interceptor("a", permission=False)], host, Uploads())
    assert host.called == []
    assert settlement.turns[0].publication.state is PublicationState.UNAUTHORIZED


async def test_ahp_s25_a_failed_observation_fails_nobody_else() -> None:
    async def fail(publication: Publication) -> Reply:
        raise HookFailure("unreachable", "The connection to the receiver of events failed.")

    sender = Uploads({"https://b.example/upload": refused})
    receivers = [receiver("a"), receiver("b"), receiver("c")]
    host = Host(a=fail)
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, receivers, attachments, sender) as running,
    ):
        turns = await observe(running, host)
    assert sorted(host.called) == ["a", "c"]
    assert [turn.failed for turn in turns] == [True, True, False]
    assert [turn.receiver.name for turn in turns] == ["a", "b", "c"]


async def test_ahp_s30_an_observation_after_settlement_uses_the_confirmed_reference() -> None:
    sender, one, host = Uploads(), interceptor("a"), Host()
    async with Attachments({"shot": Counted().source}) as attachments:
        async with delivery(SHOT, [one], attachments, sender) as running:
            settlement = await intercept(running, host)
        observer = receiver("later", scope="a", upload=one.upload)
        async with Observations(host) as observations:
            observations.start(delivery(settlement.messages, [observer], attachments, sender))
    assert host.seen["later"].references == host.seen["a"].references
    assert len(sender.bodies) == 1


async def test_ahp_s45_an_observation_that_hangs_gates_nothing_and_ends_in_time() -> None:
    sender = Uploads({"https://a.example/upload": forever})
    host, tasks, order = Host(), asyncio.all_tasks(), []
    async with Attachments({"shot": Counted().source}) as attachments:
        async with Observations(host) as observations:
            prepared = delivery(SHOT, [receiver("a")], attachments, sender, seconds=0.1)
            assert observations.start(prepared)
            order.append("the host went on")
        order.append("the observation ended")
    assert order == ["the host went on", "the observation ended"]
    assert [turn.failed for turn in observations.turns] == [True]
    assert asyncio.all_tasks() == tasks


async def test_ahp_s45_observations_are_bounded_and_not_kept_for_later() -> None:
    sender, host = Uploads(), Host()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        Observations(host, at_once=1) as observations,
    ):
        started = [
            observations.start(delivery(SHOT, [receiver("a")], attachments, sender))
            for _ in range(3)
        ]
    assert started == [True, False, False]
    assert (observations.dropped, host.called) == (2, ["a"])


async def test_ahp_s40_an_error_of_the_host_ends_its_observations() -> None:
    sender = Uploads({"https://a.example/upload": forever})

    async def work(attachments: Attachments) -> None:
        async with Observations(Host()) as observations:
            observations.start(delivery(SHOT, [receiver("a")], attachments, sender))
            while not sender.running:
                await asyncio.sleep(0)
            raise KeyError("of the host")

    async with Attachments({"shot": Counted().source}) as attachments:
        with pytest.raises(KeyError, match="of the host"):
            await work(attachments)
        assert sender.running == 0


async def test_ahp_s25_a_fault_in_an_observation_is_logged_and_reaches_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(part: object) -> bool:
        raise LookupError("no such policy")

    caplog.set_level(logging.ERROR)
    faulty = receiver("a", permission=fail)
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        Observations(Host()) as observations,
    ):
        observations.start(delivery(SHOT, [faulty], attachments, Uploads()))
    assert observations.turns == []
    assert "An observation failed." in caplog.text


async def test_an_edit_is_held_against_the_view_that_it_is_an_edit_of() -> None:
    one = interceptor("a")
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, Uploads()) as running,
    ):
        publication = await running.publication(one)
        assert accept_edit(publication, SHOT, publication.messages, attachments) == SHOT
        moved = parse_messages([*(m.wire() for m in publication.messages), tool_message()])
        assert len(accept_edit(publication, SHOT, moved, attachments)) == 2


def tool_message() -> dict[str, Any]:
    return {"id": "m2", "role": "tool", "parts": [text("t9", "a result")]}
