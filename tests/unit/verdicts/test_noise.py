"""The expected noise is what real GPUs showed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.verdicts.noise import placement_spread, process_spread


@pytest.mark.parametrize(("latency", "spread"), [(268e-6, 0.0005), (39.5e-6, 0.002), (7e-6, 0.01), (3.5e-6, 0.02), (10e-3, 0.0005)])
def test_between_processes(latency: float, spread: float) -> None:
    assert process_spread(latency) == pytest.approx(spread)


@pytest.mark.parametrize(("latency", "spread"), [(268e-6, 0.0005), (39.5e-6, 0.0037), (7e-6, 0.021)])
def test_between_placements(latency: float, spread: float) -> None:
    assert placement_spread(latency) == pytest.approx(spread)


@given(st.floats(1e-6, 1e-2), st.floats(1.01, 10.0))
def test_a_longer_kernel_is_never_noisier(latency: float, factor: float) -> None:
    for spread in (process_spread, placement_spread):
        assert spread(latency * factor) <= spread(latency)
