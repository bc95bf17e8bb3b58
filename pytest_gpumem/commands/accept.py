"""The command `gpumem accept`: a file that says which change of a test is meant."""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import click

from pytest_gpumem.baselines.acceptances import (
    NONE,
    Acceptance,
    AcceptedChange,
    Figure,
    absolute_limits,
    changes_of,
    refusal,
    write,
)
from pytest_gpumem.commands import examples
from pytest_gpumem.commands.gate import FOLDER, RESULTS
from pytest_gpumem.files import ResultFile, load_results
from pytest_gpumem.judging.expectations import possibly_intended
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records import selects
from pytest_gpumem.records.row import Omission, Row
from pytest_gpumem.revisions import DIRTY, RevisionError, ancestry, head
from pytest_gpumem.units import did_you_mean

BY_HAND: tuple[Figure, ...] = ("time", "memory", "removed", "measured")
"""Figures of `--change`."""
WHO = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN")  # variables in which a CI names whoever started it


@click.command(
    short_help="Accept a change of a test, in a file for its pull request.",
    epilog=examples(
        'gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"',
        "gpumem accept tests/test_a.py::test_triad --change time=10% --reason ...",
        "gpumem accept tests/test_a.py::test_triad --change max_regression=5% --reason ...",
        "gpumem accept tests/test_a.py::test_new --renamed-from tests/test_a.py::test_old "
        "--reason ...",
    ),
)
@click.option("--reason", required=True, help="Why the change is right.")
@click.option(
    "--change",
    "changes",
    metavar="WHAT",
    multiple=True,
    help='What is accepted, and how far: "time=10%", "memory=96 MiB", a limit as '
    '"max_regression=5%" or "max_copies=none", "removed" or "measured" (in another way). '
    "Default: what the last gate found.",
)
@click.option(
    "--renamed-from", metavar="OLD", help="The name of TEST in BASE; the duet compares both."
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help=f"Results of the last gate, or of a session. Default: {FOLDER / RESULTS}.",
)
@click.argument("tests", metavar="TEST...", nargs=-1, required=True)
def accept(
    tests: tuple[str, ...],
    reason: str,
    changes: tuple[str, ...],
    renamed_from: str | None,
    results: Path | None,
) -> None:
    """Accept a change of TEST: write a file into .gpumem/accepted, for the pull request.

    TEST is a node id, a row's name with its label, or a selection: a file, a class, or a test with
    all its parameters. A gate with --accept-from-change counts a file that its change adds, up to
    its sizes. The file stays: with it, the test has a new reference, and without it the old one.
    """
    if not reason.strip():
        raise click.UsageError("--reason: it is empty; give the reason for the change.")
    if renamed_from is not None and len(tests) > 1:
        raise click.UsageError("--renamed-from: one TEST at a time has another name.")
    folder = Path.cwd()
    path = results or FOLDER / RESULTS
    by_hand = bool(changes or renamed_from)
    last = None
    if results or path.exists():
        last = load_results(path)
    elif not by_hand:
        raise UserError(
            f"there is no {path}, which says what changed; run gpumem gate, or give --results, "
            "--change or --renamed-from"
        )
    accepted: dict[str, list[AcceptedChange]] = {}
    selected: list[Row | Omission] = []
    for test in tests:
        if last is not None:
            if renamed_from is not None:
                _of_test(renamed_from, last, "--renamed-from ")
            selected = _of_test(test, last)
        if by_hand:
            accepted[test] = [_as_written(test, change) for change in changes]
            for change in accepted[test]:
                rows = [row for row in selected if isinstance(row, Row)]
                limited = any(getattr(row.limits, change.limit, True) for row in rows)
                if rows and not limited and change.value != NONE:
                    raise UserError(f"{test} has no limit {change.limit}: nothing to accept")
            if renamed_from is not None:
                accepted[test].append(AcceptedChange(test, "renamed", renamed_from))
            continue
        assert last is not None
        for nodeid, change in _changed(test, selected, last):
            of_test = accepted.setdefault(nodeid, [])
            if change not in of_test:
                of_test.append(change)
    base = _base(last, folder)
    gpu = last.document.device.key if last is not None else None
    who, now = _who(os.environ), datetime.now(timezone.utc).isoformat()  # a later file counts
    for test, of_test in accepted.items():
        file = Acceptance(test, reason.strip(), who, tuple(of_test), base, gpu, now)
        written = write(folder, file)
        words = ", ".join(str(change) for change in of_test)
        click.echo(printable(f"{test}: accepted {words}; wrote {written}"))
    click.echo("commit it with the change: gpumem gate --accept-from-change counts it")


