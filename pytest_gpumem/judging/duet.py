"""The duet's verdict: base against head by pairs of processes (docs/explanation/judging.md).

Five looks at the mean of log(head / base), each by Student's t at 99.9 % a side. At the last look
99.5 % is enough for a PASS. It decides slow-downs alone; what it leaves open has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median_low, stdev

from pytest_gpumem.judging.finding import Check, change
from pytest_gpumem.judging.reference import PASSES
from pytest_gpumem.judging.spread import quantile
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import LimitResult
from pytest_gpumem.units import counted, format_share, parse_growth, sizes

LOOKS = (5, 8, 12, 20, 32)
"""Numbers of pairs after which a row is judged."""
LOOK = 0.999
"""Confidence of a look; five looks add up to 0.4 % a side."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of a row so far. Shares: +0.01 is 1 % slower."""

    log_ratios: tuple[float, ...]  # log(head / base) of each pair, in the order of measurement
    limit: float  # log(1 + `max_regression`)
    outcome: Outcome | None  # PASS or FAIL; UNDECIDED after the last look; None: more pairs

    @property
    def change(self) -> float:
        """Head over base less 1, by the mean of the pairs."""
        return math.expm1(fmean(self.log_ratios))

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval that the verdict rests on; infinite for fewer than two pairs."""
        if len(self.log_ratios) < 2:
            return -math.inf, math.inf
        low, high = _interval(self.log_ratios)
        return math.expm1(low), math.expm1(high)


def judge_pairs(log_ratios: Sequence[float], limit: float) -> Pairs:
    """Judge a row at each look that its pairs have reached. Arguments as of `Pairs`."""
    for look in LOOKS:
        if look > len(log_ratios):
            return Pairs(tuple(log_ratios), limit, None)
        seen = tuple(log_ratios[:look])
        low, high = _interval(seen)
        if low > limit:
            return Pairs(seen, limit, Outcome.FAIL)
        if high < limit:
            return Pairs(seen, limit, Outcome.PASS)
    return Pairs(tuple(log_ratios), limit, Outcome.UNDECIDED)


def _interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    pairs = len(log_ratios)
    mean, deviation = fmean(log_ratios), stdev(log_ratios)
    passes = PASSES if pairs >= LOOKS[-1] else LOOK
    low = mean - quantile(LOOK, pairs - 1) * deviation / math.sqrt(pairs)
    return low, mean + quantile(passes, pairs - 1) * deviation / math.sqrt(pairs)


def of_pairs(check: Check, pairs: Pairs) -> LimitResult:
    """Return the finding about the pairs so far; UNDECIDED where they decide nothing."""
    text = f"{change(pairs.change)} over {counted(len(pairs.log_ratios), 'pair')} of processes"
    low, high = pairs.bounds
    if math.isfinite(low) and low != high:
        text += f", between {change(low)} and {change(high)}"
    limit = f"{check.name} {check.written}"
    if check.origin == "accepted":
        limit = f"the accepted {check.written}"
    if pairs.outcome is Outcome.PASS:
        return check.finding(Outcome.PASS, f"{text}: within {limit}")
    if pairs.outcome is Outcome.FAIL:
        return check.finding(Outcome.FAIL, f"{text}: slower than {limit} allows", Code.SLOWER)
    text += f": open at {limit}"
    if math.isfinite(high):
        text += f"; at {format_share(max(high, 0))} it would pass"
    return check.finding(Outcome.UNDECIDED, text, Code.NOISY)


PEAKS = 3
"""Processes of each side whose peaks a duet compares."""


def of_peaks(check: Check, head: Sequence[Footprint], base: Sequence[Footprint]) -> LimitResult:
    """Return the finding about the footprints of `PEAKS` processes a side, if all were watched."""
    watches = {footprint.driver_watched for footprint in (*base, *head)}
    if not (len(base) == len(head) == PEAKS and len(watches) == 1):
        return check.not_judged("memory was not watched alike on both sides", Code.NOT_READ)
    greatest = max(footprint.peak for footprint in base)
    middle = median_low(footprint.peak for footprint in head)
    middle_text, greatest_text = sizes(middle, greatest)
    figure = f"a peak of {middle_text} against {greatest_text} of base"
    if greatest:
        figure += f" ({change(middle / greatest - 1)})"
    most = parse_growth(check.written).most(greatest)
    return check.at_most(middle, most, figure, Code.TOO_MUCH_MEMORY)
