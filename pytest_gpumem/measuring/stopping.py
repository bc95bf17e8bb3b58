"""Stopping rules: confidence over placements, steadiness of a warm-up, and how to spend a budget.
All times are seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from pytest_gpumem.records.measurement import quantile

LEAST_SAMPLES = 3  # of each placement side by side
FEW_SAMPLES = 256  # samples from which they themselves tell the noise
NEGLIGIBLE_SHARE = 0.12  # of the budget: as good as free
MOST_SAMPLES = 1000  # placements and processes differ by more than further samples resolve
MOST_PLACEMENTS_FACTOR = 4  # over the wanted number, while the interval is too wide
ENOUGH_SAMPLES = 16  # most of each placement, where placements follow each other
NEGLIGIBLE = 0.5  # standard error from samples over that from placements

# The test for a trend in a warm-up.
WINDOW = 12  # fewest samples: enough for a rank correlation to show a drift in quiet samples
MOST_WINDOW = 100  # launches that need so many samples are short: they cost some milliseconds
RESOLVED = 0.0075  # largest standard error of the drift within the window, as a share of the median
DRIFT = 0.002  # share of the median below which a trend does not matter
LEVEL = 0.05  # significance level
_DRIFT_ERROR = 2 * 1.2533
"""Standard error of the difference between the medians of both halves of n normal samples, in
sigma / sqrt(n): sqrt(2 pi)."""


def half_width(medians: Sequence[float]) -> float | None:
    """Return half of Student's 95 % interval of the mean, or None for fewer than two."""
    if len(medians) < 2:
        return None
    deviation = float(np.std(medians, ddof=1))  # much faster than `statistics.stdev`
    return quantile(0.975, len(medians) - 1) * deviation / math.sqrt(len(medians))


def precise(medians: Sequence[float], wanted_share: float) -> bool:
    """True if the half-width is within the share `wanted_share` of the mean."""
    width = half_width(medians)
    return width is not None and width <= wanted_share * fmean(medians)


def sampling_error(placements: Sequence[Sequence[float]]) -> float:
    """Return the standard error that the samples leave in the mean of the placements' medians. Each
    placement has as many samples.

    A median's standard error is half the distance between the samples that lie a standard
    deviation of the median's rank, sqrt(n) / 2, below and above it, whatever the distribution
    (David and Nagaraja 2003, Order Statistics, chapter 7). It covers two levels between which the
    median may fall, and is 0 where the clock's ticks are coarser than the samples' variation.
    """
    samples = np.asarray(placements)
    reach = 0.5 / math.sqrt(samples.shape[1])
    low, high = np.quantile(samples, (0.5 - reach, 0.5 + reach), axis=1)
    return float(np.linalg.norm(high - low)) / 2 / len(samples)


def enough(
    placements: Sequence[Sequence[float]], *, wanted_share: float, spent: float, budget: float
) -> bool:
    """True if placements that are sampled side by side need no more samples.

    `placements`: samples so far, of each placement. `spent`: since the first sample.
    """
    counts = [len(samples) for samples in placements]
    least, count = min(counts), sum(counts)
    # Three samples each; after twice the budget a single sample is enough.
    if least < LEAST_SAMPLES and (least < 1 or spent <= 2 * budget):
        return False
    if spent >= budget or count >= MOST_SAMPLES:
        return True
    if count < FEW_SAMPLES and spent < NEGLIGIBLE_SHARE * budget:
        return False
    medians = [median(samples) for samples in placements]
    noise = sampling_error(placements)
    if len(medians) < 2:
        return 1.96 * noise <= wanted_share * medians[0]
    if precise(medians, wanted_share):
        return True
    # The interval is wide because of the placements, which more samples do not change.
    return bool(noise <= NEGLIGIBLE * np.std(medians, ddof=1) / math.sqrt(len(medians)))


def rounds_left(rounds: int, places: int) -> int:
    """Return the rounds until `enough` may end the sampling, after `rounds` of `places` samples."""
    next_look = FEW_SAMPLES if rounds * places < FEW_SAMPLES else MOST_SAMPLES
    return max(1, -(-next_look // places) - rounds)


def affordable(cost: float, budget: float) -> int:
    """Return the largest number of placements side by side, if a sample has this cost."""
    samples = 1 + LEAST_SAMPLES  # the first warms up
    return max(2, int(min(budget / (samples * cost), MOST_SAMPLES)))


def samples_per_placement(cost: float, budget: float, placements: int) -> int:
    """Return the most samples of each placement, where placements follow each other."""
    return int(min(ENOUGH_SAMPLES, max(1, budget / placements / cost)))


def go_on(
    medians: Sequence[float],
    *,
    wanted_share: float,
    placements: int,
    most: int,
    spent: float,
    budget: float,
) -> bool:
    """True if another placement is to be measured: of `placements`, within twice the budget; then,
    up to `most`, while the interval is too wide and the budget lasts."""
    if placements == 1:
        return not medians  # it stays where it is
    if len(medians) >= 2 and spent * (1 + 1 / len(medians)) > 2 * budget:
        return False
    if len(medians) < placements:
        return True
    return len(medians) < most and spent < budget and not precise(medians, wanted_share)


def steady(samples: Sequence[float]) -> bool:
    """True if the last samples have no trend: as many as tell a drift from noise."""
    if len(samples) < WINDOW:
        return False
    window = min(MOST_WINDOW, _resolving(samples[-MOST_WINDOW:]))
    if len(samples) < window:
        return False
    last = list(samples[-window:])
    if _stepped(last):  # a rank correlation hardly notices a step near the end
        return False
    # A real but tiny trend must not prolong the warm-up.
    early, late = median(last[: window // 2]), median(last[window // 2 :])
    return bool(abs(late - early) <= DRIFT * late or trend_significance(last) > LEVEL)


def _stepped(series: Sequence[float]) -> bool:
    """True if the last few samples lie apart from all before them, by more than `DRIFT`."""
    for count in range(2, WINDOW // 2 + 1):
        before, after = series[:-count], series[-count:]
        if max(after) < min(before) or min(after) > max(before):
            late = median(after)
            if abs(late - median(before)) > DRIFT * late:
                return True
    return False


def _resolving(samples: Sequence[float]) -> int:
    """Return how many samples resolve a drift, from the median absolute deviation of `samples`."""
    middle = median(samples)
    sigma = 1.4826 * median(abs(sample - middle) for sample in samples) / middle
    return max(WINDOW, math.ceil((_DRIFT_ERROR * sigma / RESOLVED) ** 2))


def trend_significance(series: Sequence[float]) -> float:
    """Return the two-sided p-value of the Mann-Kendall trend test (Mann 1945; Kendall 1975).

    In its normal approximation with ties, good from ten values on.
    """
    n = len(series)
    values = np.asarray(series)
    score = int(np.triu(np.sign(values[np.newaxis, :] - values[:, np.newaxis]), 1).sum())
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(series).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance == 0:
        return 1.0
    return math.erfc(max(abs(score) - 1, 0) / math.sqrt(2 * variance))
