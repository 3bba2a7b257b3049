"""What holds for any messages, selections, permissions and failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.ahp.content import Message, parse_messages
from app.sender.attachments import Attachments
from app.sender.edits import accept_edit
from app.sender.publication import Publication, PublicationState
from app.sender.receivers import Part, Receiver
from tests.sender.deliveries import (
    Counted,
    Uploads,
    attached,
    delivery,
    parts_in,
    receiver,
    refused,
    text,
)

MODES = st.sampled_from(["body", "metadata", "omit"])
CATEGORIES = st.sampled_from([None, "reasoning", "skills", "images", "Images", "mine"])
MEDIA = st.sampled_from(["image/png", "audio/ogg", "application/pdf"])
IDS = [f"part-{i}" for i in range(5)]
ENDPOINTS = ["https://a.example/upload", "https://b.example/upload"]


@st.composite
def parts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Parts with ids of their own; the text of each can be told from all other JSON."""
    chosen: list[dict[str, Any]] = []
    for part_id in draw(st.lists(st.sampled_from(IDS), unique=True)):
        category = draw(CATEGORIES)
        more = {} if category is None else {"category": category}
        if draw(st.booleans()):
            chosen.append(text(part_id, f"words of <{part_id}>", **more))
        else:
            chosen.append(attached(part_id, draw(MEDIA), **more))
    return chosen


@st.composite
def receivers(draw: st.DrawFn, name: str) -> Receiver:
    allowed = draw(st.frozensets(st.sampled_from(IDS)))

    def permit(part: Part) -> bool:
        return part.id in allowed

    return receiver(
        name,
        {"default": draw(MODES), "images": draw(MODES), "reasoning": draw(MODES)},
        permission=draw(st.sampled_from([True, False, permit])),
        on_failed=draw(st.sampled_from(["fail", "suppress", "gap"])),
    )


def may_have(one: Receiver, part: Part) -> bool:
    permitted = one.permission if isinstance(one.permission, bool) else one.permission(part)
    return one.selection.view_of(part) == "body" and permitted is True


class Run:
    """One delivery of `chosen` to `two` receivers, of which those at `failing` refuse uploads."""

    def __init__(
        self, chosen: list[dict[str, Any]], two: list[Receiver], failing: list[str]
    ) -> None:
        self.messages = parse_messages([{"id": "m", "role": "user", "parts": chosen}])
        self.two = two
        self.sender = Uploads(dict.fromkeys(failing, refused))
        self.sources = {
            part["id"]: Counted(part["id"].encode())
            for part in chosen
            if part["kind"] == "attachment"
        }

    async def publications(self) -> list[tuple[Publication, tuple[Message, ...]]]:
        """Each publication, and what the host gets back if the receiver edits nothing."""
        bound = {part_id: counted.source for part_id, counted in self.sources.items()}
        async with (
            Attachments(bound) as attachments,
            delivery(self.messages, self.two, attachments, self.sender) as running,
        ):
            published = [await running.publication(each) for each in self.two]
            return [
                (each, accept_edit(each, self.messages, each.messages, attachments))
                if each.state is PublicationState.READY
                else (each, self.messages)
                for each in published
            ]


@given(parts(), receivers("a"), receivers("b"), st.lists(st.sampled_from(ENDPOINTS), unique=True))
def test_what_holds_for_every_delivery(
    chosen: list[dict[str, Any]], a: Receiver, b: Receiver, failing: list[str]
) -> None:
    run = Run(chosen, [a, b], failing)
    results = asyncio.run(run.publications())
    for publication, untouched in results:
        check_view(run, publication)
        assert untouched == run.messages
    check_sources(run)
    refs = [ref for publication, _ in results for ref in publication.references.values()]
    assert len(refs) == len(set(refs))


def check_view(run: Run, publication: Publication) -> None:
    """AHP-C02, C06, S22 to S24: valid, in order, and nothing that the receiver may not have."""
    if publication.state is not PublicationState.READY:
        assert publication.messages == ()
        return
    shown = parts_in(publication.messages)
    assert parse_messages([m.wire() for m in publication.messages]) == publication.messages
    [message] = run.messages
    assert [part["id"] for part in shown] == [part.id for part in message.parts]
    for part, view in zip(message.parts, shown, strict=True):
        has_body = "text" in view or "body" in view
        assert not has_body or may_have(publication.receiver, part)
        assert has_body or f"<{part.id}>" not in json.dumps(shown)
        assert ("gap" in view) <= (view["selection"] == "body")


def check_sources(run: Run) -> None:
    """AHP-S34 to S36, S39: read once if anybody may have it, else never; closed in any case."""
    [message] = run.messages
    for part in message.parts:
        counted = run.sources.get(part.id)
        if counted is not None:
            wanted = any(may_have(each, part) for each in run.two)
            assert (counted.reads, counted.closed) == (int(wanted), 1)
