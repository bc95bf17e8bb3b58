"""The commands that set up a machine: `gpumem doctor`, `gpumem card` and `gpumem completion`."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from pytest_gpumem.commands import examples, json_option, terminal, write_json
from pytest_gpumem.commands.baseline import opened, place_option
from pytest_gpumem.outcomes import Exit, NoAnswer
from pytest_gpumem.printable import printable
from pytest_gpumem.settings import device_choice
from pytest_gpumem.units import QuantityError

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Report what this machine can measure, and what is missing.",
    epilog=examples("gpumem doctor", "gpumem doctor --json machine.json"),
)
@json_option("Write the report as JSON.")
def doctor(file: Path | None) -> None:
    """Report what this machine can measure, and what is missing for the rest.

    The exit code is 0 even if only the simulated device can be used.
    """
    from pytest_gpumem import doctor as examination

    report = examination.examine()
    width, colour = terminal()
    for line in examination.text(report, width):
        click.echo(_coloured(line) if colour else line)
    write_json(file, report.to_json())


def _coloured(line: str) -> str:
    """A line of a report with its status in colour."""
    status, gap, rest = line.partition(" ")
    return click.style(status, fg=_COLOURS[status]) + gap + rest if status in _COLOURS else line


@click.command(
    short_help="Measure a card, and report whether it is healthy.",
    epilog=examples("gpumem card", "gpumem card --device cuda:1 --baseline s3://bucket/baselines --json card.json"),
)
@click.option("--device", metavar="DEVICE", help="cuda, cuda:N or sim:NAME. Default: GPUMEM_DEVICE, else the first GPU.")
@place_option
@click.option("--quick", is_flag=True, help="Take few readings, under half a second of load.")
@json_option("Write the report as JSON.")
def card(device: str | None, baseline: str | None, quick: bool, file: Path | None) -> int:
    """Measure bandwidths, latencies, link and state of a card, and compare them with other cards of its model and its own history.

    Takes some 20 s on an idle card. The other cards are those on record in the package and those whose runs are in the baselines.
    """
    from pytest_gpumem.devices import opening
    from pytest_gpumem.devices.protocol import DeviceError
    from pytest_gpumem.doctor.card import judge, state, stored
    from pytest_gpumem.doctor.report import lines
    from pytest_gpumem.measuring.card import examine

    origin, written = ("--device", device) if device else ("GPUMEM_DEVICE", os.environ.get("GPUMEM_DEVICE"))
    try:
        choice = device_choice(written or "cuda")
    except QuantityError as error:
        raise click.UsageError(f"{origin}: {error}") from None
    try:
        # The health of a card: never of the simulated device because there is no GPU.
        chosen = opening.choose("cuda" if choice == "auto" else choice)
        history = stored(opened(baseline), chosen.facts.key)
        opened_device = chosen.open()
        try:
            examined = examine(opened_device, chosen.card, quick=quick)
        finally:
            opened_device.close()
    except DeviceError as error:
        raise NoAnswer(f"nothing was measured: {error}") from None
    report = judge(chosen.facts, examined, history)
    width, colour = terminal()
    facts = chosen.facts
    click.echo(printable(", ".join(part for part in (facts.name, facts.uuid, "simulated" if facts.simulated else None) if part)))
    figures = report.figures()
    widths = [max(len(line[column]) for line in figures) for column in (0, 1)]
    for name, value, others in figures:
        click.echo(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {others}")
    for line in (*state(examined), "", *lines(report.checks, width)):
        click.echo(_coloured(printable(line)) if colour else printable(line))
    write_json(file, report.to_json())
    return Exit.FINE if report.healthy else Exit.FAILED


VARIABLE = "_GPUMEM_COMPLETE"  # by which the shell asks `gpumem` for what may come next; click's own name for it


@click.command(
    short_help="Print a script that completes this command in a shell.",
    epilog=examples("gpumem completion bash >> ~/.bashrc", "gpumem completion fish > ~/.config/fish/completions/gpumem.fish"),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands and options of gpumem in a shell.

    Put it where the shell reads it at its start: into ~/.bashrc, ~/.zshrc (behind compinit), or a file of fish's completions.
    """
    made = get_completion_class(shell)
    assert made is not None
    script = made(context.find_root().command, {}, "gpumem", VARIABLE)
    click.echo(script.source_template % script.source_vars())
