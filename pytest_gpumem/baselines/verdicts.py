"""The verdict on a row against a baseline: a session and `gpumem compare` give the same. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timezone

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.judging import regression
from pytest_gpumem.judging.finding import Finding, Judgement, of_limit
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, judge_footprint
from pytest_gpumem.judging.judge import judge
from pytest_gpumem.judging.regression import NAME, Runs
from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row


def judged(
    row: Row,
    baseline: Baseline,
    facts: DeviceFacts,
    *,
    siblings: Mapping[str, Measurement],
    strict: bool,
    evidence: bool = True,
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
            reference_runs(row, baseline),
            why_new=baseline.why_new(row),
            measured_differently=baseline.measured_differently(row),
            siblings=siblings,
            evidence=evidence,
        )
    findings: list[Finding] = list(judgement.findings)
    comparison = judgement.comparison
    if row.footprint is not None:
        names = [name for name in RULES if row.footprint.ended or name not in AT_THE_END]
        findings += memory_findings(row, baseline, names, simulated=facts.simulated)
    return with_verdict(
        row,
        findings,
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
        results = [*known(row), of_limit(NAME, finding).result]
        after.append(with_verdict(row, results, strict=strict))
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
    runs = []
    for saved in baseline.reference_runs(row):
        runs.append((saved.process.utc.astimezone(timezone.utc).date(), saved.measurement))
    return runs


def memory_findings(
    row: Row, baseline: Baseline, names: Sequence[str], *, simulated: bool
) -> list[Finding]:
    """Return the findings on a row's footprint. `names`: of the limits to judge."""
    assert row.footprint is not None
    past = [run.footprint for run in baseline.reference_footprints(row)]
    why = None if past else baseline.why_memory_is_new(row)
    fixtures_alone = simulated and not row.label
    return list(
        judge_footprint(row.footprint, row.limits, past, names, why, fixtures_alone=fixtures_alone)
    )
