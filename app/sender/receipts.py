"""The one answer that confirms an upload (AHP-S17 to S19)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from app.sender.errors import TransferError

if TYPE_CHECKING:
    import httpx

    from app.sender.spool import Snapshot

MAX_RECEIPT_BYTES: Final = 8 * 1024
"""Far above what three short members take."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a receiver confirmed: its own reference, bytes, 64 lowercase hex.

    It confirms that the bytes are available in the credential's scope. It acknowledges no event
    and promises no durable storage (AHP-S49).
    """

    ref: str
    size: int
    sha256: str


async def read_receipt(response: httpx.Response, snapshot: Snapshot) -> Receipt:
    """The receipt of `snapshot` in a 201. Raises TransferError unless it is just that."""
    media_type, _, _ = response.headers.get("content-type", "").partition(";")
    if media_type.strip().lower() != "application/json":
        raise _no_receipt("is not application/json")
    receipt = parse_receipt(await _bounded(response))
    if (receipt.size, receipt.sha256) != (snapshot.size, snapshot.sha256):
        raise TransferError(
            "receipt_mismatch",
            "The receiver confirmed other bytes than were sent; tell its operator.",
            status=response.status_code,
        )
    return receipt


def parse_receipt(body: bytes) -> Receipt:
    """A receipt with exactly `ref`, `size` and `sha256`. Raises TransferError."""
    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=_each_once)
    except (ValueError, RecursionError):
        raise _no_receipt("is not JSON with each member once") from None
    if not isinstance(document, dict) or document.keys() != {"ref", "size", "sha256"}:
        raise _no_receipt("has not exactly the members ref, size and sha256")
    ref, size, sha256 = document["ref"], document["size"], document["sha256"]
    # bool is a kind of int here, and 3.0 would be equal to 3.
    if not _is_reference(ref) or type(size) is not int or not isinstance(sha256, str):
        raise _no_receipt("has a member of the wrong type")
    return Receipt(ref, size, sha256)


async def _bounded(response: httpx.Response) -> bytes:
    body = b""
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_RECEIPT_BYTES:
            raise _no_receipt(f"is longer than {MAX_RECEIPT_BYTES} bytes")
    return body


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a member is there twice")
    return document


def _is_reference(value: object) -> bool:
    """A string that can be written into an event: lone surrogates have no UTF-8 form."""
    return isinstance(value, str) and re.fullmatch(r"[^\ud800-\udfff]+", value) is not None


def _no_receipt(why: str) -> TransferError:
    return TransferError(
        "malformed_receipt",
        f"The receiver's answer is no receipt, it {why}; nothing counts as confirmed.",
        status=201,
    )
