"""The command `gpumem bisect`."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.commands import (
    examples,
    json_option,
    log,
    margin,
    pytest_arguments,
    rounds_option,
    terminal,
    write_json,
)
from pytest_gpumem.commands.duet import default_journal, ended_by_signals, measured_under, progress
from pytest_gpumem.commands.explain import explanations, grown
from pytest_gpumem.judging.finding import between, change, counted
from pytest_gpumem.outcomes import Exit, NoAnswer, Outcome, UserError
from pytest_gpumem.printable import printable
from pytest_gpumem.revisions import Commit, RevisionError, line_between
from pytest_gpumem.units import sizes

if TYPE_CHECKING:
    from pytest_gpumem.judging.bisection import Search
    from pytest_gpumem.judging.paired import Judge, Paired
    from pytest_gpumem.runs.bisect import Commits, CommitStep, Conclusion, Question
    from pytest_gpumem.runs.processes import ProcessRecord

OF_MEMORY = ("peak", "kept", "reserved", "allocations")  # figures of `Footprint`
OF_LAUNCH = (
    "kernels",
    "copies",
    "copied_bytes",
    "waits",
    "registers",
    "spill",
)  # figures of `WhatRan`,
IN_BYTES = ("peak", "kept", "reserved", "copied_bytes", "spill")
LISTED = 20  # commits that are listed at most
EXPLAINED = 3  # pairs of processes behind an explanation


@click.command(
    short_help="Find the commit that made a test slower.",
    epilog=examples(
        "gpumem bisect --good v1.4 --bad HEAD tests/test_a.py::test_triad",
        "gpumem bisect --good v1.4 --figure peak tests/test_a.py::test_triad",
    ),
)
@click.option(
    "--good", required=True, metavar="REVISION", help="Before the change; an ancestor of BAD."
)
@click.option("--bad", default="HEAD", metavar="REVISION", help="After the change. Default: HEAD.")
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Least slow-down to look for, such as "2%". Default: the test\'s own max_regression, else 1%.',
)
@click.option(
    "--figure",
    type=click.Choice((*OF_MEMORY, *OF_LAUNCH)),
    help="Find what raised this figure of the test's memory or of its launch, without timing.",
)
@rounds_option
@click.option(
    "--journal",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to resume from. Default: one in the temporary folder.",
)
@click.option(
    "--explain/--no-explain",
    "explained",
    default=True,
    help="Measure why the commit is slower, as gpumem explain. Default: yes.",
)
@json_option("Write the search as JSON.")
@click.argument("test", metavar="TEST")
@pytest_arguments
def bisect(file: Path | None, **options: Any) -> int:
    """Find the commit between GOOD and BAD that made TEST slower, or its memory or a count larger.

    Duets of single commits halve the range, along first parents. Another duet proves the commit: it names a wrong one in at most 1 % of
    searches. Commits that run the same machine code as one that was measured need no duet; those that do not build or lack the test are
    stepped over. After an interruption, the same command continues.
    """
    from pytest_gpumem.runs.processes import check_arguments

    request = Request(**options)
    if request.figure is not None and request.max_regression is not None:
        raise click.UsageError("--max-regression and --figure exclude each other")
    check_arguments(request.pytest_arguments)
    try:
        line = line_between(request.good, request.bad, Path.cwd())
    except RevisionError as error:
        raise click.UsageError(f"--good, --bad: {error}.") from None
    with ended_by_signals():
        return _search(line, request, file)


@dataclass(frozen=True)
class Request:
    """The command's arguments."""

    good: str
    bad: str
    test: str
    max_regression: str | None
    figure: str | None  # None: times
    rounds_max: int
    explained: bool
    journal: Path | None
    pytest_arguments: tuple[str, ...]


