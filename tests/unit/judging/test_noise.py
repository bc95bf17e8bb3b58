"""The expected noise is what real GPUs showed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.judging.spread import placement_spread, process_spread, session_spread


@pytest.mark.parametrize(
    ("latency", "spread"), [(183e-6, 0.00037), (24.8e-6, 0.0012), (5.4e-6, 0.0051), (2.7e-6, 0.0102), (10e-3, 0.00037)]
)
def test_between_processes(latency: float, spread: float) -> None:
    assert process_spread(latency) == pytest.approx(spread)


@pytest.mark.parametrize(("latency", "spread"), [(183e-6, 0.0016), (24.8e-6, 0.0029), (5.4e-6, 0.0094)])
def test_between_placements(latency: float, spread: float) -> None:
    assert placement_spread(latency) == pytest.approx(spread)


def test_a_launch_overhead_that_stays_in_the_latency_adds_to_a_short_kernels_spread() -> None:
    assert process_spread(6e-6, overhead_corrected=False) == pytest.approx((process_spread(6e-6) ** 2 + 0.01**2) ** 0.5)
    assert process_spread(1e-3, overhead_corrected=False) == pytest.approx(process_spread(1e-3), rel=0.02)


@given(st.floats(1e-6, 1e-2), st.floats(1.01, 10.0))
def test_a_longer_kernel_is_never_noisier(latency: float, factor: float) -> None:
    for spread in (process_spread, placement_spread):
        assert spread(latency * factor) <= spread(latency)


def test_sessions_differ_by_half_of_what_short_processes_do() -> None:
    assert session_spread(5.4e-6) == pytest.approx(0.0025)
    assert session_spread(24.8e-6) == pytest.approx(0.0007)
    assert session_spread(1e-3) == pytest.approx(0.0004)
