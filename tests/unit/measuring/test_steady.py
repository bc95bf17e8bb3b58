"""When a warm-up counts as over."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem.measuring.steady import WINDOW, steady, trend_significance


def noisy(level: float, sigma: float, count: int, seed: int) -> list[float]:
    return list(level * np.exp(np.random.default_rng(seed).normal(0, sigma, count)))


def test_too_few_samples_are_never_steady() -> None:
    assert not steady([1e-5] * (WINDOW - 1))


def test_constant_samples_are_steady() -> None:
    assert steady([1e-5] * WINDOW)


@pytest.mark.parametrize("sigma", [0.0005, 0.003, 0.02])
def test_noise_without_trend_is_nearly_always_steady(sigma: float) -> None:
    verdicts = [steady(noisy(30e-6, sigma, WINDOW, seed)) for seed in range(200)]
    assert sum(verdicts) >= 180


def test_a_falling_series_is_not_steady() -> None:
    warming = [30e-6 * (1 + 0.3 * 0.7**i) for i in range(WINDOW)]
    assert not steady(warming)


def test_only_the_last_window_counts() -> None:
    assert steady([1.0, 0.5, 0.2] + [1e-5] * WINDOW)


def test_a_step_inside_the_window_is_not_steady() -> None:
    assert not steady([40e-6 - 1e-8 * i for i in range(WINDOW // 2)] + [30e-6 - 1e-8 * i for i in range(WINDOW // 2)])


def test_a_trend_below_the_drift_share_does_not_keep_the_warm_up_going() -> None:
    assert steady([30e-6 * (1 + 1e-5 * i) for i in range(WINDOW)])


def test_a_quantised_clock_is_steady() -> None:
    ticks = np.random.default_rng(3).integers(100, 102, WINDOW) * 32e-9
    assert steady(list(ticks), drift=0.02)


def test_the_trend_test_agrees_with_scipy_and_counts_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    random = np.random.default_rng(7)
    for _ in range(100):
        series = list(random.integers(0, 8, WINDOW) + 0.3 * np.arange(WINDOW) * random.integers(0, 3))
        theirs = stats.kendalltau(range(WINDOW), series, method="asymptotic").pvalue
        # Ours corrects for continuity, which is the cautious side.
        assert theirs - 1e-9 <= trend_significance(series) <= theirs + 0.12
