"""`GET /v1/sessions/{session_id}/files/archive`: every artifact of a session as one zip (UHP-27).

The current file of each path lies under that path, older ones under `previous/<file id>/<path>`.
It is written while it is sent; its length is known before, from names and sizes.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import TYPE_CHECKING

from app.http.names import ZipNames, content_disposition
from app.http.streams import send_stream, takes_files
from app.store.files import session_not_found
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute
from app.uhp.zips import Entry, archive_length, archive_pieces

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from app.store.content import ContentStore
    from app.store.files import FileRecord, Files
    from app.uhp.services import Services

_SESSION_ID = re.compile(r"hsess_[A-Za-z0-9]{1,64}")

_HARMLESS = (
    (b"content-security-policy", b"default-src 'none'; sandbox"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"private, no-transform"),
)


def routes(services: Services) -> list[UhpRoute]:
    """The route of archives."""
    archives = Archives(services.store)
    methods = {"GET": archives.fetch, "HEAD": archives.fetch}
    return [UhpRoute("/v1/sessions/{session_id}/files/archive", methods)]


class Archives:
    """The handler of archives."""

    def __init__(self, store: ContentStore) -> None:
        self._store = store

    async def fetch(self, request: UhpRequest) -> UhpAnswer:
        """The archive; for HEAD nothing is opened."""
        session_id = request.path["session_id"]
        if not _SESSION_ID.fullmatch(session_id):
            raise session_not_found()
        records = await self._store.files.of_session(request.scope, session_id)
        request.note({"files": len(records), "bytes": sum(record.size for record in records)})
        return partial(self._send, f"{session_id}.zip", records)

    async def _send(
        self, name: str, records: list[FileRecord], scope: Scope, receive: Receive, send: Send
    ) -> None:
        entries = entries_of(records)
        length = archive_length(entries)
        headers = [
            (b"content-type", b"application/zip"),
            (b"content-disposition", content_disposition(name)),
            *_HARMLESS,
        ]
        if scope["method"] == "HEAD":
            headers.append((b"content-length", b"%d" % length))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        sources = _Artifacts(self._store.files, records)
        archive = archive_pieces(entries, sources, takes_files=takes_files(scope))
        async with aclosing(archive) as pieces:
            await send_stream(receive, send, headers, pieces, length=length)


def entries_of(records: Sequence[FileRecord]) -> list[Entry]:
    """The entries of an archive: current files first, then older ones, each oldest first.

    Current files take their names first, so that none of them is displaced by an older one.
    """
    names = ZipNames()
    ordered = [r for r in records if r.current] + [r for r in records if not r.current]
    return [
        Entry(names.add(_wanted(record)), record.size, record.created_at, record.id)
        for record in ordered
    ]


def _wanted(record: FileRecord) -> str:
    return record.path if record.current else f"previous/{record.id}/{record.path}"


class _Artifacts:
    """The sources of an archive."""

    def __init__(self, files: Files, records: Sequence[FileRecord]) -> None:
        self._files = files
        self._records = {record.id: record for record in records}

    def open(self, entry: Entry) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of one artifact."""
        return self._files.open(self._records[entry.key])

    async def small(self, entries: Sequence[Entry]) -> Mapping[str, bytes]:
        """The bytes of those that lie in the database, in one question."""
        return await self._files.small([self._records[entry.key] for entry in entries])
