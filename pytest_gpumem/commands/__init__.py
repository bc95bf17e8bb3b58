"""Commands of `gpumem`, and what several of them do alike."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, TypeVar

import click

from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.outcomes import EXIT_CODES
from pytest_gpumem.printable import printable

_Command = TypeVar("_Command", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """The epilog of a command's help: calls that work, and the exit codes. click leaves paragraphs that begin with `\\b` as they are."""
    codes = EXIT_CODES.get(lines[0].split()[1], {})
    meanings = (fill(f"  {code:d}  {meaning}", 76, subsequent_indent=" " * 5) for code, meaning in codes.items())
    shown = "\n\n\b\nExit codes:\n" + "\n".join(meanings) if codes else ""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines) + shown


def margin(_context: click.Context, option: click.Parameter, written: str | None) -> str | None:
    """Check the margin that an option takes: it stays as written."""
    from pytest_gpumem.units import QuantityError, parse_margin

    try:
        if written is not None:
            parse_margin(written)
    except QuantityError as error:
        raise click.UsageError(f"{option.opts[0]}: {error}.") from None
    return written


pytest_arguments = click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")


def file_option(flag: str, help: str, name: str = "file") -> Callable[[_Command], _Command]:
    """An option with the file that a command writes. A file that cannot be written is refused before anything is done."""
    return click.option(flag, name, type=click.Path(path_type=Path), metavar="FILE", help=help, callback=_writable)


def _writable(_context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and (why := unwritable(path)) is not None:
        raise click.UsageError(f"{option.opts[0]}: {path}: {why}.")
    return path


def write(option: str, path: Path, content: str | memoryview | Iterator[bytes]) -> None:
    """Write the file that an option names. Raises `click.ClickException`: it cannot be written."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise click.ClickException(f"{option}: cannot write {path}: {error.strerror or error}") from None


def say(sentence: str, *, err: bool = False) -> None:
    """Print a sentence at the terminal's width."""
    from pytest_gpumem.reporting.columns import wrapped

    for line in wrapped(printable(sentence), terminal()[0]):
        click.echo(line, err=err)


def terminal() -> tuple[int, bool]:
    """Columns of standard output, and whether it takes colour."""
    from pytest_gpumem.reporting.terminal import wants_colour

    return shutil.get_terminal_size((120, 24)).columns, wants_colour(sys.stdout, os.environ)