def _search(line: Sequence[Commit], request: Request, file: Path | None) -> int:
    from pytest_gpumem.revisions import DIRTY, head
    from pytest_gpumem.runs import RunError
    from pytest_gpumem.runs.bisect import Commits

    begun = time.monotonic()
    asked = _asked(line, request)
    if (head(asked.here) or "").endswith(DIRTY):
        _tell("uncommitted changes take no part: each commit runs in a worktree of its own")
    merged = "" if all(len(one.parents) == 1 for one in line[1:]) else ", a merge as one"
    _tell(
        f"good: {_named(line[0], request.good)}; bad: {_named(line[-1], request.bad)}; "
        f"{counted(len(line) - 1, 'commit')} along first parents{merged}"
    )
    with ExitStack() as stack:
        commits = Commits(line, asked, progress)
        stack.callback(commits.close)
        try:
            found, key, first = _found(line, request, commits)
            explanation = (
                _explanation(found, key, commits, request)
                if found.commit is not None and request.explained
                else None
            )
        except KeyboardInterrupt:
            if asked.journal.exists():
                _tell(
                    f"stopped; the folder {asked.journal} has what was measured, and the same command goes on from there"
                )
            raise
        except RunError:
            if request.journal is None and not commits.duets:
                shutil.rmtree(asked.journal, ignore_errors=True)
            raise
    seconds = time.monotonic() - begun
    code = Exit.FAILED if found.nothing else Exit.NO_VERDICT if found.commit is None else Exit.FINE
    for text in _text(found, line, request, key, simulated=first.simulated):
        click.echo(printable(text))
    if explanation is not None:
        click.echo("\n" + explanation["text"])
    timed = f"{counted(commits.duets, 'duet')}, " if request.figure is None else ""
    resumed = f", {commits.resumed} of them from the journal" if commits.resumed else ""
    click.echo(f"{timed}{counted(commits.processes, 'process')} in {seconds:.0f} s{resumed}")
    write_json(
        file, _document(found, line, request, key, first, explanation, commits, seconds, code)
    )
    if request.journal is None and code is not Exit.NO_VERDICT:
        shutil.rmtree(asked.journal, ignore_errors=True)
    return code


def _asked(line: Sequence[Commit], request: Request) -> Question:
    from pytest_gpumem.runs.bisect import Question

    here = Path.cwd()
    arguments = (
        *request.pytest_arguments,
        *(("--gpumem-footprint=on",) if request.figure in OF_MEMORY else ()),
    )
    # A row's key ends with its label, which pytest does not know.
    tests = tuple(
        dict.fromkeys(
            (
                request.test,
                request.test.rpartition("[")[0] if request.test.endswith("]") else request.test,
            )
        )
    )
    identity = {
        "folder": str(here),
        "test": request.test,
        "pytest": list(arguments),
        "environment": measured_under(os.environ),
    }
    journal = request.journal or default_journal(
        "bisect", {**identity, "good": line[0].id, "bad": line[-1].id}
    )
    try:
        journal.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise click.UsageError(f"--journal: {journal}: {error.strerror or error}.") from None
    return Question(
        here, tests, arguments, journal.absolute(), dict(os.environ), request.rounds_max, identity
    )


def _end(commits: Commits, option: str, name: str, index: int, test: str) -> ProcessRecord:
    """A process of good or bad. From then on, no other tests run. Raises `RunError`: it does not measure the test."""
    from pytest_gpumem.runs import RunError
    from pytest_gpumem.runs.bisect import Skip, rows_of_test

    _tell(f"{option.removeprefix('--')}: one process")
    try:
        found = commits.look(index)
    except Skip as reason:
        raise RunError(f"{option} {name}: {test} measures nothing there: {reason}") from None
    if not (rows := rows_of_test(found, test)):
        raise RunError(f"{option} {name}: {test} is no test or measurement there")
    commits.tests = tuple(dict.fromkeys(row.nodeid for row in rows.values()))
    return found


