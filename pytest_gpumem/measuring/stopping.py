"""When is a measurement good enough? Confidence over placements, and how to spend a budget. Pure functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MOST_SAMPLES = 200
"""Samples of a measurement, shared over its placements: more do not help, because placements differ by more than samples (0.3 to 2 %)."""
ENOUGH_SAMPLES = 25
"""Samples that each placement may take however many placements there are."""
LEAST_SAMPLES = 3
"""Samples of one placement for a launch so slow that the budget holds no more: the least that has a median."""
MOST_PLACEMENTS_FACTOR = 4
"""Placements may grow to this many times the wanted number while the interval is too wide and the budget lasts."""


def half_width(medians: Sequence[float], confidence: float = 0.95) -> float | None:
    """Half of Student's confidence interval of the mean of `medians`, in their unit; None for fewer than two."""
    if len(medians) < 2:
        return None
    from scipy.special import stdtrit  # Student's quantile, without the second that importing scipy.stats takes

    quantile = float(stdtrit(len(medians) - 1, 0.5 + confidence / 2))
    return quantile * statistics.stdev(medians) / math.sqrt(len(medians))


def precise(medians: Sequence[float], wanted: float) -> bool:
    """Whether the half-width is within the share `wanted` of the mean."""
    width = half_width(medians)
    return width is not None and width <= wanted * statistics.fmean(medians)


def samples_per_placement(cost: float, budget: float, placements: int) -> int:
    """Samples that each placement gets.

    Args:
        cost: seconds that one sample takes, flush and all.
        budget: seconds for the whole measurement.
        placements: how many placements are wanted.
    """
    share = budget / placements / cost if cost > 0 else math.inf
    return int(min(max(MOST_SAMPLES // placements, ENOUGH_SAMPLES), max(LEAST_SAMPLES, share)))


def go_on(medians: Sequence[float], *, wanted: float, placements: int, spent: float, budget: float) -> bool:
    """Whether to measure one more placement.

    Goes on until `placements` are there; then for as long as the interval is wider than the share `wanted`, the budget (seconds) is
    not spent, and placements do not exceed four times the wanted number. A budget that is spent twice over ends it before that.
    One wanted placement stays one: somebody does not want the buffers moved.
    """
    if placements == 1:
        return not medians
    if len(medians) >= 2 and spent > 2 * budget:
        return False
    if len(medians) < placements:
        return True
    return len(medians) < MOST_PLACEMENTS_FACTOR * placements and spent < budget and not precise(medians, wanted)
