"""The conclusion of a session or a gate: what it decides, why, and what to do. The same lines end
the terminal's output, `summary.md` and the page."""

from __future__ import annotations

import os
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpumem.judging.expectations import possibly_intended
from pytest_gpumem.judging.finding import mark
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records import function_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import (
    ACCEPTED,
    LOST,
    NOT_RUN,
    ROW,
    TEST,
    UNDECIDED,
    Omission,
    Past,
    Row,
)
from pytest_gpumem.reporting.row import broken_limits, verdict_text, why_lines, worst_first
from pytest_gpumem.reporting.terminal import wrapped
from pytest_gpumem.units import counted

LISTED = 20  # lost measurements that are listed; the results have all
EXPLAINED = 5  # rows and tests that a conclusion names
THINGS = {ROW: "measurement", TEST: "test"}  # others are limits
COLOURS: Mapping[int, str] = {
    Exit.FINE: "green",
    Exit.FAILED: "red",
    Exit.USAGE: "could not start",
}


@dataclass(frozen=True)
class Conclusion:
    """How a session or a gate ends, as plain data."""

    code: int  # exit code
    causes: Sequence[str]  # why, in few words, such as "1 of 3 rows fails"
    rows: Sequence[Row] = ()  # all rows of a gate, or those that fail a session
    missing: Sequence[Omission] = ()  # what was not judged
    remarks: Sequence[str] = ()  # what a reader of a gate should know, a sentence each
    advice: Sequence[str] = ()  # what to do, such as "to repeat: pytest t.py::test_a"
    errors: Mapping[str, str] = field(default_factory=dict)
    """By node id, the first line of the error of tests that failed by themselves."""
    simulated: bool = False  # no GPU was measured

    @property
    def colour(self) -> str:
        """The word for its exit code."""
        return COLOURS.get(self.code, "no verdict")


def failing_text(failing: Sequence[Row], rows: Iterable[Row]) -> str:
    measured = sum(row.measured_something for row in rows)
    verb = "fails" if len(failing) == 1 else "fail"
    return f"{len(failing)} of {counted(measured, 'row')} {verb}"


def conclusion_lines(conclusion: Conclusion, width: int, further: Iterable[str] = ()) -> list[str]:
    """The causes, what fails, `further` lines, and what to do."""
    lines = [f"{conclusion.colour}{mark(conclusion.simulated)}: {'; '.join(conclusion.causes)}"]
    rows = failing_rows(conclusion.rows)
    for row in rows[:EXPLAINED]:
        lines += row_lines(row, conclusion.errors.get(row.nodeid))
    if len(rows) > EXPLAINED:
        lines.append(f"and {counted(len(rows) - EXPLAINED, 'further row')}")
    named = {row.nodeid for row in conclusion.rows}
    others = [nodeid for nodeid in conclusion.errors if nodeid not in named]
    for nodeid in others[:EXPLAINED]:
        lines.append(f"FAIL {nodeid}: {conclusion.errors[nodeid]}")
    if len(others) > EXPLAINED:
        tests = counted(len(others) - EXPLAINED, "further test")
        lines.append(f"and {tests} without a measurement")
    for old, new in renamed(conclusion).items():
        lines.append(f"{old} is gone and {new} is new: renamed?")
    drawn = []
    for line in lines:
        drawn += wrapped(printable(line), width, indent="    ")
    drawn += [line for line in further if line not in drawn]
    return drawn + printable(list(conclusion.advice))  # a command stays on its line


