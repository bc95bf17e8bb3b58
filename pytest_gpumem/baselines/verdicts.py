"""The verdict on a row against a baseline: a session and `gpumem compare` give the same one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from pytest_gpumem.baselines.history import Baseline
from pytest_gpumem.judging.finding import Finding, Judgement
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, PastFootprint, judge_footprint
from pytest_gpumem.judging.judge import judge
from pytest_gpumem.judging.screen import Family
from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison, LimitResult, Row


def judged(
    row: Row,
    baseline: Baseline,
    facts: DeviceFacts,
    family: Family,
    *,
    siblings: Mapping[str, Measurement],
    strict: bool,
    evidence: bool = True,
    left: Callable[
        [Row, list[Finding], Comparison | None], Iterable[Finding | LimitResult]
    ] = lambda row, findings, comparison: findings,
) -> tuple[Row, Family]:
    """The row with the verdict on its times, counts, machine code and memory; and the family of compared rows after it.
    `row`: with its measurement, its footprint so far, and its limits.
    `left`: the findings, without the changes that somebody accepted.
    The others as of `judge`.
    """
    measurement, found = row.measurement, Judgement([])
    if measurement is not None:
        runs = baseline.reference_runs(row)
        found = judge(
            measurement,
            row.limits,
            facts,
            [run.measurement for run in runs],
            no_history=baseline.why_new(row),
            siblings=siblings,
            evidence=evidence,
            family=family,
        )
        if row.limits.max_regression is not None:
            family = family.after(found)
    findings, comparison = found
    if row.footprint is not None:
        names = tuple(name for name in RULES if row.footprint.ended or name not in AT_THE_END)
        findings = [*findings, *memory_findings(row, baseline, names, simulated=facts.simulated)]
    left_over = left(row, findings, comparison)
    return with_verdict(
        row, left_over, comparison=comparison, simulated=facts.simulated, strict=strict
    ), family


def memory_findings(
    row: Row, baseline: Baseline, names: Sequence[str], *, simulated: bool
) -> list[Finding]:
    """The findings on a row's footprint. `names`: of the limits to judge."""
    assert row.footprint is not None
    past = []
    for run in baseline.reference_footprints(row):
        past.append(PastFootprint(run.footprint, run.process.revision))
    return list(
        judge_footprint(
            row.footprint,
            row.limits,
            past,
            names,
            None if past else baseline.why_memory_is_new(row),
            fixtures_alone=simulated and not row.label,
        )
    )
