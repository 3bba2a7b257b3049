"""Stored files on their way into a workspace: artifacts of earlier tasks, and a task's inputs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from app.harness.base import InputFile
from app.harness.blocking import run_blocking
from app.harness.layout import INPUTS, Layout, name_of_input
from app.harness.tree import Draft, NotPlain, open_file, opened_folder
from app.store.files import FileRecord

OpenStored = Callable[[FileRecord], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""How the bytes of a stored file are read."""

log = logging.getLogger("consignee.harness")


@dataclass(frozen=True, slots=True)
class Filling:
    """One workspace that stored files are written to."""

    layout: Layout
    open_stored: OpenStored

    async def take_in_artifacts(self, current: Sequence[FileRecord]) -> None:
        known = _parsed_known(await run_blocking(self.layout.read_known))
        for record in current:
            if record.id not in known and not await self._is_there(record.path, record):
                await self._take_in_artifact(record)
        ids = [record.id for record in current]
        if known != set(ids):
            await run_blocking(self.layout.write_known, json.dumps(ids).encode())

    async def _take_in_artifact(self, record: FileRecord) -> None:
        try:
            await self._write(record.path, record)
        except IsADirectoryError:
            # Two artifacts can be called `a` and `a/b`; one workspace cannot hold both.
            log.warning("A folder of the workspace has the name of an artifact: %s", record.id)

    async def take_in_input(self, record: FileRecord) -> InputFile:
        path = f"{INPUTS}/{name_of_input(record.filename, ())}"
        if not await self._is_there(path, record):
            taken = await run_blocking(_names_of_inputs, self.layout)
            path = f"{INPUTS}/{name_of_input(record.filename, taken)}"
            await self._write(path, record)
        return InputFile(path, record.filename, record.media_type, record.size, record.sha256)

    async def _is_there(self, path: str, record: FileRecord) -> bool:
        return await run_blocking(_has_content, self.layout, path, record.size, record.sha256)

    async def _write(self, path: str, record: FileRecord) -> None:
        draft = Draft(path)
        try:
            await run_blocking(_begin, self.layout, draft)
            async with self.open_stored(record) as content:
                async for piece in content:
                    await run_blocking(draft.write, piece)
            await run_blocking(draft.keep)
        finally:
            await run_blocking(draft.discard)


def _begin(layout: Layout, draft: Draft) -> None:
    with layout.opened_files() as files:
        draft.open(files)


def _has_content(layout: Layout, path: str, size: int, sha256: str) -> bool:
    with (
        suppress(OSError, NotPlain),
        layout.opened_files() as files,
        os.fdopen(open_file(files, path), "rb") as file,
    ):
        is_as_long = os.fstat(file.fileno()).st_size == size
        return is_as_long and hashlib.file_digest(file, "sha256").hexdigest() == sha256
    return False


def _names_of_inputs(layout: Layout) -> frozenset[str]:
    with (
        suppress(OSError),
        layout.opened_files() as files,
        opened_folder(files, (INPUTS,)) as folder,
        os.scandir(folder) as entries,
    ):
        return frozenset(entry.name for entry in entries)
    return frozenset()


def _parsed_known(document: bytes) -> set[str]:
    """The ids in `document`, which the agent may have written over: anything else is no id."""
    try:
        ids = json.loads(document or b"[]")
    except (ValueError, RecursionError):
        return set()
    return {entry for entry in ids if isinstance(entry, str)} if isinstance(ids, list) else set()
