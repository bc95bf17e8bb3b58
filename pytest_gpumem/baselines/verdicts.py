"""The verdict on a row against a baseline. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.baselines.saved import memory_of, times_of
from pytest_gpumem.judging import regression
from pytest_gpumem.judging.finding import check_of
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, judge_footprint
from pytest_gpumem.judging.judge import Judgement, judge
from pytest_gpumem.judging.regression import NAME
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import LimitResult, Row


def judged(
    row: Row,
    baseline: Baseline,
    facts: DeviceFacts,
    *,
    siblings: Mapping[str, Measurement],
    strict: bool,
) -> Row:
    """Return the row with the verdict at its test's end. `screened` judges what waits.

    `row`: with its measurement, its footprint so far, and its limits.
    The others as of `judge`.
    """
    measurement, judgement = row.measurement, Judgement([])
    if measurement is not None:
        judgement = judge(
            measurement,
            row.limits,
            facts,
            times_of(baseline.reference_runs(row)),
            why_new=baseline.why_new(row),
            measured_differently=baseline.measured_differently(row),
            siblings=siblings,
        )
    findings = list(judgement.findings)
    if row.footprint is not None:
        names = [name for name in RULES if row.footprint.ended or name not in AT_THE_END]
        findings += memory_findings(row, baseline, names, simulated=facts.simulated)
    return with_verdict(
        row,
        findings,
        comparison=judgement.comparison,
        simulated=facts.simulated,
        strict=strict,
    )


def screened(
    rows: Sequence[Row], baseline: Baseline, *, strict: bool = False, in_gate: bool = False
) -> list[Row]:
    """Return the rows of a whole session; those that wait have the screen's verdict.

    `rows`: as `judged` made them, with the changes that the screen compares.
    """
    changes = []
    for row in rows:
        comparison = row.verdict.comparison
        if comparison is not None and comparison.delta > -1:
            changes.append((row.key, math.log1p(comparison.delta)))
    after = []
    for row in rows:
        check = check_of(row.limits, NAME)
        runs = times_of(baseline.reference_runs(row)) if waits(row) else []
        if row.measurement is None or check is None or not runs:
            after.append(row)
            continue
        run = regression.against_reference(row.measurement, runs)
        others = [other for key, other in changes if key != row.key]
        nodeid = "" if in_gate else row.nodeid
        finding = regression.at_the_sessions_end(run, check, others, nodeid)
        after.append(with_verdict(row, [*known(row), finding], strict=strict))
    return after


def waits(row: Row) -> bool:
    """True if a row's slow-down is judged at the session's end."""
    if row.limits.max_regression is None or row.measurement is None:
        return False
    if row.verdict.comparison is None:
        return False
    # A doubt about the whole measurement stays.
    return all(result.limit not in (NAME, "") for result in row.verdict.limits)


def memory_findings(
    row: Row, baseline: Baseline, names: Sequence[str], *, simulated: bool
) -> list[LimitResult]:
    """Return the findings on a row's footprint. `names`: of the limits to judge."""
    assert row.footprint is not None
    past = memory_of(baseline.reference_runs(row, "memory"))
    why = None if past else baseline.why_new(row, "memory")
    fixtures_alone = simulated and not row.label
    return list(
        judge_footprint(row.footprint, row.limits, past, names, why, fixtures_alone=fixtures_alone)
    )
