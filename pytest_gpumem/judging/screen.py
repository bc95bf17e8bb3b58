"""The screen: one run against the accepted runs of its baseline (docs/gate.md).

`max_regression` = delta allows a slow-down of up to delta:

- PASS: the upper bound of the change (99.5 %) is below delta;
- FAIL: its lower bound (99.9 %) is above delta, also after Holm's procedure over the suite;
- UNDECIDED: the interval holds delta, or too few runs or processes stand behind it.

So a slow-down of delta or more passes in at most 0.5 % of verdicts, and unchanged code fails in at most 0.1 %. A run may be judged again
with more processes (`--gpumem-processes auto`); ci/bench/gate_simulation.py judges as often, and the rates hold for all looks together.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from pytest_gpumem.judging.finding import Finding, basis, between, chance, change, counted
from pytest_gpumem.judging.spread import Difference, difference, levelled, readings
from pytest_gpumem.judging.suite import ALONE, ALPHA, Family
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.verdict import ENOUGH, GROSS, Comparison
from pytest_gpumem.units import format_share, parse_margin, parse_share

LOWER = 0.999
"""Confidence of the lower bound, which FAIL rests on."""
UPPER = 0.995
"""Confidence of the upper bound, which PASS rests on."""
POWER = 0.99
"""Probability with which `Comparison.catches` is found."""
LOOKS = (1, 3, 6, 12)
"""Processes of a run at which it is judged again while it is undecided."""


def baseline_latency(history: Sequence[Measurement]) -> float:
    """Seconds: the geometric mean over the history's runs, at least one."""
    return math.exp(statistics.fmean(map(statistics.fmean, levelled([readings(one) for one in history]))))


def since(now: Measurement, first: Measurement, history: Sequence[Measurement]) -> Difference:
    """A run less the first accepted run, with the spread that the whole baseline shows.

    Args:
        now: this run.
        first: the first accepted run.
        history: the runs of the baseline, for their spread.
    """
    of_all, alone = difference(now, history), difference(now, [first])
    return replace(of_all, log=alone.log, base=of_all.session + of_all.process / alone.processes)


