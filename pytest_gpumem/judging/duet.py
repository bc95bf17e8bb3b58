"""The duet's verdict: base against head by pairs of processes (docs/explanation/judging.md).

Five looks at the mean of log(head / base), each by Student's t at 99.9 % a side. At the last look
99.5 % is enough for a PASS. It decides slow-downs alone; what it leaves open has no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from pytest_gpumem.judging.reference import PASSES
from pytest_gpumem.judging.spread import quantile
from pytest_gpumem.outcomes import Outcome

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
        mean = fmean(self.log_ratios)
        low = mean - _reach(self.log_ratios, LOOK)
        high = mean + _reach(self.log_ratios, _confidence_of_pass(len(self.log_ratios)))
        return math.expm1(low), math.expm1(high)


def judge_pairs(log_ratios: Sequence[float], limit: float) -> Pairs:
    """Judge a row at each look that its pairs have reached. Arguments as of `Pairs`."""
    for look in LOOKS:
        if look > len(log_ratios):
            return Pairs(tuple(log_ratios), limit, None)
        outcome = _look(log_ratios[:look], limit)
        if outcome is not None:
            return Pairs(tuple(log_ratios[:look]), limit, outcome)
    return Pairs(tuple(log_ratios), limit, Outcome.UNDECIDED)


def _look(log_ratios: Sequence[float], limit: float) -> Outcome | None:
    mean = fmean(log_ratios)
    if mean - _reach(log_ratios, LOOK) > limit:
        return Outcome.FAIL
    if mean + _reach(log_ratios, _confidence_of_pass(len(log_ratios))) < limit:
        return Outcome.PASS
    return None


def _reach(log_ratios: Sequence[float], confidence: float) -> float:
    pairs = len(log_ratios)
    return quantile(confidence, pairs - 1) * stdev(log_ratios) / math.sqrt(pairs)


def _confidence_of_pass(pairs: int) -> float:
    return PASSES if pairs >= LOOKS[-1] else LOOK


PEAKS = 3
"""Processes of each side whose peaks a duet compares."""


def judge_peaks(head: Sequence[int], base: Sequence[int], most: Callable[[int], float]) -> Outcome:
    """Compare the peaks of `PEAKS` processes a side. `most`: the largest allowed over a peak."""
    return Outcome.FAIL if median(head) > most(max(base)) else Outcome.PASS
