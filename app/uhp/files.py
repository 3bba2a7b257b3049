"""Files in: uploads, which tasks name by their id (Files section 1.2; UHP-03 to UHP-10).

    POST   /v1/files          multipart/form-data, one part `file`, optionally `purpose`
    GET    /v1/files          newest first, in pages
    GET    /v1/files/{id}
    DELETE /v1/files/{id}
    GET    /v1/files/{id}/content     the bytes of an upload, for whoever may name it in a task

An upload streams from the socket into staging. A body over the limit is refused, never cut; so is
one that ends before its closing boundary. Uploads end `upload_ttl` after they arrived.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.errors import TooLarge
from app.http import media_types, names
from app.http.multipart import FRAMING_BYTES, FileForm, boundary_of
from app.store.files import file_not_found
from app.uhp.containers import accelerator_of, download_of, representation_of
from app.uhp.errors import invalid_input
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.shapes import upload_object

if TYPE_CHECKING:
    from app.http.downloads import Accelerator
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.uhp.cursors import Cursors
    from app.uhp.services import Services

DEFAULT_PURPOSE = "user_data"
MAX_PAGE = 100
DEFAULT_PAGE = 20

_FILE_ID = re.compile(r"file_[A-Za-z0-9]{1,64}")
_PURPOSE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def routes(services: Services) -> list[UhpRoute]:
    """The routes of uploads."""
    settings = services.settings
    uploads = Uploads(settings, services.store, services.cursors, accelerator_of(settings))
    return [
        UhpRoute("/v1/files", {"POST": uploads.create, "GET": uploads.page, "HEAD": uploads.page}),
        UhpRoute(
            "/v1/files/{file_id}",
            {"GET": uploads.inspect, "HEAD": uploads.inspect, "DELETE": uploads.delete},
        ),
        UhpRoute("/v1/files/{file_id}/content", {"GET": uploads.content, "HEAD": uploads.content}),
    ]


@dataclass(frozen=True, slots=True)
class Uploads:
    """The handlers."""

    settings: Settings
    store: ContentStore
    cursors: Cursors
    accelerator: Accelerator | None

    async def create(self, request: UhpRequest) -> UhpAnswer:
        """`POST /v1/files`."""
        limit = int(self.settings.max_upload_bytes)
        boundary = _check_head(request, limit)
        form = FileForm(aiter(request.body), boundary, field="file", file_bytes=limit)
        part = await form.file()
        filename = names.accept(part.filename, param="file")
        media_type = _media_type(part.media_type, filename)
        async with self.store.stage(form.content()) as sealed:
            record = await self.store.files.add_upload(
                sealed,
                scope=request.scope,
                principal=request.principal.name,
                filename=filename,
                media_type=media_type,
                purpose=_purpose(form.fields),
                expires_at=self._expiry(),
            )
        request.note(record.audited)
        return json_answer(upload_object(record))

    async def page(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/files?limit&cursor`; `next_cursor` is null on the last page."""
        limit = request.query.integer("limit", default=DEFAULT_PAGE, least=1, most=MAX_PAGE)
        position = self.cursors.open(request.scope, "files", request.query.text("cursor"))
        before = position[0] if position else None
        found = await self.store.files.uploads(request.scope, before=before, limit=limit + 1)
        shown = found[:limit]
        following = None
        if len(found) > limit:
            following = self.cursors.seal(request.scope, "files", (shown[-1].position,))
        return json_answer(
            {"files": [upload_object(record) for record in shown], "next_cursor": following}
        )

    async def inspect(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/files/{id}`."""
        record = await self.store.files.get_upload(request.scope, _file_id(request))
        request.note(record.audited)
        return json_answer(upload_object(record))

    async def content(self, request: UhpRequest) -> UhpAnswer:
        """`GET /v1/files/{id}/content`: what was uploaded, as a download of an artifact is."""
        record = await self.store.files.get_upload(request.scope, _file_id(request))
        request.note(record.audited)
        source = await representation_of(self.store.files, record, self.accelerator)
        return download_of(source, request, self.accelerator)

    async def delete(self, request: UhpRequest) -> UhpAnswer:
        """`DELETE /v1/files/{id}`; a task that has taken the file in keeps its copy."""
        file_id = _file_id(request)
        await self.store.files.delete_upload(request.scope, file_id)
        return json_answer({"id": file_id, "object": "file", "deleted": True})

    def _expiry(self) -> int:
        return int(time.time() + self.settings.upload_ttl.total_seconds())


def _check_head(request: UhpRequest, limit: int) -> bytes:
    """What can be refused before any of the body is read; the boundary."""
    request.refuse_content_coding()
    boundary = boundary_of(request.header(b"content-type"))
    declared = request.header(b"content-length")
    if declared is not None and int(declared) > limit + FRAMING_BYTES:
        raise TooLarge(limit)
    return boundary


def _media_type(declared: str | None, filename: str) -> str:
    if declared is None:
        return media_types.guess(filename)
    return media_types.accept(declared, param="file")


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose") or DEFAULT_PURPOSE
    if _PURPOSE.fullmatch(purpose) is None:
        raise invalid_input("purpose is a word of at most 64 characters.", param="purpose")
    return purpose


def _file_id(request: UhpRequest) -> str:
    file_id = request.path["file_id"]
    if _FILE_ID.fullmatch(file_id) is None:
        raise file_not_found()
    return file_id
