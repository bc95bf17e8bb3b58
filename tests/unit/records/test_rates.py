"""Theoretical rates of cards."""

from __future__ import annotations

import pytest

from pytest_gpumem.records.device import host_link, peak_bandwidth


def test_peak_of_an_h100() -> None:
    # 2619 MHz, 5120 bit: NVIDIA quotes 3.35 TB/s
    assert peak_bandwidth(2619e6, 5120) == pytest.approx(3.352e12, rel=1e-3)


def test_theoretical_bandwidth_of_a_link() -> None:
    for generation, width, rate in [
        (3, 16, 15.75e9),
        (4, 16, 31.5e9),
        (5, 16, 63.0e9),
        (5, 8, 31.5e9),
        (1, 16, 4.0e9),
    ]:
        words, bandwidth = host_link(generation, width)
        assert words == f"PCIe Gen{generation} x{width}", (generation, width, rate)
        assert bandwidth == pytest.approx(rate, rel=2e-3), (generation, width, rate)


def test_a_link_that_pcie_does_not_bound_has_no_bandwidth() -> None:
    assert host_link(9, 16) == ("PCIe Gen9 x16", None)
    assert host_link(0, 16) == host_link(5, 0) == (None, None)
    assert host_link(5, 16, integrated=True) == ("memory shared with the host", None)
    assert host_link(5, 16, host_page_tables=True) == ("coherent link to the host", None)
