"""When a warm-up counts as over."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem.measuring.stopping import MOST_WINDOW, WINDOW, steady, trend_significance


def noisy(level: float, sigma: float, count: int, seed: int) -> list[float]:
    return list(level * np.exp(np.random.default_rng(seed).normal(0, sigma, count)))


def first_steady(series: list[float]) -> int:
    """Samples after which a warm-up that takes half a window at a time ends."""
    count = 2
    while not steady(series[:count]):
        count += WINDOW // 2
        assert count <= len(series), "never steady"
    return count


def test_too_few_samples_are_never_steady() -> None:
    assert not steady([1e-5] * (WINDOW - 1))


def test_noise_without_trend_is_nearly_always_steady() -> None:
    for sigma in [0.0005, 0.003, 0.02, 0.1]:
        verdicts = [steady(noisy(30e-6, sigma, MOST_WINDOW, seed)) for seed in range(200)]
        assert sum(verdicts) >= 180, sigma


def test_quiet_samples_need_few_and_noisy_ones_many() -> None:
    taken = [
        np.median([first_steady(noisy(30e-6, sigma, 150, seed)) for seed in range(50)])
        for sigma in (0.001, 0.01, 0.03)
    ]
    assert taken[0] <= taken[1] <= WINDOW + 2
    assert 60 < taken[2] <= MOST_WINDOW + 10


def test_a_falling_series_is_not_steady() -> None:
    warming = [30e-6 * (1 + 0.3 * 0.7**i) for i in range(WINDOW)]
    assert not steady(warming)


def test_a_step_is_not_steady_before_half_of_the_window_lies_behind_it() -> None:
    """Clocks that rise at once. One sample may be an outlier, and seven of twelve on the new level are the level."""
    for since in range(2, WINDOW // 2 + 1):
        for level in (30e-6, 39e-6, 41e-6):
            assert not any(
                steady(noisy(40e-6, 0.001, 30, seed=s) + noisy(level, 0.001, since, seed=s + 100))
                for s in range(50)
            ), since


def test_the_trend_test_agrees_with_scipy_and_counts_ties() -> None:
    from scipy import stats  # slow: here, not in each worker

    random = np.random.default_rng(7)
    for _ in range(100):
        series = list(
            random.integers(0, 8, WINDOW) + 0.3 * np.arange(WINDOW) * random.integers(0, 3)
        )
        theirs = stats.kendalltau(range(WINDOW), series, method="asymptotic").pvalue
        # Ours corrects for continuity, which is the cautious side.
        assert theirs - 1e-9 <= trend_significance(series) <= theirs + 0.12


def test_the_significance_of_a_trend_is_mann_and_kendalls() -> None:
    # Of ten growing values the score is 45, and its variance 125.
    assert trend_significance(range(10)) == pytest.approx(8.303e-5, rel=1e-3)
