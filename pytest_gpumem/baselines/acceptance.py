"""Which rows may enter a baseline, and which of them begin a new epoch. Pure."""

from __future__ import annotations

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.units import QuantityError, format_share, parse_margin

FORMING = 20
"""Processes up to which a baseline of one row is still forming: what one run of a short kernel can be held to grows with them, and a row
that needs twenty to resolve its limit would otherwise stay INCONCLUSIVE, and its baseline small, for ever."""
USUAL_LIMIT = 0.01
"""Slow-down that counts as allowed where a row is held to no max_regression, when a gain is to be told from noise."""


def refusal(row: Row, simulated: bool) -> str | None:
    """Why a row may not enter a baseline; None if it may.

    Accepted are rows of tests that passed, judged PASS, or NO BASELINE where theirs is the first. INCONCLUSIVE is accepted only while
    the row's baseline is forming and the measured change does not exceed half of what is allowed: a small baseline is often
    too small to decide, and could otherwise never grow; and where this is the baseline's first process of its sort of card.
    """
    measurement, verdict = row.measurement, row.verdict
    if measurement is None:
        return "nothing was measured"
    if row.failed:
        return "its test failed"
    if verdict.simulated != simulated:
        return "it is simulated" if verdict.simulated else "it is not simulated"
    if (why := unfit(measurement)) is not None:
        return why
    if verdict.comparison is not None and verdict.comparison.low > 0 and verdict.outcome is not Outcome.FAIL:
        return f"it is slower than the baseline by {verdict.comparison.delta:.2%}, which accepting would make the new normal"
    undecided = verdict.outcome is Outcome.INCONCLUSIVE and (verdict.another_sort or _forming(row))
    if verdict.outcome in (Outcome.PASS, Outcome.NO_BASELINE) or undecided:
        return None
    return f"{verdict.outcome.value}: {verdict.reason}"


def unfit(measurement: Measurement) -> str | None:
    """Why a measurement says nothing for others to be compared with; None if it does."""
    if measurement.profiled:
        return "it was measured under a profiler"
    if throttled := sorted({reason for c in measurement.conditions for reason in c.throttle_reasons}):
        return f"it was measured under throttling ({', '.join(throttled)})"
    return None


def improvement(row: Row) -> str | None:
    """What an accepted row has gained, where that begins a new epoch; None where it joins the epoch that is on.

    It begins one where it is faster than the baseline beyond doubt (99 %) and by more than half of what its max_regression allows as a
    slow-down, the margin that a slow-down is judged against too. Older processes would hide a later loss of that gain, and as part of
    the baseline look like noise. A smaller gain joins: were each of them to begin an epoch, no baseline would grow.
    """
    comparison = row.verdict.comparison
    if comparison is None or row.measurement is None or row.verdict.outcome is not Outcome.PASS:
        return None
    allowed = _allowed(row)
    if comparison.high >= -(USUAL_LIMIT if allowed is None else allowed) / 2:
        return None
    return f"faster by {format_share(-comparison.delta)}, by {format_share(-comparison.high)} or more with 99 %"


def _forming(row: Row) -> bool:
    comparison, allowed = row.verdict.comparison, _allowed(row)
    return comparison is not None and allowed is not None and comparison.processes < FORMING and comparison.delta <= allowed / 2


def _allowed(row: Row) -> float | None:
    """The slow-down that the row's max_regression allows, as a share; None without one."""
    if row.limits.max_regression is None or row.measurement is None:
        return None
    try:
        return parse_margin(row.limits.max_regression).over(row.measurement.latency)
    except QuantityError:
        return None
