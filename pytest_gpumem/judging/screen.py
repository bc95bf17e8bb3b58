"""The screen: one run against the saved runs of its baseline (docs/gate.md).

`max_regression` = delta allows a slow-down of up to delta:

- PASS: the upper bound of the change (99.5 %) is below delta;
- FAIL: its lower bound (99.9 %) is above delta, also after Holm's procedure over the suite;
- UNDECIDED: the interval holds delta, or too few runs or processes stand behind it.

A slow-down of delta or more passes in at most 0.5 % of verdicts, and unchanged code fails in at most 0.1 %.

Holm's procedure limits false alarms of a whole suite of unchanged tests. A test is judged when it ends, before the suite has ended. Its
p-value is compared with Holm's threshold at that moment: alpha over the number of the baseline's rows less the rows rejected so far. In any
order of rows, this rejects nothing that Holm over the whole suite would not (Holm 1979, "A simple sequentially rejective multiple test
procedure": sorted, the rejected p-values meet its thresholds). It holds too where several runners each judge a part of the suite: each
counts all rows of the baseline, and less rejected ones.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_gpumem.judging.change import Evidence, decide_change
from pytest_gpumem.judging.finding import (
    Finding,
    Judgement,
    against,
    basis,
    between,
    chance,
    change,
    counted,
    find,
)
from pytest_gpumem.judging.spread import Difference, corrected_logs, readings
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import ENOUGH, GROSS, Comparison, Verdict
from pytest_gpumem.units import format_share, parse_margin

ALPHA = 0.05  # largest share of suites of unchanged tests with a false alarm; choice


@dataclass(frozen=True)
class Family:
    """The rows of one suite that are compared with a baseline."""

    size: int = 1  # number of rows of the baseline; a number that is too large is stricter
    rejected: int = 0  # number of rows rejected so far

    @property
    def threshold(self) -> float:
        """The largest p-value that is a change now."""
        return ALPHA / max(self.size - self.rejected, 1)

    def after(self, verdict: Judgement | Verdict) -> Family:
        """The family after this judgement of a compared row."""
        failed = verdict.comparison is not None and verdict.outcome is Outcome.FAIL
        p_value = verdict.comparison.p_value if verdict.comparison is not None else None
        # A row that fails by another limit is not rejected.
        return (
            replace(self, rejected=self.rejected + 1)
            if failed and p_value is not None and p_value <= self.threshold
            else self
        )


ALONE = Family()  # the family of a single row


LOWER = 0.999  # confidence of the lower bound, which decides FAIL; choice: an alarm costs more than a duet
UPPER = 0.995  # confidence of the upper bound, which decides PASS; choice
SETTLES = 1 - ALPHA
"""Confidence of the upper bound that decides PASS where the same machine code ran."""
POWER = 0.99  # probability that a slow-down of `Comparison.catches` fails, and that a repetition shows the same side of a limit; choice


def mean_latency(history: Sequence[Measurement]) -> float:
    """Seconds: the geometric mean over the runs of a row, at least one, each of them the mean over its processes."""
    if len(history) == 1 and not history[0].further:
        return history[0].latency
    return math.exp(
        statistics.fmean(map(statistics.fmean, corrected_logs([readings(one) for one in history])))
    )


def base_latency(measurement: Measurement, comparison: Comparison) -> float:
    """Seconds: the mean of the baseline that a row was compared with."""
    return mean_latency([measurement]) / max(
        1 + comparison.delta, sys.float_info.epsilon
    )  # a change of 1e-16 and less is -1 as a float


def allowed(written: str | None, history: Sequence[Measurement]) -> float:
    """The slow-down that `max_regression` allows, as a share; 0 without a limit. Raises `QuantityError`: a limit that cannot be read."""
    return parse_margin(written).over(mean_latency(history)) if written is not None else 0.0


def compared(found: Difference, delta: float) -> Comparison:
    """A difference as shares, with its bounds and the slow-down that a limit of `delta` catches."""
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


def judge_change(
    measurement: Measurement,
    found: Difference,
    comparison: Comparison,
    delta: float,
    limit: str,
    family: Family = ALONE,
) -> Finding:
    """The finding about a slow-down against the baseline.
    `delta`: allowed slow-down, as a share.
    `limit`: the limit's name, value and origin.
    `family`: the suite of the row.
    """
    words = {"limit": limit, "seen": f"{against(comparison)}, {basis(measurement)}"}
    over, under = comparison.low > delta, comparison.high < delta
    doubt = _doubt(found, comparison, delta, family) if over else None
    outcome = decide_change(Evidence(slower=over and doubt is None, within=under and _known(found)))
    if outcome is Outcome.FAIL:
        return find(outcome, "slower", Code.SLOWER, **words)
    if outcome is Outcome.PASS:
        return find(outcome, "within", None, **words, catches=format_share(comparison.catches))
    if doubt is not None:
        return find(outcome, "looks slower", Code.LOOKS_SLOWER, **words, doubt=doubt)
    if under:
        return find(outcome, "too few runs", Code.TOO_FEW_RUNS, **words, doubt=_needed(found))
    if found.unseen and found.log + found.variance(seen=True).reach(UPPER) < math.log1p(delta):
        return find(
            outcome, "too few days", Code.TOO_FEW_RUNS, **words, days=counted(found.days, "day")
        )
    looks_slower = comparison.delta > delta and comparison.low > 0
    form, code = ("looks slower", Code.LOOKS_SLOWER) if looks_slower else ("noisy", Code.NOISY)
    return find(
        outcome,
        form,
        code,
        **words,
        doubt="gpumem duet decides",
        catches=format_share(comparison.catches),
    )


def judge_creep(
    measurement: Measurement,
    found: Difference,
    comparison: Comparison,
    delta: float,
    limit: str,
    family: Family = ALONE,
) -> Finding:
    """The finding about a slow-down since the first saved runs, which is above the limit. Args as for `judge_change`; `found` is the
    difference from the first runs (`spread.since`)."""
    seen = f"{change(comparison.delta)} since the first saved runs, {between(comparison.low, comparison.high)}, {basis(measurement)}"
    doubt = (
        _doubt(found, comparison, delta, family)
        if comparison.low > delta
        else "more runs, or gpumem duet against an older revision, decide"
    )
    if (outcome := decide_change(Evidence(slower=doubt is None, within=False))) is Outcome.FAIL:
        return find(outcome, "crept", Code.CREPT, limit=limit, seen=seen)
    return find(
        outcome,
        "looks crept",
        Code.LOOKS_SLOWER if comparison.low > 0 else Code.NOISY,
        limit=limit,
        seen=seen,
        doubt=doubt or "",
    )


def below(found: Difference, delta: float) -> bool:
    """True if the upper bound that the same machine code asks for is below the limit.
    `delta`: allowed slow-down, as a share.
    """
    return found.log + found.variance(seen=True).reach(SETTLES) < math.log1p(delta)


def limit_name(written: str, origin: str, delta: float) -> str:
    """ "max_regression 1% (marker)", with the sum if the limit has an absolute part."""
    total = f" = {format_share(delta)} here" if parse_margin(written).absolute else ""
    return f"max_regression {written}{total} ({origin})"


def _doubt(found: Difference, comparison: Comparison, delta: float, family: Family) -> str | None:
    """Why a change with its lower bound above the limit is not a FAIL; None if it is one."""
    p_value = comparison.p_value or 0.0
    if p_value > family.threshold:
        return f"a FAIL among {counted(family.size, 'row')} of the baseline needs {chance(family.threshold)}, and it has {chance(p_value)}"
    if not _known(found):
        return _needed(found)
    if found.measured < ENOUGH and comparison.low <= delta + GROSS:
        return f"a FAIL below {format_share(delta + GROSS)} needs {counted(ENOUGH, 'process')} of this run; gpumem duet decides"
    return None


def _known(found: Difference) -> bool:
    """True if the spread of the row's runs is known, from the prior or from enough runs."""
    return found.has_prior or found.runs >= ENOUGH


def _needed(found: Difference) -> str:
    return (
        f"{counted(ENOUGH - found.runs, 'more saved run')} (--gpumem-save) or gpumem duet decides"
    )
