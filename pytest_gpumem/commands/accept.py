"""The command `gpumem accept`: a file that says which change of a test is meant, for the pull request that makes it."""

from __future__ import annotations

import getpass
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import examples
from pytest_gpumem.commands.gate import DUET, FOLDER, RESULTS
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import ITS_TEST_FAILED, Omission, Row, selects
from pytest_gpumem.result_files import load_results
from pytest_gpumem.revisions import DIRTY, RevisionError, ancestry, files_at, head
from pytest_gpumem.units import did_you_mean

if TYPE_CHECKING:
    from pytest_gpumem.baselines.accepted import AcceptedChange
    from pytest_gpumem.result_files import Results

WHO = ("GITHUB_ACTOR", "GITLAB_USER_LOGIN")  # variables in which a CI names whoever started it
SCOPES = ("time", "memory", "kernels", "limit", "removed")


@click.command(
    short_help="Accept a change of a test, in a file for its pull request.",
    epilog=examples(
        'gpumem accept tests/test_a.py::test_triad --reason "checks bounds now"',
        'gpumem accept tests/test_a.py::test_triad --scope time --size 10% --reason "checks bounds now"',
        'gpumem accept tests/test_a.py::test_old --scope removed --reason "test_new has taken its place"',
    ),
)
@click.option("--reason", required=True, help="Why the change is right.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    help="What is accepted; may be given several times. Default: what the last gate found.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    help='The largest change, once for each --scope in their order: "10%" of time, "96 MiB" of peak, "max_copies=3" of kernels, '
    '"max_regression=5%" or "max_regression=none" of a limit. Default: what the last gate measured.',
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help=f"Results of the last gate, with its {DUET} in the same folder, or of a session. Default: {FOLDER / RESULTS}.",
)
@click.argument("tests", metavar="TEST...", nargs=-1, required=True)
def accept(
    tests: tuple[str, ...],
    reason: str,
    scopes: tuple[str, ...],
    sizes: tuple[str, ...],
    results: Path | None,
) -> None:
    """Accept a change of TEST: write a file into .gpumem/accepted, for the pull request that changes the test.

    TEST is a node id, a row's name with its label, or a selection: a file, a class, or a test with all its parameters. The file has
    the scope of the change and its size, which come from the last gate in this folder. A gate with --accept-from-change counts a file that
    its change adds, up to this size. After the merge, the next run with --gpumem-save begins a new baseline of the test.
    """
    from pytest_gpumem.baselines.accepted import FOLDER as ACCEPTED
    from pytest_gpumem.baselines.accepted import Acceptance, Scope, acceptances, write

    if not reason.strip():
        raise click.UsageError("--reason: it is empty; give the reason for the change.")
    here, chosen = Path.cwd(), [Scope(scope) for scope in scopes]
    sized = [scope for scope in chosen if scope is not Scope.REMOVED]
    _check_sizes(sized, sizes)
    last = _last(results, needed=not scopes or len(sizes) < len(sized))
    if last is not None:
        for test in tests:
            _of_test(test, last)
    if sizes or (not sized and scopes):
        by_test = {test: list(_as_given(test, chosen, iter(sizes), last)) for test in tests}
    else:
        assert last is not None
        by_test = _of_last(tests, last, chosen)
    base = _base(last, here)
    merged = frozenset[str]() if base is None else files_at(base, ACCEPTED, here)
    earlier = acceptances(here)
    for test, changes in by_test.items():
        made = Acceptance(test, reason.strip(), _who(os.environ), tuple(changes), base)
        path = write(here, made)
        click.echo(printable(f"{test}: accepted {', '.join(map(_words, changes))}; wrote {path}"))
        for name in () if base is None else [one.file_name for one in earlier if one.test == test]:
            if name not in {*merged, made.file_name}:
                (here / ACCEPTED / name).unlink(missing_ok=True)
                click.echo(printable(f"  in place of {ACCEPTED / name}"))
    click.echo(
        "commit it with the change: gpumem gate --accept-from-change counts it, and the next run with --gpumem-save takes it over"
    )


def _last(results: Path | None, *, needed: bool) -> Results | None:
    """The results of the last gate; None if there are none, and none are needed. Raises `UserError`: they are needed, or unreadable."""
    path = results if results is not None else FOLDER / RESULTS
    if results is None and not path.exists():
        if needed:
            raise UserError(
                f"there is no {path}, which says what changed; run gpumem gate, or give --results, or --scope and --size"
            )
        return None
    return load_results(path)


def _as_given(
    test: str, scopes: Iterable[Any], sizes: Iterator[str], last: Results | None
) -> Iterator[AcceptedChange]:
    """The changes that the options name. `last`: the results with the limits that held. Raises `click.UsageError`: a size is none of its
    scope."""
    from pytest_gpumem.baselines.accepted import AcceptedChange, Scope, refusal

    for scope in scopes:
        if scope is Scope.REMOVED:
            yield AcceptedChange(test, scope)
            continue
        size, limit = next(sizes), None
        if scope in (Scope.KERNELS, Scope.LIMIT):
            limit, equals, size = size.partition("=")
            if not equals:
                raise click.UsageError(
                    f"--size: {limit!r}; of the scope {scope.value} it names a limit: max_copies=3."
                )
        rows = (
            [row for row in last.document.rows if _names_row(test, row.key, row.nodeid)]
            if last is not None
            else []
        )
        old = (
            next((getattr(row.limits, str(limit), None) for row in rows), None)
            if scope is Scope.LIMIT
            else None
        )
        change = AcceptedChange(test, scope, size, limit, old)
        if (why := refusal(change)) is not None:
            raise click.UsageError(f"--size: {why.partition(': ')[2]}.")
        yield change


