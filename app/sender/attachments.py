"""The attachments of a host: which source stands behind which part, and who confirmed its bytes.

`Attachments` belongs to the host, and so does its lifetime: while it is open, a reference that a
receiver confirmed is used again for the same attachment in the same authorization context, in the
same delivery or a later one (AHP-S30), and never in another context (AHP-S31). Closing it closes
every source, used or not, and forgets every reference (AHP-S39).
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from app.sender.errors import SourceError, TransferError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from types import TracebackType

    from app.sender.budget import Budget
    from app.sender.config import BearerAuth, OAuthAuth
    from app.sender.sources import Snapshot, Source
    from app.sender.transfer import Receipt


@dataclass(frozen=True, slots=True)
class Context:
    """Where a confirmed reference holds: an endpoint, how it is authorized, and in which scope.

    Two receivers share a reference only if all three are equal, so that a scope named wrongly by
    the host does not join what the endpoint or the credential keeps apart.
    """

    endpoint: str
    auth: BearerAuth | OAuthAuth | None
    scope: str


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A receipt that holds in a context, and whether an earlier upload has brought it."""

    receipt: Receipt
    reused: bool


class Attachment:
    """One immutable attachment: a source, and the receipts of the contexts that have its bytes.

    `sha256` is the digest of the bytes (64 lowercase hex), None before they were first read.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sha256: str | None = None
        self._receipts: dict[Context, Receipt] = {}
        self._turns: dict[Context, asyncio.Lock] = {}

    async def snapshot(self, *, max_bytes: int, budget: Budget) -> Snapshot:
        """The source's one snapshot; its digest is known from then on. Raises as a source does."""
        snapshot = await self.source.snapshot(max_bytes=max_bytes, budget=budget)
        self.sha256 = snapshot.sha256
        return snapshot

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """What was confirmed so far, in whatever context."""
        return tuple(self._receipts.values())

    async def confirm(
        self, context: Context, upload: Callable[[], Awaitable[Receipt]]
    ) -> Confirmation:
        """The receipt for `context`; `upload` runs only where there is none, one at a time.

        A failed upload leaves nothing behind: whoever waited makes an attempt of its own.
        """
        async with self._turns.setdefault(context, asyncio.Lock()):
            known = self._receipts.get(context)
            if known is not None:
                return Confirmation(known, reused=True)
            receipt = self._receipts[context] = await upload()
            return Confirmation(receipt, reused=False)

    def forget(self) -> None:
        """Every receipt is forgotten; the next delivery uploads anew."""
        self._receipts.clear()
        self._turns.clear()


class Attachments:
    """The attachments of a host by the id of the part that shows them.

    Constructing and binding reads nothing (AHP-S35). Use it as an async context manager, or call
    `aclose()` in the end.
    """

    def __init__(self, sources: Mapping[str, Source] | None = None) -> None:
        self._by_part: dict[str, Attachment] = {}
        self._by_source: dict[Source, Attachment] = {}
        self._bodies: dict[tuple[Context, str], tuple[int, str]] = {}
        self._closed = False
        for part_id, source in (sources or {}).items():
            self.bind(part_id, source)

    def bind(self, part_id: str, source: Source) -> None:
        """`source` stands behind the part `part_id` from now on.

        One source is one attachment, however many parts show it. An attachment is immutable: a
        part that has a source keeps it. Raises SourceError `part_is_bound` for another one, and
        `attachments_closed` after the end.
        """
        self._require_open()
        attachment = self._by_source.get(source) or Attachment(source)
        if self._by_part.setdefault(part_id, attachment) is not attachment:
            raise SourceError(
                "part_is_bound",
                "This part has a source already. Give changed bytes a part id of their own.",
            )
        self._by_source[source] = attachment

    def share(self, known: str, part_id: str) -> None:
        """`part_id` shows the attachment of the part `known` as well. Raises as `bind` does."""
        self._require_open()
        self.bind(part_id, self._by_part[known].source)

    def get(self, part_id: str) -> Attachment | None:
        """The attachment that the part shows; None for a part without a source."""
        return self._by_part.get(part_id)

    async def confirm(
        self, attachment: Attachment, context: Context, upload: Callable[[], Awaitable[Receipt]]
    ) -> Confirmation:
        """As `Attachment.confirm`, and a reference never stands for two different bodies.

        Raises TransferError `reference_reused` if the receiver hands out one that it gave to other
        bytes before, `attachments_closed` after the end, and what `upload` raises.
        """
        self._require_open()

        async def checked() -> Receipt:
            receipt = await upload()
            self._remember(context, receipt)
            return receipt

        return await attachment.confirm(context, checked)

    async def aclose(self) -> None:
        """Close every source, whatever one of them raises, and forget the references."""
        self._closed = True
        attachments = tuple(self._by_source.values())
        self._by_part.clear()
        self._by_source.clear()
        self._bodies.clear()
        async with AsyncExitStack() as closing:
            for attachment in attachments:
                attachment.forget()
                closing.push_async_callback(attachment.source.aclose)

    async def __aenter__(self) -> Self:
        self._require_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _remember(self, context: Context, receipt: Receipt) -> None:
        body = (receipt.size, receipt.sha256)
        if self._bodies.setdefault((context, receipt.ref), body) != body:
            raise TransferError(
                "reference_reused",
                "The receiver gave one reference to two different bodies. Do not use it.",
            )

    def _require_open(self) -> None:
        if self._closed:
            raise SourceError(
                "attachments_closed", "These attachments are closed. Bind the sources to new ones."
            )
