"""Evidence made by hand: one kernel on an H100, with counters, and what is changed of it."""

from __future__ import annotations

from typing import Any

import measurements
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.explain.causes import Explanation, SlowDown, explain
from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.records.measurement import Conditions, Measurement, MovedBytes, Window
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse

MIB, GB = 1 << 20, 10**9
FULL = Conditions(sm_clock_hz=1980e6, memory_clock_hz=2619e6)

KERNEL = KernelUse(
    "triad<float>",
    (1056, 1, 1),
    (256, 1, 1),
    launches=5,
    nanoseconds=5 * 400_000,
    registers=32,
    dram_read=5 * 800_000_000,
    dram_written=5 * 400_000_000,
    l2_read=5 * 800_000_000,
    l2_written=5 * 400_000_000,
    l2_hit_rate=0.33,
    sectors_per_request=4.0,
    sectors_per_store=4.0,
    used_of_load=1.0,
    used_of_store=1.0,
    occupancy=0.9,
)
"""Five launches of 400 us that move 1.2 GB each: 3000 GB/s of 3352."""


def measurement(latency: float = 400e-6, **changed: Any) -> Measurement:
    given = {
        "target": "triad",
        "placements": ((latency,),) * 8,
        "half_width": latency * 1e-4,
        "moved_bytes": MovedBytes(800_000_000, 400_000_000),
        "footprint": 1_200_000_000,
        "floor": 1.3e-6,
        "conditions": (FULL, FULL),
        "migrations": Migrations(PageCounts(), PageCounts(), "CUPTI"),
        "activity": Activity(source="CUPTI", set_aside=0),
    }
    return measurements.measurement(**given | changed)


def profile(*kernels: KernelUse, **changed: Any) -> TestProfile:
    return replace(
        TestProfile("test_it", "test_it.py::test_it", "", 5, kernels or (KERNEL,), tool="ncu"),
        **changed,
    )


def side(
    latency: float = 400e-6, kernels: tuple[KernelUse, ...] | None = (KERNEL,), **changed: Any
) -> SideFigures:
    """One side; `kernels=None` is one that nobody counted."""
    return SideFigures(
        measurement(latency, **changed), H100, None if kernels is None else profile(*kernels)
    )


def counted(kernel: KernelUse = KERNEL, **changed: Any) -> KernelUse:
    """A kernel with other figures; those of `times_` are multiplied."""
    plain = {name: value for name, value in changed.items() if not name.startswith("times_")}
    for name, factor in changed.items():
        if name.startswith("times_"):
            field = name.removeprefix("times_")
            value = getattr(kernel, field) * factor
            plain[field] = round(value) if isinstance(getattr(kernel, field), int) else value
    return replace(kernel, **plain)


def window(nbytes: int = 8 * MIB, hit_ratio: float = 1.0, set_aside: int = 12 * MIB) -> Window:
    return Window(nbytes, hit_ratio, set_aside)


def copies(*uses: CopyUse, **changed: Any) -> Activity:
    return Activity(copies=uses, source="CUPTI", set_aside=0, **changed)


def pages(faults: int = 0, moved: int = 0, ahead: int = 0, **changed: Any) -> Migrations:
    """Pages of one launch: `faults` of the GPU in a sixth as many groups, `moved` bytes to the device; `ahead` before it."""
    counts = PageCounts(
        gpu_faults=faults, gpu_groups=faults // 6, gpu_pages=faults, to_device=moved, **changed
    )
    return Migrations(PageCounts(to_device=ahead), counts, "CUPTI")


def why(base: SideFigures, head: SideFigures, *, noise: float = 0.002) -> Explanation:
    """The explanation, the slow-down known to a share `noise` of base."""
    was, now = base.measurement.latency, head.measurement.latency
    return explain(base, head, SlowDown(was, now, now - was - noise * was, now - was + noise * was))
