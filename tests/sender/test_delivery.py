"""Deliveries: who is selected, what is read, what is uploaded, what is published."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from app.ahp.content import AttachmentPart, TextPart
from app.sender.attachments import Attachments
from app.sender.budget import Budget
from app.sender.config import UploadConfiguration
from app.sender.delivery import Bounds, Delivery
from app.sender.errors import BudgetExceeded, ConfigurationError, SourceError, TransferError
from app.sender.observation import observe
from app.sender.publication import Publication, PublicationState, UploadState
from app.sender.receivers import Receiver
from app.sender.sources import Source
from app.sender.transfer import Receipt, Sender
from tests.sender.deliveries import (
    LONG,
    PIXELS,
    Counted,
    Uploads,
    attached,
    configuration,
    delivery,
    edited,
    forever,
    messages_of,
    parts_in,
    receiver,
    refused,
    sha256,
    text,
)
from tests.sender.receivers import confirm, scripted

pytestmark = pytest.mark.anyio

SHOT = messages_of(text("t1", "look at this"), attached("shot"))


async def published(
    one: Receiver, counted: Counted, sender: Uploads, messages: Any = SHOT
) -> Publication:
    async with (
        Attachments({"shot": counted.source}) as attachments,
        delivery(messages, [one], attachments, sender) as running,
    ):
        return await running.publication(one)


async def test_ahp_s18_a_part_is_ready_with_the_reference_of_the_receipt_alone() -> None:
    sender = Uploads()
    publication = await published(receiver(), Counted(), sender)
    assert publication.state is PublicationState.READY
    assert parts_in(publication.messages)[1] == {
        "id": "shot",
        "kind": "attachment",
        "mediaType": "image/png",
        "selection": "body",
        "body": {"ref": "reference-1"},
    }
    assert sender.bodies == [("https://one.example/upload", PIXELS)]


@pytest.mark.parametrize(
    "selection", ["metadata", "omit", {"default": "body", "images": "metadata"}]
)
async def test_ahp_s34_a_source_is_not_read_when_nobody_selects_its_body(selection: Any) -> None:
    counted, sender = Counted(), Uploads()
    publication = await published(receiver(selection=selection), counted, sender)
    assert (counted.reads, sender.started) == (0, [])
    assert publication.state is PublicationState.READY
    assert publication.references == {}
    assert publication.uploads == ()


async def test_ahp_s34_views_of_all_receivers_are_known_before_a_source_is_touched() -> None:
    order: list[str] = []

    async def read() -> None:
        order.append("read")

    async def permit(part: Any) -> bool:
        await asyncio.sleep(0)
        order.append("asked")
        return True

    receivers = [receiver(str(i), permission=permit) for i in range(3)]
    messages = messages_of(attached("shot"))
    async with (
        Attachments({"shot": Counted(before=read).source}) as attachments,
        delivery(messages, receivers, attachments, Uploads()) as running,
    ):
        for one in receivers:
            await running.publication(one)
    assert order == ["asked"] * 3 + ["read"]


async def test_ahp_s35_constructing_reads_and_uploads_nothing() -> None:
    counted, sender = Counted(), Uploads()
    async with Attachments({"shot": counted.source}) as attachments:
        delivery(SHOT, [receiver()], attachments, sender)
        assert (counted.reads, sender.started) == (0, [])
    assert (counted.reads, counted.closed) == (0, 1)


@pytest.mark.parametrize("permission", [False, lambda part: False, lambda part: "yes"])
async def test_ahp_s24_selection_is_no_permission(permission: Any) -> None:
    counted, sender = Counted(), Uploads()
    publication = await published(receiver(permission=permission), counted, sender)
    assert (counted.reads, sender.started) == (0, [])
    assert publication.references == {}
    assert "look at this" not in json.dumps(parts_in(publication.messages))


async def test_ahp_s24_a_receiver_without_any_permission_gets_no_message() -> None:
    publication = await published(receiver(permission=False), Counted(), Uploads())
    assert publication.state is PublicationState.UNAUTHORIZED
    assert publication.messages == ()


async def test_ahp_s24_what_permission_withholds_is_a_gap_for_text_as_for_attachments() -> None:
    publication = await published(
        receiver(permission=lambda part: False),
        Counted(),
        Uploads(),
        messages_of(text("t1", "secret"), attached("shot", size=3, sha256="0" * 64)),
    )
    assert publication.gaps == {"t1": "withheld", "shot": "withheld"}
    assert [sorted(part) for part in parts_in(publication.messages)] == [
        ["gap", "id", "kind", "mediaType", "selection"]
    ] * 2


async def test_ahp_s24_a_permission_that_does_not_answer_in_time_is_none() -> None:
    async def permit(part: object) -> bool:
        await forever()
        return True

    one = receiver(permission=permit)
    counted = Counted()
    async with (
        Attachments({"shot": counted.source}) as attachments,
        delivery(SHOT, [one], attachments, Uploads(), seconds=0.05) as running,
    ):
        publication = await running.publication(one)
    assert publication.gaps == {"t1": "withheld", "shot": "withheld"}
    assert counted.reads == 0


async def test_ahp_s24_permission_is_asked_once_for_each_part_whose_body_is_selected() -> None:
    asked: list[str] = []

    def permit(part: TextPart | AttachmentPart) -> bool:
        asked.append(part.id)
        return True

    one = receiver(selection={"default": "body", "audio": "omit"}, permission=permit)
    messages = messages_of(text("t1", "words"), attached("shot"), attached("song", "audio/ogg"))
    async with (
        Attachments({"shot": Counted().source, "song": Counted().source}) as attachments,
        delivery(messages, [one], attachments, Uploads()) as running,
    ):
        await running.publication(one)
        await running.publication(one)
    assert asked == ["t1", "shot"]


async def test_ahp_c19_a_second_part_of_another_category_is_no_way_around_a_selection() -> None:
    counted, sender = Counted(), Uploads()
    one = receiver(selection={"default": "body", "images": "omit", "reasoning": "metadata"})
    messages = messages_of(
        attached("shot"),
        attached("again", category="harmless"),
        text("t1", "because", category="reasoning"),
        text("t2", "because"),
    )
    async with (
        Attachments({"shot": counted.source, "again": counted.source}) as attachments,
        delivery(messages, [one], attachments, sender) as running,
    ):
        publication = await running.publication(one)
    assert (counted.reads, publication.references) == (0, {})
    assert "because" not in json.dumps(parts_in(publication.messages))


async def test_ahp_s24_text_withheld_in_one_part_is_withheld_in_its_repetition() -> None:
    one = receiver(permission=lambda part: part.category != "private")
    messages = messages_of(text("t1", "the key", category="private"), text("t2", "the key"))
    async with (
        Attachments() as attachments,
        delivery(messages, [one], attachments, Uploads()) as running,
    ):
        publication = await running.publication(one)
    assert publication.gaps == {"t1": "withheld", "t2": "withheld"}


async def test_ahp_s36_a_source_is_read_once_and_its_snapshot_sent_to_all() -> None:
    counted, sender = Counted(), Uploads()
    receivers = [receiver(str(i)) for i in range(5)]
    async with (
        Attachments({"shot": counted.source}) as attachments,
        delivery(SHOT, receivers, attachments, sender) as running,
    ):
        publications = [await running.publication(each) for each in receivers]
    assert counted.reads == 1
    assert [body for _, body in sender.bodies] == [PIXELS] * 5
    receipts = [upload.receipt for each in publications for upload in each.uploads]
    assert {receipt.sha256 for receipt in receipts if receipt} == {sha256(PIXELS)}


async def test_ahp_s37_each_receiver_confirms_a_reference_of_its_own() -> None:
    receivers = [receiver("one"), receiver("two")]
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, receivers, attachments, Uploads()) as running,
    ):
        refs = [(await running.publication(each)).references["shot"] for each in receivers]
    assert len(set(refs)) == 2


async def test_ahp_s21_a_publication_waits_for_the_uploads_of_its_receiver() -> None:
    confirmed = asyncio.Event()
    one, sender = receiver(), Uploads({"https://one.example/upload": confirmed.wait})  # type: ignore[dict-item]
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender) as running,
    ):
        waiting = asyncio.create_task(running.publication(one))
        while not sender.running:
            await asyncio.sleep(0)
        assert not waiting.done()
        confirmed.set()
        assert (await waiting).references == {"shot": "reference-1"}


async def test_ahp_s26_uploads_run_at_once_and_bounded() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    receivers = [receiver(str(i)) for i in range(6)]
    sender = Uploads({f"https://{i}.example/upload": wait for i in range(6)})
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(
            SHOT, receivers, attachments, sender, bounds=Bounds(concurrent_uploads=3)
        ) as running,
    ):
        while sender.running < 3:
            await asyncio.sleep(0)
        release.set()
        states = [(await running.publication(each)).state for each in receivers]
    assert states == [PublicationState.READY] * 6
    assert sender.most == 3


async def test_at_most_eight_uploads_run_at_once_by_default() -> None:
    assert Bounds().concurrent_uploads == 8


async def test_ahp_s28_a_failed_upload_stays_with_the_delivery_that_it_affects() -> None:
    receivers = [receiver("one"), receiver("two")]
    sender = Uploads({"https://one.example/upload": refused})
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, receivers, attachments, sender) as running,
    ):
        first, second = [await running.publication(each) for each in receivers]
    assert first.state is PublicationState.FAILED
    assert isinstance(first.missing[0].error, TransferError)
    assert (second.state, second.references) == (PublicationState.READY, {"shot": "reference-1"})


async def test_ahp_s28_a_hanging_receiver_does_not_hold_up_another() -> None:
    receivers = [receiver("one"), receiver("two")]
    sender = Uploads({"https://one.example/upload": forever})
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, receivers, attachments, sender) as running,
    ):
        second = await running.publication(receivers[1])
        assert sender.running == 1
    assert second.references == {"shot": "reference-1"}
    assert sender.running == 0


@pytest.mark.parametrize(
    ("on_failed", "state"),
    [("fail", PublicationState.FAILED), ("suppress", PublicationState.SUPPRESSED)],
)
async def test_ahp_s22_a_missing_body_fails_or_suppresses_the_delivery(
    on_failed: Any, state: PublicationState
) -> None:
    sender = Uploads({"https://one.example/upload": refused})
    publication = await published(receiver(on_failed=on_failed), Counted(), sender)
    assert (publication.state, publication.messages) == (state, ())
    assert [upload.state for upload in publication.missing] == [UploadState.FAILED]


async def test_ahp_s22_s23_a_missing_body_is_a_gap_and_never_a_substitute() -> None:
    sender = Uploads({"https://one.example/upload": refused})
    publication = await published(receiver(on_failed="gap"), Counted(), sender)
    assert publication.state is PublicationState.READY
    assert parts_in(publication.messages)[1] == {
        "id": "shot",
        "kind": "attachment",
        "mediaType": "image/png",
        "selection": "body",
        "gap": {"reason": "transfer_failed"},
    }


async def broken() -> None:
    raise OSError("/home/somebody/shot.png")


@pytest.mark.parametrize(
    ("one", "counted", "reason", "code"),
    [
        (receiver(upload=None), Counted(), "unavailable", "no_upload"),
        (receiver(), Counted(before=broken), "unavailable", "failed"),
        (receiver(), Counted(sha256="0" * 64), "unavailable", "digest_mismatch"),
        (receiver(upload=configuration(max_bytes=3)), Counted(), "limit_exceeded", "too_large"),
        (
            receiver(upload=configuration("https://slow.example/", timeout_ms=1)),
            Counted(),
            "transfer_failed",
            "budget_exceeded",
        ),
    ],
    ids=["no endpoint", "source fails", "other bytes", "too large", "too slow"],
)
async def test_ahp_s44_a_gap_says_which_of_the_four_cases_it_is(
    one: Receiver, counted: Counted, reason: str, code: str
) -> None:
    gapped = receiver(upload=one.upload, on_failed="gap")
    sender = Uploads({"https://slow.example/": forever})
    publication = await published(gapped, counted, sender)
    assert publication.gaps == {"shot": reason}
    assert [upload.error.code for upload in publication.missing if upload.error] == [code]
    assert "somebody" not in json.dumps(parts_in(publication.messages))


async def test_ahp_s08_a_smaller_limit_fails_only_the_receiver_that_has_it() -> None:
    small = receiver("small", upload=configuration("https://small.example/", max_bytes=10))
    large = receiver("large")
    counted, sender = Counted(), Uploads()
    async with (
        Attachments({"shot": counted.source}) as attachments,
        delivery(SHOT, [small, large], attachments, sender) as running,
    ):
        first, second = await running.publication(small), await running.publication(large)
    assert (first.state, second.state) == (PublicationState.FAILED, PublicationState.READY)
    assert sender.bodies == [("https://large.example/upload", PIXELS)]


async def test_ahp_s42_a_snapshot_is_bounded_by_the_host_whatever_receivers_take() -> None:
    one, sender = receiver(), Uploads()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender, bounds=Bounds(snapshot_bytes=9)) as running,
    ):
        publication = await running.publication(one)
    assert publication.missing[0].error is not None
    assert (publication.missing[0].error.code, sender.started) == ("too_large", [])


async def test_ahp_s36_a_source_that_gives_no_byte_in_time_is_missing_at_every_receiver() -> None:
    receivers = [receiver("one"), receiver("two")]
    counted = Counted(before=forever)
    async with (
        Attachments({"shot": counted.source}) as attachments,
        delivery(
            SHOT, receivers, attachments, Uploads(), bounds=Bounds(snapshot_seconds=0.05)
        ) as running,
    ):
        publications = [await running.publication(each) for each in receivers]
    assert [each.state for each in publications] == [PublicationState.FAILED] * 2
    assert all(isinstance(each.missing[0].error, BudgetExceeded) for each in publications)
    assert (counted.reads, counted.closed) == (1, 1)


async def test_ahp_s43_each_transfer_has_its_own_budget_within_that_of_the_hook_call() -> None:
    quick = receiver("quick", upload=configuration("https://quick.example/", timeout_ms=1000))
    patient = receiver("patient", upload=configuration("https://p.example/", timeout_ms=10**7))
    sender = Uploads()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [quick, patient], attachments, sender, seconds=30) as running,
    ):
        await running.publication(quick)
        await running.publication(patient)
    budgets = dict(zip(sender.started, sender.budgets, strict=True))
    assert budgets["https://quick.example/"] <= 1
    assert 1 < budgets["https://p.example/"] <= 30


async def test_ahp_s32_the_hook_call_ends_every_preparation() -> None:
    one, sender = receiver(), Uploads({"https://one.example/upload": forever})
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender, seconds=0.05) as running,
    ):
        publication = await running.publication(one)
    assert isinstance(publication.missing[0].error, BudgetExceeded)
    assert sender.running == 0


async def test_ahp_s30_a_confirmed_reference_is_used_again_for_the_same_context() -> None:
    counted, sender, one = Counted(), Uploads(), receiver()
    async with Attachments({"shot": counted.source}) as attachments:
        async with delivery(SHOT, [one], attachments, sender) as running:
            first = await running.publication(one)
        later = receiver(mode="observe")
        async with delivery(SHOT, [later], attachments, sender) as running:
            second = await running.publication(later)
    assert first.references == second.references == {"shot": "reference-1"}
    assert [upload.state for upload in second.uploads] == [UploadState.REUSED]
    assert (len(sender.bodies), counted.reads) == (1, 1)


@pytest.mark.parametrize(
    "other",
    [
        receiver(scope="another"),
        receiver(upload=configuration("https://other.example/upload")),
        receiver(
            upload=configuration(
                "https://one.example/upload", auth={"type": "bearer", "tokenEnv": "TOKEN"}
            )
        ),
    ],
    ids=["scope", "endpoint", "credential"],
)
async def test_ahp_s31_a_reference_is_never_used_in_another_context(other: Receiver) -> None:
    sender, one = Uploads(), receiver()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one, other], attachments, sender) as running,
    ):
        first, second = await running.publication(one), await running.publication(other)
    assert first.references["shot"] != second.references["shot"]
    assert len(sender.bodies) == 2


async def test_ahp_s31_equal_bytes_of_two_attachments_are_uploaded_twice() -> None:
    sender, one = Uploads(), receiver()
    messages = messages_of(attached("a"), attached("b"))
    async with (
        Attachments({"a": Source.memory(PIXELS), "b": Source.memory(PIXELS)}) as attachments,
        delivery(messages, [one], attachments, sender) as running,
    ):
        publication = await running.publication(one)
    assert sorted(publication.references.values()) == ["reference-1", "reference-2"]


async def test_ahp_s20_a_failed_upload_is_made_anew_in_the_next_delivery() -> None:
    sender, one = Uploads({"https://one.example/upload": refused}), receiver()
    async with Attachments({"shot": Counted().source}) as attachments:
        async with delivery(SHOT, [one], attachments, sender) as running:
            first = await running.publication(one)
        sender.behave("https://one.example/upload", lambda: asyncio.sleep(0))
        async with delivery(SHOT, [one], attachments, sender) as running:
            second = await running.publication(one)
    assert (first.state, second.references) == (PublicationState.FAILED, {"shot": "reference-1"})


async def test_two_subscriptions_of_one_context_share_an_upload() -> None:
    sender, pair = Uploads(), [receiver(), receiver()]
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, pair, attachments, sender) as running,
    ):
        refs = [(await running.publication(each)).references for each in pair]
    assert refs == [{"shot": "reference-1"}] * 2
    assert len(sender.bodies) == 1


async def test_ahp_r40_a_reference_that_stands_for_two_bodies_is_not_published() -> None:
    class Careless(Uploads):
        async def upload(self, *arguments: Any, **more: Any) -> Receipt:
            receipt = await super().upload(*arguments, **more)
            return Receipt("always-the-same", receipt.size, receipt.sha256)

    one = receiver()
    messages = messages_of(attached("a"), attached("b"))
    async with (
        Attachments({"a": Source.memory(b"a"), "b": Source.memory(b"b")}) as attachments,
        delivery(messages, [one], attachments, Careless()) as running,
    ):
        publication = await running.publication(one)
    assert publication.state is PublicationState.FAILED
    assert [upload.error.code for upload in publication.missing if upload.error] == [
        "reference_reused"
    ]


async def test_ahp_s29_an_attachment_that_an_edit_removed_is_not_published() -> None:
    sender, one = Uploads(), receiver()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender) as running,
    ):
        await running.publication(one)
        publication = await running.publication(one, edited(SHOT, text("t1", "look at this")))
    assert len(sender.bodies) == 1
    assert publication.references == {}
    assert "reference-1" not in json.dumps(parts_in(publication.messages))


async def test_ahp_s29_the_failure_of_a_removed_attachment_fails_nobody() -> None:
    sender, one = Uploads({"https://one.example/upload": refused}), receiver()
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender) as running,
    ):
        publication = await running.publication(one, edited(SHOT, text("t1", "words")))
    assert (publication.state, publication.missing) == (PublicationState.READY, ())
    assert [upload.state for upload in publication.uploads] == [UploadState.FAILED]


async def test_an_attachment_that_nobody_prepared_is_missing() -> None:
    one = receiver(on_failed="gap")
    async with (
        Attachments({"shot": Counted().source, "late": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, Uploads()) as running,
    ):
        publication = await running.publication(one, messages_of(attached("late")))
    assert publication.gaps == {"late": "unavailable"}


async def test_ahp_c23_metadata_without_a_source_is_no_failure() -> None:
    messages = messages_of(attached("elsewhere", size=3, sha256="0" * 64))
    publication = await published(receiver(), Counted(), Uploads(), messages)
    assert publication.state is PublicationState.READY
    assert parts_in(publication.messages) == parts_in(messages)


async def test_what_the_host_omits_stays_omitted() -> None:
    counted = Counted()
    publication = await published(
        receiver(), counted, Uploads(), messages_of(attached("shot", selection="omit"))
    )
    assert counted.reads == 0
    assert parts_in(publication.messages)[0]["selection"] == "omit"


async def test_ahp_s18_the_hosts_messages_carry_no_reference() -> None:
    ready = messages_of(attached("shot", selection="body", body={"ref": "made-up"}))
    async with Attachments({"shot": Counted().source}) as attachments:
        with pytest.raises(ConfigurationError) as refusal:
            delivery(ready, [receiver()], attachments, Uploads())
    assert refusal.value.code == "ready_reference"


async def test_ahp_s01_text_is_never_uploaded() -> None:
    async with Attachments({"t1": Counted().source}) as attachments:
        with pytest.raises(ConfigurationError) as refusal:
            delivery(SHOT, [receiver()], attachments, Uploads())
    assert refusal.value.code == "text_is_inline"


async def test_ahp_s41_what_the_host_does_to_its_bytes_does_not_reach_the_upload() -> None:
    body = bytearray(PIXELS)
    source = Source.memory(body)  # type: ignore[arg-type]
    body[:] = bytes(len(body))
    sender, one = Uploads(), receiver()
    async with (
        Attachments({"shot": source}) as attachments,
        delivery(SHOT, [one], attachments, sender) as running,
    ):
        await running.publication(one)
    assert [sent for _, sent in sender.bodies] == [PIXELS]


async def test_ahp_s39_sources_are_closed_used_or_not_and_though_one_of_them_fails() -> None:
    async def fail() -> None:
        raise OSError("closing failed")

    used, unused = Counted(), Counted()
    failing = Source.lazy(lambda: asyncio.sleep(0, b""), fail)
    attachments = Attachments({"shot": used.source, "f": failing, "unused": unused.source})
    async with delivery(SHOT, [receiver()], attachments, Uploads()) as running:
        await running.publication(running.receivers[0])
    with pytest.raises(OSError, match="closing failed"):
        await attachments.aclose()
    assert (used.closed, unused.closed) == (1, 1)
    await attachments.aclose()


async def test_ahp_s39_s40_an_error_of_the_host_ends_everything_and_stays_itself() -> None:
    counted = Counted()
    sender = Uploads({"https://one.example/upload": forever})

    async def deliver() -> None:
        async with (
            Attachments({"shot": counted.source}) as attachments,
            delivery(SHOT, [receiver()], attachments, sender),
        ):
            while not sender.running:
                await asyncio.sleep(0)
            raise KeyError("of the host")

    with pytest.raises(KeyError, match="of the host"):
        await deliver()
    assert (sender.running, counted.closed) == (0, 1)


async def test_ahp_s32_s40_a_cancelled_delivery_stops_its_uploads() -> None:
    counted, tasks = Counted(), asyncio.all_tasks()
    sender = Uploads({"https://one.example/upload": forever})
    one = receiver()

    async def deliver() -> None:
        async with (
            Attachments({"shot": counted.source}) as attachments,
            delivery(SHOT, [one], attachments, sender) as running,
        ):
            await running.publication(one)

    delivering = asyncio.create_task(deliver())
    while not sender.running:
        await asyncio.sleep(0)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    assert (sender.running, counted.closed) == (0, 1)
    assert asyncio.all_tasks() == tasks


async def test_who_stops_waiting_for_a_publication_does_not_stop_its_uploads() -> None:
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    one, sender = receiver(), Uploads({"https://one.example/upload": wait})
    async with (
        Attachments({"shot": Counted().source}) as attachments,
        delivery(SHOT, [one], attachments, sender) as running,
    ):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running.publication(one), 0.01)
        release.set()
        assert (await running.publication(one)).references == {"shot": "reference-1"}


async def test_a_part_keeps_its_source() -> None:
    source = Source.memory(PIXELS)
    async with Attachments({"shot": source}) as attachments:
        attachments.bind("shot", source)
        with pytest.raises(SourceError) as refusal:
            attachments.bind("shot", Source.memory(PIXELS))
    assert refusal.value.code == "part_is_bound"


async def test_closed_attachments_take_no_source_and_confirm_nothing() -> None:
    attachments = Attachments({"shot": Source.memory(PIXELS)})
    await attachments.aclose()
    with pytest.raises(SourceError) as refusal:
        attachments.bind("shot", Source.memory(PIXELS))
    assert refusal.value.code == "attachments_closed"
    with pytest.raises(SourceError):
        async with attachments:
            pytest.fail("entered")


async def test_ahp_s38_an_expectation_is_checked_against_the_bytes_and_not_trusted() -> None:
    sender = Uploads()
    publication = await published(receiver(), Counted(size=len(PIXELS) + 1), sender)
    assert publication.missing[0].error is not None
    assert (publication.missing[0].error.code, sender.started) == ("size_mismatch", [])


async def test_ahp_s07_an_upload_is_http_however_the_event_travels() -> None:
    """Here the event goes through a pipe; the reference in it comes from the upload endpoint."""
    one, sender = receiver(), Uploads()
    reading, writing = os.pipe()

    async def publish(publication: Publication) -> None:
        line = json.dumps([message.wire() for message in publication.messages])
        os.write(writing, line.encode() + b"\n")

    try:
        async with (
            Attachments({"shot": Counted().source}) as attachments,
            delivery(SHOT, [one], attachments, sender) as running,
        ):
            await observe(running, publish)
        [message] = json.loads(os.read(reading, 65536))
    finally:
        os.close(reading)
        os.close(writing)
    assert message["parts"][1]["body"] == {"ref": "reference-1"}
    assert sender.started == ["https://one.example/upload"]


async def test_ahp_s12_authorization_and_transfer_spend_one_budget() -> None:
    class Slow:
        def __init__(self) -> None:
            self.budgets: list[float] = []

        async def credential(
            self, configuration: UploadConfiguration, challenge: str | None, budget: Budget
        ) -> str | None:
            self.budgets.append(budget.remaining())
            if configuration.target == b"/slow":
                await forever()
            return "Bearer token"

    authorization = Slow()
    async with scripted(confirm) as server, Sender(authorization) as sender:
        slow = receiver("slow", upload=server.configuration("/slow", timeoutMs=100))
        quick = receiver("quick", upload=server.configuration("/quick"))
        async with (
            Attachments({"shot": Counted().source}) as attachments,
            Delivery(SHOT, [slow, quick], attachments, sender, budget=Budget(LONG)) as running,
        ):
            first, second = await running.publication(slow), await running.publication(quick)
        assert [exchange.target for exchange in server.exchanges] == [b"/quick"]
    assert isinstance(first.missing[0].error, BudgetExceeded)
    assert second.references == {"shot": "ref-of-the-receiver"}
    assert min(authorization.budgets) <= 0.1


ADVERTISED = {
    "events": ["turn.start"],
    "mode": "intercept",
    "timeoutMs": 2500,
    "failurePolicy": "fail-closed",
    "includeNative": True,
    "content": {"default": "omit", "images": "body"},
    "upload": {"endpoint": "https://files.example/", "timeoutMs": 7000, "maxBytes": 9},
}


def test_ahp_s02_a_receiver_is_built_from_the_subscription_that_is_advertised() -> None:
    one = Receiver.subscribed("one", ADVERTISED, permission=True, scope="s")
    assert (one.mode, one.failure_policy, one.timeout_seconds) == ("intercept", "fail-closed", 2.5)
    assert one.include_native
    assert one.selection.mode_of("images") == "body"
    assert one.configuration.max_bytes == 9
    bare = Receiver.subscribed("two", {"content": {"default": "body"}}, permission=False, scope="s")
    assert (bare.mode, bare.upload, bare.include_native) == ("observe", None, False)


@pytest.mark.parametrize(
    "changed",
    [
        {"content": None},
        {"content": {"images": "body"}},
        {"upload": {"endpoint": "http://files.example/", "timeoutMs": 1, "maxBytes": 1}},
    ],
)
def test_a_subscription_that_cannot_be_used_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Receiver.subscribed("one", ADVERTISED | changed, permission=True, scope="s")
