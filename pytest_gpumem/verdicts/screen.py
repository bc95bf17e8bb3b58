"""The screen: one run against the accepted processes of its baseline (docs/gate.md).

The datum is the logarithm of a process's latency, with the launch overhead put to what all of them have on average, where it is
known: processes differ in what a launch costs more than in what a kernel takes (docs/measuring.md).

`max_regression` = delta: a slow-down of delta is caught with 99 %, and unchanged code raises an alarm in at most 1e-3 of verdicts and in
at most 5 % of suites. The test's margin is delta/2, because a test against delta itself has no power at delta. With the change measured
against the baseline's mean,

- flagged: its lower bound (99.9 %) is above the margin;
- FAIL: flagged, its p-value survives Holm's procedure over the suite, the change is as far from none as no heavy tail reaches, which is
  so wherever delta is resolved, and it is more than a single process may be off by; SUSPECT: flagged, and not all of that, or the baseline
  has fewer than three processes and the lower bound is not above delta itself;
- INCONCLUSIVE: not flagged, and the smallest slow-down that would be flagged with 99 % is above delta;
- PASS: not flagged, though a slow-down of delta would be with 99 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.verdict import Comparison, Outcome
from pytest_gpumem.units import Margin, format_share, format_time, parse_margin, parse_share
from pytest_gpumem.verdicts.drift import Drift
from pytest_gpumem.verdicts.finding import Finding, basis, between, chance, change, counted
from pytest_gpumem.verdicts.reading import Reading, readings, sessions
from pytest_gpumem.verdicts.spread import Variance, level, of_difference
from pytest_gpumem.verdicts.suite import ALONE, ALPHA, Family

NO_ALARM = 0.999
"""Confidence of the lower bound."""
SPREAD_KNOWN = 3
"""Processes from which on a baseline shows its own spread."""
POWER = 0.99
"""Confidence of the upper bound, and of catching what is called resolvable."""
FAR = 7.5
"""Standard errors from which on a change is none by chance, even if processes differ with the heavy tails of Student's t with 3 degrees of
freedom: such reach as far in 5 of 10 000 cases. Where delta is resolved, its margin alone is six or more."""
ONE_OFF = 0.03
"""Beyond the margin, what a single process does not prove. On H200 cards 5 of 2475 measurements of unchanged code, of launches of 20 to
30 us, were 2 to 3 % slower at all their placements, with the rows beside them in the same process as ever, and nothing that explains it
(ci/records/nvidia-h200/gate_validation_short.json)."""
ONE_OFF_BELOW = 100e-6
"""Seconds of a launch below which that holds: none of 1485 measurements of launches of 120 to 190 us was so."""


@dataclass(frozen=True)
class Difference:
    """A run less its baseline."""

    log: float
    """Mean log(latency) of the run's processes less that of the baseline's; the device's drift is taken out."""
    variance: Variance
    """Of `log`, if nothing changed."""
    processes: int
    """Of the baseline."""
    sessions: int
    """Of the baseline."""
    measured: int
    """Processes of the run."""
    drift: float = 0.0
    """Log-ratio that was taken out."""
    without_slowest: float | None = None
    """`log` without this run's slowest process; None for a run of one."""


def baseline_latency(history: Sequence[Measurement]) -> float:
    """Seconds: the geometric mean over the history's processes, at least one."""
    return math.exp(statistics.fmean(math.log(latency) for latency in level(_all(history))))


