"""The command `gpumem completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from pytest_gpumem.commands import examples

VARIABLE = "_GPUMEM_COMPLETE"
"""By which the shell asks `gpumem` for what may come next; click's own name for it."""


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
