"""Student's t against SciPy's, over the degrees of freedom, distances and confidences that verdicts use."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from pytest_gpumem.judging.student import quantile, tail

FREEDOMS = (1, 1.5, 2, 3, 6, 6.4, 7, 9, 13.8, 25, 63, 120.5, 199.9, 200.1, 511, 1000)
CONFIDENCES = (0.6, 0.75, 0.95, 0.96, 0.975, 0.99, 0.995, 0.999, 0.9995, 0.9999)


def test_the_tail_is_scipys() -> None:
    for freedom in FREEDOMS:
        # SciPy loses digits for distances of one degree of freedom from 100 on.
        for distance in np.logspace(-3, 2, 200):
            if (expected := float(stdtr(freedom, -distance))) > 1e-250:
                assert tail(distance, freedom) == pytest.approx(expected, rel=1e-12, abs=0), (
                    distance
                )
            assert tail(-distance, freedom) == pytest.approx(
                float(stdtr(freedom, distance)), rel=1e-12
            ), freedom


def test_the_quantile_is_scipys() -> None:
    for confidence in CONFIDENCES:
        for freedom in FREEDOMS:
            value = quantile(confidence, freedom)
            assert value == pytest.approx(float(stdtrit(freedom, confidence)), rel=1e-12), (
                confidence,
                freedom,
            )
            assert tail(value, freedom) == pytest.approx(1 - confidence, rel=1e-12), (
                confidence,
                freedom,
            )
            assert quantile(1 - confidence, freedom) == pytest.approx(-value, rel=1e-9), (
                confidence,
                freedom,
            )


def test_the_ends_are_numbers() -> None:
    assert tail(0.0, 6) == tail(1e-200, 6) == 0.5
    assert tail(1e200, 6) == tail(float("inf"), 6) == 0.0
    assert tail(-1e200, 6) == 1.0
    assert quantile(0.5, 6) == 0.0
