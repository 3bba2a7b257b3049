"""What the store tells its callers: plain, immutable facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.settings import SettingsError


class StoreError(SettingsError):
    """The store cannot be opened as it is configured; the message says what to do."""

    exit_status = 1


@dataclass(frozen=True, slots=True)
class Reference:
    """A confirmed reference: its bytes are kept, durably, for `scope` (AHP-R24..R26).

    `size` is in bytes, `sha256` is 64 lowercase hex, times are unix seconds; `expires_at` is None
    for a reference that is kept until it is removed.
    """

    ref: str
    size: int
    sha256: str
    scope: str
    principal: str
    created_at: int
    expires_at: int | None


@dataclass(frozen=True, slots=True)
class Listed(Reference):
    """A reference with its place in the order of confirmation: the next page starts after it."""

    position: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What is stored: distinct bodies, their bytes, and the references to them."""

    blobs: int
    bytes: int
    references: int


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did, or with `dry_run` would do.

    `expired` references, `events` past their retention, `blobs` that nothing refers to any more
    with their `bytes`, `orphans` (stored bytes that no record names), `kept` (orphans of unknown or
    future age, which stay) and `staging` folders of processes that are gone.
    """

    dry_run: bool = False
    expired: int = 0
    events: int = 0
    blobs: int = 0
    bytes: int = 0
    orphans: int = 0
    kept: int = 0
    staging: int = 0


FindingKind = Literal[
    "missing", "unreadable", "wrong_size", "wrong_digest", "dangling_reference", "orphan"
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault that fsck saw.

    `sha256` names the body (64 lowercase hex) where one is known, `location` where its bytes lie
    inside the blob store, `references` how many references are hit.
    """

    kind: FindingKind
    detail: str
    sha256: str | None = None
    location: str | None = None
    references: int = 0
