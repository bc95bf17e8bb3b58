"""The commands that set up a machine: `gpumem doctor`, and `gpumem completion`."""

from __future__ import annotations

import json
import os
import shutil
import sys

import click
from click.shell_completion import get_completion_class

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
