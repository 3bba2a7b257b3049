"""Looking after a receiver: migrate, check, readyz, gc, fsck."""

from __future__ import annotations

import json
import re
import ssl
import time
from typing import Any, Final
from urllib.parse import urlsplit

import click
import httpx

from app.commands.options import EVERY_ADDRESS, Source, audit_command, configured, in_store
from app.commands.switches import FAILED
from app.main import create_app
from app.server import configuration, require_protected
from app.settings import Settings
from app.store.content import ContentStore
from app.store.migrations import migrate as migrate_database
from app.store.records import SweepReport

POLL_SECONDS: Final = 0.2
"""Pause between two questions of `readyz --wait`."""
READYZ_SECONDS: Final = 5.0
"""How long one question of `readyz` may take."""


@click.command()
@configured
def migrate(source: Source) -> None:
    """Bring the database up to date; creates it when it is missing."""
    migrate_database(source.load())
    click.echo("The database is up to date.")


@click.command()
@configured
def check(source: Source) -> None:
    """Check the configuration, and print the settings in force without their secrets."""
    settings = source.load()
    require_protected(settings)
    configuration(create_app(settings), settings)
    for name, value in _presentable(settings).items():
        click.echo(f"{name} = {'not set' if value is None else json.dumps(value)}")


def _presentable(settings: Settings) -> dict[str, Any]:
    shown = settings.model_dump(mode="json", exclude={"tokens": {"__all__": {"token_sha256"}}})
    shown |= {"database_url": _hidden(settings.database), "blob_url": _hidden(settings.blobs)}
    return shown


def _hidden(url: str) -> str:
    """`url` without its password, and without a query, which may hold one, too."""
    without_query = url.partition("?")[0]
    return re.sub(r"(?<=://)([^:/@]*):[^/]*@", r"\1:***@", without_query)


@click.command()
@click.option("--wait", is_flag=True, help="Ask until it is ready.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long --wait asks.",
)
@click.option("--url", metavar="URL", help="URL of the server; as configured when not given.")
@configured
def readyz(source: Source, wait: bool, timeout: float, url: str | None) -> None:
    """Ask a running server whether it is ready: status 0 if it is, 1 if not."""
    target, trust = _readiness_target(source, url)
    deadline = time.monotonic() + timeout
    # Asked directly: a proxy of the environment knows nothing of this machine's loopback.
    with httpx.Client(verify=trust, trust_env=False, timeout=READYZ_SECONDS) as client:
        while (trouble := _trouble(client, target)) is not None:
            if not wait or time.monotonic() >= deadline:
                raise click.ClickException(f"{target} is not ready: {trouble}")
            time.sleep(POLL_SECONDS)
    click.echo("ready")


def _readiness_target(source: Source, url: str | None) -> tuple[str, ssl.SSLContext]:
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise click.UsageError("--url must be an absolute http(s) URL")
        return f"{url.rstrip('/').removesuffix('/readyz')}/readyz", ssl.create_default_context()
    settings = source.load()
    if settings.port == 0:
        raise click.UsageError("the configured port is 0, any free one: say which with --url")
    host = EVERY_ADDRESS.get(settings.host, settings.host)
    local = settings.model_copy(update={"host": host, "public_url": None})
    return f"{local.base_url}/readyz", _own_certificate(settings)


def _own_certificate(settings: Settings) -> ssl.SSLContext:
    """Trust in exactly the configured certificate, which is made out to the public name."""
    if settings.tls_cert_file is None:
        return ssl.create_default_context()
    context = ssl.create_default_context(cafile=settings.tls_cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _trouble(client: httpx.Client, target: str) -> str | None:
    """Why the server at `target` is not ready; None when it is."""
    try:
        status = client.get(target).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return str(error) or type(error).__name__
    return None if status == httpx.codes.OK else f"status {status}"


@click.command()
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@configured
def gc(source: Source, dry_run: bool) -> None:
    """Remove what has expired, and bytes that no reference needs. Legal while a server runs."""

    async def sweep(store: ContentStore) -> SweepReport:
        if not dry_run:
            audit_command("store.sweep")
        return await store.sweep(dry_run=dry_run)

    report = in_store(source, sweep)
    click.echo(
        f"{'would remove' if dry_run else 'removed'}: {report.expired} expired references, "
        f"{report.blobs} bodies ({report.bytes} bytes), {report.orphans} orphans, "
        f"{report.staging} abandoned staging folders, {report.events} expired events; "
        f"kept: {report.kept} orphans of unknown age"
    )


@click.command()
@configured
def fsck(source: Source) -> int:
    """Read every stored body again and report each fault; changes nothing.

    Status 1 says that a confirmed body is damaged. Orphans are named, but they are no damage:
    `consignee gc` removes them when they are old enough.
    """
    damages = in_store(source, _report_findings)
    click.echo(f"{damages} damaged" if damages else "no damage")
    return FAILED if damages else 0


async def _report_findings(store: ContentStore) -> int:
    audit_command("store.verify")
    damages = 0
    async for finding in store.verify():
        damages += finding.kind != "orphan"
        named = finding.sha256 or finding.location or "-"
        hit = f" ({finding.references} references)" if finding.references else ""
        click.echo(f"{finding.kind}\t{named}\t{finding.detail}{hit}")
    return damages


# References
