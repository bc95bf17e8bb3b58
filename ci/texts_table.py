"""The figures of a recorded suite that belong to the experiments of CUDA's guides and other texts, for `docs/seeds-experiments.md`.

`python ci/renew_tables.py` draws it where a page has the marker `texts`. A change has its 95 % interval where that is a hundredth or wider.
It is followed by ? where the interval holds no change, and by * where the row has one set of buffers and so no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_bytes

Find = Callable[[str, str], Measurement]
"""The measurement of a test, by the name of the test and its label. Raises `KeyError`: it is not in the record."""


class Timed(NamedTuple):
    """Seconds, and half of their 95 % interval."""

    latency: float
    half_width: float | None


WINDOWS = {
    "reset_data, 32 blocks, 3 MiB set aside, the text's tables": "reset_data_at_the_texts_sizes",
    "reset_data, 32 blocks, half of L2 set aside, tables of sixths of L2": "reset_data_at_shares_of_l2",
    "sliding_window, 30 MiB set aside, the text's regions": "sliding_window_at_the_texts_sizes",
    "sliding_window, the largest set-aside, regions of shares of L2": "sliding_window_at_shares_of_l2",
}
"""Tests whose rows are called "size, variant". The first variant is the base of the others."""

WARPS, PAGES = (
    "test_a_warp_for_each_page_faults_less_than_all_warps_on_all_pages[{}]",
    (4096, 65536, 2097152),
)

PAIRS = """
persisting L2
  A's lines persist | a_reset_gives_the_next_kernel_all_of_l2[by the context] | C, nothing has persisted | C, without a reset
  after a reset by the context | a_reset_gives_the_next_kernel_all_of_l2[by the context] | C, nothing has persisted | C, after a reset
  after a reset by the window | a_reset_gives_the_next_kernel_all_of_l2[by the window] | C, nothing has persisted | C, after a reset
  after other work, without a reset | a_reset_gives_the_next_kernel_all_of_l2[by ageing] | C, nothing has persisted | C, after other work
  largest set-aside, unused | a_set_aside_that_nothing_uses_slows_a_saturated_kernel | no set-aside | the largest set-aside, without a window
  two windows, ratio 1 and 0.5 | two_windows_at_once | ratio 1 | ratio 0.5
  window on a graph's kernels | a_window_on_a_graph_or_on_a_launch_gains_too[graph] | off | persisting
  window on a launch | a_window_on_a_graph_or_on_a_launch_gains_too[launch] | off | persisting
  shared memory, 48 KiB, 32 blocks | a_table_in_shared_memory | 48 KiB, 32 blocks, persisting | 48 KiB, 32 blocks, shared memory
  shared memory, 48 KiB, full grid | a_table_in_shared_memory | 48 KiB, full grid, persisting | 48 KiB, full grid, shared memory
  shared memory, 227 KiB, 32 blocks | a_table_in_shared_memory | 227 KiB, 32 blocks, persisting | 227 KiB, 32 blocks, shared memory
  shared memory, 227 KiB, full grid | a_table_in_shared_memory | 227 KiB, full grid, persisting | 227 KiB, full grid, shared memory
  "fit", 16/32 of L2, reset_data | a_fitted_window_is_never_slower_than_none[16-reset_data] | off | fitted
  "fit", 24/32 of L2, reset_data | a_fitted_window_is_never_slower_than_none[24-reset_data] | off | fitted
  "fit", 48/32 of L2, reset_data | a_fitted_window_is_never_slower_than_none[48-reset_data] | off | fitted
  "fit", 16/32 of L2, sliding_window | a_fitted_window_is_never_slower_than_none[16-sliding_window] | off | fitted
  "fit", 24/32 of L2, sliding_window | a_fitted_window_is_never_slower_than_none[24-sliding_window] | off | fitted
  "fit", 48/32 of L2, sliding_window | a_fitted_window_is_never_slower_than_none[48-sliding_window] | off | fitted
