"""The measurement that a stack of ranges stands for."""

from __future__ import annotations

import pytest

from pytest_gpumem.nsight.recording import RangePlace, place_of


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
        (
            ("outer", "outer.measure", "inner", "inner.label.y", "inner.measure"),
            RangePlace("inner", "y", True),
        ),
    ],
)
def test_a_stack_of_ranges_is_a_place(ranges: tuple[str, ...], place: RangePlace | None) -> None:
    assert place_of(ranges) == place
