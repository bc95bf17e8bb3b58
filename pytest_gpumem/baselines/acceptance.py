"""Which rows may enter a baseline, which of them begin a new epoch, and which take their revision out of it. Pure."""

from __future__ import annotations

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import ENOUGH, GROSS, Code, Outcome
from pytest_gpumem.units import QuantityError, format_share, parse_margin

USUAL_LIMIT = 0.01
"""Slow-down that counts as allowed for a row without max_regression."""
_REFUSED = {
    Code.CONDITIONS: "its conditions forbid a comparison",
    Code.MEASURED_DIFFERENTLY: "it is measured in another way than its baseline",
}


def refusal(row: Row, simulated: bool) -> str | None:
    """Why a row may not enter a baseline; None if it may.

    Every run of a test that passed enters, whatever its figure: a baseline that leaves out slow runs takes an unchanged test's slow mode
    for a regression. Only what fails stays out, or would by a limit of `USUAL_LIMIT` where there is none, and what cannot be compared.
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
    if verdict.code in _REFUSED:
        return f"{_REFUSED[verdict.code]}: {verdict.reason}"
    comparison = verdict.comparison
    if comparison is not None and row.limits.max_regression is None:
        beyond = USUAL_LIMIT if comparison.measured >= ENOUGH else USUAL_LIMIT + GROSS
        if comparison.low > beyond:
            return f"it is slower than the baseline by {format_share(comparison.low)} or more with 99.9 %"
    return f"{verdict.outcome.value}: {verdict.reason}" if verdict.outcome is Outcome.FAIL else None


def unfit(measurement: Measurement) -> str | None:
    """Why a measurement says nothing for others to be compared with; None if it does."""
    if measurement.profiled:
        return "it was measured under a profiler"
    if throttled := sorted({reason for c in measurement.conditions for reason in c.throttle_reasons}):
        return f"it was measured under throttling ({', '.join(throttled)})"
    return None


def improvement(row: Row) -> str | None:
    """The gain of an accepted row, where it begins a new epoch; None where the row joins the current epoch.

    It begins one where the gain is larger than the slow-down that its max_regression allows (99.5 %), over `ENOUGH` processes. Older
    processes would hide a later loss of that gain. A smaller gain joins: were each of them to begin an epoch, no baseline would grow.
    """
    comparison = row.verdict.comparison
    if comparison is None or row.measurement is None or row.verdict.outcome is not Outcome.PASS or comparison.measured < ENOUGH:
        return None
    if comparison.high >= -_allowed(row):
        return None
    return f"faster by {format_share(-comparison.delta)}, by {format_share(-comparison.high)} or more with 99.5 %"


def rejects(row: Row) -> bool:
    """True if a row shows that its revision is slower than the baseline: earlier runs of that revision then leave it."""
    return row.verdict.code in (Code.SLOWER, Code.CREPT)


def _allowed(row: Row) -> float:
    """The slow-down that the row's max_regression allows, as a share."""
    if row.limits.max_regression is None or row.measurement is None:
        return USUAL_LIMIT
    try:
        return parse_margin(row.limits.max_regression).over(row.measurement.latency)
    except QuantityError:
        return USUAL_LIMIT
