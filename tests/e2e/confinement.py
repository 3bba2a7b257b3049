"""A receiver in a container of the image, in the place of one from this source tree.

`TEST_SERVER_IMAGE` names the image. Then what tests start by `running_server` is that image, run by
podman as it is meant to be run: not as root, nothing writable but what it is given, no rights. Not
for tests that look at the process itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

IMAGE = os.environ.get("TEST_SERVER_IMAGE")
LABEL = os.environ.get("TEST_SERVER_LABEL", "consignee-test")
"""What the containers of one run of tests can be found by."""

USER = 10001
CONFINED = (
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--network=host",
)


def program(
    writable: Iterable[Path], arguments: Sequence[str], variables: Iterable[str]
) -> list[str]:
    """What `consignee` is here: the words in front of its command.

    It may write to the folders `writable`, read the file that `--config` names, and has those
    `variables` of the process that is started, and the credentials of an object store.
    """
    if IMAGE is None:
        return [sys.executable, "-m", "app.cli"]
    credentials = (name for name in os.environ if name.startswith("AWS_"))
    named = [f"--env={name}" for name in (*variables, *credentials)]
    # The network is the machine's own, and `dev` is for this machine only.
    listening = ["--env=CONSIGNEE_HOST=127.0.0.1", f"--label={LABEL}"]
    mounts = [*map(_handed_over, writable), *_readable(arguments)]
    return ["podman", "run", "--rm", *CONFINED, *named, *listening, *mounts, IMAGE]


def _handed_over(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    os.chown(folder, USER, USER)
    return f"--volume={folder}:{folder}"


def _readable(arguments: Sequence[str]) -> list[str]:
    if "--config" not in arguments:
        return []
    config = arguments[arguments.index("--config") + 1]
    return [f"--volume={config}:{config}:ro"]
