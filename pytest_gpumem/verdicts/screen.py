"""The screen: one run against the accepted processes of its baseline.

The datum is the logarithm of a process's latency, with the launch overhead put to what all of them have on average, where it is
known: processes differ in what a launch costs more than in what a kernel takes (docs/measuring.md).

`max_regression` = delta allows a slow-down of delta; the test's margin is delta/2, because a test against delta itself has no power
at delta. With the change measured against the baseline's mean,

- flagged: its lower bound (99.9 %) is above the margin; an unchanged kernel is flagged in at most 1e-3 of verdicts;
- FAIL: flagged, and the measured change itself is above delta; SUSPECT: flagged, and it is not;
- PASS: its upper bound (99 %) is below delta: a slow-down of delta passes in at most 1 % of verdicts;
- else INCONCLUSIVE, with the smallest slow-down that would have been flagged with 99 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.verdict import Comparison, Outcome
from pytest_gpumem.units import Margin, format_share, parse_margin
from pytest_gpumem.verdicts.finding import Finding, basis, change, counted
from pytest_gpumem.verdicts.spread import level, of_difference

NO_ALARM = 0.999
"""Confidence of the lower bound."""
SPREAD_KNOWN = 3
"""Processes from which on a baseline shows its own spread."""
POWER = 0.99
"""Confidence of the upper bound, and of catching what is called resolvable."""


def baseline_latency(history: Sequence[Measurement]) -> float:
    """Seconds: the geometric mean over the history's processes, at least one."""
    return math.exp(statistics.fmean(math.log(latency) for latency in level(history)))


def allowed(written: str | None, history: Sequence[Measurement]) -> float:
    """The slow-down that `max_regression` allows, as a share of the baseline; 0 without a limit.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    return parse_margin(written).over(baseline_latency(history)) if written is not None else 0.0


def compare(measurement: Measurement, history: Sequence[Measurement], delta: float) -> Comparison:
    """The change against the baseline.

    Args:
        measurement: this run's.
        history: those of the baseline's processes, at least one.
        delta: allowed slow-down as a share; `Comparison.resolvable` refers to its margin, delta/2.
    """
    now, *past = level([measurement, *history])
    difference = math.log(now) - statistics.fmean(math.log(latency) for latency in past)
    variance = of_difference(measurement, history)
    below, above = variance.reach(NO_ALARM), variance.reach(POWER)
    return Comparison(
        delta=math.expm1(difference),
        low=math.expm1(difference - below),
        high=math.expm1(difference + above),
        resolvable=math.expm1(math.log1p(delta / 2) + below + above),
        processes=len(history),
    )


def judge_change(measurement: Measurement, comparison: Comparison, delta: float, limit: str) -> Finding:
    """The finding about a change; `limit` names the limit and its origin."""
    against = f"{change(comparison.delta)} against {counted(comparison.processes, 'process')} of the baseline"
    interval = f"between {change(comparison.low)} and {change(comparison.high)}"
    tail = f"margin {format_share(delta / 2)}, {basis(measurement)}"
    if comparison.low > delta / 2:
        if comparison.delta > delta and _thin(measurement, comparison):
            why = f"a measurement by {measurement.sampler} on {counted(len(measurement.placements), 'placement')}"
            doubt = f"{why} needs a baseline of {SPREAD_KNOWN} processes to be beyond doubt"
            return Finding(Outcome.SUSPECT, f"slower than {limit} allows: {against}, {interval}, {tail}; {doubt}")
        if comparison.delta > delta:
            return Finding(Outcome.FAIL, f"slower than {limit} allows: {against}, {interval}, {tail}")
        return Finding(Outcome.SUSPECT, f"slower, though less than {limit}: {against}, {interval}, {tail}")
    if comparison.high < delta:
        return Finding(Outcome.PASS, f"{against}, {interval}: within {limit}, {tail}")
    return Finding(
        Outcome.INCONCLUSIVE,
        f"{limit} cannot be decided: {against}, {interval}, {tail}; a slow-down of "
        f"{format_share(comparison.resolvable)} could have been resolved",
    )


def _thin(measurement: Measurement, comparison: Comparison) -> bool:
    """Whether too little is known of how processes differ: the priors are those of device-timed kernels over several placements."""
    return comparison.processes < SPREAD_KNOWN and (measurement.sampler == "host" or len(measurement.placements) < 2)


def limit_name(written: str, origin: str, delta: float) -> str:
    """ "max_regression 1% (marker)", with the sum where an absolute part belongs to it."""
    margin: Margin = parse_margin(written)
    total = f" = {format_share(delta)} here" if margin.absolute else ""
    return f"max_regression {written}{total} ({origin})"
