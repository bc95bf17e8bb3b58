"""The verdict on a row against a baseline: a session and `gpumem compare` give the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timezone
from functools import partial

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.judging import regression
from pytest_gpumem.judging.finding import Finding, Judgement, of_limit
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, judge_footprint
from pytest_gpumem.judging.judge import comparable, how, judge
from pytest_gpumem.judging.regression import NAME, Runs, changed_work, moves_more
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison, LimitResult, Row

WithoutAccepted = Callable[
    [Row, Iterable[Finding | LimitResult], "Comparison | None"], Iterable[Finding | LimitResult]
]
"""Returns findings of a row without the changes that somebody accepted."""


def _all(
    row: Row, findings: Iterable[Finding | LimitResult], comparison: Comparison | None
) -> Iterable[Finding | LimitResult]:
    return findings


def judged(
    row: Row,
    baseline: Baseline,
    facts: DeviceFacts,
    *,
    siblings: Mapping[str, Measurement],
    strict: bool,
    evidence: bool = True,
    left: WithoutAccepted = _all,
) -> Row:
    """Return the row with the verdict at its test's end. `screened` judges what waits.

    `row`: with its measurement, its footprint so far, and its limits.
    The others as of `judge`.
    """
    measurement, judgement = row.measurement, Judgement([])
    if measurement is not None:
        why_new, differently = _why_new(row, baseline)
        judgement = judge(
            measurement,
            row.limits,
            facts,
            reference_runs(row, baseline),
            why_new=why_new,
            measured_differently=differently,
            siblings=siblings,
            evidence=evidence,
        )
    findings = list(judgement.findings)
    comparison = judgement.comparison
    if row.footprint is not None:
        names = [name for name in RULES if row.footprint.ended or name not in AT_THE_END]
        findings += memory_findings(row, baseline, names, simulated=facts.simulated)
    return with_verdict(
        row,
        left(row, findings, comparison),
        comparison=comparison,
        simulated=facts.simulated,
        strict=strict,
    )


def screened(
    rows: Sequence[Row],
    baseline: Baseline,
    *,
    evidence: bool = True,
    strict: bool = False,
    left: WithoutAccepted = _all,
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
        runs = reference_runs(row, baseline) if waits(row) else ()
        if not runs:
            after.append(row)
            continue
        assert row.measurement is not None
        change = regression.against_reference(row.measurement, runs, evidence=evidence)
        others = [other for key, other in changes if key != row.key]
        finding = regression.at_the_sessions_end(change, row.limits, others, row.nodeid)
        findings = left(row, [*known(row), of_limit(NAME, finding)], change.comparison)
        after.append(with_verdict(row, findings, strict=strict))
    return after


def waits(row: Row) -> bool:
    """True if a row's slow-down is judged at the session's end."""
    if row.limits.max_regression is None or row.measurement is None:
        return False
    if row.verdict.comparison is None or NAME in row.verdict.accepted:
        return False
    # A doubt about the whole measurement stays.
    return all(result.limit not in (NAME, "") for result in row.verdict.limits)


def reference_runs(row: Row, baseline: Baseline) -> Runs:
    """Return the saved runs of a measured row's reference with their UTC dates, oldest first."""
    measurement = row.measurement
    assert measurement is not None
    runs = []
    for saved in baseline.history(row.key, partial(comparable, measurement)).accepted:
        past = saved.measurement
        if comparable(measurement, past) and not changed_work(past, measurement):
            runs.append((saved.process.utc.astimezone(timezone.utc).date(), past))
    return runs


def _why_new(row: Row, baseline: Baseline) -> tuple[str | None, bool]:
    """Return why a row has no reference, and whether it was measured in another way before."""
    measurement = row.measurement
    assert measurement is not None
    history = baseline.history(row.key, partial(comparable, measurement))
    past = history.measurements
    same_mode = [run for run in past if run.mode == measurement.mode and not run.profiled]
    if not past:
        return history.reason, False
    if not same_mode:
        modes = " and ".join(sorted({run.mode for run in past}))
        return f"its rows are {modes}; this one is {measurement.mode}", False
    newest = same_mode[-1]
    if how(newest) != how(measurement):
        then, now = ", ".join(how(newest)), ", ".join(how(measurement))
        return f"its rows are {then}; this one is {now}", True
    changed = []
    for what, was, now in changed_work(newest, measurement):
        changed.append(f"its {what} from {was} to {now}")
    return " and ".join(changed), not moves_more(newest, measurement)


def memory_findings(
    row: Row, baseline: Baseline, names: Sequence[str], *, simulated: bool
) -> list[Finding]:
    """Return the findings on a row's footprint. `names`: of the limits to judge."""
    assert row.footprint is not None
    past = [saved.footprint for saved in baseline.past_footprints(row.key)]
    why = None if past else baseline.accepted(row.key) or baseline.note
    fixtures_alone = simulated and not row.label
    return list(
        judge_footprint(row.footprint, row.limits, past, names, why, fixtures_alone=fixtures_alone)
    )
