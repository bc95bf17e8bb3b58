"""Confidence over placements, the spending of a budget, and when samples are enough."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from scipy.special import stdtrit

from pytest_gpumem.measuring.stopping import (
    ENOUGH_SAMPLES,
    FEW_SAMPLES,
    LEAST_SAMPLES,
    MOST_SAMPLES,
    NEGLIGIBLE_SHARE,
    enough,
    go_on,
    half_width,
    precise,
    rounds_left,
    samples_per_placement,
    sampling_error,
)

# Intervals


def test_half_width_agrees_with_scipy() -> None:
    for count in [2, 3, 4, 8, 9, 32, 128]:
        medians = list(np.random.default_rng(count).normal(1.0, 0.01, count))
        error = np.std(medians, ddof=1) / np.sqrt(count)
        assert half_width(medians) == pytest.approx(stdtrit(count - 1, 0.975) * error, rel=1e-9)


def test_half_width_needs_two_placements() -> None:
    assert half_width([1.0]) is None
    assert not precise([1.0], 0.5)


def test_the_sampling_error_is_that_of_a_mean_of_medians() -> None:
    random = np.random.default_rng(3)
    series = random.normal(1.0, 0.01, (300, 16, 25))
    actual = np.median(series, axis=2).mean(axis=1).std(ddof=1)
    estimated = statistics.fmean(sampling_error(s.tolist()) for s in series)
    assert estimated == pytest.approx(actual, rel=0.1)


def test_outliers_do_not_raise_the_sampling_error() -> None:
    random = np.random.default_rng(4)
    quiet = random.normal(1.0, 0.01, (8, 25))
    spoilt = quiet.copy()
    spoilt[:, :2] *= 20
    assert sampling_error(spoilt.tolist()) < 1.5 * sampling_error(quiet.tolist())


# Enough


def rounds_of(placements: np.ndarray, count: int) -> list[list[float]]:
    return [samples[:count].tolist() for samples in placements]


def stops_at(
    placements: np.ndarray, *, cost: float, wanted: float = 0.001, budget: float = 1.0
) -> int:
    """Samples of each placement after which `enough` says so, at `cost` seconds a sample."""
    for count in range(1, placements.shape[1] + 1):
        if enough(
            rounds_of(placements, count),
            wanted_share=wanted,
            spent=count * len(placements) * cost,
            budget=budget,
        ):
            return count
    raise AssertionError("never enough")


def made(
    sigma: float, between: float, placements: int = 16, rounds: int = 200, seed: int = 6
) -> np.ndarray:
    """Samples that vary by `sigma` within a placement, and medians by `between` between them."""
    random = np.random.default_rng(seed)
    return 30e-6 * (
        1
        + random.normal(0, between, (placements, 1))
        + random.normal(0, sigma, (placements, rounds))
    )


def test_a_cheap_measurement_takes_its_few_samples_however_quiet_it_is() -> None:
    assert stops_at(made(0.0, 0.0), cost=1e-6) == FEW_SAMPLES // 16
    assert stops_at(made(0.0, 0.0, placements=1, rounds=1000), cost=1e-6) == FEW_SAMPLES


def test_a_dear_one_stops_as_soon_as_it_is_precise() -> None:
    dear = NEGLIGIBLE_SHARE / LEAST_SAMPLES / 16
    assert stops_at(made(1e-4, 1e-5), cost=dear) == LEAST_SAMPLES
    assert stops_at(made(1e-4, 1e-5), cost=dear / 4) == 4 * LEAST_SAMPLES


def test_more_samples_are_taken_where_they_help() -> None:
    """Samples that vary by 5 %: the interval is wide because of them, and shrinks with more."""
    assert stops_at(made(0.05, 0.0005), cost=1e-6) > 1.5 * FEW_SAMPLES / 16


def test_no_more_samples_are_taken_where_only_placements_would_help() -> None:
    assert stops_at(made(0.005, 0.02), cost=1e-6) == FEW_SAMPLES // 16


def test_there_is_an_end() -> None:
    endless = made(0.5, 0.0, rounds=400)
    assert stops_at(endless, cost=1e-6) == -(-MOST_SAMPLES // 16)
    assert stops_at(endless, cost=1 / 160) == 10  # the budget


def test_sampling_in_chunks_looks_at_the_numbers_that_may_be_enough() -> None:
    for places in [1, 8, 21, 32]:
        for chunk in [1, 7, 100]:
            rounds, looks = 0, [0]
            while rounds * places < MOST_SAMPLES:
                rounds += min(chunk, rounds_left(rounds, places))
                looks.append(rounds)
            assert -(-FEW_SAMPLES // places) in looks, (places, chunk)
            assert looks[-1] == -(-MOST_SAMPLES // places), (places, chunk)
            assert rounds_left(rounds, places) == 1, (places, chunk)


def test_each_placement_has_three_samples_unless_the_budget_is_spent_twice() -> None:
    assert stops_at(made(0.5, 0.0), cost=1 / 16) == LEAST_SAMPLES
    assert stops_at(made(0.5, 0.0), cost=2.5 / 16) == 1
    assert not enough([[1.0], []], wanted_share=0.1, spent=100.0, budget=1.0)


# Placements that follow each other


def test_samples_are_shared_over_placements_within_bounds() -> None:
    assert samples_per_placement(cost=10e-3, budget=1.0, placements=10) == 10
    assert samples_per_placement(cost=1e-6, budget=1.0, placements=8) == ENOUGH_SAMPLES
    # Placements differ by more than samples of one do.
    assert samples_per_placement(cost=0.1, budget=1.0, placements=8) == 1
    assert samples_per_placement(cost=5.0, budget=1.0, placements=8) == 1


WIDE = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]


def test_one_wanted_placement_stays_one() -> None:
    assert go_on([], wanted_share=0.001, placements=1, most=4, spent=0.0, budget=1.0)
    assert not go_on([1.0], wanted_share=0.001, placements=1, most=4, spent=0.0, budget=1.0)


def test_go_on() -> None:
    for medians, spent, expected in [
        (WIDE[:4], 0.1, True),  # fewer than wanted
        (WIDE[:4], 0.9, True),  # the wanted number comes before a tight budget
        (WIDE[:4], 2.1, False),  # but not at any price
        (WIDE[:2], 1.3, True),  # a third one ends before twice the budget
        (WIDE[:2], 1.5, False),  # a third one would not
        (WIDE[:1], 3.0, True),  # two in any case
        (WIDE, 0.5, True),  # wanted number, too wide, budget left
        (WIDE, 1.1, False),  # budget used
        (WIDE * 4, 0.5, False),  # as many as there may be
        ([1.0, 1.0 + 1e-6] * 4, 0.5, False),  # precise
    ]:
        assert (
            go_on(medians, wanted_share=0.001, placements=8, most=32, spent=spent, budget=1.0)
            is expected
        ), (medians, spent, expected)
