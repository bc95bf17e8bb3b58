"""Figures that follow from the samples of a measurement."""

from __future__ import annotations

import pytest
from measurements import measurement

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