def _found(
    line: Sequence[Commit], request: Request, commits: Commits
) -> tuple[Conclusion, str, ProcessRecord]:
    """The search, the key of the measurement, and a process of good."""
    from pytest_gpumem.runs import RunError
    from pytest_gpumem.runs.bisect import Skip, bisect_times, bisect_values, rows_of_test

    last = len(line) - 1
    ends = [
        _end(commits, *one, request.test)
        for one in (("--good", request.good, 0), ("--bad", request.bad, last))
    ]
    show = _Steps(line, request)
    if request.figure is not None:
        key = _grown(_values(ends[0], request), _values(ends[1], request), request)

        def value(index: int) -> int:
            values = _values(commits.look(index), request)
            if key not in values:
                raise Skip(f"{key} has no such figure")
            return values[key]

        return bisect_values(last, value, show), key, ends[0]
    from pytest_gpumem.runs.reading import RowFilter

    timed = [
        row for row in rows_of_test(ends[1], request.test).values() if row.measurement is not None
    ]
    _tell("bad against good: a duet")
    # What is looked for is no limit: it may be another than the test's own.
    sought = (
        None
        if request.max_regression is None
        else dict.fromkeys((row.key for row in timed), request.max_regression)
    )
    played = commits.duet(0, last, RowFilter.of(timed), max_regression=sought)
    judged = {one.key: one.paired for one in played.verdicts if one.paired is not None}
    if not judged:
        raise RunError(
            "; ".join(f"{one.key}: {one.sentence}" for one in played.verdicts)
            or f"{request.test} measured nothing"
        )
    # FAIL comes before undecided, and that before PASS.
    key = max(judged, key=lambda one: (_RANKS[judged[one].outcome], judged[one].change))
    if len(judged) > 1:
        _tell(
            f"of {len(judged)} measurements, {key} changed most; name another one as TEST to follow that"
        )
    wanted = RowFilter.of([row for row in timed if row.key == key])
    _tell(f"bad against good: {judged[key].sentence}")

    def look(index: int) -> Any:
        row = rows_of_test(commits.look(index), key).get(key)
        if row is None or row.measurement is None:
            raise Skip(f"there is no {key}")
        return row.measurement

    play = commits.timed(wanted, key)

    def duet(base: int, head: int, judge: Judge, name: str) -> Paired:
        if name:
            _tell(f"proof: {line[head].short} against {line[base].short}, by new pairs")
        return play(base, head, judge, name)

    return bisect_times(last, judged[key], look, duet, show), key, ends[0]


_RANKS = {Outcome.FAIL: 2, None: 1, Outcome.PASS: 0}


def _values(process: ProcessRecord, request: Request) -> dict[str, int]:
    """The figure of each measurement of the test that has it."""
    from pytest_gpumem.runs.bisect import rows_of_test

    found = {}
    for key, row in rows_of_test(process, request.test).items():
        if request.figure in OF_MEMORY:
            if row.footprint is not None:
                found[key] = getattr(row.footprint, request.figure)
        elif (
            row.measurement is not None
            and (ran := row.measurement.what_ran) is not None
            and ran.order
        ):
            found[key] = getattr(
                ran, "waits" if request.figure == "waits" else request.figure or ""
            )
    return found


def _grown(good: Mapping[str, int], bad: Mapping[str, int], request: Request) -> str:
    """The measurement whose figure grew most."""
    from pytest_gpumem.runs import RunError

    both = [key for key in bad if key in good]
    if not both:
        raise RunError(
            f"{request.test} has no {request.figure} on both sides; its memory or its launches were not watched"
        )
    return max(both, key=lambda key: bad[key] / max(1, good[key]))


class _Steps:
    """Prints each step."""

    def __init__(self, line: Sequence[Commit], request: Request) -> None:
        self._line = line
        self._request = request
        self._begun = time.monotonic()
        self._seconds: list[float] = []

    def __call__(self, search: Search, index: int, step: CommitStep | None) -> None:
        """As `runs.bisect.OnStep`."""
        from pytest_gpumem.judging.bisection import steps_of
        from pytest_gpumem.runs.report import rounded_duration

        commit = self._line[index]
        if step is not None:
            self._seconds.append(time.monotonic() - self._begun)
            _tell(f"  {self._known(step)}")
            return
        self._begun = time.monotonic()
        # The proof takes about as long as a step.
        more = steps_of(search.high - search.low) + 1
        left = rounded_duration(statistics.mean(self._seconds) * more) if self._seconds else ""
        number = len(self._seconds) + 1
        about = f"step {number} of about {number + more - 1}: {counted(search.high - search.low, 'commit')} left"
        _tell(f"{about}{f', about {left}' if left else ''}: {commit.short} {commit.subject}")

    def _known(self, step: CommitStep) -> str:
        side = {True: "on bad's side", False: "on good's side", None: "not decided"}[step.bad]
        if step.skipped is not None:
            return f"skipped: {step.skipped}"
        if step.same_as is not None:
            return f"{side}: runs the same as {self._line[step.same_as].short}"
        if step.value is not None:
            return f"{side}: {_figures(self._request, step.value)}"
        return f"{side}: {_seen(step.paired) if step.paired is not None else ''}"


def _tell(sentence: str) -> None:
    log(f"gpumem bisect: {sentence}")


def _named(commit: Commit, name: str) -> str:
    return commit.short if commit.id.startswith(name) else f"{name} ({commit.short})"


