"""What an interceptor made of the messages, taken back into the host's own form.

An edit may remove, reorder and add messages and parts, and change text. Of attachments it carries
only unchanged references that it was given; it never rebinds one, invents one or changes the bytes
behind one (AHP-C15, C16). A part that comes back as it was shown is the host's own again, so that
what this receiver could not see is not lost to the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.ahp.content import AttachmentPart, admit_edit
from app.errors import Malformed
from app.sender.errors import SendError, SourceError
from app.sender.receivers import Part, parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.ahp.content import Message
    from app.sender.attachments import Attachments
    from app.sender.publication import Publication


class EditRefused(SendError):
    """An interceptor's effect changes what no effect may change; nothing of it is applied."""


def accept_edit(
    publication: Publication,
    messages: Sequence[Message],
    edited: Sequence[Message],
    attachments: Attachments,
) -> tuple[Message, ...]:
    """The host's messages after an edit of `publication`, which was the view of `messages`.

    Raises EditRefused, with the code of what was tried.
    """
    try:
        admit_edit(publication.messages, edited)
    except Malformed as refusal:
        raise EditRefused(refusal.code, refusal.message) from None
    restoring = _Restoring(publication, messages, attachments)
    return tuple(restoring.message(message) for message in edited)


class _Restoring:
    """Puts the host's parts back where the receiver left its view of them alone."""

    def __init__(
        self, publication: Publication, messages: Sequence[Message], attachments: Attachments
    ) -> None:
        views = parts_of(publication.messages)
        self._originals: dict[Part, Part] = {}
        for view, original in zip(views, parts_of(messages), strict=True):
            self._originals.setdefault(view, original)
        self._owners = {ref: part_id for part_id, ref in publication.references.items()}
        self._attachments = attachments

    def message(self, edited: Message) -> Message:
        parts = tuple(self._part(part) for part in edited.parts)
        return edited.model_copy(update={"parts": parts})

    def _part(self, edited: Part) -> Part:
        original = self._originals.get(edited)
        if original is not None:
            return original
        if isinstance(edited, AttachmentPart) and edited.body is not None:
            return self._moved(edited, edited.body.ref)
        if isinstance(edited, AttachmentPart) or self._attachments.get(edited.id) is not None:
            raise EditRefused(
                "attachment_changed",
                "An edit cannot change what a part says of its attachment, nor add one without a "
                "body. Leave it as it is, or remove it.",
            )
        return edited

    def _moved(self, edited: AttachmentPart, ref: str) -> AttachmentPart:
        """A reference in a part of another id: its attachment stands behind that, too."""
        try:
            self._attachments.share(self._owners[ref], edited.id)
        except SourceError as error:
            raise EditRefused("reference_rebound", error.message) from None
        return edited.viewed("metadata")
