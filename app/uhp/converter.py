"""One conversion to PDF by LibreOffice, in a process of its own that leaves nothing behind.

The converter sees a folder made for this job, a file of a fixed name in it, and an environment of
six variables. It runs below the launcher of the harnesses, which holds it to its limits and ends
everything that it has started; where this machine allows it, it has no network. Its profile is
fresh for every job: two jobs on one profile lose one (B66), and a crash spoils only its own (B72).
What counts is the PDF that lies there in the end, never the exit status (B68).
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.harness.processes import Contained, Limits, Verdict
from app.settings import MIB
from app.uhp.preview_formats import NotConvertible, looks_like_pdf

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.uhp.preview_formats import Format

PROGRAMS = ("soffice", "libreoffice")
"""Looked for on PATH, in this order, unless `preview_command` names another."""

OUTPUT_NAME = "input.pdf"
TAIL_BYTES = 1024
PROFILE_BYTES = 64 * MIB
"""What the job's folder may hold beside its input and its output."""

PROCESSES = 64
_ISOLATIONS = (
    ("unshare", "--net", "--"),
    ("unshare", "--user", "--map-root-user", "--net", "--"),
)

_SAFE_PROFILE = """\
<?xml version="1.0" encoding="UTF-8"?>
<oor:items xmlns:oor="http://openoffice.org/2001/registry">
<item oor:path="/org.openoffice.Office.Common/Security/Scripting"><prop oor:name="\
BlockUntrustedRefererLinks" oor:op="fuse"><value>true</value></prop></item>
<item oor:path="/org.openoffice.Office.Common/Security/Scripting"><prop oor:name="\
DisableMacrosExecution" oor:op="fuse"><value>true</value></prop></item>
<item oor:path="/org.openoffice.Office.Writer/Content/Update"><prop oor:name="Link" \
oor:op="fuse"><value>0</value></prop></item>
<item oor:path="/org.openoffice.Office.Calc/Content/Update"><prop oor:name="Link" \
oor:op="fuse"><value>1</value></prop></item>
</oor:items>
"""
"""No macro runs, and no link of a document is followed, not even to a file of this machine."""

log = logging.getLogger("consignee.previews")


@dataclass(frozen=True, slots=True)
class ConversionLimits:
    """Bounds of one job; see the settings of the same names."""

    seconds: float
    memory_bytes: int
    source_bytes: int
    output_bytes: int

    @property
    def folder_bytes(self) -> int:
        """What the whole folder of a job may take."""
        return self.source_bytes + self.output_bytes + PROFILE_BYTES


class Converter:
    """The configured converter, or none."""

    def __init__(self, command: Sequence[str] | None, limits: ConversionLimits) -> None:
        self._command = command
        self._limits = limits
        self._isolation: tuple[str, ...] | None = None

    def command(self) -> list[str] | None:
        """The converter's program with its path, and arguments; None when there is none.

        Looked up each time: a converter that is taken away is "never", not "this file" (B72).
        """
        if self._command is not None:
            program, *arguments = self._command or ("",)
            found = shutil.which(program) if program else None
            return [found, *arguments] if found else None
        found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
        return [found] if found else None

    async def convert(self, folder: Path, source: Path, wanted: Format) -> Path:
        """Make a PDF of `source`, which lies in the job's `folder`, and give its path there.

        Raises NotConvertible. Cancelled, it ends the converter first.
        """
        command = self.command()
        if command is None:
            raise _broken_down()
        if self._isolation is None:
            self._isolation = await _working_isolation()
        argv = [*self._isolation, *command, *_arguments(folder, source, wanted)]
        await asyncio.to_thread(_prepare, folder)
        verdict = await self._run(argv, folder)
        if not verdict.is_success:
            log.warning("converter ended badly", extra={"how": verdict.how})
        return await asyncio.to_thread(self._result, folder / "out" / OUTPUT_NAME, verdict)

    async def _run(self, argv: list[str], folder: Path) -> Verdict:
        running = await Contained.start(
            argv,
            cwd=folder,
            folder=folder,
            environment=_environment(folder),
            limits=Limits(
                memory_bytes=self._limits.memory_bytes,
                folder_bytes=self._limits.folder_bytes,
                processes=PROCESSES,
                grace_seconds=0.0,
            ),
        )
        try:
            async with asyncio.timeout(self._limits.seconds):
                while await running.read():
                    continue
                return await running.wait()
        except TimeoutError:
            raise NotConvertible("timed_out", "The conversion took too long.") from None
        finally:
            await running.end()

    def _result(self, path: Path, verdict: Verdict) -> Path:
        """The output, if it is a PDF."""
        if verdict.how in ("memory", "processes", "folder"):
            raise NotConvertible("over_limit", "The conversion needed more than it may use.")
        if not verdict.is_success:
            raise _broken_down()
        if not _is_whole_pdf(path, self._limits.output_bytes):
            raise NotConvertible("no_output", "The converter could not read this file.")
        return path


def _broken_down() -> NotConvertible:
    return NotConvertible("crashed", "The converter broke down.", lasting=False)


def _arguments(folder: Path, source: Path, wanted: Format) -> list[str]:
    chosen = [f"--infilter={wanted.input_filter}"] if wanted.input_filter else []
    return [
        f"-env:UserInstallation={(folder / 'profile').as_uri()}",
        *("--headless", "--nologo", "--nodefault", "--nolockcheck", "--norestore"),
        *chosen,
        *("--convert-to", "pdf", "--outdir", str(folder / "out"), str(source)),
    ]


def _prepare(folder: Path) -> None:
    for name in ("out", "tmp", "home"):
        (folder / name).mkdir(mode=0o700)
    user = folder / "profile" / "user"
    user.mkdir(mode=0o700, parents=True)
    (user / "registrymodifications.xcu").write_text(_SAFE_PROFILE, encoding="utf-8")


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "SAL_USE_VCLPLUGIN": "svp",
    }


async def _working_isolation() -> tuple[str, ...]:
    """The way in which this machine lets a process have no network; nothing when it does not."""
    for prefix in _ISOLATIONS:
        if shutil.which(prefix[0]) and await _succeeds(*prefix, "true"):
            return prefix
    log.warning("converters can reach the network: this machine does not allow `unshare --net`")
    return ()


async def _succeeds(*argv: str) -> bool:
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=nothing, stdout=nothing, stderr=nothing
    )
    return await process.wait() == 0


def _is_whole_pdf(path: Path, limit: int) -> bool:
    """Whether a regular file lies there that begins and ends like a PDF within `limit` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= limit:
            return False
        tail_at = max(status.st_size - TAIL_BYTES, 0)
        head, tail = (os.pread(descriptor, TAIL_BYTES, at) for at in (0, tail_at))
        return looks_like_pdf(head) and b"%%EOF" in tail
    finally:
        os.close(descriptor)
