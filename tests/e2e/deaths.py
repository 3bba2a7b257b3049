"""Workers that die by SIGKILL at a step that a test names, each death once.

A server loads this module as its event handler, and takes note of the steps. A test makes a file
of the step's name when it is time: the process that takes it away, as the first to come to that
step, dies there.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from app.ahp.events import Effects, Event

FOLDER = "TEST_DEATHS"
"""The variable with the folder of those files."""

HANDLER = f"{__name__}:handle"
"""What the setting `event_handler` is then."""

STEPS: Mapping[str, str] = {
    "seal": "app.store.staging:Staged.seal",
    "publish": "app.store.objects:ObjectBlobs.publish",
    "commit": "app.store.catalogue:Catalogue.add",
    "discard": "app.store.staging:Staged.discard",
    "accept": "app.store.responses:Responses.begin",
    "prepare": "app.harness.workspace:Workspaces.prepare",
    "events": "app.store.responses:Responses.append_events",
    "artifact": "app.store.files:Files.add_artifact",
    "end": "app.store.responses:Responses.finish",
}
"""Steps of an upload and of a task, each a method that is awaited."""

Step = Callable[..., Coroutine[Any, Any, Any]]


def order(folder: Path, step: str, moment: str) -> Path:
    """Let the next worker die that comes `before` or `after` a step; the file is then gone."""
    assert step in STEPS
    file = folder / f"{moment} {step}"
    file.touch()
    return file


async def handle(_: Event) -> Effects:
    """Events are only stored."""
    return None


def _arm(folder: Path) -> None:
    for step, target in STEPS.items():
        module, _, path = target.partition(":")
        name, _, method = path.partition(".")
        owner = getattr(importlib.import_module(module), name)
        setattr(owner, method, _deadly(getattr(owner, method), folder, step))


def _deadly(original: Step, folder: Path, step: str) -> Step:
    @wraps(original)
    async def deadly(*args: Any, **options: Any) -> Any:
        _die_if_ordered(folder / f"before {step}")
        outcome = await original(*args, **options)
        _die_if_ordered(folder / f"after {step}")
        return outcome

    return deadly


def _die_if_ordered(file: Path) -> None:
    try:
        file.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


if FOLDER in os.environ:
    _arm(Path(os.environ[FOLDER]))
