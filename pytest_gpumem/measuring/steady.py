"""Has the warm-up ended? A trend test over the last samples."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence

import numpy as np

WINDOW = 12
"""Least samples that the test looks at: enough for a rank correlation to show a drift in quiet samples, few enough to stay cheap."""
MOST_WINDOW = 100
"""Most of them: launches that vary so much are short, and a hundred of them cost some milliseconds."""
RESOLVED = 0.0075
"""Standard error of the drift within the window, as a share, that the samples' noise may leave. On an H200 the first hundred samples of a
triad of 2 MiB arrays fall by 5 % while they vary by 3 %: twelve of them show no trend, and the next fifty read 3 % too much."""
_MEDIANS = 2 * 1.2533
"""Standard error of the difference between the medians of a series' halves, times the square root of its length, over the standard
deviation: sqrt(2 pi) for normal data."""


def steady(samples: Sequence[float], *, most: int = MOST_WINDOW, drift: float = 0.002, level: float = 0.05) -> bool:
    """Whether the last samples no longer move in one direction.

    As many are looked at as it takes to see a drift through their noise. True if the Mann-Kendall test finds no trend in them at `level`,
    or if the medians of their halves differ by less than the share `drift`: a real but tiny trend must not keep the warm-up going. A
    step near the end, which a rank correlation hardly sees, is none of both: the last two to six samples lie beyond all before them
    (by chance, one time in twenty).

    Args:
        samples: seconds, oldest first.
        most: samples looked at at most, 12 at least; with fewer than it takes the answer is no.
        drift: share of the median below which a trend does not matter.
        level: significance level of the trend test.
    """
    if len(samples) < WINDOW:
        return False
    window = min(most, _resolving(samples[-most:]))
    if len(samples) < window:
        return False
    last = list(samples[-window:])
    early, late = statistics.median(last[: window // 2]), statistics.median(last[window // 2 :])
    if _stepped(last, drift):
        return False
    return bool(abs(late - early) <= drift * late or trend_significance(last) > level)


def _stepped(series: Sequence[float], drift: float) -> bool:
    """Whether the last few samples lie apart from all before them, by more than the share `drift`."""
    for count in range(2, WINDOW // 2 + 1):
        before, after = series[:-count], series[-count:]
        apart = max(after) < min(before) or min(after) > max(before)
        if apart and abs(statistics.median(after) - statistics.median(before)) > drift * statistics.median(after):
            return True
    return False


def _resolving(samples: Sequence[float]) -> int:
    """Samples that it takes to see a drift, from the median absolute deviation of those there are."""
    middle = statistics.median(samples)
    sigma = 1.4826 * statistics.median(abs(s - middle) for s in samples) / middle
    return max(WINDOW, math.ceil((_MEDIANS * sigma / RESOLVED) ** 2))


def trend_significance(series: Sequence[float]) -> float:
    """Two-sided p-value of the Mann-Kendall trend test, in its normal approximation with ties (Mann 1945; Kendall 1975).

    From ten values on the approximation is good enough; `scipy.stats.kendalltau` gives nearly the same, but its import takes longer
    than the whole warm-up.
    """
    n = len(series)
    values = np.asarray(series)
    score = int(np.triu(np.sign(values[np.newaxis, :] - values[:, np.newaxis]), 1).sum())
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(series).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance == 0:
        return 1.0
    return math.erfc(max(abs(score) - 1, 0) / math.sqrt(2 * variance))
