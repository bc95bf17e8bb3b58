"""Student's t against SciPy's, over the degrees of freedom and confidences that verdicts use."""

from __future__ import annotations

import pytest
from scipy.special import stdtrit

from pytest_gpumem.records.measurement import quantile


def test_the_quantile_is_scipys() -> None:
    for confidence in (0.5, 0.6, 0.75, 0.95, 0.96, 0.975, 0.99, 0.995, 0.999, 0.9995, 0.9999):
        for freedom in (1, 2, 3, 4, 6, 7, 9, 13, 25, 63, 120, 199, 511, 1000):
            value = quantile(confidence, freedom)
            expected = pytest.approx(float(stdtrit(freedom, confidence)), rel=1e-9, abs=1e-12)
            assert value == expected, (confidence, freedom)
