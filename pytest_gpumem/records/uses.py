"""Kernels, copies and memsets: all launches of one shape or all copies of one kind, with their counters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeVar

from msgspec.structs import replace

from pytest_gpumem.records.record import Bytes, Count, Launches, Nanoseconds, Record

COPY_KINDS = ("H2D", "D2H", "D2D", "P2P", "H2H", "H2A", "A2H", "A2A", "A2D", "D2A", "other")
"""Direction of a copy: host, device, array, or one device to another ("P2P"). Migrations of managed memory are not among them."""

MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "unknown")
"""Kind of memory on one side of a copy (CUPTI, `CUpti_ActivityMemoryKind`)."""


def at_once(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that lies in two intervals or more, each with its start and end."""
    moments = sorted(moment for start, end in intervals for moment in ((start, 1), (end, -1)))
    running, total = 0, 0.0
    for (moment, change), (following, _) in pairwise(moments):
        running += change
        total += following - moment if running > 1 else 0.0
    return total


class KernelUse(Record, frozen=True):
    """All launches of one kernel with one shape."""

    name: str  # Demangled name, with its template and parameter types where the tool gives them
    grid: tuple[int, int, int]  # Blocks in x, y and z
    block: tuple[int, int, int]  # Threads of a block in x, y and z
    launches: Launches  # Launches with this shape
    nanoseconds: Nanoseconds  # Running time in nanoseconds, summed over `launches`
    registers: int | None = None  # Registers of a thread
    shared: int | None = None  # Bytes of shared memory of a block, static and dynamic together
    local: int | None = None  # Bytes of local memory of a thread: spilled registers and stack
    dram_read: int | None = None  # Bytes read from DRAM, summed over `launches`
    dram_written: int | None = None  # Bytes written to DRAM, summed over `launches`
    l2_read: int | None = None
    """Bytes that the SMs read from L2, in whole sectors of 32 bytes, summed over `launches`."""
    l2_written: int | None = None
    """Bytes that the SMs wrote to L2, in whole sectors of 32 bytes, summed over `launches`."""
    l2_hit_rate: float | None = None
    """L2 hit rate of all sectors, 0 to 1: the mean over `launches`, weighted by their bytes where these are known."""
    l2_read_hit_rate: float | None = None
    """L2 hit rate of reads of the SMs, 0 to 1. The overall rate includes writes, which nearly always hit."""
    sectors_per_request: float | None = None
    """Sectors of 32 bytes that one load of a warp from global memory touches: 4 for adjacent 4-byte elements, 32 at worst."""
    sectors_per_store: float | None = None  # The same for stores to global memory
    used_of_load: float | None = None
    """Share of the bytes of these sectors that the threads load, 0 to 1: 1 for adjacent elements, 0.5 at a stride of two. Wider elements
    take more sectors too; this share tells them from scattered ones."""
    used_of_store: float | None = None  # The same for stores to global memory
    l1_load: int | None = None
    """Bytes of the sectors that loads of global memory touch, before L1 serves any of them, summed over `launches`."""
    l1_store: int | None = None  # The same for stores to global memory
    occupancy: float | None = None
    """Achieved occupancy, 0 to 1: active warps over the most that an SM can have, the mean over the time in which SMs were active."""
    sm_clock_hz: float | None = None  # SM clock in hertz while it ran, the mean over `launches`
    memory_clock_hz: float | None = None
    """Memory clock in hertz while it ran, the mean over `launches`."""


class CopyUse(Record, frozen=True):
    """All copies of one kind between the same kinds of memory, or all memsets of one kind of memory."""

    kind: str  # One of `COPY_KINDS`; "memset" for a memset
    source: str  # Memory that is read, one of `MEMORY_KINDS`; "" for a memset
    destination: str  # Memory that is written, one of `MEMORY_KINDS`
    count: Count  # Number of copies or memsets
    nbytes: Bytes  # Bytes, summed over `count`
    nanoseconds: Nanoseconds  # Running time in nanoseconds, summed over `count`; copies that overlap count each