managed memory
  2^20 floats, GPU first | the_texts_own_size | 4 MiB, faulting | 4 MiB, GPU first
  2^20 floats, prefetched | the_texts_own_size | 4 MiB, faulting | 4 MiB, prefetched
  64 MiB arrays, prefetched | prefetch_beats_faulting | faulting | prefetched
  a warp for each 4 KiB | a_warp_for_each_page_faults_less_than_all_warps_on_all_pages[4096] | grid stride | a warp a page
  a warp for each 64 KiB | a_warp_for_each_page_faults_less_than_all_warps_on_all_pages[65536] | grid stride | a warp a page
  a warp for each 2 MiB | a_warp_for_each_page_faults_less_than_all_warps_on_all_pages[2097152] | grid stride | a warp a page
link and access patterns
  intermediates on the host | intermediates_that_stay_on_the_device_save_a_round_trip | stays on the device | to the host and back
  zero copy, read once | reading_once_in_place_is_no_slower_than_copying_first | copied, 1 x | mapped, 1 x, stride 1
  zero copy, read four times | reading_again_crosses_the_link_again | copied, 4 x | mapped, 4 x, stride 1
  copies both ways, and a kernel | copies_both_ways_and_the_kernel_run_at_once | both copies | staged
  1024 copies of 4 KiB | one_packed_copy_beats_many_small_ones | one of 4 MiB | 1024 copies of 4 KiB
  pageable to device | pinned_to_device_beats_pageable | pinned | pageable
  device to pageable | device_to_pinned_beats_pageable | pinned | pageable
  offset 1 | offset_copy | offset 0 | offset 1
  offset 8 | offset_copy | offset 0 | offset 8
"""
"""Groups, and of each row what it is called, the test, the label that it is compared with, and its own."""

PLACES = ("L1, 16 KiB", "L2, 1 MiB", "DRAM, ", "mapped host memory, ", "managed on the host, ")
"""Of the ladder of latencies, the last row whose label begins so."""


def lines(rows: Sequence[Row], device: DeviceFacts) -> list[str]:
    """The table of a run's rows; of experiments that the run lacks there is a line that says so."""
    found = {
        (row.nodeid.partition("::")[2], row.measurement.label): row.measurement
        for row in rows
        if row.measurement
    }

    def find(test: str, label: str) -> Measurement:
        return found[test, label]

    drawn = []
    for title, test in WINDOWS.items():
        own = [(label, one) for (name, label), one in found.items() if name == f"test_{test}"]
        drawn += [*_windows(title, own), ""]
    for line in PAIRS.strip().splitlines():
        if line.startswith(" "):
            what, test, base, label = line.strip().split(" | ")
            drawn.append(_pair(what, find, f"test_{test}", base, label))
        else:
            drawn += [""] * drawn[-1].startswith(" ") + [f"{line:<40}{'base':>12}   change"]
    return [*drawn, "", *_bandwidths(find, device), *_latencies(found)]


def of_two_windows(cases: Sequence[Mapping[str, Any]], l2_bytes: int) -> Iterator[str]:
    """The table of kernels that run at once, of a record of `ci/bench/l2_persistence.py`: times of both, against no window."""
    yield "two windows at once: reset_data twice, each on a table as large as the set-aside of both"
    yield f"{'':<26}{'no window':>12}{'ratio 1':>14}{'ratio 0.5':>14}{'fitted':>14}"
    for case in cases:
        off, *others = (_timed(case["found"][name]) for name in ("off", "1", "0.5", "fit"))
        size = f"{case['blocks']} blocks, 1/{round(l2_bytes / case['set_aside'])} of L2"
        yield f"  {size:<24}{_time(off.latency):>12}" + "".join(
            f"{change(off, one):>14}" for one in others
        )


def _timed(nanoseconds: Mapping[str, float]) -> Timed:
    return Timed(1e-9 * nanoseconds["median"], 1e-9 * nanoseconds["half_width"])


