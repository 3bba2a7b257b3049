"""Containers with files in them, on a real store, called as ASGI."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.settings import Settings, TokenSettings
from app.store import ContentStore, migrate
from app.store.files import FileRecord
from app.store.sessions import SessionRecord
from app.uhp import archive, containers
from app.uhp.application import UhpApplication
from app.uhp.previews import Previews
from tests import backends
from tests.http.messages import Header, Sent
from tests.uhp.calling import FIRST, application_of, call, services_on

READER = "reader-token"
WRITER = "writer-token"
STRANGER = "stranger-token"

NO_CONVERTER = "/nowhere/soffice"


def _token(token: str, scope: str, *permissions: Any) -> TokenSettings:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return TokenSettings(
        name=token, token_sha256=digest, scope=scope, permissions=frozenset(permissions)
    )


@dataclass(frozen=True, slots=True)
class Depot:
    """The routes of containers and archives, and one session to put files in."""

    settings: Settings
    store: ContentStore
    previews: Previews
    app: UhpApplication
    session: SessionRecord

    async def call(
        self, method: str, target: str, *chunks: bytes, token: str | None = FIRST, **more: Any
    ) -> Sent:
        """One request of the session's owner."""
        return await call(self.app, method, target, *chunks, token=token, **more)

    async def add(
        self, content: bytes, path: str = "a.txt", media_type: str = "text/plain"
    ) -> FileRecord:
        """An artifact of the session."""
        async with self.store.stage(_once(content)) as sealed:
            return await self.store.files.add_artifact(
                sealed,
                scope="a",
                principal="first",
                session=self.session,
                response_id=None,
                path=path,
                media_type=media_type,
            )

    def url(self, record: FileRecord, last: str = "content") -> str:
        """Where an artifact is."""
        return f"/v1/containers/{record.container_id}/files/{record.id}/{last}"

    async def put(
        self, path: str, content: bytes, *, token: str = FIRST, headers: list[Header] | None = None
    ) -> Sent:
        """Hand an artifact in, framed as it must be unless `headers` says otherwise."""
        target = f"/v1/containers/{self.session.container_id}/files/{path}"
        framing = framed(content) if headers is None else headers
        return await self.call("PUT", target, content, token=token, headers=framing)


def framed(content: bytes) -> list[Header]:
    """The framing of raw octets."""
    return [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"%d" % len(content)),
        (b"ahp-content-sha256", hashlib.sha256(content).hexdigest().encode()),
    ]


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content


@asynccontextmanager
async def depot_in(data_dir: Path, **changes: Any) -> AsyncIterator[Depot]:
    """A depot with a store of its own; without a converter unless `changes` names one."""
    tokens = (
        _token(FIRST, "a", "uhp", "artifacts.write"),
        _token(READER, "a", "uhp"),
        _token(WRITER, "a", "artifacts.write"),
        _token(STRANGER, "b", "uhp", "artifacts.write"),
    )
    chosen: dict[str, Any] = {"preview_command": NO_CONVERTER}
    chosen |= backends.settings_of(data_dir) | changes
    settings = Settings(data_dir=data_dir, tokens=tokens, **chosen)
    migrate(settings)
    store = await ContentStore.start(settings)
    previews = Previews(settings, store.sessions.exists)
    try:
        services = replace(services_on(settings, store), previews=previews)
        routes = [*containers.routes(services), *archive.routes(services)]
        session = await store.sessions.create(scope="a", principal="first")
        yield Depot(settings, store, previews, application_of(routes, settings), session)
    finally:
        await previews.close()
        await store.close()
