"""Has the warm-up ended? A trend test over the last samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

WINDOW = 12
"""Samples that the test looks at: enough for a rank correlation to show a drift, few enough to stay cheap."""


def steady(samples: Sequence[float], *, window: int = WINDOW, drift: float = 0.002, level: float = 0.05) -> bool:
    """Whether the last `window` samples no longer move in one direction.

    True if Kendall's rank correlation with time is not significant at `level`, or if the medians of the window's halves differ by
    less than the share `drift`: a real but tiny trend must not keep the warm-up going.

    Args:
        samples: seconds, oldest first.
        window: samples looked at; with fewer the answer is no.
        drift: share of the median below which a trend does not matter.
        level: significance level of the trend test (Mann 1945, Kendall 1975).
    """
    if len(samples) < window:
        return False
    last = list(samples[-window:])
    early, late = statistics.median(last[: window // 2]), statistics.median(last[window // 2 :])
    if abs(late - early) <= drift * late:
        return True
    from scipy.stats import kendalltau

    return float(kendalltau(range(window), last).pvalue) > level
