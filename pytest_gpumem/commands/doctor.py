"""The command `gpumem doctor`."""

from __future__ import annotations

import json
import os
import shutil
import sys

import click

from pytest_gpumem.commands import examples
from pytest_gpumem.reporting.terminal import wants_colour

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Say what this machine can measure, and what is amiss.",
    epilog=examples("gpumem doctor", "gpumem doctor --json > machine.json"),
)
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
    for line in examination.text(report, shutil.get_terminal_size((120, 24)).columns):
        status, gap, rest = line.partition(" ")
        click.echo(click.style(status, fg=_COLOURS[status]) + gap + rest if colour and status in _COLOURS else line)
