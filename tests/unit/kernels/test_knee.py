"""The knee of a bandwidth sweep, on curves whose knee is known."""

from __future__ import annotations

import numpy as np
import pytest
from cases import naming

from pytest_gpumem.kernels.l2_bandwidth import knee

SIZES = [2, 4, 8, 12, 16, 24, 32, 48, 64, 128]


def falling(at: float, plateau: float, end: float) -> list[float]:
    """A smooth fall from plateau to end around the footprint `at`."""
    return [end + (plateau - end) / (1 + np.exp(size - at)) for size in SIZES]


def test_the_last_footprint_before_the_fall() -> None:
    for at, last in [(13, 12), (20, 16), (30, 24), (40, 32), (100, 64)]:
        assert knee(SIZES, falling(at, 5.5, 3.0)) == last, at


def test_what_has_no_knee_is_refused() -> None:
    for bandwidths, problem in [
        ([3.0, 3.0, 3.0], "no fall: of 3 bandwidths the last, 3, is the highest"),
        ([1.0, 2.0, 3.0], "no fall"),
    ]:
        with naming(bandwidths, problem), pytest.raises(ValueError, match=problem):
            knee([1, 2, 4], bandwidths)