def failing_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that fail, worst first, without those that pass beside a failing row of their test.
    A test that failed by an error has the first of its rows."""
    by_verdict = {row.nodeid for row in rows if row.verdict.outcome is Outcome.FAIL}
    failing: dict[str, Row] = {}
    for row in worst_first(rows):
        fails = row.verdict.outcome is Outcome.FAIL
        fails = fails or (row.failed and row.nodeid not in by_verdict)
        if fails and row.verdict.code is not Code.DID_NOT_RUN:
            failing.setdefault(row.nodeid if row.test_error else row.key, row)
    return list(failing.values())


def row_lines(row: Row, error: str | None = None) -> list[str]:
    """Verdict and name of a row, every broken limit, and the first thing that differs.
    `error`: the first line of the error of its test."""
    if row.test_error and row.verdict.outcome is not Outcome.FAIL:
        return [f"FAIL {row.key}", f"  {error or 'its test failed by an assertion or an error'}"]
    lines = [f"{verdict_text(row)}{mark(row.verdict.simulated)} {row.key}"]
    for text in broken_limits(row):
        lines.append(f"  {' '.join(text.split())}")
    lines += [f"  why: {why}" for why in why_lines(row)[:1]]
    return lines


def renamed(conclusion: Conclusion) -> dict[str, str]:
    """By lost test, the only new test of its file: perhaps its new name."""
    is_new: dict[str, bool] = {}
    for row in conclusion.rows:
        function = function_of(row.nodeid)
        new = row.verdict.outcome is Outcome.NEW and not row.test_error
        is_new[function] = new and is_new.get(function, True)
    names_now = {}
    for omission in conclusion.missing:
        old = function_of(omission.nodeid)
        file = old.partition("::")[0] + "::"
        names = [name for name, new in is_new.items() if new and name.startswith(file)]
        if possibly_intended(omission) and len(names) == 1 and old not in is_new:
            names_now[old] = names[0]
    return names_now


def more(tests: Sized, named: int = EXPLAINED) -> str:
    """The comment after a command that names the first of these tests."""
    further = len(tests) - named
    return f"  # and {further} further" if further > 0 else ""


def seen_from(folder: Path, test: str, origin: Path) -> str:
    """The name of a test in `origin` as it is in `folder`; a node id is of the root folder."""
    path, *names = test.split("::")
    return "::".join((os.path.relpath(origin / path, folder), *names))


def session_of(tests: Collection[str], arguments: Iterable[str], paths: Collection[str]) -> str:
    """The command of a session of `tests`, in place of those that `paths` among its words name."""
    words, before = ["pytest"], ""
    for word in arguments:
        if word not in paths or before in ("-k", "-m", "--rootdir"):
            words.append(word)
        before = word
    return shlex.join([*words, *list(tests)[:EXPLAINED]]) + more(tests)


def advice(
    repeat: Iterable[str],
    limits: Sequence[str],
    accept: Sequence[str],
    repair: Sequence[str] = (),
    *,
    uncounted: bool = False,
) -> list[str]:
    """What to do about a failure. `limits`: names of those that no acceptance covers.
    `uncounted`: the gate counts no acceptance of the change."""
    steps = [f"to repeat: {command}" for command in repeat]
    if limits:
        names = ", ".join(dict.fromkeys(limits))
        repair = [*repair, f"meet or change {names}, which cannot be accepted"]
    if repair:
        steps.append(f"to repair: {'; '.join(repair)}")
    words = "to accept, commit what this writes"
    if uncounted:
        words += " and gate with --accept-from-change"
    return steps + [f"{words}: {command}" for command in accept]


@dataclass(frozen=True)
class Run:
    """The rows of a run, and what is known of it besides."""

    rows: Sequence[Row]  # in the order in which they are shown; failed ones too
    facts: DeviceFacts
    settings: Mapping[str, object]  # plain values that the run was taken under, by option
    utc: str = ""  # time of the run, ISO 8601
    revision: str | None = None  # of the code that was measured; None if unknown
    past: Mapping[str, Sequence[Past]] = field(default_factory=dict)
    """By `Row.key`, the saved runs, oldest first."""
    remarks: Sequence[str] = ()  # sentences about the run, such as what decided a gate
    conclusion: Conclusion | None = None  # what it decides; None where only rows are known


def run_lines(run: Run, width: int) -> list[str]:
    further = list(run.remarks)
    # The remarks of a gate name the rows without a verdict.
    if run.conclusion is None or not run.conclusion.remarks:
        further += remedies(run.rows, store=run.conclusion is None)
    if run.conclusion is not None:
        return printable(conclusion_lines(run.conclusion, width, further))
    lines = []
    for row in failing_rows(run.rows):
        lines += row_lines(row)
    return printable([*lines, *further])


# Rows without a verdict, counts, and what was not judged


def remedies(rows: Iterable[Row], *, store: bool = True) -> list[str]:
    """A sentence for each reason that leaves rows without a verdict. It says what decides them.
    `store`: name the commands that store or compare such rows."""
    groups: dict[tuple[Outcome, Code | None, str], list[Row]] = {}
    for row in rows:
        outcome = row.verdict.outcome
        if outcome in (Outcome.UNDECIDED, Outcome.ACCEPTED, Outcome.NEW) and not row.test_error:
            reason = row.verdict.reason
            if outcome is not Outcome.NEW:  # its reason has figures: group by limit
                reason = row.verdict.limits[0].limit if row.verdict.limits else ""
            groups.setdefault((outcome, row.verdict.code, reason), []).append(row)
    sentences = []
    for those in sorted(groups.values(), key=lambda those: those[0].verdict.outcome.rank):
        verdict = those[0].verdict
        word = verdict.outcome.word
        sentences += grouped((word, "row", row.key, verdict.reason) for row in those)
        if store and verdict.code is Code.MEASURED_DIFFERENTLY:
            sentences[-1] += "; gpumem gate BASE compares them"
    if store and any(outcome is Outcome.NEW for outcome, *_ in groups):  # the last sentence
        sentences[-1] += "; pytest --gpumem --gpumem-save --gpumem-processes 3 stores this state"
    return sentences


def counts_text(rows: Sequence[Row]) -> str:
    """Such as "9 rows (simulated): 1 FAIL, 2 PASS; 1 test failed without a measurement"."""
    counts: Counter[Outcome] = Counter()
    by_error, nothing = set[str](), set[str]()
    for row in rows:
        if not row.measured_something:
            nothing.add(row.nodeid)
            continue
        counts[row.verdict.outcome] += 1
        if row.test_error:
            by_error.add(row.nodeid)
    ranked = sorted(counts, key=lambda outcome: outcome.rank)
    outcomes = [f"{counts[outcome]} {outcome.word}" for outcome in ranked]
    simulated = mark(any(row.verdict.simulated for row in rows))
    parts = [f"{counted(counts.total(), 'row')}{simulated}"]
    if outcomes:
        parts[0] += f": {', '.join(outcomes)}"
    if by_error:
        parts.append(f"{counted(len(by_error), 'test')} failed by an assertion or an error")
    if nothing:
        parts.append(f"{counted(len(nothing), 'test')} failed without a measurement")
    return "; ".join(parts)


def grouped(entries: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """A line for all that differ in the key alone: "NEW 3 rows, such as t.py::a: no baseline".
    Each entry: "NEW", "row", "t.py::a", "no baseline".
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for before, thing, key, reason in entries:
        groups.setdefault((before, thing, reason), []).append(key)
    lines = []
    for (before, thing, reason), keys in groups.items():
        which = keys[0]
        if len(keys) > 1:
            which = f"{counted(len(keys), thing)}, such as {which}"
        lines.append(f"{before} {which}: {reason}")
    return lines


