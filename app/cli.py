"""The command line: `consignee COMMAND`.

Every command takes `--config` and `--data-dir`. What goes wrong is one line on standard error:
status 2 says that the command or the configuration is wrong, status 1 that the work failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import click

from app import __version__, logs
from app.commands.switches import FAILED, INTERRUPTED, WRONG
from app.errors import CommandError, Refusal

COMMANDS: Final = {
    "audit": "audit",
    "backup": "moving",
    "check": "upkeep",
    "copy": "moving",
    "dev": "serving",
    "events": "events",
    "fsck": "upkeep",
    "gc": "upkeep",
    "migrate": "upkeep",
    "readyz": "upkeep",
    "refs": "references",
    "restore": "moving",
    "send": "send",
    "serve": "serving",
    "token": "tokens",
    "usage": "usage",
}
"""Every command, and the module of app.commands that has it."""


class Commands(click.Group):
    """Imports what one command needs when it is called: a server's modules are not a sender's."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Their names."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        del ctx
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(import_module(f"app.commands.{module}"), cmd_name)
        return command


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
    except Refusal as error:
        return _complain(str(error), FAILED)
    except CommandError as error:
        return _complain(str(error), error.exit_status)
    except OSError as error:
        return _complain(f"{error.filename or 'system'}: {error.strerror or error}", FAILED)
    return status or 0


def _complain(message: str, status: int) -> int:
    click.echo(f"consignee: {logs.printable(message)}", err=True)
    return status


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """A receiver for what agents send: verified uploads, opaque references, nothing lost."""


if __name__ == "__main__":
    sys.exit(main())
