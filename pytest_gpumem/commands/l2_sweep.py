"""The command `gpumem l2-sweep`."""

from __future__ import annotations

import os

import click

from pytest_gpumem.commands import examples, pytest_arguments


@click.command(
    "l2-sweep",
    short_help="Find a test's best set-aside and hit ratio.",
    epilog=examples("gpumem l2-sweep tests/test_table.py::test_lookup --map l2.svg"),
)
@click.option("--map", "file", metavar="FILE", help="Draw the map into this SVG file too.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def l2_sweep(test: str, file: str | None, pytest_arguments: tuple[str, ...]) -> None:
    """Find the best set-aside and hit ratio for the measurements of TEST, a node id, on a persisting_stream.

    Runs pytest with --gpumem-l2-sweep, which prints the map and sets the exit code.
    """
    if test.startswith("-"):
        raise click.UsageError(f"TEST is a pytest node id such as tests/test_table.py::test_lookup, not {test!r}.")
    drawing = [] if file is None else ["--gpumem-l2-sweep-map", file]
    from pytest_gpumem.runs.child import for_a_run, pytest_command, replace_this_process

    command = pytest_command([*pytest_arguments, test], options=["--gpumem-l2-sweep", *drawing])
    replace_this_process(command, for_a_run(os.environ))
