"""The end of a gate: the rows of its screen with the verdicts of its duet, and the exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.footprint import RULES, added, judge_footprint
from pytest_gpumem.judging.judge import SETTLED, failing_in_themselves, is_failure, judge
from pytest_gpumem.judging.limits import of_baseline
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import LOST, Missing, Row, Verdict
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.runs.reading import DuetVerdict

_REGRESSION = (Code.SLOWER, Code.CREPT)  # codes of a FAIL that a duet may clear


@dataclass(frozen=True)
class Decision:
    """How a gate ends."""

    code: int
    rows: tuple[Row, ...]  # the run's rows, with the duet's verdict where it gave one
    remarks: tuple[str, ...]  # the reasons, a sentence each; the last one is the result


def with_missing(decision: Decision, missing: Sequence[Missing]) -> Decision:
    """The end of a gate whose screen lacks measurements that the baseline holds: a lost one is red."""
    if decision.code == Exit.USAGE or not missing:
        return decision
    *remarks, result = decision.remarks
    if lost := sum(one.status == LOST for one in missing):
        also = f"; {result.removeprefix('red: ')}" if decision.code == Exit.FAILED else ""
        decision, result = replace(decision, code=Exit.FAILED), f"red: {counted(lost, 'measurement')} of the baseline lost{also}"
    return replace(decision, remarks=(*remarks, *missing_lines(missing), result))


def flagged(rows: Sequence[Row]) -> list[Row]:
    """Rows that a duet is to judge: those that the screen finds slower, or cannot compare."""
    return [row for row in rows if row.limits.max_regression is not None and _flagged(row.verdict)]


def _flagged(verdict: Verdict) -> bool:
    if verdict.outcome is Outcome.FAIL:
        return verdict.code in _REGRESSION
    return verdict.outcome is not Outcome.PASS and verdict.code is not Code.ACCEPTED


def unaltered(row: Row) -> bool:
    """True for a row that is in doubt by its noise, or by the device's drift, and runs the same machine code as its baseline. Its duet
    would take longer than the rest of a gate: only a strict gate has one. A row that looks slower is among them if its interval holds 0 at
    the confidence of a PASS too: of unchanged rows, one in 200 is not.
    """
    change, code = row.verdict.comparison, row.verdict.code
    if change is None or not change.same_code or change.low > 0:
        return False
    by_noise = 2 * math.log1p(change.delta) <= math.log1p(change.high)  # the change is within the reach of its upper bound
    return code in (*SETTLED, Code.CONDITIONS) or (code is Code.LOOKS_SLOWER and by_noise)


def _unjudged(row: Row, duet: Mapping[str, DuetVerdict] | None) -> bool:
    """Whether neither the screen nor the duet could compare a row with base, though base may have it."""
    if row.verdict.comparison is not None or not flagged([row]):
        return False
    if duet is None:
        # Without a duet the conditions alone are a warning.
        return row.verdict.code is not Code.CONDITIONS
    judged = duet.get(row.key)
    return judged is None or (judged.outcome is None and not judged.new)


def without_regression(row: Row, rows: Sequence[Row], facts: DeviceFacts) -> Verdict | None:
    """The verdict of a row without its limit on slow-downs, if no other limit fails by its figures; else None. A failed assertion of the
    test is no figure: a test that fails in itself has no verdict in a duet, which clears nothing."""
    measurement = row.measurement
    if measurement is None or not flagged([row]):
        return None
    siblings = {one.label: one.measurement for one in rows if one.nodeid == row.nodeid and one.measurement is not None}
    others = structs.replace(row.limits, max_regression=None, fail_if_faster=None)
    if row.verdict.code is not Code.NO_BASELINE:
        # The screen compared these counts, and one above its limit is no flagged row's.
        others = structs.replace(others, **dict.fromkeys(of_baseline(measurement, others)))
    if row.verdict.code is Code.CONDITIONS and all(getattr(others, name) is None for name in LIMITS):
        # The conditions of the screen are none of the duet's, and nothing else was to be judged by them.
        return structs.replace(row.verdict, outcome=Outcome.PASS, code=None)
    verdict = judge(measurement, others, facts, (), strict=False, siblings=siblings)
    if row.footprint is not None:
        # Of the growth of its peak nothing is known here; a FAIL by it is no flagged row's.
        limits = structs.replace(row.limits, max_peak_regression=None)
        verdict = added(verdict, list(judge_footprint(row.footprint, limits, (), tuple(RULES))), strict=False)
    return None if is_failure(verdict, strict=False) else verdict


def open_to_a_duet(rows: Sequence[Row], facts: DeviceFacts, *, strict: bool) -> list[Row]:
    """Flagged rows whose test fails or passes by the duet; the others fail whatever its verdict. Arguments as for `settled`."""
    failing = failing_in_themselves(rows, strict)
    found = []
    for row in flagged(rows):
        rest = without_regression(row, rows, facts)
        lost = is_failure(row.verdict, strict) and (rest is None or is_failure(rest, strict))
        if row.nodeid not in failing and not lost:
            found.append(row)
    return found


def settled(rows: Sequence[Row], facts: DeviceFacts, duet: Mapping[str, DuetVerdict], *, strict: bool) -> tuple[Row, ...]:
    """The rows; flagged ones have the duet's verdict, if it judged them.
    `duet`: its verdicts, by `Row.key`.
    `strict`: the screen failed every row that is no PASS.
    """
    failing = failing_in_themselves(rows, strict)
    after = [row if row.nodeid in failing else _settled(row, rows, facts, duet.get(row.key)) for row in rows]
    failing.update(row.nodeid for row in after if is_failure(row.verdict, strict))
    # All rows of a test fail with one of them, and no longer once none does.
    return tuple(structs.replace(row, failed=False) if row.failed and row.nodeid not in failing else row for row in after)


def _settled(row: Row, rows: Sequence[Row], facts: DeviceFacts, judged: DuetVerdict | None) -> Row:
    if judged is None or row not in flagged(rows):
        return row
    old = row.verdict
    screen = f"the screen: {old.outcome.value}, {old.reason}"
    verdict = f"the duet: {judged.outcome.value if judged.outcome is not None else 'no verdict'}, {judged.sentence}"
    if judged.outcome is Outcome.FAIL:
        return structs.replace(
            row, failed=True, verdict=structs.replace(old, outcome=Outcome.FAIL, code=Code.SLOWER, reason=f"{verdict}; {screen}")
        )
    rest = without_regression(row, rows, facts) if judged.outcome is Outcome.PASS else None
    if rest is None:
        return structs.replace(row, verdict=structs.replace(old, reason=f"{old.reason}; {verdict}"))
    besides = f"; {rest.reason}" if rest.outcome is not Outcome.PASS else ""
    same_code = judged.paired is not None and judged.paired.same_code
    code = Code.SAME_CODE if same_code and rest.outcome is Outcome.PASS else rest.code
    return structs.replace(
        row, failed=False, verdict=structs.replace(old, outcome=rest.outcome, code=code, reason=f"{verdict}{besides}; {screen}")
    )


def decide(
    code: int,
    failures: int,
    rows: Sequence[Row],
    facts: DeviceFacts | None,
    duet: Mapping[str, DuetVerdict] | None,
    *,
    strict: bool,
    strict_screen: bool = False,
) -> Decision:
    """The gate's end.
    `code`: pytest's exit code of the screen.
    `failures`: failures and errors that pytest counted.
    `facts`: of the device; None if pytest wrote no results.
    `duet`: its verdicts, by `Row.key`; None without a duet.
    `strict`: green takes a PASS of every row, on a real GPU.
    `strict_screen`: the screen failed every row that is no PASS.
    """
    if code == Exit.USAGE:
        return Decision(Exit.USAGE, tuple(rows), ("no verdict: pytest did not accept its arguments, its settings or the device",))
    if code == Exit.NO_TESTS:
        return Decision(Exit.NO_VERDICT, tuple(rows), ("no verdict: no tests were collected",))
    if code not in (Exit.FINE, Exit.FAILED):
        return Decision(Exit.FAILED, tuple(rows), (f"red: pytest ended with {code} before its tests did",))
    if facts is None or not rows:
        if code == Exit.FAILED:
            return Decision(Exit.FAILED, tuple(rows), ("red: tests failed, and nothing was measured",))
        return Decision(Exit.NO_VERDICT, tuple(rows), ("no verdict: nothing was measured",))
    after = settled(rows, facts, duet or {}, strict=strict_screen)
    cleared = [row.key for row, old in zip(after, rows, strict=True) if old.failed and not row.failed]
    remarks = [f"cleared by the duet: {key}" for key in cleared]
    # A test is cleared once all its rows are: others of it may fail.
    tests = {row.nodeid for row in rows if row.failed} - {row.nodeid for row in after if row.failed}
    bad = [row for row in after if row.failed or is_failure(row.verdict, strict=False)]
    # By what was measured; the others fail with their test.
    broken = [row for row in bad if not (row.measurement is None and row.footprint is None) and is_failure(row.verdict, strict_screen)]
    in_themselves = {row.nodeid for row in bad} - {row.nodeid for row in broken}
    others = max(0, failures - len(tests) - len({row.nodeid for row in bad}))
    if code == Exit.FAILED and failures == 0:
        return Decision(Exit.FAILED, after, (*remarks, "red: pytest failed the session as a whole; its output says why"))
    if bad or others:
        causes = [f"{len(broken)} of {counted(len(after), 'row')} {'fails' if len(broken) == 1 else 'fail'}"] if broken else []
        causes += [f"{counted(len(in_themselves), 'test')} failed by an assertion or an error of its own"] if in_themselves else []
        causes += [f"{counted(others, 'failure')} that no row accounts for"] if others else []
        return Decision(Exit.FAILED, after, (*remarks, f"red: {'; '.join(causes)}"))
    if all(getattr(row.limits, name) is None for row in after for name in LIMITS):
        return Decision(Exit.NO_VERDICT, after, (*remarks, "no verdict: no row has a limit; --max-regression sets one for all"))
    if all(row.verdict.code is Code.CONDITIONS for row in after):
        return Decision(Exit.NO_VERDICT, after, (*remarks, "no verdict: the conditions let no row be judged"))
    if unjudged := [row for row in after if _unjudged(row, duet)]:
        remarks += [f"not judged: {row.key}: {row.verdict.reason}" for row in unjudged]
        why = "" if duet is not None else ", and there was no duet to judge them"
        return Decision(
            Exit.NO_VERDICT, after, (*remarks, f"no verdict: {len(unjudged)} of {len(after)} rows were compared with nothing{why}")
        )
    doubtful = [row for row in after if row.verdict.outcome is not Outcome.PASS]
    new = [row for row in doubtful if (judged := (duet or {}).get(row.key)) is not None and judged.new]
    undecided = [row for row in doubtful if row not in new and row.verdict.code is not Code.ACCEPTED]
    remarks += [f"new, base does not have it: {row.key}" for row in new]
    remarks += [f"a change of it was accepted: {row.key}" for row in doubtful if row.verdict.code is Code.ACCEPTED]
    remarks += [f"undecided{f', {row.verdict.code.value}' if row.verdict.code is not None else ''}: {row.key}" for row in undecided]
    if no_duet := sum(unaltered(row) and row.key not in (duet or {}) for row in undecided):
        remarks.append(f"{counted(no_duet, 'noisy row')} of the same machine code had no duet: --strict, or gpumem duet, decides")
    if free := sum(row.measurement is not None and row.limits.max_regression is None for row in after):
        remarks.append(f"{free} of {len(after)} rows have no max_regression, so no slow-down of them is detected; see --max-regression")
    if strict and (doubtful or facts.simulated):
        why = f"{len(doubtful)} of {len(after)} rows are no PASS" if doubtful else "the device is simulated"
        return Decision(Exit.NO_VERDICT, after, (*remarks, f"no verdict under --strict: {why}"))
    counts = {"undecided": len(undecided), "new": len(new), "accepted": len(doubtful) - len(undecided) - len(new)}
    left = "".join(f", {count} of them {name}" for name, count in counts.items() if count)
    return Decision(Exit.FINE, after, (*remarks, f"green: {counted(len(after), 'row')}{left}"))
