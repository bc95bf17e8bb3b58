"""Figures that follow from the samples of a measurement."""

from __future__ import annotations

import pytest
from measurements import measurement

from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.reporting.row import asked_bandwidth

PLACED = ((1e-3, 5e-3, 2e-3), (4e-3,))


def test_samples_medians_and_latency() -> None:
    found = measurement(placements=PLACED)
    assert found.samples == (1e-3, 5e-3, 2e-3, 4e-3)
    assert found.medians == (2e-3, 4e-3)
    assert found.latency == pytest.approx(3e-3)
    assert found.placement_spread == pytest.approx(2**0.5 * 1e-3 / 3e-3)
    assert measurement().placement_spread is None


def test_noise_is_a_share_of_the_latency() -> None:
    for half_width, noise in [(None, None), (0.0, 0.0), (3e-5, 0.01)]:
        assert measurement(placements=PLACED, half_width=half_width).noise == (
            None if noise is None else pytest.approx(noise)
        ), half_width


def test_what_threads_ask_for_is_a_rate_where_it_repeats_the_compulsory_bytes() -> None:
    for requested, traffic, rate in [
        (None, MovedBytes(100, 0), None),
        (900, None, None),
        (299, MovedBytes(60, 40), None),
        (300, MovedBytes(60, 40), 3e5),
        (900, MovedBytes(0, 0, declared=300), 9e5),
    ]:
        found = measurement(requested=requested, moved_bytes=traffic)
        assert asked_bandwidth(found) == (None if rate is None else pytest.approx(rate)), (
            requested,
            traffic,
            rate,
        )
        assert found.bandwidth == (
            None if traffic is None else pytest.approx(traffic.total / 1e-3)
        ), (requested, traffic, rate)