def missing_lines(missing: Sequence[Omission]) -> list[str]:
    names = {LOST: "lost", ACCEPTED: "accepted", UNDECIDED: "not judged"}
    crashed: dict[str, set[str]] = defaultdict(set)
    not_run = []
    listed: dict[str, list[str]] = defaultdict(list)
    for omission in missing:
        reason, lost = omission.reason, omission.status == LOST
        thing = THINGS.get(omission.what, "limit")
        key = omission.key + (f", {omission.what}" if thing == "limit" else "")
        if omission.status == NOT_RUN:
            not_run.append(("not run:", thing, key, reason))
        elif lost and omission.how == "not reached":
            crashed["not reached, because the session ended before"].add(omission.nodeid)
        elif lost and omission.how == "did not run":
            crashed[f"did not run because {reason}"].add(omission.nodeid)
        else:
            name = names[omission.status]
            listed[name].append(f"{name}: {key}: {reason}")
    lines = []
    for why, tests in crashed.items():
        count = counted(len(tests), "test")
        lines.append(f"lost: {count} {why}; --gpumem-isolate runs them all the same")
    for name, entries in listed.items():
        lines += entries[:LISTED]
        if len(entries) > LISTED:
            lines.append(f"{name}: {len(entries) - LISTED} further")
    return lines + grouped(not_run)
