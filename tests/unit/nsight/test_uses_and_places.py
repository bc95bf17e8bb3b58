"""Uses added up, and the measurement that a stack of ranges stands for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_gpumem.nsight.recording import RangePlace, place_of
from pytest_gpumem.records.uses import CopyUse, KernelUse, copies_together, kernels_together, longest_first

ONE = KernelUse("k", (1, 1, 1), (32, 1, 1), launches=1, nanoseconds=10, registers=16, shared=0, local=0)


@pytest.mark.parametrize(
    ("ranges", "place"),
    [
        ((), None),
        (("test_a",), RangePlace("test_a", "", False)),
        (("test_a", "test_a.setup"), RangePlace("test_a", "", False)),
        (("test_a.flush",), RangePlace("test_a", "", False)),
        (("test_a", "test_a.measure", "test_a.launch"), RangePlace("test_a", "", True)),
        (("test_a", "test_a.label.x-1", "test_a.measure"), RangePlace("test_a", "x-1", True)),
        (("test_a", "test_a.label.x-1", "test_a.flush"), RangePlace("test_a", "x-1", False)),
        # pytest run by a test, itself measured
        (("outer", "outer.measure", "inner", "inner.label.y", "inner.measure"), RangePlace("inner", "y", True)),
    ],
)
def test_a_stack_of_ranges_is_a_place(ranges: tuple[str, ...], place: RangePlace | None) -> None:
    assert place_of(ranges) == place


@pytest.mark.parametrize(
    "change", [{"grid": (2, 1, 1)}, {"block": (64, 1, 1)}, {"registers": 17}, {"shared": 1}, {"local": 8}, {"name": "l"}]
)
def test_launches_of_another_shape_stay_apart(change: dict[str, object]) -> None:
    other = replace(ONE, nanoseconds=25, **change)
    assert longest_first(kernels_together([ONE, other, ONE])) == (other, replace(ONE, launches=2, nanoseconds=20))


def test_a_figure_that_one_launch_lacks_is_not_known_of_all() -> None:
    full = replace(ONE, dram_read=100, occupancy=0.5, sm_clock_hz=1e9)
    (both,) = kernels_together([full, ONE])
    assert (both.dram_read, both.occupancy, both.sm_clock_hz) == (None, None, None)
    (both,) = kernels_together([full, replace(full, nanoseconds=30, occupancy=0.9)])
    assert (both.dram_read, both.occupancy) == pytest.approx((200, 0.8))


def test_copies_between_other_memories_stay_apart() -> None:
    one = CopyUse("H2D", "pinned", "device", 1, 100, 10)
    other = replace(one, source="pageable", nanoseconds=40)
    assert copies_together([one, other, one]) == (other, replace(one, count=2, nbytes=200, nanoseconds=20))
