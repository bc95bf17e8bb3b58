"""Commands of `gpumem`, and what several of them do alike."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import click

from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.outcomes import EXIT_CODES, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.terminal import columns, wants_colour, wrapped
from pytest_gpumem.units import QuantityError, parse_margin

Command = TypeVar("Command", bound=Callable[..., Any])
STANDARD_OUTPUT = Path("-")  # as the file of an option
# Key of a context's `meta`: standard output, while the command's text goes nowhere.
_REAL = "pytest_gpumem.standard_output"


def examples(*lines: str) -> str:
    """The epilog of a command's help. click leaves paragraphs that begin with `\\b` as they are."""
    codes = EXIT_CODES.get(lines[0].split()[1], {})
    meanings = (
        fill(f"  {code:d}  {meaning}", 76, subsequent_indent=" " * 5)
        for code, meaning in codes.items()
    )
    shown = "\n\n\b\nExit codes:\n" + "\n".join(meanings) if codes else ""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) + shown


def _margin(_context: click.Context, option: click.Parameter, written: str | None) -> str | None:
    try:
        if written is not None:
            parse_margin(written)
    except QuantityError as error:
        raise click.UsageError(f"{option.opts[0]}: {error}.") from None
    return written


def _absolute(_context: click.Context, _option: click.Parameter, path: str | None) -> str | None:
    # A link stays one, as in a venv. A name alone is looked up in PATH.
    return os.path.abspath(path) if path and os.sep in path else path


max_regression_option = click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=_margin,
    help="Allowed slow-down of tests without a limit of their own. Default of gpumem duet: 1%.",
)
base_python_option = click.option(
    "--base-python",
    metavar="PATH",
    callback=_absolute,
    help="Interpreter of an environment that holds BASE. Default: this one.",
)
test_option = click.option(
    "--test",
    "tests",
    multiple=True,
    metavar="TEST",
    help="Only this test, with all its parameters; may be given several times.",
)
pytest_arguments = click.argument(
    "pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]"
)


def refuse(arguments: Iterable[str], refused: Mapping[str, str]) -> None:
    """Raise `click.UsageError` for an argument of pytest's. `refused`: why, by name."""
    for argument in arguments:
        name = argument.partition("=")[0]
        why = refused.get(name) or refused.get(name[:2])
        if why:
            raise click.UsageError(f"{argument} among pytest's arguments: {why}.")


def file_option(flag: str, help: str, name: str | None = None) -> Callable[[Command], Command]:
    """An option with a file that a command writes beside its text, or on standard output instead.

    `name`: of the command's argument; None: as the option.
    """
    return click.option(
        flag,
        name or flag.removeprefix("--"),
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help=f"{help} -: standard output, in place of the text.",
        callback=_writable,
    )


def _writable(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    flag = option.opts[0]
    if path == STANDARD_OUTPUT:
        if _REAL in context.meta:
            raise click.UsageError(f"{flag} -: another file goes to standard output already.")
        context.meta[_REAL] = sys.stdout
        context.with_resource(contextlib.redirect_stdout(io.StringIO()))
    elif path is not None:
        why = unwritable(path)
        if why is not None:
            raise click.UsageError(f"{flag}: {path}: {why}.")
    return path


def write(option: str, path: Path, text: str) -> None:
    """Write the file that an option names. Raises `UserError`: it cannot be written."""
    if path == STANDARD_OUTPUT:
        click.echo(text, file=click.get_current_context().meta[_REAL], nl=False)
        return
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(f"{option}: cannot write {path}: {error.strerror or error}") from None


def write_named(option: str, path: Path, text: str) -> None:
    """Write the file that an option names, and print its name. Raises as `write`."""
    write(option, path, text)
    click.echo(printable(f"wrote {path}"))


def say(sentence: str, *, err: bool = False) -> None:
    """Print a sentence at the terminal's width."""
    for line in wrapped(printable(sentence), terminal()[0]):
        click.echo(line, err=err)


def log(line: str) -> None:
    """Print a line on standard error, where the output of pytest and of the tools goes."""
    click.echo(printable(line), err=True)


def terminal() -> tuple[int, bool]:
    """Columns of standard output, and whether it takes colour."""
    return columns(), wants_colour(sys.stdout, os.environ)
