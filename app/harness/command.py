"""The harness that runs a configured program, once for each task.

The program gets the prompt on standard input and works in the session's folder. Everything else
about its task stands in the JSON file that CONSIGNEE_TASK_FILE names:

    {"response_id", "session_id", "model", "prompt", "instructions",
     "history": [{"user", "assistant"}],
     "inputs": [{"path", "filename", "media_type", "size", "sha256"}],
     "max_step", "max_output_tokens", "timeout_seconds"}

What it writes to standard output is the answer (see `output`), what it leaves in its folder are
artifacts. `{model}` in an argument stands for the model's name. Exit status 0 is success; any
other makes the task fail, with what it said and wrote kept. Standard error goes to the log, never
to the client: nobody knows what is in it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import asdict

from app.harness.base import (
    BudgetSpent,
    HarnessEvent,
    HarnessFailed,
    HarnessUnavailable,
    Task,
)
from app.harness.blocking import run_blocking
from app.harness.layout import Layout
from app.harness.output import LinesOutput, Output, TextOutput
from app.harness.processes import Contained, Limits, Verdict, kill_strays
from app.settings import TASK_FILE_VARIABLE, HarnessSettings
from app.store.disk import disk_border

LOGGED_ERRORS = 2000
"""Characters of standard error that a line of the log holds."""

_LIMITS = {
    "memory": "memory",
    "processes": "number of processes",
    "folder": "size of its workspace",
}

log = logging.getLogger("consignee.harness")


class CommandHarness:
    """One configured program; any number of tasks can run at once."""

    def __init__(self, settings: HarnessSettings, *, grace_seconds: float) -> None:
        self._settings = settings
        self._limits = Limits(
            memory_bytes=settings.max_memory_bytes,
            folder_bytes=settings.max_workspace_bytes,
            processes=settings.max_processes,
            grace_seconds=grace_seconds,
        )

    def is_available(self) -> bool:
        """Whether the program is there and may be run."""
        return self._program() is not None

    def _program(self) -> str | None:
        return shutil.which(self._settings.argv[0], path=_search_path())

    async def run(self, task: Task) -> AsyncGenerator[HarnessEvent, None]:
        """Run the program over `task`.

        Raises HarnessUnavailable when it cannot be started, HarnessFailed when it does not
        succeed, BudgetSpent when it says too much; Exhausted and Unavailable from the disk.
        """
        layout = Layout.around(task.workspace)
        process = await self._start(task, layout)
        try:
            async for event in self._events(process):
                yield event
            verdict = await process.wait()
        finally:
            if (await process.end()).how == "lost":
                await run_blocking(kill_strays, layout.task_file)
        self._judge(task, verdict, process.errors)

    async def _start(self, task: Task, layout: Layout) -> Contained:
        program = self._program()
        if program is None:
            raise self._unavailable()
        arguments = [part.replace("{model}", task.model) for part in self._settings.argv[1:]]
        with disk_border():
            await run_blocking(layout.write_task, _task_document(task))
        try:
            return await Contained.start(
                [program, *arguments],
                stdin=task.prompt.encode("utf-8", "replace"),
                cwd=layout.files,
                folder=layout.root,
                environment=self._environment(layout),
                limits=self._limits,
            )
        except OSError as error:
            log.warning("%s cannot be started: %s", self._settings.name, error.strerror)
            raise self._unavailable() from None

    def _environment(self, layout: Layout) -> dict[str, str]:
        """Only what is named here and in the settings: the server's secrets are not for agents."""
        passed = {
            name: os.environ[name] for name in self._settings.environment if name in os.environ
        }
        return {
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            **passed,
            "PATH": _search_path(),
            "HOME": str(layout.home),
            "TMPDIR": str(layout.scratch),
            TASK_FILE_VARIABLE: str(layout.task_file),
        }

    async def _events(self, process: Contained) -> AsyncIterator[HarnessEvent]:
        output: Output = TextOutput() if self._settings.output == "text" else LinesOutput()
        left = int(self._settings.max_output_bytes)
        while data := await process.read():
            for event in output.take(data[:left]):
                yield event
            left -= len(data)
            if left < 0:
                raise BudgetSpent("max_output")
        for event in output.close():
            yield event

    def _judge(self, task: Task, verdict: Verdict, errors: str) -> None:
        if verdict.is_success:
            return
        log.warning(
            "%s: %s %d: %s",
            self._settings.name,
            verdict.how,
            verdict.number,
            errors[-LOGGED_ERRORS:].strip(),
            extra={"ref": task.response_id},
        )
        if verdict.how == "not_started":
            raise self._unavailable()
        raise HarnessFailed(_why(verdict))

    def _unavailable(self) -> HarnessUnavailable:
        return HarnessUnavailable(f"The harness {self._settings.name!r} cannot be started here.")


def _why(verdict: Verdict) -> str:
    if verdict.how in _LIMITS:
        return f"The harness was ended: it went over the limit of the {_LIMITS[verdict.how]}."
    if verdict.how == "exited":
        return f"The harness ended with status {verdict.number}."
    return "The harness was ended by a signal."


def _search_path() -> str:
    """PATH without relative folders: they would be found inside the workspace."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if folder.startswith("/"))


def _task_document(task: Task) -> bytes:
    document = asdict(task)
    del document["workspace"]
    return json.dumps(document).encode()
