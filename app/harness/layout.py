"""Where the files of a session's workspace lie. No other module joins these paths.

<data_dir>/workspaces/
    hsess_…/            one session; its id is checked before it becomes a name
        files/          the folder that the agent works in, and the only one that is collected
            inputs/     files that came with tasks
        home/           HOME of the agent: its settings and caches, kept for the next task
        scratch/        TMPDIR of the agent
        task.json       what a command is told about its task
        known.json      the artifacts that this workspace has taken in
        newest          the task that it was made ready for last
    .gone-…/            being removed
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from app.errors import NotFound
from app.harness.tree import Draft, NotPlain, open_file, opened_folder

INPUTS = "inputs"

MAX_KNOWN_BYTES = 16 * 1024 * 1024
"""More than any list of known artifacts takes: about 40 bytes for each."""

MAX_NAME_BYTES = 200
"""The longest name of an input; file systems take 255, and agents add to names."""

_SESSION_ID = re.compile(r"hsess_[A-Za-z0-9]{1,64}")
_TASK = "task.json"
_KNOWN = "known.json"
_NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of one session below `root`."""

    root: Path

    @classmethod
    def of_session(cls, workspaces: Path, session_id: str) -> Layout:
        """The places of `session_id`. Raises NotFound for what is no id of a session."""
        if not _SESSION_ID.fullmatch(session_id):
            raise NotFound("session_not_found", "There is no such session.")
        return cls(workspaces / session_id)

    @classmethod
    def around(cls, files: Path) -> Layout:
        """The places of the session whose `files` folder this is."""
        return cls(files.parent)

    @property
    def files(self) -> Path:
        """The folder that the agent works in."""
        return self.root / "files"

    @property
    def home(self) -> Path:
        """The agent's HOME."""
        return self.root / "home"

    @property
    def scratch(self) -> Path:
        """The agent's TMPDIR."""
        return self.root / "scratch"

    @property
    def task_file(self) -> Path:
        """What a command is told about its task."""
        return self.root / _TASK

    def make(self) -> None:
        """Make the folders; a link in the place of one is replaced. Blocks; raises OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self.files, self.home, self.scratch):
            if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                folder.unlink()
            folder.mkdir(mode=0o700, exist_ok=True)

    @contextmanager
    def opened_files(self) -> Iterator[int]:
        """The descriptor of `files`. Raises OSError where it is no folder of its own."""
        with self._opened_root() as root, opened_folder(root, ("files",)) as files:
            yield files

    def write_task(self, document: bytes) -> None:
        """Put `document` into the task file. Blocks; raises OSError."""
        self._write(_TASK, document)

    def write_known(self, document: bytes) -> None:
        """Put `document` into the file of known artifacts. Blocks; raises OSError."""
        self._write(_KNOWN, document)

    def read_known(self) -> bytes:
        """The file of known artifacts; empty where there is none. Blocks; raises OSError."""
        return self._read(_KNOWN)

    def write_newest(self, response_id: str) -> None:
        """Note the task that the workspace is made ready for. Blocks; raises OSError."""
        self._write(_NEWEST, response_id.encode())

    def read_newest(self) -> str | None:
        """The task that the workspace was made ready for last. Blocks; raises OSError."""
        return self._read(_NEWEST).decode(errors="replace") or None

    def _read(self, name: str) -> bytes:
        # The agent could have put anything there: only a plain file of bounded size is read.
        try:
            with (
                suppress(NotPlain),
                self._opened_root() as root,
                os.fdopen(open_file(root, name), "rb") as file,
            ):
                return file.read(MAX_KNOWN_BYTES)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):
                raise
        return b""

    def _write(self, name: str, document: bytes) -> None:
        draft = Draft(name)
        with self._opened_root() as root:
            try:
                draft.open(root)
                draft.write(document)
                draft.keep()
            finally:
                draft.discard()

    @contextmanager
    def _opened_root(self) -> Iterator[int]:
        with opened_path(self.root) as root:
            yield root


@contextmanager
def opened_path(folder: Path) -> Iterator[int]:
    """The descriptor of `folder`, which must not be a link itself."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def name_of_input(filename: str, taken: Collection[str]) -> str:
    """The name under which an input called `filename` lies in `inputs/`; none of `taken`.

    It keeps the name as far as a file can have it: the last part of a path, no control
    characters, at most 200 bytes cut between characters with the extension kept.
    """
    plain = re.split(r"[/\\]", filename)[-1]
    plain = re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", "_", plain).strip()
    if plain in ("", ".", ".."):
        plain = "file"
    stem, extension = os.path.splitext(plain)  # noqa: PTH122 - a name, not a path
    if len(extension.encode()) > MAX_NAME_BYTES // 4:
        stem, extension = plain, ""
    suffixes = chain([extension], (f"-{number}{extension}" for number in count(2)))
    names = (_cut(stem, MAX_NAME_BYTES - len(suffix.encode())) + suffix for suffix in suffixes)
    return next(name for name in names if name not in taken)


def _cut(text: str, size: int) -> str:
    return text.encode()[:size].decode(errors="ignore")
