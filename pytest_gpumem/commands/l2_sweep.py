"""The command `gpumem l2-sweep`."""

from __future__ import annotations

import os
import sys

import click

from pytest_gpumem.commands import examples
from pytest_gpumem.settings import without


@click.command(
    "l2-sweep",
    short_help="Find a test's best set-aside and hit ratio.",
    epilog=examples("gpumem l2-sweep tests/test_table.py::test_lookup --map l2.svg"),
)
@click.option("--map", "file", metavar="FILE", help="Draw the map into this SVG file too.")
@click.argument("test", metavar="TEST")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- PYTEST_ARGUMENTS]")
def l2_sweep(test: str, file: str | None, pytest_arguments: tuple[str, ...]) -> None:
    """Find the set-aside and hit ratio that suit what TEST, a node id, measures on a persisting_stream.

    Hands on to pytest with --gpumem-l2-sweep, which prints the map and sets the exit code.
    """
    if test.startswith("-"):
        raise click.UsageError(f"TEST is a pytest node id such as tests/test_table.py::test_lookup, not {test!r}.")
    drawing = [] if file is None else ["--gpumem-l2-sweep-map", file]
    sys.stdout.flush()
    # The process becomes pytest, so that Ctrl-C and the exit code are pytest's own.
    command = [sys.executable, "-m", "pytest", "--gpumem", "--gpumem-l2-sweep", *drawing, *pytest_arguments, test]
    os.execve(sys.executable, command, without(os.environ, "save"))