class Activity(Record, frozen=True):
    """What some work ran, traced. Tracing slows it down: its times compare the parts with each other and are not its latency."""

    kernels: tuple[
        KernelUse, ...
    ] = ()  # Kernels in the order of their first launch; hardware counters are None
    copies: tuple[CopyUse, ...] = ()  # Copies, the longest first
    memsets: tuple[CopyUse, ...] = ()  # Memsets, the longest first
    at_once: Nanoseconds = 0
    """Nanoseconds in which two kernels or more ran, by their starts and ends."""

    @property
    def busy(self) -> float:
        """Seconds of kernels, copies and memsets; kernels that run at once count once."""
        kernels = sum(kernel.nanoseconds for kernel in self.kernels) - self.at_once
        return (kernels + sum(copy.nanoseconds for copy in (*self.copies, *self.memsets))) * 1e-9


_Use = TypeVar("_Use", KernelUse, CopyUse)


def kernels_together(launches: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """The sums of kernels of one name and shape, in the order of their first launch."""
    groups: dict[tuple[object, ...], list[KernelUse]] = {}
    for one in launches:
        groups.setdefault(
            (one.name, one.grid, one.block, one.registers, one.shared, one.local), []
        ).append(one)
    return tuple(_one_kernel(group) for group in groups.values())


def _one_kernel(group: list[KernelUse]) -> KernelUse:
    def of(name: str) -> list[Any]:
        return [getattr(one, name) for one in group]

    asked = [
        None if one.l2_read is None or one.l2_written is None else one.l2_read + one.l2_written
        for one in group
    ]
    weighted_by = (
        (asked, ("l2_hit_rate",)),
        (of("l2_read"), ("l2_read_hit_rate", "sectors_per_request", "used_of_load")),
        (of("l2_written"), ("sectors_per_store", "used_of_store")),
        (of("nanoseconds"), ("occupancy", "sm_clock_hz", "memory_clock_hz")),
    )
    sums = (
        "launches",
        "nanoseconds",
        "dram_read",
        "dram_written",
        "l2_read",
        "l2_written",
        "l1_load",
        "l1_store",
    )
    means = {name: _mean(of(name), weights) for weights, names in weighted_by for name in names}
    return replace(group[0], **{name: _sum(of(name)) for name in sums}, **means)


def copies_together(copies: Iterable[CopyUse]) -> tuple[CopyUse, ...]:
    """The sums of copies or memsets of one kind between the same kinds of memory, the longest first."""
    groups: dict[tuple[str, str, str], list[CopyUse]] = {}
    for one in copies:
        groups.setdefault((one.kind, one.source, one.destination), []).append(one)
    sums = ("count", "nbytes", "nanoseconds")
    return longest_first(
        replace(group[0], **{name: sum(getattr(one, name) for one in group) for name in sums})
        for group in groups.values()
    )


def clock(kernels: Iterable[KernelUse], which: str) -> float | None:
    """The mean of a clock over kernels, weighted by their time; `which` is "sm_clock_hz" or "memory_clock_hz"."""
    known = [kernel for kernel in kernels if getattr(kernel, which) is not None]
    return _mean(
        [getattr(kernel, which) for kernel in known], [kernel.nanoseconds for kernel in known]
    )


def longest_first(uses: Iterable[_Use]) -> tuple[_Use, ...]:
    """The uses by their time."""
    # The sort is stable: equal times keep their order.
    return tuple(sorted(uses, key=lambda one: -one.nanoseconds))


def _sum(figures: list[int | None]) -> int | None:
    known = [one for one in figures if one is not None]
    return sum(known) if len(known) == len(figures) else None


def _mean(figures: list[float | None], weights: list[int | None]) -> float | None:
    """A weighted mean; the plain one if a weight is unknown or 0, and None if a figure is unknown."""
    known = [one for one in figures if one is not None]
    if not known or len(known) < len(figures):
        return None
    whole = [one for one in weights if one]
    if len(whole) < len(weights):
        return sum(known) / len(known)
    return sum(value * weight for value, weight in zip(known, whole, strict=True)) / sum(whole)
