"""A chain of interceptors: one call after the other, each with what the ones before it left.

Uploads of all of them may run before and beside the chain; a failure of theirs is looked at only
when the turn of that interceptor comes (AHP-S26, S27), and only if the attachment is still there
(AHP-S29). A transfer failure is not a hook failure (AHP-S44): the first is in the publication, the
second a HookFailure; the receiver's failure policy decides about both.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.sender.edits import EditRefused, accept_edit
from app.sender.errors import BudgetExceeded, SendError
from app.sender.publication import Publication, PublicationState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.ahp.content import Message
    from app.sender.budget import Budget
    from app.sender.delivery import Delivery
    from app.sender.receivers import Receiver


class HookFailure(SendError):
    """The receiver did not take the event, or did not answer it in time or in form."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a receiver answered.

    `messages` are the effective messages after its edits, None if it made none; `stop` ends the
    chain, as a denial does; `result` is the answer itself, for the host to settle.
    """

    messages: tuple[Message, ...] | None = None
    stop: bool = False
    result: Mapping[str, Any] | None = None


# Hands a READY publication to its receiver. Raises HookFailure when that does not succeed.
Publish = Callable[[Publication], Awaitable[Reply | None]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One receiver's turn: what it was given, what it answered, and the error that kept it from
    being called or from counting."""

    publication: Publication
    reply: Reply | None = None
    error: SendError | None = None

    @property
    def receiver(self) -> Receiver:
        """Whose turn it was."""
        return self.publication.receiver

    @property
    def failed(self) -> bool:
        """Whether the failure policy of the receiver has to decide."""
        return self.error is not None or self.publication.state is PublicationState.FAILED


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a chain ended: the effective messages in the host's form, the turns in order, and the
    receiver that ended it, by its answer or by failing closed."""

    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    ended_by: Receiver | None = None


async def intercept(delivery: Delivery, publish: Publish) -> Settlement:
    """Call the interceptors of `delivery` in their order and settle."""
    messages = delivery.messages
    turns: list[Turn] = []
    for receiver in delivery.receivers:
        if receiver.mode != "intercept":
            continue
        turn = await _turn_of(delivery, receiver, messages, publish)
        turn, messages = _applied(delivery, turn, messages)
        turns.append(turn)
        if _ends(turn):
            return Settlement(messages, tuple(turns), receiver)
    return Settlement(messages, tuple(turns))


async def _turn_of(
    delivery: Delivery, receiver: Receiver, messages: Sequence[Message], publish: Publish
) -> Turn:
    publication = await delivery.publication(receiver, messages)
    if publication.state is not PublicationState.READY:
        return Turn(publication)
    return await called(publication, publish, delivery.budget.part(receiver.timeout_seconds))


async def called(publication: Publication, publish: Publish, budget: Budget) -> Turn:
    """Publish within `budget`, which starts now, whatever the uploads took (AHP-S43)."""
    try:
        async with budget.limit():
            return Turn(publication, await _published(publication, publish))
    except BudgetExceeded:
        error = HookFailure("hook_timed_out", "The receiver did not take the event in time.")
        return Turn(publication, error=error)
    except SendError as failure:
        return Turn(publication, error=failure)


async def _published(publication: Publication, publish: Publish) -> Reply | None:
    try:
        return await publish(publication)
    except SendError:
        raise
    except Exception as error:
        raise HookFailure(
            "publish_failed", f"Publishing failed with {type(error).__name__}; see its own log."
        ) from error


def _applied(
    delivery: Delivery, turn: Turn, messages: tuple[Message, ...]
) -> tuple[Turn, tuple[Message, ...]]:
    """The turn and the messages after its edit, or before it if that is refused (AHP-C15)."""
    reply = turn.reply
    if reply is None or reply.messages is None:
        return turn, messages
    try:
        edited = accept_edit(turn.publication, messages, reply.messages, delivery.attachments)
    except EditRefused as refusal:
        return Turn(turn.publication, error=refusal), messages
    return turn, edited


def _ends(turn: Turn) -> bool:
    if turn.failed:
        return turn.receiver.failure_policy == "fail-closed"
    return turn.reply is not None and turn.reply.stop
