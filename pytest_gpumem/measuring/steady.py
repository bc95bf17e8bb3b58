"""Has the warm-up ended? A trend test over the last samples."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

WINDOW = 12
"""Samples that the test looks at: enough for a rank correlation to show a drift, few enough to stay cheap."""


def steady(samples: Sequence[float], *, window: int = WINDOW, drift: float = 0.002, level: float = 0.05) -> bool:
    """Whether the last `window` samples no longer move in one direction.

    True if the Mann-Kendall test finds no trend at `level`, or if the medians of the window's halves differ by less than the share
    `drift`: a real but tiny trend must not keep the warm-up going.

    Args:
        samples: seconds, oldest first.
        window: samples looked at; with fewer the answer is no.
        drift: share of the median below which a trend does not matter.
        level: significance level of the trend test.
    """
    if len(samples) < window:
        return False
    last = list(samples[-window:])
    early, late = statistics.median(last[: window // 2]), statistics.median(last[window // 2 :])
    return abs(late - early) <= drift * late or trend_significance(last) > level


def trend_significance(series: Sequence[float]) -> float:
    """Two-sided p-value of the Mann-Kendall trend test, in its normal approximation with ties (Mann 1945; Kendall 1975).

    From ten values on the approximation is good enough; `scipy.stats.kendalltau` gives nearly the same, but its import takes longer
    than the whole warm-up.
    """
    n = len(series)
    score = sum(int(b > a) - int(b < a) for i, a in enumerate(series) for b in series[i + 1 :])
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(series).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance == 0:
        return 1.0
    return math.erfc(max(abs(score) - 1, 0) / math.sqrt(2 * variance))