def allowed(written: str | None, history: Sequence[Measurement]) -> float:
    """The slow-down that `max_regression` allows, as a share; 0 without a limit.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    return parse_margin(written).over(baseline_latency(history)) if written is not None else 0.0


def compared(found: Difference, delta: float) -> Comparison:
    """A difference as shares, with its bounds and what it catches beside a limit of `delta`."""
    variance = found.variance()
    below, above, limit = variance.reach(LOWER), variance.reach(UPPER), math.log1p(delta)
    return Comparison(
        delta=math.expm1(found.log),
        low=math.expm1(found.log - below),
        high=math.expm1(found.log + above),
        catches=math.expm1(limit + below + variance.reach(POWER)),
        processes=found.processes,
        runs=found.runs,
        measured=found.measured,
        p_value=variance.chance(found.log - limit),
    )


def judge_change(measurement: Measurement, found: Difference, delta: float, limit: str, family: Family = ALONE) -> Finding:
    """The finding about a slow-down against the baseline's runs.

    Args:
        measurement: this run's.
        found: its difference from the baseline.
        delta: allowed slow-down, as a share.
        limit: the limit's name, value and origin.
        family: the suite that the row belongs to.
    """
    comparison = compared(found, delta)
    text = f"{against(comparison)}, {basis(measurement)}"
    if comparison.low > delta:
        if (doubt := _doubt(found, comparison, delta, family)) is None:
            return Finding(Outcome.FAIL, f"slower than {limit} allows: {text}", Code.SLOWER)
        return Finding(Outcome.UNDECIDED, f"looks slower than {limit} allows: {text}; {doubt}", Code.LOOKS_SLOWER)
    if comparison.high < delta:
        if _enough_to_pass(found):
            return Finding(Outcome.PASS, f"within {limit}: {text}, catches {format_share(comparison.catches)}")
        needed = _needed(found)
        return Finding(Outcome.UNDECIDED, f"too few runs to pass {limit}: {text}; {needed}", Code.TOO_FEW_RUNS)
    if comparison.delta > delta:
        return Finding(Outcome.UNDECIDED, f"looks slower than {limit} allows: {text}; {_remedy(found, delta)}", Code.LOOKS_SLOWER)
    return Finding(Outcome.UNDECIDED, f"{limit} lies within the interval: {text}; {_remedy(found, delta)}", Code.NOISY)


def judge_creep(measurement: Measurement, found: Difference, delta: float, limit: str, family: Family = ALONE) -> Finding | None:
    """The finding about a slow-down since the first accepted run; None where there is none beyond doubt.

    Args:
        measurement: this run's.
        found: its difference from that run (`since`).
        delta: allowed slow-down, as a share.
        limit: the limit's name, value and origin.
        family: the suite that the row belongs to.
    """
    comparison = compared(found, delta)
    if comparison.low <= delta:
        return None
    text = f"{change(comparison.delta)} since the first accepted run, {between(comparison.low, comparison.high)}, {basis(measurement)}"
    if (doubt := _doubt(found, comparison, delta, family)) is None:
        return Finding(Outcome.FAIL, f"crept beyond {limit}: {text}; gpumem compare shows the runs between", Code.CREPT)
    return Finding(Outcome.UNDECIDED, f"looks crept beyond {limit}: {text}; {doubt}", Code.LOOKS_SLOWER)


def judge_gain(found: Difference, written: str, origin: str, family: Family = ALONE) -> Finding | None:
    """The finding about a gain that makes the baseline stale; None where there is none beyond doubt.

    Raises:
        QuantityError: a limit that cannot be read.
    """
    variance, limit = found.variance(), math.log1p(-parse_share(written))
    if not _known(found) or found.log + variance.reach(LOWER) >= limit or variance.chance(limit - found.log) > family.threshold:
        return None
    return Finding(
        Outcome.FAIL,
        f"faster than fail_if_faster {written} ({origin}): {against(compared(found, 0.0))}; the baseline is stale, and a slow-down back to "
        "it would pass: accept the gain into it",
        Code.FASTER,
    )


def decidable(found: Difference, delta: float) -> bool:
    """True if more processes of this run may decide it: with those of the last look, and a change by one standard deviation clearer."""
    limit, variance, deviation = math.log1p(delta), found.variance(LOOKS[-1]), math.sqrt(found.process / found.measured)
    if not _known(found) or (found.runs < ENOUGH and found.processes < ENOUGH):
        return False
    passes = found.log - deviation + variance.reach(UPPER) < limit
    return passes or found.log + deviation - variance.reach(LOWER) > limit


def against(comparison: Comparison) -> str:
    """The change with its interval, and what it is against."""
    text = f"{change(comparison.delta)} against {_of_baseline(comparison.runs, comparison.processes)}, "
    text += between(comparison.low, comparison.high)
    return text if comparison.measured == 1 else f"{text}, over {counted(comparison.measured, 'process')} of this run"


def limit_name(written: str, origin: str, delta: float) -> str:
    """ "max_regression 1% (marker)", with the sum where the limit has an absolute part."""
    total = f" = {format_share(delta)} here" if parse_margin(written).absolute else ""
    return f"max_regression {written}{total} ({origin})"


def _doubt(found: Difference, comparison: Comparison, delta: float, family: Family) -> str | None:
    """Why a change whose lower bound is above the limit is no FAIL; None if it is one."""
    p_value = comparison.p_value or 0.0
    if p_value > family.threshold:
        needed = f"{chance(family.threshold)} is beyond doubt ({ALPHA:.0%} a suite)"
        return f"among {family.size} compared rows only {needed}, not {chance(p_value)}"
    if not _known(found):
        return _needed(found)
    if min(found.measured, found.processes) < ENOUGH and comparison.low <= delta + GROSS:
        whose = "this run" if found.measured < ENOUGH else "the baseline"
        return f"below {format_share(delta + GROSS)} that takes {counted(ENOUGH, 'process')} of {whose}"
    return None


def _known(found: Difference) -> bool:
    """True if the spread of the row's runs is known: from the prior, or from enough runs without one."""
    return found.has_prior or found.runs >= ENOUGH


def _enough_to_pass(found: Difference) -> bool:
    return _known(found) and (found.runs >= ENOUGH or min(found.measured, found.processes) >= ENOUGH)


def _needed(found: Difference) -> str:
    if found.has_prior and found.processes >= ENOUGH:
        return (
            f"{counted(ENOUGH, 'process')} of this run decide (--gpumem-processes), or {counted(ENOUGH - found.runs, 'more accepted run')}"
        )
    return f"{counted(ENOUGH - found.runs, 'more accepted run')} (--gpumem-save) or gpumem duet decides"


def _remedy(found: Difference, delta: float) -> str:
    if found.measured < LOOKS[-1] and decidable(found, delta):
        return "more processes of this run decide (--gpumem-processes)"
    return "gpumem duet decides"


def _of_baseline(runs: int, processes: int) -> str:
    text = counted(runs, "accepted run")
    return text if processes == runs else f"{text} of {counted(processes, 'process')}"
