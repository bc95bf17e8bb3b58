"""What becomes of a run's rows once a duet has judged those that its screen flagged, and the exit code that follows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.settings import LIMITS
from pytest_gpumem.verdicts.finding import counted
from pytest_gpumem.verdicts.judge import is_failure, judge

FINE, RED, USAGE, NO_VERDICT = 0, 1, 4, 6
"""Exit codes of the gate."""
PYTEST_PASSED, PYTEST_FAILED, PYTEST_USAGE, PYTEST_NOTHING = 0, 1, 4, 5
"""pytest's."""
_FLAGGED = (Outcome.FAIL, Outcome.SUSPECT, Outcome.INCONCLUSIVE, Outcome.UNRELIABLE)


@dataclass(frozen=True)
class Judged:
    """What the duet said of one row."""

    outcome: str | None
    """Its verdict's name; None: there was nothing to compare."""
    sentence: str
    """Why."""


def judged(document: Mapping[str, Any]) -> dict[str, Judged]:
    """By `Row.key`, what a duet's document (`report.to_json`) says of each row."""
    found = {one["key"]: Judged(one["outcome"], one["sentence"]) for one in document["verdicts"]}
    common = document["common"]
    if common is None or common["outcome"] != Outcome.FAIL.value:
        return found
    # A shift of all together ends the duet: what is not decided by then is part of it.
    decided = (Outcome.PASS.value, Outcome.FAIL.value)
    return {key: one if one.outcome in decided else Judged(common["outcome"], common["sentence"]) for key, one in found.items()}


@dataclass(frozen=True)
class Decision:
    """How a gate ends."""

    code: int
    rows: tuple[Row, ...]
    """The run's rows, with the duet's verdict where it gave one."""
    remarks: tuple[str, ...]
    """What decided it, a sentence each; the last one is the result."""


def flagged(rows: Sequence[Row]) -> list[Row]:
    """Rows that a duet is to judge: those that the screen finds slower, or cannot tell."""
    return [row for row in rows if row.verdict.outcome in _FLAGGED and (row.verdict.comparison is not None or _not_compared(row))]


def _not_compared(row: Row) -> bool:
    """Whether the screen could not hold a row to its limit: it is now measured in another way, such as another kernel, or on another sort
    of card, or the conditions forbade it."""
    doubted = row.verdict.outcome in (Outcome.SUSPECT, Outcome.UNRELIABLE)
    return row.verdict.another_sort or (doubted and row.limits.max_regression is not None)


def without_regression(row: Row, rows: Sequence[Row], facts: DeviceFacts) -> Verdict | None:
    """What a row is without its limit on slow-downs, if that is all that speaks against it as far as its figures tell; else None.

    A failed assertion of the test is no figure: a test that fails in itself has no verdict in a duet, which clears nothing.
    """
    comparison, measurement = row.verdict.comparison, row.measurement
    if measurement is None or (comparison is None and not _not_compared(row)):
        return None
    # Faster than the baseline by too much is no slow-down: such a row fails because its baseline is stale.
    if comparison is not None and comparison.delta <= 0 and row.verdict.outcome is Outcome.FAIL:
        return None
    siblings = {one.label: one.measurement for one in rows if one.nodeid == row.nodeid and one.measurement is not None}
    others = replace(row.limits, max_regression=None, fail_if_faster=None)
    if row.verdict.outcome is Outcome.UNRELIABLE and all(getattr(others, name) is None for name in LIMITS):
        # The conditions of the screen are none of the duet's, and nothing else was to be judged by them.
        return replace(row.verdict, outcome=Outcome.PASS)
    verdict = judge(measurement, others, facts, (), strict=False, siblings=siblings)
    return None if is_failure(verdict, strict=False) else verdict


def open_to_a_duet(rows: Sequence[Row], facts: DeviceFacts, *, strict: bool, in_itself: Collection[str] = ()) -> list[Row]:
    """Flagged rows of which a duet decides whether their test fails: not those that fail whatever it says.

    Arguments as for `settled`.
    """
    failing = _failing_in_themselves(rows, strict, in_itself)
    found = []
    for row in flagged(rows):
        rest = without_regression(row, rows, facts)
        lost = is_failure(row.verdict, strict) and (rest is None or is_failure(rest, strict))
        if row.nodeid not in failing and not lost:
            found.append(row)
    return found


def _failing_in_themselves(rows: Sequence[Row], strict: bool, in_itself: Collection[str]) -> set[str]:
    """Node ids of tests that fail by an assertion or an error, as far as that is known or none of their verdicts explains it."""
    by_verdict = {row.nodeid for row in rows if is_failure(row.verdict, strict)}
    return {row.nodeid for row in rows if row.failed} - by_verdict | set(in_itself)


