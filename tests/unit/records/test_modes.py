"""The modes of placements: found where there are some, and none made of noise."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from measurements import measurement

from pytest_gpumem.records.measurement import Window, modes_of, without_exceptions
from pytest_gpumem.units import MiB

FAST, SLOW = 225e-6, 251e-6
"""Seconds of an 8 MiB table on an H100 with the smallest set-aside that holds it: at two of three placements, and at the rest."""


def drawn(seconds: list[float], spread: float, seed: int) -> list[float]:
    return [
        float(value)
        for value in np.array(seconds)
        * np.random.default_rng(seed).normal(1.0, spread, len(seconds))
    ]


def test_placements_apart_are_of_two_modes() -> None:
    for spread in [0.0, 1e-4, 1e-3]:
        where = [0, 1, 0, 0, 1, 0, 1, 0]
        medians = drawn([SLOW if slow else FAST for slow in where], spread, seed=1)
        assert modes_of(medians) == tuple(where), spread


def test_noise_alone_is_rarely_taken_for_modes() -> None:
    for placements in [8, 16, 32]:
        for spread in [1e-4, 2e-3, 2e-2]:
            found = sum(
                max(modes_of(drawn([FAST] * placements, spread, seed))) > 0 for seed in range(500)
            )
            assert found <= 25, (placements, spread)


def test_too_few_or_equal_placements_are_of_one_mode() -> None:
    for medians in [[], [FAST], [FAST, SLOW], [FAST, FAST, FAST, SLOW, FAST], [FAST] * 8]:
        assert set(modes_of(medians)) <= {0}, medians
        assert without_exceptions(medians) == tuple(medians), medians


def test_at_most_a_quarter_of_the_placements_are_exceptions() -> None:
    assert without_exceptions([FAST, FAST, SLOW, FAST, FAST, SLOW, FAST, FAST]) == (FAST,) * 6
    assert without_exceptions([SLOW, SLOW, FAST, SLOW, SLOW, SLOW]) == (SLOW,) * 5
    both = [FAST, SLOW, FAST, SLOW, FAST, FAST, SLOW, FAST]
    assert modes_of(both) == (0, 1, 0, 1, 0, 0, 1, 0)
    assert without_exceptions(both) == tuple(both)


def test_the_latency_of_a_row_is_without_exceptions_only_under_a_window() -> None:
    placements = tuple((median,) for median in (FAST, FAST, SLOW, FAST, FAST, FAST, FAST, FAST))
    plain = measurement(placements=placements)
    under = measurement(placements=placements, window=Window(8 * MiB, 1.0, 12 * MiB))
    assert under.latency == pytest.approx(FAST)
    assert plain.latency == pytest.approx(statistics.fmean((FAST,) * 7 + (SLOW,)))
    assert under.placement_spread == plain.placement_spread
