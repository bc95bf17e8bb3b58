"""The spread that unchanged code is expected to show, and the margin of an absolute limit.

A standard deviation is a time in seconds and a share of the latency: both grow with the launch.
"""

from __future__ import annotations

import functools
import math
import statistics

from pytest_gpumem.records import LEAST_TIME, LONGEST_TIME
from pytest_gpumem.records.measurement import Measurement

BETWEEN_PROCESSES = (27.5e-9, 0.0004)
"""Spread between processes; recorded on an H200, 2026-11-21 (docs/explanation/judging.md)."""
BETWEEN_PLACEMENTS = (50e-9, 0.0017)
"""Spread between placements; recorded at the same time."""
BETWEEN_DAYS = (13.5e-9, 0.0004)
"""Spread between days and between cards; recorded on H200s at the same time."""
LAUNCH_OVERHEAD = 60e-9
"""Spread of the launch overhead between processes, in seconds; recorded at the same time."""
PRIOR = 6
"""Degrees of freedom of an expected variance (d0 of Smyth 2004); recorded: 4 to 13."""
REPETITION = 0.99
"""Probability that a repetition in another session shows the same side of a limit; choice."""
FARTHEST = math.log(LONGEST_TIME / LEAST_TIME) + 1
"""Log-ratio that no two times have; exponentials of larger ones overflow."""


def share_of(spread: tuple[float, float], latency: float) -> float:
    """Return a spread as a share of a latency in seconds, above 0."""
    time, share = spread
    return math.hypot(time / latency, share)


def repetition_margin(measurement: Measurement) -> float:
    """Return the log-ratio by which a repetition in another session may differ (99 %, one-sided).

    The expected variance between placements is moderated by the measured variance (Smyth 2004,
    "Linear models and empirical Bayes methods", eq. 3).
    """
    medians = measurement.counting
    latency = statistics.fmean(medians)
    logs = [math.log(median) for median in medians]
    mean = math.fsum(logs) / len(logs)
    squares = math.fsum((value - mean) ** 2 for value in logs)
    freedom = len(logs) - 1
    expected = share_of(BETWEEN_PLACEMENTS, latency)
    placement = (PRIOR * expected**2 + squares) / (PRIOR + freedom)
    if freedom > 1:
        placement = max(placement, squares / freedom)
    deviation = math.hypot(
        share_of(BETWEEN_PROCESSES, latency),
        math.sqrt(placement / len(logs)),
        share_of(BETWEEN_DAYS, latency),
    )
    # The overhead is part of the latency, unless it is known and subtracted, or launches share it.
    if measurement.overhead is None and measurement.sampler not in ("graph", "batched"):
        deviation = math.hypot(deviation, LAUNCH_OVERHEAD / latency)
    return min(quantile(REPETITION, PRIOR) * deviation, FARTHEST)


# Student's t distribution. SciPy has it; it is larger than this package.


@functools.cache
def quantile(confidence: float, freedom: int) -> float:
    """Return the value that is not exceeded with a confidence from 0.5 on, to nine digits."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * confidence - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * confidence - 1:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """Probability of a value between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.sin(angle)
    if odd:
        term *= math.cos(angle)
    total = 0.0
    for index in range(freedom // 2):
        total += term
        above = 2 * index + 1 + odd
        term *= math.cos(angle) ** 2 * above / (above + 1)
    return 2 / math.pi * (angle + total) if odd else total
