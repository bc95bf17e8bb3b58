"""Kernels, copies and memsets: all launches of one shape or all copies of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from msgspec.structs import replace

from pytest_gpumem.records.record import Bytes, Count, Launches, Nanoseconds, Record

COPY_KINDS = ("H2D", "D2H", "D2D", "P2P", "H2H", "H2A", "A2H", "A2A", "A2D", "D2A", "other")
"""Direction of a copy: host, device, array, or one device to another ("P2P"). Migrations of managed
memory are not among them."""

MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "unknown")
"""Kind of memory on one side of a copy (CUPTI, `CUpti_ActivityMemoryKind`)."""


def at_once(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the time that lies in two intervals or more, each with its start and end."""
    moments = []
    for start, end in intervals:
        moments += [(start, 1), (end, -1)]
    moments.sort()
    running, total = 0, 0.0
    for (moment, change), (following, _) in pairwise(moments):
        running += change
        if running > 1:
            total += following - moment
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


class CopyUse(Record, frozen=True):
    """All copies of one kind between the same kinds of memory, or all memsets of one kind of
    memory."""

    kind: str  # One of `COPY_KINDS`; "memset" for a memset
    source: str  # Memory that is read, one of `MEMORY_KINDS`; "" for a memset
    destination: str  # Memory that is written, one of `MEMORY_KINDS`
    count: Count  # Number of copies or memsets
    nbytes: Bytes  # Bytes, summed over `count`
    # Running time in nanoseconds, summed over `count`; copies that overlap count each
    nanoseconds: Nanoseconds


class Activity(Record, frozen=True):
    """What some work ran, traced. Tracing slows it down: its times compare the parts with each
    other and are not its latency."""

    kernels: tuple[KernelUse, ...] = ()  # Kernels in the order of their first launch
    copies: tuple[CopyUse, ...] = ()  # Copies, the longest first
    memsets: tuple[CopyUse, ...] = ()  # Memsets, the longest first
    at_once: Nanoseconds = 0
    """Nanoseconds in which two kernels or more ran, by their starts and ends."""

    @property
    def busy(self) -> float:
        """Seconds of kernels, copies and memsets; kernels that run at once count once."""
        kernels = sum(kernel.nanoseconds for kernel in self.kernels)
        copies = sum(copy.nanoseconds for copy in (*self.copies, *self.memsets))
        return (kernels - self.at_once + copies) * 1e-9


def kernels_together(launches: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """Return the sums of kernels of one name and shape, in the order of their first launch."""
    sums: dict[KernelUse, KernelUse] = {}
    for launch in launches:
        shape = replace(launch, launches=1, nanoseconds=0)
        total = sums.get(shape)
        if total is None:
            sums[shape] = launch
        else:
            count, nanoseconds = total.launches + launch.launches, total.nanoseconds
            nanoseconds += launch.nanoseconds
            sums[shape] = replace(total, launches=count, nanoseconds=nanoseconds)
    return tuple(sums.values())


def copies_together(copies: Iterable[CopyUse]) -> tuple[CopyUse, ...]:
    """Return the sums of copies or memsets of one kind between the same kinds of memory, the
    longest first."""
    sums: dict[CopyUse, CopyUse] = {}
    for copy in copies:
        kind = replace(copy, count=0, nbytes=0, nanoseconds=0)
        total = sums.get(kind, kind)
        sums[kind] = replace(
            total,
            count=total.count + copy.count,
            nbytes=total.nbytes + copy.nbytes,
            nanoseconds=total.nanoseconds + copy.nanoseconds,
        )
    return tuple(sorted(sums.values(), key=lambda copy: -copy.nanoseconds))
