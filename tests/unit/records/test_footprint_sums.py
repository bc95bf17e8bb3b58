"""What follows from a footprint's uses by library and kind."""

from __future__ import annotations

from pytest_gpumem.records.footprint import Footprint, MemoryUse

USES = (
    MemoryUse("CuPy", "device", peak=100, kept=10, reserved=40, allocations=3, largest=60),
    MemoryUse("PyTorch", "device", peak=200, kept=-30, reserved=-5, allocations=2, largest=90),
    MemoryUse("CUDA", "pinned", peak=7, kept=1, reserved=2, allocations=1, largest=7),
    MemoryUse("gpumem", "pinned", peak=8),
    MemoryUse("CUDA", "managed", peak=16, kept=4, reserved=1, allocations=5, largest=95),
    MemoryUse("gpumem", "managed", peak=32),
)


def test_sums_are_over_libraries_and_what_one_gave_back_makes_up_for_nothing() -> None:
    found = Footprint(250, USES)
    assert (found.kept, found.reserved) == (10 + 1 + 4, 40 + 2 + 1)
    assert (found.allocations, found.largest) == (11, 95)
    assert (found.pinned_peak, found.managed_peak) == (15, 48)


def test_a_test_that_takes_nothing_has_sums_of_nothing() -> None:
    found = Footprint(0)
    assert (
        found.kept,
        found.reserved,
        found.allocations,
        found.largest,
        found.pinned_peak,
        found.managed_peak,
    ) == (0,) * 6
