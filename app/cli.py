"""The command line: `consignee COMMAND`.

Every command takes `--config` and `--data-dir`. What goes wrong is one line on standard error:
status 2 says that the command or the configuration is wrong, status 1 that the work failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from app import __version__, logs
from app.commands.options import FAILED, INTERRUPTED, WRONG
from app.commands.references import refs
from app.commands.serving import dev, serve
from app.commands.tokens import token
from app.commands.upkeep import check, fsck, gc, migrate, readyz
from app.errors import Refusal
from app.server import ServerError
from app.settings import SettingsError
from app.store.records import StoreError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failed, 2 wrong."""
    try:
        status = cli.main(arguments, prog_name="consignee", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG
    except click.Abort:
        return _complain("interrupted", INTERRUPTED)
    except click.ClickException as error:
        return _complain(error.format_message(), error.exit_code)
    except (StoreError, ServerError, Refusal) as error:
        return _complain(str(error), FAILED)
    except SettingsError as error:
        return _complain(str(error), WRONG)
    except OSError as error:
        return _complain(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    return status or 0


def _complain(message: str, status: int) -> int:
    click.echo(f"consignee: {logs.printable(message)}", err=True)
    return status


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """A receiver for what agents send: verified uploads, opaque references, nothing lost."""


for _command in (dev, serve, migrate, check, readyz, gc, fsck, refs, token):
    cli.add_command(_command)


if __name__ == "__main__":
    sys.exit(main())
