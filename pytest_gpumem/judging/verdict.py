"""The verdict on a row, from findings. No other module makes or changes a verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from pytest_gpumem.judging.regression import against
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict


def unjudged(*, simulated: bool) -> Verdict:
    """Return the verdict of a row before any finding, which stays that of a row without limits."""
    return Verdict(Outcome.MEASURED, "no limit set", simulated=simulated)


def with_verdict(row: Row, findings: Iterable[LimitResult], *, strict: bool = False) -> Row:
    """Return the row with the verdict that follows from all findings about it.

    `findings`: of a row that has a verdict, `known(row)` are those that it rests on.
    `strict`: the reason of a doubt says that it fails.
    """
    comparison = row.verdict.comparison
    by_outcome: dict[Outcome, list[LimitResult]] = {outcome: [] for outcome in Outcome}
    for result in findings:
        by_outcome[result.outcome].append(result)
    accepted, passed = by_outcome[Outcome.ACCEPTED], by_outcome[Outcome.PASS]
    doubts = by_outcome[Outcome.FAIL] + by_outcome[Outcome.UNDECIDED] + by_outcome[Outcome.NEW]
    doubts.sort(key=_order)
    reported = [*accepted, *doubts] or passed or by_outcome[Outcome.MEASURED]
    reported = reported or [_measured(comparison, row.limits)]
    decisive = doubts[0] if doubts else reported[0]
    outcome, code = decisive.outcome, decisive.code
    reasons = dict.fromkeys(result.reason for result in reported if result.reason)
    reason = "; ".join(reasons) or row.verdict.reason
    if strict and outcome in (Outcome.UNDECIDED, Outcome.NEW):
        reason += " (strict: this fails)"
    verdict = Verdict(
        outcome,
        reason,
        comparison,
        row.verdict.simulated,
        code,
        tuple(doubts),
        tuple(dict.fromkeys(result.limit for result in accepted)),
        row.verdict.paired,
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
    results = []
    for name in verdict.accepted or ("",):
        results.append(LimitResult(name, verdict.outcome, verdict.code, verdict.reason))
    return tuple(results)


def _order(result: LimitResult) -> tuple[int, bool]:
    # A FAIL by memory keeps its code beside a slow-down, which a duet may clear.
    of_memory = result.outcome is Outcome.FAIL and result.limit in OF_FOOTPRINT
    return result.outcome.rank, not of_memory


def _measured(comparison: Comparison | None, limits: Limits) -> LimitResult:
    reason = "no limit set"
    if comparison is not None and limits.max_regression is None:
        reason = f"{against(comparison)}, no limit set"
    elif comparison is not None:
        limit = f"max_regression {limits.max_regression}"
        reason = f"{against(comparison)}: {limit} is judged at the session's end"
    return LimitResult("", Outcome.MEASURED, None, reason)