def _as_written(test: str, text: str) -> AcceptedChange:
    name, equals, value = text.partition("=")
    name = name.strip()
    figures: dict[str, Figure] = {figure: figure for figure in BY_HAND}
    if name in figures:
        change = AcceptedChange(test, figures[name], value.strip() if equals else None)
    elif name in LIMITS:
        change = AcceptedChange(test, "limit", f"{name}={value.strip()}")
    else:
        known = ", ".join((*BY_HAND, *LIMITS))
        raise click.UsageError(f"--change: {name!r}; accepted are {known}.")
    problem = refusal(change)
    if problem is not None:
        raise click.UsageError(f"--change: {text!r}: {problem}.")
    return change


def _changed(
    test: str, selected: Sequence[Row | Omission], last: ResultFile
) -> list[tuple[str, AcceptedChange]]:
    """Return what the last run found, with node ids. Raises `UserError`: nothing."""
    changed = []
    for result in selected:
        changes: Iterable[AcceptedChange] = ()
        if isinstance(result, Row):
            changes = changes_of(result)
        elif possibly_intended(result):
            changes = [AcceptedChange(result.key, "removed")]
        for change in changes:
            changed.append((result.nodeid, change))
    if not changed:
        raise UserError(f"{test}: {_why_nothing(selected, last)}")
    return changed


def _of_test(test: str, last: ResultFile, option: str = "") -> list[Row | Omission]:
    """Return what TEST selects of the last run. Raises `UserError`: nothing."""
    known: list[Row | Omission] = [*last.document.rows, *last.document.missing]
    selected = [row for row in known if test == row.key or selects(test, row.nodeid)]
    if not selected:
        names = {row.key for row in known} | {row.nodeid for row in known}
        hint = did_you_mean(test, sorted(names))
        raise UserError(f"{option}{test}: no row of {last.path} belongs to it{hint}")
    return selected


def _why_nothing(selected: Sequence[Row | Omission], last: ResultFile) -> str:
    failed, limits = False, set[str]()
    for result in selected:
        if isinstance(result, Omission):
            failed = failed or result.how == "failed"
            continue
        limits.update(absolute_limits(result))
        by_limits = any(of_limit.limit for of_limit in result.verdict.limits)
        failed = failed or result.test_error or (result.failed and not by_limits)
    if failed:
        return "the test itself failed, which nobody can accept"
    if limits:
        names = ", ".join(sorted(limits))
        return f"{names} of the test does not hold; change the limit in the test"
    return f"{last.path} finds it neither slower nor lost: nothing to accept"


def _base(last: ResultFile | None, folder: Path) -> str | None:
    """Return the merge base of the last gate, else HEAD; None without git."""
    base = last.document.settings.get("baseline_of") if last is not None else None
    try:
        if isinstance(base, str):
            return ancestry(base, (), folder).merge_base
    except RevisionError:  # such as results of another clone
        pass
    commit = head(folder)
    return commit.removesuffix(DIRTY) if commit is not None else None


def _who(environment: Mapping[str, str]) -> str:
    for name in WHO:
        if environment.get(name):
            return environment[name]
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return f"user {os.getuid()}"
