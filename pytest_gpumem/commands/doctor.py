"""The commands that set up a machine: `gpumem doctor`, `gpumem card` and `gpumem completion`."""

from __future__ import annotations

import json
import os

import click
from click.shell_completion import get_completion_class

from pytest_gpumem.commands import examples, terminal
from pytest_gpumem.commands.baseline import opened, place_option
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable

_COLOURS = {"OK": "green", "warning": "yellow", "failure": "red"}


@click.command(
    short_help="Say what this machine can measure, and what is amiss.",
    epilog=examples("gpumem doctor", "gpumem doctor --json > machine.json"),
)
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can measure, and what is missing for the rest.

    The exit code is 0 even if only the simulated device can be used.
    """
    from pytest_gpumem import doctor as examination

    report = examination.examine()
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    width, colour = terminal()
    for line in examination.text(report, width):
        click.echo(_coloured(line) if colour else line)


def _coloured(line: str) -> str:
    """A line of a report with its status in colour."""
    status, gap, rest = line.partition(" ")
    return click.style(status, fg=_COLOURS[status]) + gap + rest if status in _COLOURS else line


@click.command(
    short_help="Measure a card, and say whether it is healthy.",
    epilog=examples("gpumem card", "gpumem card --device cuda:1 --baseline s3://bucket/baselines --json"),
)
@click.option("--device", metavar="DEVICE", help="cuda, cuda:N or sim:NAME. Default: GPUMEM_DEVICE, else the first GPU.")
@place_option
@click.option("--quick", is_flag=True, help="Take few readings, under half a second of load.")
@click.option("--json", "as_json", is_flag=True, help="Write the report as JSON.")
def card(device: str | None, baseline: str | None, quick: bool, as_json: bool) -> int:
    """Measure bandwidths, latencies, link and state of a card, and compare them with other cards of its model and its own history.

    Takes some 20 s on an idle card. The other cards are those on record in the package and those whose runs are in the baselines.
    """
    from pytest_gpumem.baselines.storage import BaselineError
    from pytest_gpumem.devices import opening
    from pytest_gpumem.devices.protocol import DeviceError
    from pytest_gpumem.doctor.card import judge, state, stored
    from pytest_gpumem.doctor.report import lines
    from pytest_gpumem.measuring.card import examine
    from pytest_gpumem.settings import device_choice
    from pytest_gpumem.units import QuantityError

    origin, written = ("--device", device) if device else ("GPUMEM_DEVICE", os.environ.get("GPUMEM_DEVICE"))
    try:
        choice = device_choice(written or "cuda")
    except QuantityError as error:
        raise click.UsageError(f"{origin}: {error}") from None
    try:
        chosen = opening.choose(choice)
        history = stored(opened(baseline), chosen.facts.key)
        opened_device = chosen.open()
        try:
            examined = examine(opened_device, chosen.card, quick=quick)
        finally:
            opened_device.close()
    except BaselineError as error:
        raise click.ClickException(str(error)) from None
    except DeviceError as error:
        click.echo(printable(f"gpumem: nothing was measured: {error}"), err=True)
        return Exit.NO_VERDICT
    report = judge(chosen.facts, examined, history)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=1))
    else:
        width, colour = terminal()
        facts = chosen.facts
        click.echo(printable(", ".join(part for part in (facts.name, facts.uuid, "simulated" if facts.simulated else None) if part)))
        figures = report.figures()
        widths = [max(len(line[column]) for line in figures) for column in (0, 1)]
        for name, value, others in figures:
            click.echo(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {others}")
        for line in (*state(examined), "", *lines(report.checks, width)):
            click.echo(_coloured(printable(line)) if colour else printable(line))
    return Exit.FINE if report.healthy else Exit.FAILED


VARIABLE = "_GPUMEM_COMPLETE"  # by which the shell asks `gpumem` for what may come next; click's own name for it


@click.command(
    short_help="Print what completes this command in a shell.",
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
