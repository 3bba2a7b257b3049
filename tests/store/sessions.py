"""What the tests of sessions, tasks and files share: making them, and adding up what is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event

from app.store import ContentStore
from app.store.files import FileRecord
from app.store.responses import Beginning, Begun, IdempotencyKey
from app.store.sessions import SessionRecord
from app.store.sqlite import SqliteDatabase
from tests.store.stores import database, sqlite_rows, stream

HARNESS = "chrn_one"


def described(response_id: str, session: SessionRecord, created_at: int) -> dict[str, Any]:
    """A response as it begins."""
    return {"id": response_id, "status": "in_progress", "output": [], "created_at": created_at}


def beginning(scope: str = "a", **changes: Any) -> Beginning:
    """A task of the principal `alice` on the harness HARNESS."""
    given: dict[str, Any] = {
        "principal": "alice",
        "harness_id": HARNESS,
        "request": {"input_items": []},
        "describe": described,
        "owner": "me",
        **changes,
    }
    return Beginning(scope=scope, **given)


def key_of(key: str = "K", principal: str = "alice", digest: bytes = b"1") -> IdempotencyKey:
    """An Idempotency-Key."""
    return IdempotencyKey(key, principal, digest * 32)


async def begin(store: ContentStore, scope: str = "a", **changes: Any) -> Begun:
    """Begin a task."""
    return await store.responses.begin(beginning(scope, **changes))


async def finish(
    store: ContentStore, begun: Begun, status: str = "completed", *, retain: bool = True
) -> bool:
    """Bring a task to its end."""
    response = {**begun.response.response, "status": status, "store": retain}
    return await store.responses.finish(begun.response.id, response)


async def add_artifact(
    store: ContentStore,
    session: SessionRecord,
    data: bytes = b"data",
    path: str = "a.txt",
    **changes: Any,
) -> FileRecord:
    """An artifact of a session."""
    given: dict[str, Any] = {
        "scope": session.scope,
        "principal": session.principal,
        "response_id": None,
        "media_type": "text/plain",
        **changes,
    }
    async with store.stage(stream(data)) as sealed:
        return await store.files.add_artifact(sealed, session=session, path=path, **given)


async def add_upload(
    store: ContentStore, data: bytes = b"data", scope: str = "a", **changes: Any
) -> FileRecord:
    """An upload."""
    given: dict[str, Any] = {
        "principal": "alice",
        "filename": "a.txt",
        "media_type": "text/plain",
        "purpose": "user_data",
        "expires_at": None,
        **changes,
    }
    async with store.stage(stream(data)) as sealed:
        return await store.files.add_upload(sealed, scope=scope, **given)


async def add_input(store: ContentStore, begun: Begun, data: bytes = b"data") -> FileRecord:
    """A file that came inline with a task."""
    async with store.stage(stream(data)) as sealed:
        return await store.files.add_input(
            sealed,
            scope=begun.session.scope,
            principal="alice",
            session=begun.session,
            response_id=begun.response.id,
            filename="in.txt",
            media_type="text/plain",
        )


async def content_of(store: ContentStore, record: FileRecord) -> bytes:
    """The bytes of a file."""
    async with store.files.open(record) as pieces:
        return b"".join([piece async for piece in pieces])


def counted(data_dir: Path) -> dict[str, tuple[int, int]]:
    """What each scope keeps, added up over the rows of its files."""
    with database(data_dir) as rows:
        return {
            scope: (count, size)
            for scope, count, size in rows.execute(
                "select scope, count(*), sum(size) from files group by scope"
            )
        }


def noted(data_dir: Path) -> dict[str, tuple[int, int]]:
    """What each scope keeps, as its quota has it; scopes with nothing are left out."""
    with database(data_dir) as rows:
        found = rows.execute("select scope, files, bytes from scope_usage where files != 0")
        return {scope: (count, size) for scope, count, size in found}


Statement = tuple[str, Any]


@contextmanager
def executed(store: ContentStore) -> Iterator[list[Statement]]:
    """Every statement that looks something up inside the block, with its values."""
    statements: list[Statement] = []

    def note(_: Any, __: Any, statement: str, values: Any, *___: Any) -> None:
        if statement.startswith("SELECT"):
            statements.append((statement, values))

    engines = _engines(store._database)
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


def plans_of(data_dir: Path, statements: Sequence[Statement]) -> list[str]:
    """How SQLite goes about them."""
    with sqlite_rows(data_dir) as rows:
        return [
            row[3]
            for statement, values in statements
            for row in rows.execute(f"explain query plan {statement}", values)
        ]


def _engines(opened: Any) -> list[Any]:
    """Everything that statements go through."""
    if isinstance(opened, SqliteDatabase):
        return [opened.file.reader, opened.file.writer]
    return [opened.reader.sync_engine, opened.writer.sync_engine]
