"""The command `gpumem doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from pytest_gpumem.commands import examples, file_option, terminal, write_named
from pytest_gpumem.outcomes import Exit

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Report what this machine can measure, and what is missing.",
    epilog=examples("gpumem doctor", "gpumem doctor --json machine.json"),
)
@file_option("--json", "Write the report as JSON.", "file")
def doctor(file: Path | None) -> int:
    """Report what this machine can measure, what is missing, and what else uses the GPU.

    GPUMEM_DEVICE names the GPU; default: the first one.
    """
    from pytest_gpumem import doctor as examination

    width, colour = terminal()
    report = examination.examine()
    for line in examination.text(report, width):
        status, gap, rest = line.partition(" ")
        if colour and status in _COLOURS:
            status = click.style(status, fg=_COLOURS[status])
        click.echo(f"{status}{gap}{rest}")
    if file is not None:
        write_named("--json", file, json.dumps(report.to_json(), allow_nan=False, indent=1) + "\n")
    chosen = os.environ.get("GPUMEM_DEVICE", "").lower().partition(":")[0]
    return Exit.FINE if chosen in ("sim", "simulated") or report.device is not None else Exit.FAILED
