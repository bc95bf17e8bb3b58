"""The verdict on a row, from findings. No other module makes or changes one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pytest_gpumem.judging.finding import Finding, find
from pytest_gpumem.judging.regression import against
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, LimitResult, PairedChange, Row, Verdict

OPEN = Verdict(Outcome.UNDECIDED, "")  # of a row that is about to be judged
UNLIMITED = Verdict(Outcome.MEASURED, find(Outcome.MEASURED, "no limit").sentence)
"""Of a row without limits."""


def with_verdict(
    row: Row,
    findings: Iterable[Finding | LimitResult],
    *,
    comparison: Comparison | UnsetType | None = UNSET,
    paired: PairedChange | UnsetType | None = UNSET,
    simulated: bool | None = None,
    strict: bool = False,
    remarks: Sequence[str] = (),
) -> Row:
    """Return the row with the verdict that follows from all findings about it.

    Its code is that of the worst finding; its reason has the sentences of all that are not PASS,
    the worst first.
    `findings`: of a row that has a verdict, `known(row)` are those that it rests on.
    `comparison`, `paired`, `simulated`: as `Verdict` has them. Default: as the row's verdict has.
    `strict`: the reason of a doubt says that it fails.
    `remarks`: sentences after those of the findings.
    """
    if comparison is UNSET:
        comparison = row.verdict.comparison
    if paired is UNSET:
        paired = row.verdict.paired
    by_outcome: dict[Outcome, list[LimitResult]] = {outcome: [] for outcome in Outcome}
    for finding in findings:
        result = finding.result if isinstance(finding, Finding) else finding
        by_outcome[result.outcome].append(result)
    accepted = by_outcome[Outcome.ACCEPTED]
    doubts = [*by_outcome[Outcome.FAIL], *by_outcome[Outcome.UNDECIDED], *by_outcome[Outcome.NEW]]
    doubts.sort(key=_order)
    if doubts:
        outcome, reported = doubts[0].outcome, [*accepted, *doubts]
    elif accepted:
        outcome, reported = Outcome.ACCEPTED, accepted
    elif by_outcome[Outcome.PASS]:
        outcome, reported = Outcome.PASS, by_outcome[Outcome.PASS]
    else:
        outcome = Outcome.MEASURED
        reported = by_outcome[outcome] or [_measured(comparison, row.limits)]
    code = None
    for result in doubts[:1] or reported:
        code = code or result.code
    sentences = [*(result.reason for result in reported), *remarks]
    reason = "; ".join(dict.fromkeys(filter(None, sentences))) or row.verdict.reason
    if strict and outcome in (Outcome.UNDECIDED, Outcome.NEW):
        reason += " (strict: this fails)"
    verdict = Verdict(
        outcome,
        reason + _since(row),
        comparison,
        row.verdict.simulated if simulated is None else simulated,
        code,
        tuple(doubts),
        tuple(dict.fromkeys(result.limit for result in accepted)),
        paired,
    )
    return replace(row, verdict=verdict)


def known(row: Row) -> tuple[LimitResult, ...]:
    """Return the findings that the verdict of a row rests on, as far as it has them."""
    verdict = row.verdict
    accepted = []
    for name in verdict.accepted:
        accepted.append(LimitResult(name, Outcome.ACCEPTED, None, f"{name} accepted"))
    if verdict.limits:
        return (*accepted, *verdict.limits)
    reason = verdict.reason.removesuffix(_since(row))
    results = []
    for name in verdict.accepted or ("",):
        results.append(LimitResult(name, verdict.outcome, verdict.code, reason))
    return tuple(results)


def _order(result: LimitResult) -> tuple[int, bool]:
    # A FAIL by memory keeps its code beside a slow-down, which a duet may clear.
    of_memory = result.outcome is Outcome.FAIL and result.limit in OF_FOOTPRINT
    return result.outcome.rank, not of_memory


def _measured(comparison: Comparison | None, limits: Limits) -> LimitResult:
    if comparison is None:
        return find(Outcome.MEASURED, "no limit").result
    seen = against(comparison)
    if limits.max_regression is None:
        return find(Outcome.MEASURED, "no limit, compared", seen=seen).result
    name = f"max_regression {limits.max_regression}"
    return find(Outcome.MEASURED, "waits", seen=seen, limit=name).result


def _since(row: Row) -> str:
    return f"; changed since the baseline: {', '.join(row.changed)}" if row.changed else ""
