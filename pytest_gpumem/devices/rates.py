"""Theoretical rates of a card, from what its driver or its datasheet says."""

from __future__ import annotations

_LANE_RATES = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
"""Bytes per second of one lane, one way, after line coding (PCI Express Base Specification: 8b/10b up to generation 2, 128b/130b up to
generation 5, 242 of 256 bytes of a FLIT in generation 6)."""


def peak_bandwidth(memory_clock_hz: float, bus_bits: int) -> float:
    """Theoretical DRAM bandwidth in bytes per second (CUDA Best Practices Guide, 8.2.1): the factor 2 is the double data rate."""
    return 2 * memory_clock_hz * bus_bits / 8


def host_link(generation: int, width: int) -> tuple[str, float | None]:
    """The host link in words and its theoretical bandwidth one way in bytes per second, where the generation is known."""
    lane = _LANE_RATES.get(generation)
    return f"PCIe Gen{generation} x{width}", None if lane is None else lane * width
