"""The command `gpumem accept`."""

from __future__ import annotations

import difflib
import getpass
import os
from collections.abc import Mapping
from pathlib import Path

import click

from pytest_gpumem.commands import examples
from pytest_gpumem.commands.baseline import devices, one_line, opened, place_option
from pytest_gpumem.printable import printable

WHO = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN")  # variables in which a CI names whoever started it


@click.command(
    short_help="Begin a new baseline of a test, with a reason.",
    epilog=examples('gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"'),
)
@click.option("--reason", required=True, help="Why the change is right; pytest -v shows it until the next run is saved.")
@place_option
@click.option("--gpu", metavar="KEY", help="Only for this GPU, by the name of its folder. Default: every GPU that has the test.")
@click.option("--who", help="Default: whoever started the CI, else the user.")
@click.argument("tests", metavar="TEST...", nargs=-1, required=True)
def accept(tests: tuple[str, ...], reason: str, baseline: str | None, gpu: str | None, who: str | None) -> None:
    """Accept a change of TEST: reset its baseline, so that only later runs count.

    TEST is a node id, a row's name with its label, or a selection: a file, a class, or a test with all its parameters. Nothing is
    measured; the next run with --gpumem-save starts the new baseline.
    """
    from pytest_gpumem.baselines.acceptance import untrusted
    from pytest_gpumem.baselines.store import reset, row_keys
    from pytest_gpumem.revisions import DIRTY, head

    if not reason.strip():
        raise click.UsageError("--reason: it is empty; give the reason for the change.")
    if (fork := untrusted(os.environ)) is not None:
        raise click.ClickException(f"cannot accept the code of a fork: {fork}")
    with one_line():
        place = opened(baseline)
        stored = {key: row_keys(place, key) for key in devices(place, gpu)}
        for test in tests:
            if not any(_selected(rows, test) for rows in stored.values()):
                raise click.ClickException(f"{test}: no row in {place} belongs to it{_close(test, stored)}")
        revision = head(Path.cwd())
        for key, rows in stored.items():
            chosen = sorted({row for test in tests for row in _selected(rows, test)})
            if not chosen:
                continue
            path = reset(place, key, chosen, reason.strip(), who or _who(os.environ), revision)
            click.echo(printable(f"{key}: reset the baseline of {', '.join(chosen)}; wrote {place.shown(path)}"))
    if revision is not None and revision.endswith(DIRTY):
        click.echo("there are uncommitted changes: runs with --gpumem-baseline-of ignore this; commit, then accept again")
    click.echo("run pytest --gpumem --gpumem-save to start the new baseline")


def _selected(rows: Mapping[str, str], test: str) -> list[str]:
    """Keys of the rows that a node id selects, as pytest's command line would."""
    from pytest_gpumem.records.row import selects

    return [key for key, nodeid in rows.items() if test == key or selects(test, nodeid)]


def _close(test: str, stored: Mapping[str, Mapping[str, str]]) -> str:
    names = {name for rows in stored.values() for pair in rows.items() for name in pair}
    close = difflib.get_close_matches(test, names, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _who(environment: Mapping[str, str]) -> str:
    for name in WHO:
        if environment.get(name):
            return environment[name]
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown"
