"""The command `gpumem doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_gpumem.commands import examples, json_option, terminal, write_json
from pytest_gpumem.outcomes import Exit

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Report what this machine can measure, and what is missing.",
    epilog=examples("gpumem doctor", "gpumem doctor --json machine.json"),
)
@json_option("Write the report as JSON.")
def doctor(file: Path | None) -> int:
    """Report what this machine can measure, and what is missing for the rest.

    GPUMEM_DEVICE names the GPU; default: the first one. The exit code is 0 whatever is found.
    """
    from pytest_gpumem import doctor as examination

    width, colour = terminal()
    report = examination.examine()
    for line in examination.text(report, width):
        click.echo(_coloured(line) if colour else line)
    write_json(file, report.to_json())
    return Exit.FINE


def _coloured(line: str) -> str:
    """A line of a report with its status in colour."""
    status, gap, rest = line.partition(" ")
    return click.style(status, fg=_COLOURS[status]) + gap + rest if status in _COLOURS else line
