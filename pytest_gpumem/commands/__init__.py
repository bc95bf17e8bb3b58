"""Commands of `gpumem`, and what several of them do alike."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

import click

from pytest_gpumem.files import unwritable, write_whole
from pytest_gpumem.outcomes import EXIT_CODES
from pytest_gpumem.printable import printable


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


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that an option names and that cannot be written, before anything is done."""
    if path is not None and (why := unwritable(path)) is not None:
        raise click.UsageError(f"{option}: {path}: {why}.")


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
