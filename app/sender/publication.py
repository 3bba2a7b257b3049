"""What one receiver is given of the messages: ready references, gaps, or nothing at all.

A part is ready only with the reference that this receiver confirmed for this attachment (AHP-S18).
Where a body is missing the receiver's policy decides, and only over what the messages still show:
an attachment that an edit removed is not published and its failure fails nobody (AHP-S22, S29).
Neither bytes nor a path nor a URL ever stands in for a reference (AHP-S23).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from app.ahp.content import (
    AttachmentPart,
    Message,
    Withheld,
    category_of,
    project,
    withheld_from,
)
from app.sender.errors import ConfigurationError, SendError, SourceError
from app.sender.receivers import Part, Permissions, Receiver, Verdict, View, parts_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from app.sender.attachments import Attachment, Attachments
    from app.sender.transfer import Receipt

# The draft leaves the words of a gap's reason open and names four cases; these are ours for them.
WITHHELD: Final = "withheld"
UNAVAILABLE: Final = "unavailable"
LIMIT_EXCEEDED: Final = "limit_exceeded"
TRANSFER_FAILED: Final = "transfer_failed"

_LIMIT_CODES: Final = frozenset({"too_large"})


class UploadState(Enum):
    """How an upload to a receiver ended."""

    CONFIRMED = "confirmed"
    REUSED = "reused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Upload:
    """What became of one attachment for one receiver: a receipt, or the error that prevented it.

    `part_id` is the first part that shows the attachment.
    """

    part_id: str
    state: UploadState
    receipt: Receipt | None = None
    error: SendError | None = None


class PublicationState(Enum):
    """Whether a receiver is to be given the messages, and why not."""

    READY = "ready"
    FAILED = "failed"
    SUPPRESSED = "suppressed"
    UNAUTHORIZED = "unauthorized"


@dataclass(frozen=True, slots=True)
class Publication:
    """What one receiver is given.

    `messages` is empty unless the state is READY. `uploads` is everything that was prepared for
    the receiver, `missing` the failed ones among the parts still shown, `gaps` the reasons by the
    id of the part. `withheld` is what must not be found anywhere in the event.
    """

    receiver: Receiver
    state: PublicationState
    messages: tuple[Message, ...] = ()
    uploads: tuple[Upload, ...] = ()
    missing: tuple[Upload, ...] = ()
    withheld: tuple[Withheld, ...] = ()

    @property
    def references(self) -> dict[str, str]:
        """The ready references by the id of their part."""
        return {
            part.id: part.body.ref
            for part in parts_of(self.messages)
            if isinstance(part, AttachmentPart) and part.body is not None
        }

    @property
    def gaps(self) -> dict[str, str]:
        """The reasons of the gaps by the id of their part."""
        return {
            part.id: part.gap.reason for part in parts_of(self.messages) if part.gap is not None
        }


async def publication_of(
    permissions: Permissions,
    messages: Sequence[Message],
    attachments: Attachments,
    uploads: Mapping[Attachment, Upload],
) -> Publication:
    """What the receiver is given of `messages` after `uploads`.

    A bound attachment that is not among the uploads is missing: the part came into the messages
    after the preparation. One without a source stays the metadata that the host made of it.
    """
    receiver, done = permissions.receiver, tuple(uploads.values())
    if receiver.permission is False:
        return Publication(receiver, PublicationState.UNAUTHORIZED, uploads=done)
    draft = _Draft(await View.of(permissions, messages, attachments), attachments, uploads)
    shown = tuple(draft.of_message(message) for message in messages)
    missing = tuple(draft.missing.values())
    if missing and receiver.on_failed != "gap":
        return Publication(receiver, _REFUSALS[receiver.on_failed], uploads=done, missing=missing)
    # Metadata and omission come last, so that nothing of a body is left beside them.
    projection = project(shown, receiver.selection)
    withheld = _withheld(messages, projection.messages, attachments)
    return Publication(
        receiver, PublicationState.READY, projection.messages, done, missing, tuple(withheld)
    )


_REFUSALS: Final = {"fail": PublicationState.FAILED, "suppress": PublicationState.SUPPRESSED}


class _Draft:
    """The messages of one receiver before its selection is applied."""

    def __init__(
        self, view: View, attachments: Attachments, uploads: Mapping[Attachment, Upload]
    ) -> None:
        self._view = view
        self._attachments = attachments
        self._uploads = uploads
        self.missing: dict[Attachment, Upload] = {}

    def of_message(self, message: Message) -> Message:
        parts = tuple(self._of_part(part) for part in message.parts)
        return message.model_copy(update={"parts": parts})

    def _of_part(self, part: Part) -> Part:
        verdict = self._view.verdict(part)
        if verdict is Verdict.WITHHELD:
            return _gap_in(part, WITHHELD)
        attachment = self._attachments.get(part.id)
        if verdict is Verdict.UNSELECTED or attachment is None:
            return part
        return self._attached(part, attachment)

    def _attached(self, part: Part, attachment: Attachment) -> Part:
        upload = self._uploads.get(attachment) or _unprepared(part.id)
        if upload.receipt is not None and isinstance(part, AttachmentPart):
            return part.ready(upload.receipt.ref)
        self.missing[attachment] = upload
        return _gap_in(part, reason_of(upload.error))


def _unprepared(part_id: str) -> Upload:
    error = SourceError(
        "not_prepared", "This attachment was not prepared for the receiver. Start a new delivery."
    )
    return Upload(part_id, UploadState.FAILED, error=error)


def _gap_in(part: Part, reason: str) -> Part:
    """`part` with a gap where its body would be, and nothing that describes the body."""
    return part.viewed("omit").missing(reason)


def reason_of(error: SendError | None) -> str:
    """The gap's reason: a limit, an unavailable source, or a transfer that failed (AHP-S44)."""
    if error is not None and error.code in _LIMIT_CODES:
        return LIMIT_EXCEEDED
    return UNAVAILABLE if isinstance(error, SourceError | ConfigurationError) else TRANSFER_FAILED


def _withheld(
    messages: Sequence[Message], shown: Sequence[Message], attachments: Attachments
) -> Iterator[Withheld]:
    """What `shown` keeps back: text, bytes known by their digest, references of others."""
    visible = tuple(parts_of(shown))
    yield from withheld_from(parts_of(messages), visible)
    ready = {part.content for part in visible if isinstance(part, AttachmentPart)}
    for part in parts_of(messages):
        attachment = attachments.get(part.id)
        if attachment is not None:
            yield from _traces_of(attachment, category_of(part), ready)


def _traces_of(
    attachment: Attachment, category: str, ready: Collection[str | None]
) -> Iterator[Withheld]:
    refs = {receipt.ref for receipt in attachment.receipts}
    # Bytes that are shown by reference are no secret, but inline they would stand in for it.
    if attachment.sha256 is not None:
        yield Withheld(category, sha256=attachment.sha256)
    for ref in refs.difference(ready):
        yield Withheld(category, ref=ref)
