"""How an interval reads."""

from __future__ import annotations

import pytest

from pytest_gpumem.judging.finding import between


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.001, 0.00712, "between -0.100 % and +0.712 %"),
        (0.7361, 0.7364, "between +73.61 % and +73.64 %"),
        (0.736, 0.7360001, "without a spread"),
        (0.736, 0.736, "without a spread"),
        (-1e-12, 1e-12, "without a spread"),
        (-1e-12, 0.01, "between +0 % and +1.00 %"),
    ],
)
def test_an_interval_reads_well(low: float, high: float, said: str) -> None:
    assert between(low, high) == said