def _check_sizes(scopes: Sequence[Any], sizes: Sequence[str]) -> None:
    from pytest_gpumem.baselines.accepted import Scope

    if Scope.LIMIT in scopes and not sizes:
        raise click.UsageError(
            "--size: the scope limit takes the new value of the limit: max_regression=5%, or max_regression=none."
        )
    if sizes and not scopes:
        raise click.UsageError(
            f"--size: no --scope says of what {sizes[0]!r} is the size; give a --scope before it, such as --scope time."
        )
    if sizes and len(sizes) != len(scopes):
        having = f"{counted(len(scopes), 'scope')} with a size"
        raise click.UsageError(
            f"--size: {len(sizes)} for {having}; give one for each --scope, in their order."
        )


def _of_last(
    tests: Sequence[str], last: Results, scopes: Sequence[Any]
) -> dict[str, list[AcceptedChange]]:
    """By node id, the changes that the last run found. Arguments as of `_flagged`."""
    found: dict[str, list[AcceptedChange]] = {}
    for test in tests:
        for nodeid, changes in _flagged(test, last, scopes).items():
            found.setdefault(nodeid, []).extend(
                one for one in changes if one not in found.get(nodeid, [])
            )
    return found


def _of_test(test: str, last: Results) -> tuple[list[Row], list[Omission]]:
    """The rows and the missing rows of the last run that TEST selects. Raises `UserError`: there are none."""
    document = last.document
    rows = [row for row in document.rows if _names_row(test, row.key, row.nodeid)]
    missing = [one for one in document.missing if _names_row(test, one.key, one.nodeid)]
    if not rows and not missing:
        every = [
            *((row.key, row.nodeid) for row in document.rows),
            *((one.key, one.nodeid) for one in document.missing),
        ]
        names = [name for pair in every for name in pair]
        raise UserError(f"{test}: no row of {last.path} belongs to it{did_you_mean(test, names)}")
    return rows, missing


def _names_row(test: str, key: str, nodeid: str) -> bool:
    """True if TEST is the row's name, or selects its node id as pytest's command line would."""
    return test == key or selects(test, nodeid)


def _flagged(test: str, last: Results, scopes: Sequence[Any]) -> dict[str, list[AcceptedChange]]:
    """By node id, the changes of the tests that TEST selects which the last run found. Raises `UserError`: there are none."""
    from pytest_gpumem.baselines.accepted import AcceptedChange, Scope, changes_of

    rows, missing = _of_test(test, last)
    lost = [one for one in missing if one.may_be_meant]
    duet = _duet(last.path.parent / DUET)
    found: dict[str, list[AcceptedChange]] = {}
    changes = [
        (row.nodeid, change)
        for row in rows
        if row.test_error is not True
        for change in changes_of(row, duet.get(row.key))
    ]
    changes += [(one.nodeid, AcceptedChange(one.key, Scope.REMOVED)) for one in lost]
    for nodeid, change in changes:
        if not scopes or change.scope in scopes:
            found.setdefault(nodeid, []).append(change)
    if not found:
        raise UserError(f"{test}: {_why_nothing(rows, missing, last, in_scope=bool(scopes))}")
    return found


def _why_nothing(
    rows: Sequence[Row], missing: Sequence[Omission], last: Results, *, in_scope: bool
) -> str:
    """Why nothing of these rows and missing rows can be accepted. `in_scope`: scopes were given."""
    from pytest_gpumem.baselines.accepted import own_limits

    failed = any(
        row.test_error is True or (row.failed and not any(one.limit for one in row.verdict.limits))
        for row in rows
    )
    if failed or any(one.reason == ITS_TEST_FAILED for one in missing):
        return "the test itself failed, which nobody can accept"
    own = sorted({name for row in rows for name in own_limits(row)})
    if own and not in_scope:
        return f"{', '.join(own)} of the test does not hold; change the limit in the test"
    return f"{last.path} flags nothing of it{' in this scope' if in_scope else ''}"


def _duet(path: Path) -> dict[str, float]:
    """By row key, the slow-down that a gate's duet measured where it fails; empty without a duet.
    Raises `UserError`: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        verdicts: list[dict[str, Any]] = json.loads(path.read_bytes())["verdicts"]
        return {
            one["key"]: one["paired"]["change"]
            for one in verdicts
            if one["outcome"] == Outcome.FAIL.value and one["paired"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not the results of a duet: {error}") from None


def _base(last: Results | None, here: Path) -> str | None:
    """The commit that the change is compared with: the merge base of the last gate, else HEAD; None without git."""
    of = last.document.settings.get("baseline_of") if last is not None else None
    try:
        if isinstance(of, str):
            return ancestry(of, (), here).merge_base
    except RevisionError:  # such as results of another clone
        pass
    commit = head(here)
    return commit.removesuffix(DIRTY) if commit is not None else None


def _words(change: AcceptedChange) -> str:
    from pytest_gpumem.baselines.accepted import Scope

    if change.scope is Scope.REMOVED:
        return f"that {change.row} is removed"
    of = f"{change.limit} " if change.limit is not None else ""
    if change.scope is Scope.LIMIT:
        return (
            f"{of}{change.old} -> {change.size}" if change.old is not None else f"{of}{change.size}"
        )
    return f"{change.scope.value} up to {of}{change.size}"


def _who(environment: Mapping[str, str]) -> str:
    for name in WHO:
        if environment.get(name):
            return environment[name]
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return f"user {os.getuid()}" if hasattr(os, "getuid") else "unknown"
