"""The files of a container: downloads, previews, and the intake of artifacts.

    GET, HEAD  /v1/containers/{container_id}/files/{file_id}/content
    GET, HEAD  /v1/containers/{container_id}/files/{file_id}/pdf
    PUT        /v1/containers/{container_id}/files/{path}

Ids match a strict pattern and are looked up together with the caller's scope. Everything else
below /v1/containers is one and the same 404, whatever it spells (UHP-29, UHP-30, B37, B38).
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from starlette.convertors import PathConvertor, register_url_convertor

from app.errors import Unavailable
from app.harness.blocking import run_blocking
from app.harness.tree import fault_of_path
from app.http import media_types
from app.http.downloads import Accelerator, Download, PreconditionFailed, Representation
from app.http.framing import parse_framing
from app.http.ranges import RangeNotSatisfiable
from app.http.streams import while_connected
from app.store.files import file_not_found
from app.store.sessions import refuse_expired
from app.uhp.errors import UhpError, invalid_input
from app.uhp.http import UhpAnswer, UhpRequest, UhpRoute, json_answer
from app.uhp.preview_formats import NotConvertible
from app.uhp.previews import Interrupted, check_pdf, has_previews, is_pdf_source
from app.uhp.shapes import artifact_object

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from app.settings import Permission, Settings
    from app.store.content import ContentStore
    from app.store.files import FileRecord, Files
    from app.uhp.previews import Kept, Previews
    from app.uhp.services import Services

READ_BYTES = 256 * 1024
PDF = "application/pdf"

_CONTAINER_ID = re.compile(r"cntr_[A-Za-z0-9]{1,64}")
_FILE_ID = re.compile(r"file_[A-Za-z0-9]{1,64}")
_BELOW_FILES = re.compile(rb"/v1/containers/[^/]+/files/(?P<path>.+)", re.DOTALL)
_OTHER_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS")


class _AnyPath(PathConvertor):
    """A path whatever it holds: Starlette's own stops at a line feed."""

    regex = "(?s:.*)"


register_url_convertor("any_path", _AnyPath())


def routes(services: Services) -> list[UhpRoute]:
    """The routes of containers; the last ones take what no other one does."""
    files = ContainerFiles(services.settings, services.store, services.previews)
    base = "/v1/containers/{container_id}/files"
    # Whoever may not exist must not answer otherwise than what does not: no 405 here.
    hidden = {**dict.fromkeys(_OTHER_METHODS, _nothing), "PUT": files.take}
    own: dict[str, Permission] = {"PUT": "artifacts.write"}
    return [
        UhpRoute(
            base + "/{file_id}/content",
            {**hidden, "GET": files.content, "HEAD": files.content},
            permissions=own,
            conceals=True,
        ),
        UhpRoute(
            base + "/{file_id}/pdf",
            {**hidden, "GET": files.pdf, "HEAD": files.pdf},
            permissions=own,
            conceals=True,
        ),
        UhpRoute(base + "/{path:any_path}", hidden, permissions=own, conceals=True),
        UhpRoute(
            "/v1/containers/{rest:any_path}",
            dict.fromkeys((*_OTHER_METHODS, "PUT"), _nothing),
            conceals=True,
        ),
    ]


async def _nothing(_: UhpRequest) -> UhpAnswer:
    raise file_not_found()


