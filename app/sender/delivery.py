"""One event on its way to several receivers: views first, then one snapshot, then the uploads.

    async with Attachments({"shot": Source.file(path)}) as attachments:
        async with Delivery(
            messages, receivers, attachments, sender, budget=Budget(30)
        ) as delivery:
            publication = await delivery.publication(receiver)

Entering decides what each receiver selects and may have, before any source is touched (AHP-S34),
and starts the uploads: each source is read once and its snapshot shared (AHP-S36), the uploads run
concurrently and bounded (AHP-S26), each within its own transfer budget and all within the budget of
the hook call (AHP-S43). `publication` waits for the uploads of that receiver alone (AHP-S21, S28),
and may be asked again with the messages that an edit left. Leaving ends what still runs: nothing
goes on afterwards (AHP-S40). The host's messages name attachments as metadata; references exist
only in what is published.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, Self

from app.ahp.content import AttachmentPart
from app.sender.errors import ConfigurationError, SendError
from app.sender.publication import Publication, Upload, UploadState, publication_of
from app.sender.receivers import Permissions, Receiver, Verdict, View, parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from app.ahp.content import Message
    from app.sender.attachments import Attachment, Attachments
    from app.sender.budget import Budget
    from app.sender.config import UploadConfiguration
    from app.sender.sources import Snapshot
    from app.sender.transfer import Receipt


class Uploader(Protocol):
    """What a delivery needs of a sender: `app.sender.transfer.Sender` is one."""

    async def upload(
        self, source: Snapshot, configuration: UploadConfiguration, *, budget: Budget | None = None
    ) -> Receipt:
        """Send the bytes and give the receipt that confirms them, or raise SendError."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a delivery may use: uploads at once, bytes of one snapshot, seconds to take them.

    A snapshot is bounded by the largest `maxBytes` among those who want it as well.
    """

    concurrent_uploads: int = 8
    snapshot_bytes: int = 1024**3
    snapshot_seconds: float = 30.0


class Delivery:
    """The preparation of one event for `receivers`; an async context manager, used once.

    Constructing one reads nothing. Raises ConfigurationError for messages that are not the host's
    own form: with a reference in them, or with a source bound to text.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        receivers: Iterable[Receiver],
        attachments: Attachments,
        sender: Uploader,
        *,
        budget: Budget,
        bounds: Bounds | None = None,
    ) -> None:
        require_unprepared(messages, attachments)
        self.messages = tuple(messages)
        self.receivers = tuple(receivers)
        self.attachments = attachments
        self.budget = budget
        self._sender = sender
        self._bounds = bounds or Bounds()
        self._slots = asyncio.Semaphore(self._bounds.concurrent_uploads)
        self._snapshot_bytes: dict[Attachment, int] = {}
        self._snapshot_budget = budget
        self._group = asyncio.TaskGroup()
        self._permissions = {each: Permissions(each, budget) for each in self.receivers}
        self._tasks: dict[Receiver, asyncio.Task[dict[Attachment, Upload]]] = {}

    async def __aenter__(self) -> Self:
        wanted = {receiver: await self._wanted(receiver) for receiver in self.receivers}
        self._bound_snapshots(wanted)
        await self._group.__aenter__()
        for receiver, some in wanted.items():
            self._tasks[receiver] = self._group.create_task(self._confirm_all(receiver, some))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        # The group is told of a cancellation only: it would wrap any other error of the block.
        if isinstance(error, asyncio.CancelledError):
            await self._group.__aexit__(kind, error, trace)
        else:
            await self._group.__aexit__(None, None, None)

    async def publication(
        self, receiver: Receiver, messages: Sequence[Message] | None = None
    ) -> Publication:
        """What `receiver` is given of `messages` (by default of the delivery's own).

        Waits for the receiver's uploads. A body that was not prepared counts as missing.
        """
        effective = self.messages if messages is None else tuple(messages)
        require_unprepared(effective, self.attachments)
        # Shielded: who stops waiting does not stop the uploads; only the delivery's end does.
        uploads = await asyncio.shield(self._tasks[receiver])
        return await publication_of(
            self._permissions[receiver], effective, self.attachments, uploads
        )

    async def _wanted(self, receiver: Receiver) -> dict[Attachment, str]:
        """What `receiver` selects and may have, each with the first part that shows it."""
        wanted: dict[Attachment, str] = {}
        if receiver.permission is False:
            return wanted
        view = await View.of(self._permissions[receiver], self.messages, self.attachments)
        for part in parts_of(self.messages):
            attachment = self.attachments.get(part.id)
            if attachment is not None and view.verdict(part) is Verdict.BODY:
                wanted.setdefault(attachment, part.id)
        return wanted

    def _bound_snapshots(self, wanted: Mapping[Receiver, Iterable[Attachment]]) -> None:
        most = self._bounds.snapshot_bytes
        for receiver, attachments in wanted.items():
            allowed = min(most, receiver.upload.max_bytes) if receiver.upload is not None else 0
            for attachment in attachments:
                known = self._snapshot_bytes.get(attachment, 0)
                self._snapshot_bytes[attachment] = max(known, allowed)
        self._snapshot_budget = self.budget.part(self._bounds.snapshot_seconds)

    async def _confirm_all(
        self, receiver: Receiver, wanted: Mapping[Attachment, str]
    ) -> dict[Attachment, Upload]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                attachment: group.create_task(self._confirm(receiver, part_id, attachment))
                for attachment, part_id in wanted.items()
            }
        return {attachment: task.result() for attachment, task in tasks.items()}

    async def _confirm(self, receiver: Receiver, part_id: str, attachment: Attachment) -> Upload:
        try:
            async with self.budget.limit():
                confirmation = await self.attachments.confirm(
                    attachment, receiver.context, partial(self._transfer, receiver, attachment)
                )
        except SendError as error:
            return Upload(part_id, UploadState.FAILED, error=error)
        state = UploadState.REUSED if confirmation.reused else UploadState.CONFIRMED
        return Upload(part_id, state, confirmation.receipt)

    async def _transfer(self, receiver: Receiver, attachment: Attachment) -> Receipt:
        configuration = receiver.configuration
        snapshot = await attachment.snapshot(
            max_bytes=self._snapshot_bytes[attachment], budget=self._snapshot_budget
        )
        async with self._slots:
            budget = self.budget.part(configuration.timeout_ms / 1000)
            return await self._sender.upload(snapshot, configuration, budget=budget)


def require_unprepared(messages: Iterable[Message], attachments: Attachments) -> None:
    """The host's messages carry no reference, and a source stands behind attachments only.

    Raises ConfigurationError `ready_reference`: a reference is taken from a receipt, for the
    receiver that gave it (AHP-S18, S31); and `text_is_inline`: text is never uploaded (AHP-S01).
    """
    for part in parts_of(messages):
        if isinstance(part, AttachmentPart):
            if part.body is not None:
                raise ConfigurationError(
                    "A part carries a reference already. Name the attachment as metadata and bind "
                    "its source.",
                    code="ready_reference",
                )
        elif attachments.get(part.id) is not None:
            raise ConfigurationError(
                "A source is bound to a text part. Put the text into the part itself.",
                code="text_is_inline",
            )
