"""Multipart uploads to S3 that nobody will finish: their parts cost room that no listing shows.

A failed upload is aborted by the client itself. One that was cancelled, or whose process died,
stays in the bucket until it is aborted from here. Google Cloud Storage and Azure have no such
call in `obstore`: there a rule of the bucket (deploy/lifecycle-gcs.json) or the service itself
(after a week) does it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import httpx

from app.errors import Unavailable

if TYPE_CHECKING:
    from app.store.buckets import S3Signer

PAGE = 1000
"""The most that S3 lists at once."""

REQUEST_SECONDS = 30

_NOT_OFFERED = frozenset({404, 405, 501})
"""What a store answers that knows no multipart listing; an upload that is gone, too, is 404."""

_ANY = "{*}"
"""Any XML namespace, or none: stores differ."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that is neither complete nor aborted; `begun` in unix seconds, None if unknown."""

    key: str
    upload_id: str
    begun: float | None


class UnfinishedUploads:
    """Those of one bucket, below its prefix."""

    def __init__(self, signer: S3Signer, prefix: str) -> None:
        self._signer = signer
        self._prefix = f"{prefix}/" if prefix else ""

    async def listed(self, below: str = "") -> AsyncIterator[Unfinished]:
        """Every one whose key, relative to the prefix, begins with `below`. Raises Unavailable."""
        markers: dict[str, str] = {}
        async with _client() as client:
            while True:
                page = await self._page(client, below, markers)
                if page is None:
                    return
                for upload in page.iterfind(f"{_ANY}Upload"):
                    yield self._unfinished(upload)
                if _text(page, "IsTruncated") != "true":
                    return
                markers = {
                    "key-marker": _text(page, "NextKeyMarker"),
                    "upload-id-marker": _text(page, "NextUploadIdMarker"),
                }

    async def abort(self, upload: Unfinished) -> None:
        """Take its parts away; one that is gone is fine. Raises Unavailable."""
        url = await self._signer.object_url("DELETE", upload.key, {"uploadId": upload.upload_id})
        async with _client() as client:
            await _ask(client, "DELETE", url)

    async def _page(
        self, client: httpx.AsyncClient, below: str, markers: dict[str, str]
    ) -> ElementTree.Element | None:
        query = {"uploads": "", "prefix": self._prefix + below, "max-uploads": str(PAGE)}
        url = await self._signer.bucket_url("GET", query | markers)
        answer = await _ask(client, "GET", url)
        if answer.status_code in _NOT_OFFERED:
            return None
        try:
            # From the configured store, and expat itself refuses entities that explode.
            return ElementTree.fromstring(answer.content)  # noqa: S314
        except ElementTree.ParseError as error:
            raise _unavailable() from error

    def _unfinished(self, upload: ElementTree.Element) -> Unfinished:
        key = _text(upload, "Key").removeprefix(self._prefix)
        return Unfinished(key, _text(upload, "UploadId"), _unix(_text(upload, "Initiated")))


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=REQUEST_SECONDS)


async def _ask(client: httpx.AsyncClient, method: str, url: str) -> httpx.Response:
    try:
        answer = await client.request(method, url)
    except httpx.HTTPError as error:
        raise _unavailable() from error
    if answer.is_error and answer.status_code not in _NOT_OFFERED:
        raise _unavailable()
    return answer


def _unavailable() -> Unavailable:
    return Unavailable(
        "storage_unavailable",
        "Unfinished uploads in the object store cannot be listed or aborted at the moment.",
    )


def _text(element: ElementTree.Element, name: str) -> str:
    return element.findtext(f"{_ANY}{name}", default="")


def _unix(time: str) -> float | None:
    try:
        begun = datetime.fromisoformat(time)
    except ValueError:
        return None
    return None if begun.tzinfo is None else begun.timestamp()
