"""The command `gpumem`. Each subcommand hands on to the module that does the work.

Exit codes: 0 fine, 1 regression, 4 usage, 6 no verdict under strict; 130 after Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from pytest_gpumem.reporting.terminal import wants_colour

USAGE = 4
INTERRUPTED = 130

_COLOURS = {"OK": "green", "warning": "yellow", "missing": "red"}


class _Commands(click.Group):
    """A group whose errors are one line, with the exit codes above; click's own usage errors exit with 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx is not None else "gpumem"
            click.echo(f"gpumem: {error.format_message()} Try '{path} --help'.", err=True)
            sys.exit(USAGE)
        except click.ClickException as error:
            click.echo(f"gpumem: {error.format_message()}", err=True)
            sys.exit(USAGE)
        except click.Abort:
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pytest-gpumem", prog_name="gpumem", message="%(prog)s %(version)s")
def main() -> None:
    """CUDA memory performance: what this machine can measure, and what was measured."""


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure, and what is missing for the rest.

    Exits with 0 also where only the simulated device can be used; the report says so.
    """
    from pytest_gpumem import doctor as examination

    report = examination.examine()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    colour = wants_colour(sys.stdout, os.environ)
    for line in examination.text(report):
        status, gap, rest = line.partition(" ")
        click.echo(click.style(status, fg=_COLOURS[status]) + gap + rest if colour and status in _COLOURS else line)