def _windows(title: str, labelled: list[tuple[str, Measurement]]) -> Iterator[str]:
    sizes: dict[str, dict[str, Measurement]] = {}
    for label, one in labelled:
        size, _, variant = label.rpartition(", ")
        sizes.setdefault(size, {})[variant] = one
    variants = list(next(iter(sizes.values()), {}))
    yield title
    if not sizes:
        yield "  not in this record"
        return
    yield f"{'':<12}" + "".join(f"{name:>{12 if name == variants[0] else 16}}" for name in variants)
    for size, (base, *others) in ((size, list(of.values())) for size, of in sizes.items()):
        yield f"  {size:<10}{_time(base.latency):>12}" + "".join(
            f"{change(base, one):>16}" for one in others
        )


def _pair(what: str, find: Find, test: str, base: str, label: str) -> str:
    try:
        without, other = find(test, base), find(test, label)
    except KeyError:
        return f"  {what:<38}not in this record"
    return f"  {what:<38}{_time(without.latency):>12}   {change(without, other)}"


def _bandwidths(find: Find, device: DeviceFacts) -> Iterator[str]:
    try:
        moved = find("test_the_link_bounds_migration_and_not_the_kernel", "prefetched").migrations
        if moved is not None and moved.before is not None and device.link_bandwidth:
            there, back = (
                f"{(rate or 0) / 1e9:.1f}"
                for rate in (moved.before.to_device_bandwidth, moved.before.to_host_bandwidth)
            )
            yield f"prefetch of 128 MiB: {there} GB/s there, {back} GB/s back, of a link of {device.link_bandwidth / 1e9:.0f} GB/s"
        for page in PAGES:
            ways = [
                find(WARPS.format(page), label).migrations
                for label in ("grid stride", "a warp a page")
            ]
            counted = [
                way.launch.gpu_faults for way in ways if way is not None and way.launch is not None
            ]
            if len(counted) == 2:
                yield f"page faults of 64 MiB, a warp for each {format_bytes(page)}: {counted[0]} in a grid stride, {counted[1]}"
        rates = [find("test_stride_copy", f"stride {stride}").bandwidth for stride in (1, 2, 8, 32)]
        shares = ", ".join(
            f"{100 * rate / rates[0]:.1f} %" for rate in rates[1:] if rate and rates[0]
        )
        yield f"bandwidth at strides 2, 8, 32, of that at stride 1: {shares}"
    except KeyError:
        yield "  the rest is not in this record"


def _latencies(found: dict[tuple[str, str], Measurement]) -> Iterator[str]:
    ladder = {
        label: one.latency_per_access
        for (test, label), one in found.items()
        if test == "test_the_ladder_from_l1_to_the_host"
    }
    steps = []
    for place in PLACES:
        of_place = [
            (label, seconds)
            for label, seconds in ladder.items()
            if label.startswith(place) and seconds
        ]
        if of_place:
            label, seconds = of_place[-1]
            steps.append(f"{label.partition(',')[0]} {1e9 * seconds:.0f}")
    if steps:
        yield f"ns an access: {', '.join(steps)}"


def change(base: Measurement | Timed, other: Measurement | Timed) -> str:
    """How much longer or shorter than `base`: "+4.6 %", "-14 ± 6 %", "2.04 times", "1/206"."""
    ratio = other.latency / base.latency
    if base.half_width is None or other.half_width is None:
        wide, mark = 0.0, "*"
    else:
        wide = ratio * math.hypot(base.half_width / base.latency, other.half_width / other.latency)
        mark = "?" if wide >= abs(ratio - 1) else ""
    relative = wide / ratio
    if ratio >= 2:
        return f"{ratio:.3g}{f' ± {wide:.2g}' if relative >= 0.01 else ''} times{mark}"
    if ratio <= 0.5:
        return f"1/{1 / ratio:.3g}{f' ± {100 * relative:.0f} %' if relative >= 0.01 else ''}{mark}"
    if wide >= 0.01:
        return f"{100 * (ratio - 1):+.0f} ± {100 * wide:.0f} %{mark}"
    return f"{100 * (ratio - 1):+.1f} %{mark}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.1f} us"