def _seen(paired: Paired) -> str:
    """The change with its interval."""
    ends = between(*paired.bounds) if math.isfinite(paired.bounds[0]) else "too few for an interval"
    return f"{change(paired.change)}, {ends}, over {counted(paired.pairs, 'pair')}"


def _explanation(
    found: Conclusion, key: str, commits: Commits, request: Request
) -> dict[str, Any] | None:
    """What `gpumem explain` says of the commit, as text and as plain values; None if it cannot."""
    from pytest_gpumem.explain.processes import ExplainRequest, measure_sides
    from pytest_gpumem.explain.text import text, to_json
    from pytest_gpumem.runs.bisect import rows_of_test
    from pytest_gpumem.runs.processes import BASE, HEAD

    tests = tuple(row.nodeid for row in rows_of_test(commits.look(found.high), key).values())
    asked = ExplainRequest(
        tests, request.pytest_arguments, EXPLAINED, counters=False, traces=False, tree=commits.tree
    )
    _tell("why: three pairs of processes")
    try:
        sides = {BASE: commits.side(found.low), HEAD: commits.side(found.high)}
        measured = measure_sides(sides, asked, os.environ, lambda _line: None)
        every, memory = (
            explanations(measured[BASE], measured[HEAD]),
            grown(measured[BASE], measured[HEAD]),
        )
    except (UserError, NoAnswer) as error:
        _tell(f"no explanation: {error}")
        return None
    shown = [text(name, one, width=terminal()[0]) for name, one in every.items() if name == key]
    shown += ["\n  ".join(printable([name, *lines])) for name, lines in memory.items()]
    if not shown:
        return None
    return {
        "text": "\n".join(shown),
        "explanations": [to_json(name, one) for name, one in every.items() if name == key],
        "memory": [{"key": name, "changes": lines} for name, lines in memory.items()],
    }


def _text(
    found: Conclusion, line: Sequence[Commit], request: Request, key: str, *, simulated: bool
) -> Iterator[str]:
    """The result, line by line."""
    note = " (simulated)" if simulated else ""
    if found.nothing:
        yield f"nothing to find{note}: {_whole(found, request, key)}"
        return
    if found.commit is None:
        yield f"no commit is proven{note}: {_why(found)}"
        yield f"the whole change, {request.bad} against {request.good}: {_whole(found, request, key)}"
        yield (
            "it is in one of these commits:"
            if found.proof is None or found.proof.outcome is not Outcome.PASS
            else "what is left:"
        )
        left = range(found.low + 1, found.high + 1)
        reasons = {
            step.index: f"  (skipped: {step.skipped})"
            for step in found.steps
            if step.skipped is not None
        }
        yield from (
            f"  {line[index].short} {line[index].subject}{reasons.get(index, '')}"
            for index in left[:LISTED]
        )
        if len(left) > LISTED:
            yield f"  and {len(left) - LISTED} more"
        if request.figure is None and (found.proof is None or found.proof.outcome is None):
            yield f"to go on with more pairs: the same command with --rounds-max {2 * request.rounds_max}"
        return
    commit, parent = line[found.high], line[found.low]
    yield f"found{note}: {commit.id}"
    yield f"  {commit.subject}"
    yield f"  {commit.author}, {commit.date}"
    yield f"  {key}: {_own(found, request)} against {parent.short}"
    yield f"  {100 * _share(found):.0f} % of the whole change, which is {_whole(found, request, key)}"
    if len(commit.parents) > 1:
        yield "  it is a merge; to look into its branch:"
        yield f"    {_command(request, f'$(git merge-base {commit.short}^1 {commit.short}^2)', f'{commit.short}^2')}"
    if (more := _more(found, line, request)) is not None:
        yield f"  another change remains: {more}"


def _why(found: Conclusion) -> str:
    if found.low == 0 and not found.steps:
        return "it is not decided whether bad is slower than good"
    if found.proof is not None and found.proof.outcome is Outcome.PASS:
        return "the change came in several small steps, or not by these commits"
    skipped = {step.index for step in found.steps if step.skipped is not None}
    if (
        all(index in skipped for index in range(found.low + 1, found.high))
        and found.high - found.low > 1
    ):
        return "the others in question were skipped"
    return "a step was not decided after the last pair"


def _whole(found: Conclusion, request: Request, key: str) -> str:
    if found.start is not None:
        return _seen(found.start)
    first, last = found.values[0], found.values[max(found.values)]
    return f"{request.figure} of {key}: {_figures(request, first, last)}"