class ContainerFiles:
    """The handlers of what lies in containers."""

    def __init__(self, settings: Settings, store: ContentStore, previews: Previews) -> None:
        self._store = store
        self._previews = previews
        self._base_url = settings.base_url
        self._limit = int(settings.max_upload_bytes)
        self._accelerator = accelerator_of(settings)

    async def content(self, request: UhpRequest) -> UhpAnswer:
        """The raw bytes of an artifact (UHP-18 to UHP-22)."""
        record = await self._find(request, "content")
        source = await self._representation(record)
        linked = replace(source, link=partial(self._store.link, record.sha256))
        return self._download(linked, request)

    async def pdf(self, request: UhpRequest) -> UhpAnswer:
        """A preview: 404 comes before 501, and 501 before 502 (UHP-23 to UHP-26)."""
        record = await self._find(request, "pdf")
        if not self._previews.available:
            raise UhpError("preview_unavailable", "This server makes no previews.")
        source = await self._representation(record)
        if is_pdf_source(source):
            return await self._own_preview(source, request)
        if not has_previews(source):
            raise _preview_failed(
                NotConvertible("unsupported_format", "There are no previews of this kind of file.")
            )
        if request.method == "HEAD":
            return await self._preview_head(record, source, request)
        return partial(self._converted, record, source, request)

    async def take(self, request: UhpRequest) -> UhpAnswer:
        """Artifact intake: raw octets with a declared length and digest become a file."""
        container_id = _require(_CONTAINER_ID, request.path["container_id"])
        session = await self._store.sessions.of_container(request.scope, container_id)
        refuse_expired(session)
        path = _intake_path(request)
        media_type = _intake_type(request, path)
        declared = parse_framing(request.asgi["headers"], limit=self._limit)
        async with self._store.stage(
            request.body, size=declared.size, sha256=declared.sha256
        ) as sealed:
            record = await self._store.files.add_artifact(
                sealed,
                scope=request.scope,
                principal=request.principal.name,
                session=session,
                response_id=None,
                path=path,
                media_type=media_type,
            )
        request.note(record.audited)
        return json_answer(artifact_object(record, self._base_url), status=201)

    async def _find(self, request: UhpRequest, last: str) -> FileRecord:
        container_id = _require(_CONTAINER_ID, request.path["container_id"])
        file_id = _require(_FILE_ID, request.path["file_id"])
        if request.asgi["path"] != f"/v1/containers/{container_id}/files/{file_id}/{last}":
            raise file_not_found()
        record = await self._store.files.get_in_container(request.scope, container_id, file_id)
        request.note(record.audited)
        return record

    async def _representation(self, record: FileRecord) -> Representation:
        return await representation_of(self._store.files, record, self._accelerator)

    def _download(self, source: Representation, request: UhpRequest) -> ASGIApp:
        return download_of(source, request, self._accelerator)

    async def _own_preview(self, source: Representation, request: UhpRequest) -> UhpAnswer:
        if request.method != "HEAD":
            try:
                await check_pdf(source)
            except NotConvertible as failure:
                raise _preview_failed(failure) from None
        named = Representation(
            source.size, source.sha256, PDF, source.filename, source.open, source.path
        )
        return self._download(named, request)

    async def _preview_head(
        self, record: FileRecord, source: Representation, request: UhpRequest
    ) -> UhpAnswer:
        """What a GET would answer, as far as that is known without making it (B51)."""
        kept = await self._previews.kept(_session_of(record), source)
        if kept is None:
            return _head_of_unmade
        return self._download(_made(kept, source), request)

    async def _converted(
        self,
        record: FileRecord,
        source: Representation,
        request: UhpRequest,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        making = self._previews.make(_session_of(record), source)
        try:
            kept = await while_connected(receive, making)
        except NotConvertible as failure:
            raise _preview_failed(failure) from None
        except Interrupted:
            await self._find(request, "pdf")
            raise Unavailable("interrupted", "This server is about to stop; try again.") from None
        # The file may have gone with its session while this was made: then nobody gets it.
        await self._find(request, "pdf")
        await self._download(_made(kept, source), request)(scope, receive, send)


def accelerator_of(settings: Settings) -> Accelerator | None:
    """The proxy that sends files in our place, where one is configured."""
    if settings.accel is None:
        return None
    return Accelerator(settings.accel_prefix, Path(settings.blobs.removeprefix("file://")))


async def representation_of(
    files: Files, record: FileRecord, accelerator: Accelerator | None
) -> Representation:
    """A stored file as what a download sends; its place on the disk is looked up for a proxy."""
    return Representation(
        size=record.size,
        sha256=record.sha256,
        media_type=record.media_type,
        filename=record.filename,
        open=lambda start, stop: files.open(record, start=start, stop=stop),
        path=await files.location(record) if accelerator is not None else None,
    )


def download_of(
    source: Representation, request: UhpRequest, accelerator: Accelerator | None
) -> ASGIApp:
    """The answer to a request for a file's bytes; its refusals are envelopes."""
    inline = request.query.text("disposition") == "inline"
    return _refusing(Download(source, inline=inline, accelerator=accelerator))


def _require(pattern: re.Pattern[str], value: str) -> str:
    """`value`, if it can be an id; anything else is unknown, and the database is not asked."""
    if not pattern.fullmatch(value):
        raise file_not_found()
    return value


def _session_of(record: FileRecord) -> str:
    assert record.session_id is not None, "what lies in a container belongs to a session"
    return record.session_id


def _intake_path(request: UhpRequest) -> str:
    """The path in the container, from the bytes that were sent: nothing is resolved or repaired."""
    raw = request.asgi.get("raw_path") or b""
    match = _BELOW_FILES.fullmatch(raw.partition(b"?")[0])
    try:
        path = unquote_to_bytes(match["path"]).decode("utf-8") if match else ""
    except UnicodeDecodeError:
        raise invalid_input("The path is not UTF-8.", param="path") from None
    if (fault := fault_of_path(path)) is not None:
        raise invalid_input(f"An artifact cannot lie there: {fault}.", param="path")
    return path


def _intake_type(request: UhpRequest, path: str) -> str:
    given = request.query.text("media_type")
    return (
        media_types.guess(path) if given is None else media_types.accept(given, param="media_type")
    )


def _preview_failed(failure: NotConvertible) -> UhpError:
    return UhpError("preview_failed", failure.message, detail={"reason": failure.reason})


def _refusing(download: Download) -> ASGIApp:
    """The download, with its refusals as envelopes."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await download(scope, receive, send)
        except PreconditionFailed:
            raise UhpError(
                "consignee_precondition_failed", "If-Match names no version of this file."
            ) from None
        except RangeNotSatisfiable as refused:
            raise UhpError(
                "consignee_range_not_satisfiable",
                f"The range lies outside the file, which has {refused.size} bytes.",
                detail={"size": refused.size},
                headers=[(b"content-range", b"bytes */%d" % refused.size)],
            ) from None

    return answer


async def _head_of_unmade(scope: Scope, receive: Receive, send: Send) -> None:
    del scope, receive
    headers = [(b"content-type", PDF.encode("ascii"))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _made(kept: Kept, source: Representation) -> Representation:
    """A finished preview as an answer; its name is the original's, and ends in .pdf (B69)."""
    return Representation(
        size=kept.size,
        sha256=kept.sha256,
        media_type=PDF,
        filename=f"{source.filename}.pdf",
        open=partial(_open_kept, kept.path),
    )


@asynccontextmanager
async def _open_kept(path: Path, start: int, stop: int) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        descriptor = await run_blocking(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise file_not_found() from None
    try:
        yield _pieces(descriptor, start, stop)
    finally:
        os.close(descriptor)


async def _pieces(descriptor: int, start: int, stop: int) -> AsyncIterator[bytes]:
    while start < stop:
        piece = await run_blocking(os.pread, descriptor, min(READ_BYTES, stop - start), start)
        if not piece:
            return
        yield piece
        start += len(piece)