def allowed(written: str | None, history: Sequence[Measurement]) -> float:
    """The slow-down that `max_regression` allows, as a share of the baseline; 0 without a limit.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    return parse_margin(written).over(baseline_latency(history)) if written is not None else 0.0


def difference(measurement: Measurement, history: Sequence[Measurement], drift: Drift | None = None) -> Difference:
    """The run less its baseline.

    Args:
        measurement: this run's, with the further processes that it may have.
        history: the baseline's, at least one.
        drift: of the device, to be taken out; None where none is known.
    """
    run, past = readings(measurement), _all(history)
    logs = [math.log(latency) for latency in level([*run, *past])]
    base = statistics.fmean(logs[len(run) :])
    log = statistics.fmean(logs[: len(run)]) - base
    others = sorted(logs[: len(run)])[:-1]
    variance = of_difference(run, past)
    taken_out = 0.0
    if drift is not None and drift.beyond_noise:
        taken_out, variance = drift.log, variance + drift.variance
    without = statistics.fmean(others) - base - taken_out if others else None
    return Difference(log - taken_out, variance, len(past), len(set(sessions(past))), len(run), taken_out, without)


def compare(measurement: Measurement, history: Sequence[Measurement], delta: float, drift: Drift | None = None) -> Comparison:
    """The change against the baseline.

    Args:
        measurement: this run's.
        history: those of the baseline's processes, at least one.
        delta: allowed slow-down as a share; `Comparison.resolvable` refers to its margin, delta/2.
        drift: of the device, to be taken out; None where none is known.
    """
    return compared(difference(measurement, history, drift), delta)


def compared(found: Difference, delta: float) -> Comparison:
    """A difference as shares, with its interval and what it resolves beside a margin of delta/2."""
    below, above = found.variance.reach(NO_ALARM), found.variance.reach(POWER)
    return Comparison(
        delta=math.expm1(found.log),
        low=math.expm1(found.log - below),
        high=math.expm1(found.log + above),
        resolvable=math.expm1(math.log1p(delta / 2) + below + above),
        processes=found.processes,
        sessions=found.sessions,
        measured=found.measured,
        p_value=found.variance.chance(found.log),
        drift=math.expm1(found.drift),
        errors=found.log / math.sqrt(found.variance.value) if found.variance.value > 0 else None,
        without_slowest=math.expm1(found.without_slowest) if found.without_slowest is not None else None,
    )


def judge_change(measurement: Measurement, comparison: Comparison, delta: float, limit: str, family: Family = ALONE) -> Finding:
    """The finding about a slow-down.

    Args:
        measurement: this run's.
        comparison: what `compare` gave for it.
        delta: the slow-down that is to be caught, as a share.
        limit: names the limit and its origin.
        family: the suite that the row belongs to.
    """
    against = _against(comparison)
    tail = f"margin {format_share(delta / 2)}, resolves {format_share(comparison.resolvable)}, {basis(measurement)}"
    if comparison.low > delta / 2:
        if (doubt := _doubt(measurement, comparison, delta)) is not None:
            return Finding(Outcome.SUSPECT, f"slower than {limit} allows: {against}, {tail}; {doubt}")
        p_value = comparison.p_value or 0.0
        if p_value > family.threshold:
            doubt = (
                f"alone it would fail, but unchanged code shows as much with {chance(p_value)}, and among {family.size} compared rows "
                f"only {chance(family.threshold)} is beyond doubt ({ALPHA:.0%} a suite)"
            )
            return Finding(Outcome.SUSPECT, f"slower than {limit} allows: {against}, {tail}; {doubt}")
        return Finding(Outcome.FAIL, f"slower than {limit} allows: {against}, {tail}")
    if comparison.resolvable <= delta:
        return Finding(Outcome.PASS, f"{against}: within {limit}, {tail}")
    return Finding(
        Outcome.INCONCLUSIVE,
        f"{limit} cannot be decided: {against}, margin {format_share(delta / 2)}, {basis(measurement)}; a slow-down of "
        f"{format_share(comparison.resolvable)} could have been resolved",
    )


def judge_gain(found: Difference, written: str, origin: str, family: Family = ALONE) -> Finding | None:
    """The finding about a gain that makes the baseline stale; None where there is none beyond doubt.

    The test's margin is half of `written`, as with a slow-down.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    limit = parse_share(written)
    above = found.variance.reach(NO_ALARM)
    if found.log + above >= math.log1p(-limit / 2) or found.variance.chance(-found.log) > family.threshold:
        return None
    return Finding(
        Outcome.FAIL,
        f"faster than fail_if_faster {written} ({origin}) takes for the same code: {_against(compared(found, 0.0))}, margin "
        f"{format_share(limit / 2)}; the baseline is stale, and a slow-down back to it would pass: accept the gain into it",
    )


def _against(comparison: Comparison) -> str:
    held = f"{counted(comparison.processes, 'process')} of the baseline"
    if comparison.sessions > 1:
        held += f" in {counted(comparison.sessions, 'session')}"
    text = f"{change(comparison.delta)} against {held}, {between(comparison.low, comparison.high)}"
    if comparison.measured > 1:
        text += f", over {counted(comparison.measured, 'process')} of this run"
    if comparison.drift:
        text += f", a drift of the device of {change(comparison.drift)} taken out"
    return text


def _doubt(measurement: Measurement, comparison: Comparison, delta: float) -> str | None:
    """Why a flagged slow-down is not beyond doubt; None where it is."""
    if comparison.processes < SPREAD_KNOWN:
        needed = f"needs a baseline of {SPREAD_KNOWN} processes to be beyond doubt"
        # What is expected of processes is that of device-timed kernels over several placements.
        if measurement.sampler == "host" or len(measurement.placements) < 2:
            return f"a measurement by {measurement.sampler} on {counted(len(measurement.placements), 'placement')} {needed}"
        if comparison.low <= delta:
            return f"a slow-down that may lie within the limit {needed}"
    if comparison.without_slowest is not None:
        if comparison.without_slowest <= delta / 2:
            return f"without the slowest of this run's processes it is {change(comparison.without_slowest)}, within the margin"
    elif measurement.latency < ONE_OFF_BELOW and comparison.delta <= delta / 2 + ONE_OFF:
        return (
            f"a single process may be off by {format_share(ONE_OFF)} where a launch takes less than {format_time(ONE_OFF_BELOW)}: several "
            "(--gpumem-processes) or gpumem duet decide"
        )
    if comparison.errors is not None and comparison.errors < FAR:
        return f"at {comparison.errors:.1f} standard errors it may be the tail of what processes differ by, from {FAR:g} on it is not"
    return None


def limit_name(written: str, origin: str, delta: float) -> str:
    """ "max_regression 1% (marker)", with the sum where an absolute part belongs to it."""
    margin: Margin = parse_margin(written)
    total = f" = {format_share(delta)} here" if margin.absolute else ""
    return f"max_regression {written}{total} ({origin})"


def _all(history: Sequence[Measurement]) -> list[Reading]:
    return [reading for measurement in history for reading in readings(measurement)]
