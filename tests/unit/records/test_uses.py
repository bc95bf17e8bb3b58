"""Uses of kernels and copies added up."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pytest_gpumem.records.uses import (
    CopyUse,
    KernelUse,
    at_once,
    clock,
    copies_together,
    kernels_together,
    longest_first,
)

ONE = KernelUse(
    "k", (1, 1, 1), (32, 1, 1), launches=1, nanoseconds=10, registers=16, shared=0, local=0
)
COUNTED = replace(
    ONE,
    dram_read=100,
    dram_written=10,
    l2_read=300,
    l2_written=100,
    l1_load=500,
    l1_store=50,
    l2_hit_rate=0.5,
    l2_read_hit_rate=0.25,
    sectors_per_request=4.0,
    used_of_load=1.0,
    sectors_per_store=8.0,
    used_of_store=0.5,
    occupancy=0.5,
    sm_clock_hz=1e9,
    memory_clock_hz=2e9,
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
    assert longest_first(kernels_together([ONE, other, ONE])) == (
        other,
        replace(ONE, launches=2, nanoseconds=20),
    )


def test_a_figure_that_one_launch_lacks_is_not_known_of_all() -> None:
    full = replace(ONE, dram_read=100, occupancy=0.5, sm_clock_hz=1e9)
    (both,) = kernels_together([full, ONE])
    assert (both.dram_read, both.occupancy, both.sm_clock_hz) == (None, None, None)
    (both,) = kernels_together([full, replace(full, nanoseconds=30, occupancy=0.9)])
    assert (both.dram_read, both.occupancy) == pytest.approx((200, 0.8))


def test_copies_between_other_memories_stay_apart() -> None:
    one = CopyUse("H2D", "pinned", "device", 1, 100, 10)
    other = replace(one, source="pageable", nanoseconds=40)
    assert copies_together([one, other, one]) == (
        other,
        replace(one, count=2, nbytes=200, nanoseconds=20),
    )


def test_counters_are_summed_and_rates_weighted_by_what_they_are_of() -> None:
    other = replace(
        COUNTED,
        nanoseconds=30,
        launches=2,
        dram_read=1,
        l2_read=100,
        l2_written=300,
        l1_load=5,
        l2_hit_rate=1.0,
        l2_read_hit_rate=0.75,
        sectors_per_request=8.0,
        used_of_load=0.5,
        sectors_per_store=4.0,
        used_of_store=1.0,
        occupancy=0.9,
        sm_clock_hz=2e9,
        memory_clock_hz=1e9,
    )
    (both,) = kernels_together([COUNTED, other])
    assert (both.launches, both.nanoseconds) == (3, 40)
    assert (
        both.dram_read,
        both.dram_written,
        both.l2_read,
        both.l2_written,
        both.l1_load,
        both.l1_store,
    ) == (101, 20, 400, 400, 505, 100)
    assert both.l2_hit_rate == pytest.approx(0.75)  # by all bytes of L2, which are as many
    assert (both.l2_read_hit_rate, both.sectors_per_request, both.used_of_load) == pytest.approx(
        (0.375, 5.0, 0.875)
    )  # by bytes read
    assert (both.sectors_per_store, both.used_of_store) == pytest.approx(
        (5.0, 0.875)
    )  # by bytes written
    assert (both.occupancy, both.sm_clock_hz, both.memory_clock_hz) == pytest.approx(
        (0.8, 1.75e9, 1.25e9)
    )  # by time


@pytest.mark.parametrize("weight", [None, 0])
def test_a_rate_whose_weight_is_unknown_or_nothing_is_the_plain_mean(weight: int | None) -> None:
    (both,) = kernels_together(
        [COUNTED, replace(COUNTED, l2_read=weight, l2_hit_rate=1.0, sectors_per_request=8.0)]
    )
    assert both.sectors_per_request == pytest.approx(6.0)
    assert both.l2_hit_rate == pytest.approx(0.75 if weight is None else (400 * 0.5 + 100) / 500)
    assert both.l2_read == (None if weight is None else 300)


def test_a_clock_is_the_mean_over_time_of_the_kernels_that_have_one() -> None:
    other = replace(COUNTED, name="l", nanoseconds=30, sm_clock_hz=2e9)
    assert clock(
        [COUNTED, other, replace(other, sm_clock_hz=None)], "sm_clock_hz"
    ) == pytest.approx(1.75e9)
    assert clock([ONE], "sm_clock_hz") is clock([], "memory_clock_hz") is None


def test_equal_times_keep_their_order() -> None:
    uses = [
        replace(ONE, name=name, nanoseconds=time)
        for name, time in (("a", 1), ("b", 5), ("c", 1), ("d", 5))
    ]
    assert [one.name for one in longest_first(uses)] == ["b", "d", "a", "c"]
