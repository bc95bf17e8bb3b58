"""The quantiles of Student's t distribution. SciPy has them; it is larger than this package."""

from __future__ import annotations

import functools
import math


@functools.lru_cache(maxsize=4096)
def quantile(confidence: float, freedom: int) -> float:
    """Return the value that is not exceeded with this confidence, to nine digits.

    `confidence`: from 0.5 on, below 1.
    `freedom`: degrees of freedom, from 1 on.
    """
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
