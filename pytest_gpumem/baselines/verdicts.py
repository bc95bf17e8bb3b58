"""The verdict on a row against a baseline. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pytest_gpumem.baselines.references import Baseline, memory_of, times_of
from pytest_gpumem.judging.finding import check_of, known, with_verdict
from pytest_gpumem.judging.footprint import judge_footprint
from pytest_gpumem.judging.limits import absolute, conditions, doubts, physical, too_wide
from pytest_gpumem.judging.slowdown import against_reference, at_the_sessions_end, at_the_tests_end
from pytest_gpumem.limits import OF_MEASUREMENT, STEPS, TIME
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison, LimitResult, Row


def judged(
    row: Row,
    baseline: Baseline,
    facts: DeviceFacts,
    *,
    siblings: Mapping[str, Measurement],
    strict: bool,
) -> Row:
    """Return the row with the verdict at its test's end. `screened` judges what waits.

    `siblings`: the other measurements of its test by label, for `faster_than`.
    """
    findings, comparison = list[LimitResult](), None
    if row.measurement is not None:
        findings, comparison = _of_measurement(row, baseline, facts, siblings)
    if row.footprint is not None:
        past = memory_of(baseline.reference_runs(row, "memory"))
        why = None if past else baseline.why_new(row, "memory")
        alone = facts.simulated and not row.label
        findings += judge_footprint(row.footprint, row.limits, past, why, fixtures_alone=alone)
    row = replace(row, verdict=replace(row.verdict, comparison=comparison))
    return with_verdict(row, findings, strict=strict)


def _of_measurement(
    row: Row, baseline: Baseline, facts: DeviceFacts, siblings: Mapping[str, Measurement]
) -> tuple[list[LimitResult], Comparison | None]:
    """Return the findings and the change. `max_regression` is new, fails grossly, or waits."""
    measurement, limits = row.measurement, row.limits
    assert measurement is not None
    runs = times_of(baseline.reference_runs(row))
    past = [run for _, run in runs]
    machine, timing = ", ".join(conditions(measurement)), ", ".join(doubts(measurement))
    if machine or timing:
        # What runs does not depend on the conditions.
        exact = list(absolute(measurement, limits, facts, past=past, names=STEPS))
        if not _judges_time(limits):
            return exact, None
        reason = f"{timing}: no limit was judged"
        if machine:
            reason = f"mend the machine: {machine}; no limit was judged"
        return [LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, reason), *exact], None
    findings = []
    wide = too_wide(measurement)
    if wide is not None and _judges_time(limits):
        findings.append(wide)
    findings += physical(measurement, facts)
    findings += absolute(measurement, limits, facts, siblings, past)
    check = check_of(limits, TIME)
    if not runs:
        if check is not None and baseline.measured_differently(row):
            why = f"the measurement itself has changed: {baseline.why_new(row)}"
            findings.append(check.not_judged(why, Code.MEASURED_DIFFERENTLY))
        elif check is not None:
            findings.append(check.new(baseline.why_new(row)))
        return findings, None
    run = against_reference(measurement, runs)
    slower = None if check is None else at_the_tests_end(run, check)
    if slower is not None:
        findings.append(slower)
    return findings, run.comparison


def _judges_time(limits: Limits) -> bool:
    """True unless all limits are on the steps of a launch; without a limit the time counts."""
    given = [name for name in OF_MEASUREMENT if getattr(limits, name) is not None]
    return not given or any(name not in STEPS for name in given)


def screened(
    rows: Sequence[Row], baseline: Baseline, *, strict: bool = False, in_gate: bool = False
) -> list[Row]:
    """Return the rows; those that wait have the screen's verdict."""
    changes = []
    for row in rows:
        comparison = row.verdict.comparison
        if comparison is not None and comparison.change > -1:
            changes.append((row.key, math.log1p(comparison.change)))
    after = []
    for row in rows:
        check = check_of(row.limits, TIME)
        runs = times_of(baseline.reference_runs(row)) if waits(row) else []
        if row.measurement is None or check is None or not runs:
            after.append(row)
            continue
        run = against_reference(row.measurement, runs)
        others = [other for key, other in changes if key != row.key]
        nodeid = "" if in_gate else row.nodeid
        finding = at_the_sessions_end(run, check, others, nodeid)
        after.append(with_verdict(row, [*known(row), finding], strict=strict))
    return after


def waits(row: Row) -> bool:
    """True if a row's slow-down is judged at the session's end."""
    if None in (row.limits.max_regression, row.measurement, row.verdict.comparison):
        return False
    # A doubt about the whole measurement stays.
    return all(result.limit not in (TIME, "") for result in row.verdict.limits)