def _figures(request: Request, *values: int) -> str:
    """Values of the figure of the search, in its unit."""
    return " → ".join(sizes(*values) if request.figure in IN_BYTES else map(str, values))


def _own(found: Conclusion, request: Request) -> str:
    if found.proof is not None:
        return _seen(found.proof)
    return _figures(request, found.values[found.low], found.values[found.high])


def _share(found: Conclusion) -> float:
    """Part of the whole change that the found commit explains; of times by logarithms."""
    if found.start is not None and found.proof is not None:
        return math.log1p(found.proof.change) / math.log1p(found.start.change)
    whole = found.values[max(found.values)] - found.values[0]
    return (found.values[found.high] - found.values[found.low]) / whole


def _more(found: Conclusion, line: Sequence[Commit], request: Request) -> str | None:
    """The command that finds another change; None if there is none beyond doubt."""
    if found.start is None or found.proof is None:
        before = found.values[found.low] > found.values[0]
        if not before and found.values[max(found.values)] <= found.values[found.high]:
            return None
    else:
        whole, own = math.log1p(found.start.change), math.log1p(found.proof.bounds[1])
        if whole - own <= math.log1p(found.start.delta):
            return None
        steps = {step.index: step for step in found.steps}
        low = steps.get(found.low)
        measured = (
            steps.get(low.same_as, low) if low is not None and low.same_as is not None else low
        )
        before = (
            measured is not None
            and measured.paired is not None
            and 2 * math.log1p(measured.paired.change) > whole - own
        )
    ends = (
        (request.good, line[found.low].short) if before else (line[found.high].short, request.bad)
    )
    return _command(request, *ends)


def _command(request: Request, good: str, bad: str) -> str:
    figure = [] if request.figure is None else ["--figure", request.figure]
    limit = [] if request.max_regression is None else ["--max-regression", request.max_regression]
    arguments = ["--", *request.pytest_arguments] if request.pytest_arguments else []
    return f"gpumem bisect --good {good} --bad {bad} {shlex.join([*figure, *limit, request.test, *arguments])}"


def _document(
    found: Conclusion,
    line: Sequence[Commit],
    request: Request,
    key: str,
    first: ProcessRecord,
    explanation: Mapping[str, Any] | None,
    commits: Commits,
    seconds: float,
    code: int,
) -> dict[str, Any]:
    """Everything as plain values."""
    from pytest_gpumem.judging.bisection import WRONG

    def commit(index: int) -> dict[str, Any]:
        one = line[index]
        return {"commit": one.id, "author": one.author, "date": one.date, "subject": one.subject}

    def paired(one: Paired | None) -> dict[str, Any] | None:
        if one is None:
            return None
        low, high = (end if math.isfinite(end) else None for end in one.bounds)
        return {
            "change": one.change if one.pairs else None,
            "low": low,
            "high": high,
            "pairs": one.pairs,
        }

    return {
        "kind": "gpumem bisect",
        "schema": 1,
        "datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "exit": int(code),
        "good": commit(0),
        "bad": commit(len(line) - 1),
        "commits": len(line) - 1,
        "test": request.test,
        "key": key,
        "figure": request.figure or "time",
        "wrong_at_most": WRONG if request.figure is None else 0.0,
        "simulated": first.simulated,
        "device": {
            name: getattr(first.device, name, None) for name in ("key", "name", "driver", "uuid")
        },
        "nothing": found.nothing,
        "found": None
        if found.commit is None
        else {
            **commit(found.high),
            "parent": line[found.low].id,
            "paired": paired(found.proof),
            "values": [found.values[found.low], found.values[found.high]] if found.values else None,
            "share": _share(found),
            "another": _more(found, line, request),
        },
        "left": []
        if found.nothing
        else [line[index].id for index in range(found.low + 1, found.high + 1)],
        "whole": paired(found.start) or {"values": [found.values[0], found.values[len(line) - 1]]},
        "steps": [
            {
                **commit(step.index),
                "bad": step.bad,
                "skipped": step.skipped,
                "same_as": None if step.same_as is None else line[step.same_as].id,
                "paired": paired(step.paired),
                "value": step.value,
            }
            for step in found.steps
        ],
        "explanation": None
        if explanation is None
        else {name: explanation[name] for name in ("explanations", "memory")},
        "duets": commits.duets,
        "processes": commits.processes,
        "resumed": commits.resumed,
    }
