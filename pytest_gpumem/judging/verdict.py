"""The verdict on a row, from findings. No other module makes or changes one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from pytest_gpumem.judging.finding import Finding, against, find
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict
from pytest_gpumem.units import format_share

OPEN = Verdict(Outcome.UNDECIDED, "")  # of a row that is about to be judged
_DOUBTS = (Outcome.FAIL, Outcome.UNDECIDED, Outcome.NEW)
UNLIMITED = Verdict(
    Outcome.MEASURED, find(Outcome.MEASURED, "no limit").sentence
)  # of a row without limits


def with_verdict(
    row: Row,
    findings: Iterable[Finding | LimitResult],
    *,
    comparison: Comparison | UnsetType | None = UNSET,
    simulated: bool | None = None,
    strict: bool = False,
    remarks: Sequence[str] = (),
) -> Row:
    """The row with the verdict that follows from all findings about it. Its code is that of the worst finding; its reason has the
    sentences of all that are not PASS, the worst first.
    `findings`: of a row that has a verdict, `known(row)` are those that it rests on.
    `comparison`, `simulated`: as `Verdict` has them. Default: as the row's verdict has them.
    `strict`: the reason of a doubt says that it fails.
    `remarks`: sentences after those of the findings.
    """
    comparison = row.verdict.comparison if comparison is UNSET else comparison
    by = _by_outcome(findings)
    accepted = by.get(Outcome.ACCEPTED, [])
    doubts = sorted((one for outcome in _DOUBTS for one in by.get(outcome, ())), key=_order)
    if accepted or doubts:
        outcome, said = doubts[0].outcome if doubts else Outcome.ACCEPTED, [*accepted, *doubts]
    else:
        outcome = Outcome.PASS if Outcome.PASS in by else Outcome.MEASURED
        said = by.get(outcome) or [_measured(comparison)]
    # A rule that passes has no code; one that evidence let pass has.
    code = (
        doubts[0].code if doubts else next((one.code for one in said if one.code is not None), None)
    )
    reason = (
        "; ".join(dict.fromkeys(filter(None, [*(one.reason for one in said), *remarks])))
        or row.verdict.reason
    )
    ends = " (strict: this fails)" if strict and outcome in _DOUBTS[1:] else ""
    verdict = Verdict(
        outcome,
        f"{reason}{ends}{_since(row)}",
        comparison,
        row.verdict.simulated if simulated is None else simulated,
        code,
        tuple(doubts),
        tuple(dict.fromkeys(one.limit for one in accepted)),
    )
    return replace(row, verdict=verdict)


def _by_outcome(findings: Iterable[Finding | LimitResult]) -> dict[Outcome, list[LimitResult]]:
    found: dict[Outcome, list[LimitResult]] = {}
    for one in findings:
        found.setdefault(one.outcome, []).append(one.result if isinstance(one, Finding) else one)
    return found


def known(row: Row) -> tuple[LimitResult, ...]:
    """The findings that the verdict of a row rests on, as far as it has them: a PASS is one, whatever it is about."""
    verdict = row.verdict
    accepted = tuple(
        LimitResult(name, Outcome.ACCEPTED, None, f"{name} accepted") for name in verdict.accepted
    )
    if verdict.limits:
        return (*accepted, *verdict.limits)
    limits = verdict.accepted or ("",)
    return tuple(
        LimitResult(name, verdict.outcome, verdict.code, verdict.reason.removesuffix(_since(row)))
        for name in limits
    )


def _order(one: LimitResult) -> tuple[int, bool]:
    # A FAIL by memory keeps its code beside a slow-down, which a duet may clear.
    return one.outcome.rank, one.outcome is not Outcome.FAIL or one.limit not in OF_FOOTPRINT


def _measured(comparison: Comparison | None) -> LimitResult:
    if comparison is None:
        return find(Outcome.MEASURED, "no limit").result
    return find(
        Outcome.MEASURED,
        "no limit, compared",
        seen=against(comparison),
        catches=format_share(comparison.catches),
    ).result


def _since(row: Row) -> str:
    return f"; changed since the baseline: {', '.join(row.changed)}" if row.changed else ""
