"""Uses of kernels and copies added up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_gpumem.records.uses import (
    CopyUse,
    KernelUse,
    at_once,
    copies_together,
    kernels_together,
)

ONE = KernelUse(
    "k", (1, 1, 1), (32, 1, 1), launches=1, nanoseconds=10, registers=16, shared=0, local=0
)


@pytest.mark.parametrize(
    ("intervals", "time"),
    [
        ([], 0.0),
        ([(0, 10)], 0.0),
        ([(0, 10), (10, 20)], 0.0),
        ([(5, 15), (0, 10)], 5.0),
        ([(0, 10), (2, 8), (4, 6)], 6.0),  # three at once count once
        ([(0, 4), (2, 6), (10, 14), (12, 13)], 3.0),
    ],
)
def test_time_in_which_several_run(intervals: list[tuple[float, float]], time: float) -> None:
    assert at_once(intervals) == time


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (2, 1, 1)},
        {"block": (64, 1, 1)},
        {"registers": 17},
        {"shared": 1},
        {"local": 8},
        {"name": "l"},
    ],
)
def test_launches_of_another_shape_stay_apart(change: dict[str, object]) -> None:
    other = replace(ONE, nanoseconds=25, **change)
    assert kernels_together([ONE, other, ONE]) == (replace(ONE, launches=2, nanoseconds=20), other)


def test_copies_between_other_memories_stay_apart() -> None:
    one = CopyUse("H2D", "pinned", "device", 1, 100, 10)
    other = replace(one, source="pageable", nanoseconds=40)
    assert copies_together([one, other, one]) == (
        other,
        replace(one, count=2, nbytes=200, nanoseconds=20),
    )


def test_equal_times_keep_their_order() -> None:
    copies = [
        CopyUse(kind, "pinned", "device", 1, 1, time)
        for kind, time in (("H2D", 1), ("D2H", 5), ("D2D", 1), ("P2P", 5))
    ]
    assert [copy.kind for copy in copies_together(copies)] == ["D2H", "P2P", "H2D", "D2D"]
