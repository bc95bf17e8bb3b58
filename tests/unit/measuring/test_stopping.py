"""Confidence over placements and the spending of a budget."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem.measuring.stopping import LEAST_SAMPLES, MOST_SAMPLES, go_on, half_width, precise, samples_per_placement


def test_half_width_is_students_interval() -> None:
    # Eight values, t(7, 0.975) = 2.3646; standard deviation of 1..8 is 2.4495.
    assert half_width([1, 2, 3, 4, 5, 6, 7, 8]) == pytest.approx(2.3646 * 2.4495 / np.sqrt(8), rel=1e-4)


def test_half_width_needs_two_placements() -> None:
    assert half_width([1.0]) is None
    assert not precise([1.0], 0.5)


def test_half_width_covers_the_truth_at_its_level() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for _ in range(1000):
        medians = random.normal(1.0, 0.004, 8)
        width = half_width(list(medians))
        assert width is not None
        hits += abs(medians.mean() - 1.0) <= width
    assert 930 <= hits <= 970


def test_samples_are_shared_over_placements_within_bounds() -> None:
    assert samples_per_placement(cost=10e-3, budget=1.0, placements=10) == 10
    assert samples_per_placement(cost=1e-6, budget=1.0, placements=8) == 25
    assert samples_per_placement(cost=1.0, budget=1.0, placements=8) == LEAST_SAMPLES
    assert samples_per_placement(cost=0.0, budget=1.0, placements=1) == MOST_SAMPLES


WIDE = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]


def test_one_wanted_placement_stays_one() -> None:
    assert go_on([], wanted=0.001, placements=1, spent=0.0, budget=1.0)
    assert not go_on([1.0], wanted=0.001, placements=1, spent=0.0, budget=1.0)


@pytest.mark.parametrize(
    ("medians", "spent", "expected"),
    [
        (WIDE[:4], 0.1, True),  # fewer than wanted
        (WIDE[:4], 0.9, True),  # the wanted number comes before a tight budget
        (WIDE[:4], 2.1, False),  # but not at any price
        (WIDE, 0.5, True),  # wanted number, too wide, budget left
        (WIDE, 1.1, False),  # budget used
        (WIDE * 4, 0.5, False),  # four times the wanted number
        ([1.0, 1.0 + 1e-6] * 4, 0.5, False),  # precise
    ],
)
def test_go_on(medians: list[float], spent: float, expected: bool) -> None:
    assert go_on(medians, wanted=0.001, placements=8, spent=spent, budget=1.0) is expected
