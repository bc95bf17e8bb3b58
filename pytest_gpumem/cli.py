"""The command `gpumem`. Each subcommand hands on to the module that does the work."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import click

from pytest_gpumem.commands.accept import accept
from pytest_gpumem.commands.doctor import doctor
from pytest_gpumem.commands.duet import duet
from pytest_gpumem.commands.gate import gate
from pytest_gpumem.commands.nsight import explain, profile
from pytest_gpumem.commands.report import report
from pytest_gpumem.outcomes import Exit, NoAnswer, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.units import QuantityError

TASKS: Mapping[str, tuple[click.Command, ...]] = {
    "Decide": (gate, duet, accept),
    "Find the cause": (explain, profile),
    "Report": (report,),
    "Set up": (doctor,),
}
"""The commands by task, as `gpumem --help` lists them."""


class _NobodyReads(Exception):
    """The reader of the output ended. click would exit with 1, the code of a regression."""


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _NobodyReads from None


class _Commands(click.Group):
    """A group whose errors are single lines, with the codes of `outcomes.Exit`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for task, commands in TASKS.items():
            with formatter.section(task):
                rows = []
                for command in commands:
                    text = command.get_short_help_str(limit=formatter.width)
                    rows.append((str(command.name), text))
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = args[: args.index("--")] if "--" in args else args
        if "" in words:
            # As a path, it would be the working directory; as a filter, it would select nothing.
            why = "is empty; is a variable of the shell not set?"
            raise click.UsageError(f"an argument of {' '.join(words)!r} {why}", ctx)
        return super().parse_args(ctx, args)

    def make_context(self, *arguments: Any, **extra: Any) -> click.Context:
        with _reading():
            return super().make_context(*arguments, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reading():
            return super().invoke(ctx)

    def main(self, *arguments: Any, **extra: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A file name may hold what the terminal's encoding has no character for.
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(*arguments, **{**extra, "standalone_mode": False})
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "gpumem"
            message = _in_one_line(error.format_message()).rstrip(".") + _hint(error)
            if not message.endswith("?"):
                message += "."
            click.echo(f"gpumem: {message} Try '{path} --help'.", err=True)
            sys.exit(Exit.USAGE)
        except (UserError, QuantityError, NoAnswer) as error:
            click.echo(f"gpumem: {_in_one_line(str(error))}", err=True)
            sys.exit(Exit.NO_VERDICT if isinstance(error, NoAnswer) else Exit.USAGE)
        except _NobodyReads:
            # As in `gpumem ... | head`; Python would complain once more while it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(Exit.NOBODY_READS)
        except click.Abort:
            sys.exit(Exit.CTRL_C)
        except Exception as error:
            traceback.print_exc()
            text = _in_one_line(f"{type(error).__name__}: {error}")
            click.echo(f"gpumem: internal error, no verdict: {text}", err=True)
            sys.exit(Exit.INTERNAL_ERROR)
        sys.exit(code if isinstance(code, int) else 0)


def _in_one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _hint(error: click.UsageError) -> str:
    if not isinstance(error, click.NoSuchOption) or error.ctx is None or error.possibilities:
        return ""
    for parameter in error.ctx.command.params:
        if parameter.name == "pytest_arguments":
            return f"; options of pytest come last, after --: ... -- {error.option_name}"
    return ""


@click.group(
    cls=_Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(
    package_name="pytest-gpumem", prog_name="gpumem", message="%(prog)s %(version)s"
)
def main() -> None:
    """Measure and compare CUDA memory performance."""


for command in chain(*TASKS.values()):
    main.add_command(command)
