"""`consignee copy`, `backup`, `restore`: a store in another place."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

from app import audit
from app.commands.options import Source, audit_command, configured
from app.commands.switches import FAILED
from app.settings import ENV_PREFIX, Settings, load_settings
from app.store.backup import back_up, copy_file
from app.store.backup import restore as restore_backup
from app.store.body_copies import CopyReport
from app.store.content import ContentStore
from app.store.copying import copy_store
from app.store.records import Finding

PLACES: Final = ("DATA_DIR", "DATABASE_URL", "BLOB_URL")
"""Settings that say where a store is: as variables, they would say so of both."""


class Told:
    """Prints one line for each step, and for each fault."""

    def begin(self, step: str, total: int) -> None:
        """See Observer."""
        click.echo(f"{step}: {total} {'bytes' if step == 'bodies' else 'rows'}", err=True)

    def advance(self, count: int) -> None:
        """See Observer: lines do not move."""

    def fault(self, finding: Finding) -> None:
        """See Observer."""
        click.echo(_shown(finding), err=True)


class Bars(Told):
    """A bar for each step, on standard error."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = TaskID(0)

    def begin(self, step: str, total: int) -> None:
        """See Observer."""
        self._task = self._progress.add_task(step, total=total)

    def advance(self, count: int) -> None:
        """See Observer."""
        self._progress.advance(self._task, count)

    def fault(self, finding: Finding) -> None:
        """See Observer."""
        self._progress.console.print(_shown(finding), markup=False, highlight=False)


@contextmanager
def _observer() -> Iterator[Told]:
    if not sys.stderr.isatty():
        yield Told()
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=Console(stderr=True),
    ) as progress:
        yield Bars(progress)


@click.command()
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    metavar="CONFIG",
    help="Configuration file of the store that becomes the copy.",
)
@click.option("--verify", is_flag=True, help="Read the copy again and hash every body in it.")
@configured
def copy(source: Source, target: Path, verify: bool) -> int:
    """Copy records and bodies to the store that another configuration file describes.

    That store must be migrated (`consignee migrate --config CONFIG`) and empty, or a copy of this
    one that nobody has used. Every back end goes: SQLite, PostgreSQL, files, S3. Where both name
    the same blob store, only records are copied.

    The source may be live. The copy is then of one moment, and has nothing of what came after it.
    To move a store: copy while the server runs, stop the server, copy once more (which brings just
    what has changed), and start the server with the other configuration. Let no server use the
    target before.

    A copy that was interrupted goes on when it is called again. Status 1 says that bodies of the
    source are damaged (each is named; everything else is there), or that the copy has to be called
    once more. CONSIGNEE_DATA_DIR, CONSIGNEE_DATABASE_URL and CONSIGNEE_BLOB_URL hold for the source
    alone.
    """
    settings = source.load()
    goal = _load_target(target)
    with audit.kept(settings), _observer() as observer:
        report = asyncio.run(copy_store(settings, goal, observer))
        audit_command("store.copy", bodies=report.bodies, bytes=report.bytes)
        damages = asyncio.run(_damages(goal, observer)) if verify else 0
    _bring_key(settings, goal)
    click.echo(_summary(report))
    if verify:
        click.echo(f"verified: {damages} damaged" if damages else "verified: no damage")
    return FAILED if report.faults or report.swept or damages else 0


def _load_target(config: Path) -> Settings:
    with _without_places():
        return load_settings(config)


@contextmanager
def _without_places() -> Iterator[None]:
    names = [ENV_PREFIX + place for place in PLACES]
    with ExitStack() as back:
        for name in names:
            if name in os.environ:
                back.callback(os.environ.__setitem__, name, os.environ.pop(name))
        yield


async def _damages(settings: Settings, observer: Told) -> int:
    damages = 0
    store = await ContentStore.start(settings)
    try:
        async for finding in store.verify():
            observer.fault(finding)
            damages += finding.kind != "orphan"
    finally:
        await store.close()
    return damages


def _bring_key(source: Settings, target: Settings) -> None:
    """Cursors that clients have stay good only with the key that sealed them."""
    if not source.secret_key.exists() or source.secret_key == target.secret_key:
        return
    draft = target.secret_key.with_name(f"{target.secret_key.name}.copied")
    draft.unlink(missing_ok=True)
    copy_file(source.secret_key, draft)
    try:
        target.secret_key.hardlink_to(draft)  # whole, or not at all
    except FileExistsError:
        if source.secret_key.read_bytes() != target.secret_key.read_bytes():
            click.echo("secret_key_file: the target has its own; open listings begin again there")
    finally:
        draft.unlink()


def _summary(report: CopyReport) -> str:
    told = (
        f"copied: {report.bodies} bodies ({report.bytes} bytes), {report.inserted} rows; "
        f"updated: {report.updated} rows; removed: {report.removed} rows; "
        f"there already: {report.present} bodies, {report.unchanged} rows"
    )
    lines = [told]
    if report.faults:
        lines.append(f"damaged in the source: {report.faults} bodies")
    if report.swept:
        lines.append(f"{report.swept} bodies went from the source meanwhile: copy once more")
    return "\n".join(lines)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, resolve_path=True), metavar="FOLDER")
@configured
def backup(source: Source, folder: Path) -> int:
    """Make a consistent copy of an embedded store (SQLite and files) in a new FOLDER.

    A running server goes on; uploads wait for a moment at most. The folder is there when it is
    complete. On the file system of the store bodies are hard links, which take no room: bring such
    a backup to another disk, too. The configuration, the audit log and previews are not in it; the
    key that seals cursors is, so keep it as private as the store.

    PostgreSQL and buckets have tools of their own for this.
    """
    settings = source.load()
    with audit.kept(settings), _observer() as observer:
        report = back_up(settings, folder, observer)
        audit_command("store.backup", bodies=report.bodies, bytes=report.bytes)
    click.echo(
        f"backed up: {report.references} references, {report.bodies} bodies in files "
        f"({report.bytes} bytes, {report.linked} linked)"
    )
    if report.missing:
        click.echo(f"lost in the store itself: {report.missing} bodies; see `consignee fsck`")
    return FAILED if report.missing else 0


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, resolve_path=True), metavar="FOLDER")
@configured
def restore(source: Source, folder: Path) -> int:
    """Bring a backup back into an empty data_dir, and hash every body of it.

    A backup of an older version is brought up to date. The backup itself stays as it is. Status 1
    says that bodies are damaged; each is named, and everything else is there.
    """
    settings = source.load()
    with _observer() as observer:
        report = asyncio.run(restore_backup(settings, folder, observer))
    with audit.kept(settings):
        audit_command("store.restore", bodies=report.bodies, bytes=report.bytes)
    click.echo(f"restored: {report.bodies} bodies in files ({report.bytes} bytes)")
    click.echo(f"{report.damaged} damaged" if report.damaged else "no damage")
    return FAILED if report.damaged else 0


def _shown(finding: Finding) -> str:
    return f"{finding.kind}\t{finding.sha256 or finding.location or '-'}\t{finding.detail}"