def settled(
    rows: Sequence[Row], facts: DeviceFacts, duet: Mapping[str, Judged], *, strict: bool, in_itself: Collection[str] = ()
) -> tuple[Row, ...]:
    """The rows with the duet's verdict, by `Row.key`, where it judged one that the screen had flagged.

    Args:
        rows: of the screen.
        facts: of the device.
        duet: what it said.
        strict: the screen failed every row that is no PASS.
        in_itself: node ids of tests that failed by an assertion or an error, where that is known; whatever they measured, they fail.
    """
    failing = _failing_in_themselves(rows, strict, in_itself)
    after = [row if row.nodeid in failing else _settled(row, rows, facts, duet.get(row.key)) for row in rows]
    failing.update(row.nodeid for row in after if is_failure(row.verdict, strict))
    # All rows of a test fail with one of them, and no longer once none does.
    return tuple(replace(row, failed=False) if row.failed and row.nodeid not in failing else row for row in after)


def _settled(row: Row, rows: Sequence[Row], facts: DeviceFacts, judged: Judged | None) -> Row:
    if judged is None or row not in flagged(rows):
        return row
    old = row.verdict
    screen = f"the screen had said {old.outcome.value}: {old.reason}"
    said = f"the duet: {judged.outcome or 'no verdict'}, {judged.sentence}"
    if judged.outcome == Outcome.FAIL.value:
        return replace(row, failed=True, verdict=replace(old, outcome=Outcome.FAIL, reason=f"{said}; {screen}"))
    rest = without_regression(row, rows, facts) if judged.outcome == Outcome.PASS.value else None
    if rest is None:
        return replace(row, verdict=replace(old, reason=f"{old.reason}; {said}"))
    besides = f"; {rest.reason}" if rest.outcome is not Outcome.PASS else ""
    return replace(row, failed=False, verdict=replace(old, outcome=rest.outcome, reason=f"{said}{besides}; {screen}"))


def decide(
    code: int,
    failures: int,
    rows: Sequence[Row],
    facts: DeviceFacts | None,
    duet: Mapping[str, Judged] | None,
    *,
    strict: bool,
    in_itself: Collection[str] = (),
    strict_screen: bool = False,
) -> Decision:
    """The gate's end.

    Args:
        code: pytest's exit code of the screen.
        failures: failures and errors that pytest counted.
        rows: of the screen.
        facts: of the device; None where pytest wrote no results.
        duet: what the duet said, by `Row.key`; None where there was none.
        strict: green takes a PASS of every row, on a real GPU.
        in_itself: node ids of tests that failed by an assertion or an error, and not by a row's verdict alone.
        strict_screen: the screen failed every row that is no PASS.
    """
    if code == PYTEST_USAGE:
        return Decision(USAGE, tuple(rows), ("no verdict: pytest did not accept its arguments, its settings or the device",))
    if code == PYTEST_NOTHING:
        return Decision(NO_VERDICT, tuple(rows), ("no verdict: no tests were collected",))
    if code not in (PYTEST_PASSED, PYTEST_FAILED):
        return Decision(RED, tuple(rows), (f"red: pytest ended with {code} before its tests did",))
    if facts is None or not rows:
        if code == PYTEST_FAILED:
            return Decision(RED, tuple(rows), ("red: tests failed, and nothing was measured",))
        return Decision(NO_VERDICT, tuple(rows), ("no verdict: nothing was measured",))
    after = settled(rows, facts, duet or {}, strict=strict_screen, in_itself=in_itself)
    cleared = [row.key for row, old in zip(after, rows, strict=True) if old.failed and not row.failed]
    remarks = [f"cleared by the duet: {key}" for key in cleared]
    # A test is cleared once all its rows are: others of it may fail.
    tests = {row.nodeid for row in rows if row.failed} - {row.nodeid for row in after if row.failed}
    bad = [row for row in after if row.failed or is_failure(row.verdict, strict=False)]
    # By what was measured; the others fail with their test.
    broken = [row for row in bad if row.measurement is not None and is_failure(row.verdict, strict_screen)]
    in_themselves = {row.nodeid for row in bad} - {row.nodeid for row in broken}
    others = max(0, failures - len(tests) - len({row.nodeid for row in bad}))
    if code == PYTEST_FAILED and failures == 0:
        return Decision(RED, after, (*remarks, "red: pytest failed the session as a whole; its output says why"))
    if bad or others:
        said = [f"{len(broken)} of {len(after)} rows fail"] if broken else []
        said += [f"{counted(len(in_themselves), 'test')} failed by an assertion or an error of its own"] if in_themselves else []
        said += [f"{counted(others, 'failure')} that no row accounts for"] if others else []
        return Decision(RED, after, (*remarks, f"red: {'; '.join(said)}"))
    if all(row.verdict.outcome is Outcome.UNRELIABLE for row in after):
        return Decision(NO_VERDICT, after, (*remarks, "no verdict: the conditions let no row be judged"))
    doubtful = [row for row in after if row.verdict.outcome is not Outcome.PASS]
    if strict and (doubtful or facts.simulated):
        why = f"{len(doubtful)} of {len(after)} rows are no PASS" if doubtful else "the device is simulated"
        return Decision(NO_VERDICT, after, (*remarks, f"no verdict under --strict: {why}"))
    left = f", {len(doubtful)} of them undecided or without a baseline" if doubtful else ""
    return Decision(FINE, after, (*remarks, f"green: {len(after)} rows{left}"))
