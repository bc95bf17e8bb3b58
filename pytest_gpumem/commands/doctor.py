"""The command `gpumem doctor`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from pytest_gpumem.commands import examples, json_option, terminal, write_json
from pytest_gpumem.commands.baseline import opened, place_option
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import wrapped

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Report what this machine can measure, and what is missing.",
    epilog=examples(
        "gpumem doctor",
        "gpumem doctor --json machine.json",
        "gpumem doctor --measure --baseline s3://bucket/baselines",
    ),
)
@click.option(
    "--measure",
    is_flag=True,
    help="Measure the GPU too, for some 10 s: healthy, slow or throttled. It has to be idle.",
)
@place_option
@json_option("Write the report as JSON.")
def doctor(measure: bool, baseline: str | None, file: Path | None) -> int:
    """Report what this machine can measure, and what is missing for the rest.

    With --measure, the bandwidth of DRAM is compared with the datasheet, and the control kernels with those of the runs in the baselines.
    GPUMEM_DEVICE names the GPU; default: the first one. Without --measure the exit code is 0 whatever is found.
    """
    from pytest_gpumem import doctor as examination

    if baseline is not None and not measure:
        raise click.UsageError(
            "--baseline: only --measure compares with a baseline; add --measure."
        )
    width, colour = terminal()

    def show(lines: Iterable[str]) -> None:
        for line in lines:
            click.echo(_coloured(line) if colour else line)

    report = examination.examine()
    show(examination.text(report, width))
    written = report.to_json()
    if measure:
        from pytest_gpumem.doctor import health
        from pytest_gpumem.doctor.report import lines

        found = health.examine(opened(baseline))
        show(
            [
                "",
                *lines(found.checks, width),
                "",
                *wrapped(printable(found.sentence), width, indent=""),
            ]
        )
        written |= {"health": found.to_json()}
    write_json(file, written)
    return Exit.FINE if not measure or found.verdict == "healthy" else Exit.FAILED


def _coloured(line: str) -> str:
    """A line of a report with its status in colour."""
    status, gap, rest = line.partition(" ")
    return click.style(status, fg=_COLOURS[status]) + gap + rest if status in _COLOURS else line
