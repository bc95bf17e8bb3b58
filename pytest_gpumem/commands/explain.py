"""The command `gpumem explain`."""

from __future__ import annotations

import os

import click

from pytest_gpumem.commands import examples, log, pytest_arguments
from pytest_gpumem.outcomes import Exit
from pytest_gpumem.printable import printable


@click.command(
    short_help="List the counters of a test that differ from BASE.",
    epilog=examples("gpumem explain --base main tests/test_a.py::test_triad"),
)
@click.option("--base", metavar="REV", required=True, help="The git revision to compare with.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def explain(base: str, test: str, pytest_arguments: tuple[str, ...]) -> int:
    """List what differs in TEST between the revision BASE and the working tree.

    Both sides run once under Nsight Compute, and once more without it. Lists the counters that
    differ by more than 5 %, with both values, and what ran differently. Where this user may not
    read counters, Nsight Systems times the kernels instead.
    """
    from pytest_gpumem.nsight.explain import explain as explained

    explanation = explained(base, test, pytest_arguments, os.environ, log)
    for note in explanation.notes:
        log(f"gpumem: {note}")
    _show(f"differ by more than 5 % by {explanation.tool}", explanation.counters)
    _show("ran differently", explanation.ran)
    if explanation.failed:
        return Exit.FAILED
    return Exit.FINE


def _show(title: str, lines: dict[str, list[str]]) -> None:
    if not lines:
        click.echo(f"{title}: nothing")
        return
    click.echo(f"{title}:")
    for place, differences in lines.items():
        click.echo(printable(f"  {place}"))
        for difference in differences:
            click.echo(printable(f"    {difference}"))
