"""Receivers as a host lists them, and what each is to see of a message, before a source is touched.

Selecting is not authorizing: `selection` says what a receiver wants, `permission` what it may have,
and both are asked before anything is read or sent (AHP-S24, S34). They hold for inline text as for
attachments (AHP-C02).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Self

from app.ahp.content import AttachmentPart, TextPart, parse_selection
from app.errors import Malformed
from app.sender.attachments import Context
from app.sender.config import UploadConfiguration
from app.sender.errors import BudgetExceeded, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from app.ahp.content import ContentSelection, Message
    from app.sender.attachments import Attachments
    from app.sender.budget import Budget

Part = TextPart | AttachmentPart

# True or False for everything, or asked for each part whose body the receiver selects.
Permission = bool | Callable[[Part], bool | Awaitable[bool]]

Mode = Literal["observe", "intercept"]
FailurePolicy = Literal["fail-open", "fail-closed"]
UploadFailure = Literal["fail", "suppress", "gap"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Receiver:
    """One subscription: what it selects, what it may have, and what a failure means to it.

    `scope` names the authorization context that its upload credential stands for. `failure_policy`
    is an interceptor's, for its hook call and for a delivery that failed before it. `on_failed`
    says what becomes of a delivery whose body is missing: it fails, it is suppressed, or the part
    is published as a gap (AHP-S22). `timeout_seconds` starts when an interceptor is called.
    """

    name: str
    selection: ContentSelection
    permission: Permission
    scope: str
    upload: UploadConfiguration | None = None
    mode: Mode = "observe"
    failure_policy: FailurePolicy = "fail-open"
    on_failed: UploadFailure = "fail"
    timeout_seconds: float = 10.0
    include_native: bool = False

    @classmethod
    def subscribed(
        cls,
        name: str,
        subscription: Mapping[str, Any],
        *,
        permission: Permission,
        scope: str,
        on_failed: UploadFailure = "fail",
        allow_loopback_http: bool = False,
    ) -> Self:
        """The receiver of a subscription as the draft writes it and `hooks/configuration` tells it.

        What a receiver asks for is no permission: that, the scope and what becomes of a failed
        upload are the host's to say. Raises ConfigurationError.
        """
        upload = subscription.get("upload")
        try:
            selection = parse_selection(subscription.get("content"))
        except Malformed as refusal:
            raise ConfigurationError(refusal.message) from None
        return cls(
            name=name,
            selection=selection,
            permission=permission,
            scope=scope,
            upload=None
            if upload is None
            else UploadConfiguration.parse(upload, allow_loopback_http=allow_loopback_http),
            mode=subscription.get("mode", "observe"),
            failure_policy=subscription.get("failurePolicy", "fail-open"),
            on_failed=on_failed,
            timeout_seconds=subscription.get("timeoutMs", 10_000) / 1000,
            include_native=subscription.get("includeNative", False) is True,
        )

    @property
    def context(self) -> Context:
        """Where its confirmed references hold. Raises ConfigurationError without an endpoint."""
        configuration = self.configuration
        return Context(configuration.endpoint, configuration.auth, self.scope)

    @property
    def configuration(self) -> UploadConfiguration:
        """Its upload configuration. Raises ConfigurationError `no_upload` if it has none."""
        if self.upload is None:
            raise ConfigurationError(
                "This receiver selects bodies but has no upload endpoint. Give it one.",
                code="no_upload",
            )
        return self.upload


class Verdict(IntEnum):
    """What a receiver is to get of one part; the greater is the stricter."""

    BODY = 0
    WITHHELD = 1
    UNSELECTED = 2


class Permissions:
    """What the host lets one receiver have, asked once for each part of a delivery."""

    def __init__(self, receiver: Receiver, budget: Budget) -> None:
        self.receiver = receiver
        self._budget = budget
        self._answers: dict[Part, bool] = {}

    async def allow(self, part: Part) -> bool:
        """Whether the receiver may have the body; no answer in time is none."""
        known = self._answers.get(part)
        if known is None:
            known = self._answers[part] = await self._ask(part)
        return known

    async def _ask(self, part: Part) -> bool:
        permission = self.receiver.permission
        if isinstance(permission, bool):
            return permission
        try:
            async with self._budget.limit():
                answer = permission(part)
                # Nothing but True is a permission, whatever else a callable returns.
                return (await answer if inspect.isawaitable(answer) else answer) is True
        except BudgetExceeded:
            return False


class View:
    """What one receiver is to get of each part of some messages.

    Parts that show the same attachment or repeat the same text get what the strictest of them
    gets: a second part with another category is no way around a selection (AHP-C02, C19).
    """

    def __init__(self, verdicts: Mapping[Hashable, Verdict], attachments: Attachments) -> None:
        self._verdicts = verdicts
        self._attachments = attachments

    @classmethod
    async def of(
        cls, permissions: Permissions, messages: Iterable[Message], attachments: Attachments
    ) -> Self:
        """The view of a receiver; asks its permission about each body that it selects."""
        verdicts: dict[Hashable, Verdict] = {}
        for part in parts_of(messages):
            content = _content_of(part, attachments)
            known = verdicts.get(content, Verdict.BODY)
            verdicts[content] = max(known, await _judge(permissions, part))
        return cls(verdicts, attachments)

    def verdict(self, part: Part) -> Verdict:
        """What the receiver is to get of `part`, one of the messages that this is a view of."""
        return self._verdicts[_content_of(part, self._attachments)]


def parts_of(messages: Iterable[Message]) -> Iterator[Part]:
    """Every part of `messages`, in order."""
    return (part for message in messages for part in message.parts)


async def _judge(permissions: Permissions, part: Part) -> Verdict:
    """Selected and permitted, selected but withheld, or not selected at all.

    Permission is asked only about a body that is selected. What the host omits stays omitted.
    """
    if part.selection == "omit" or permissions.receiver.selection.view_of(part) != "body":
        return Verdict.UNSELECTED
    return Verdict.BODY if await permissions.allow(part) else Verdict.WITHHELD


def _content_of(part: Part, attachments: Attachments) -> Hashable:
    """What stands for the content of `part`, equal for two parts that have the same."""
    if isinstance(part, AttachmentPart):
        return attachments.get(part.id) or ("attachment", part.id)
    return ("text", part.text) if part.text else ("part", part.id)
