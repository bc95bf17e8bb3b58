"""Kernels, copies and memsets: all launches of one shape or all copies of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

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

    kernels: tuple[KernelUse, ...] = ()  # Kernels in the order of their first launch
    copies: tuple[CopyUse, ...] = ()  # Copies, the longest first
    memsets: tuple[CopyUse, ...] = ()  # Memsets, the longest first
    at_once: Nanoseconds = 0
    """Nanoseconds in which two kernels or more ran, by their starts and ends."""

    @property
    def busy(self) -> float:
        """Seconds of kernels, copies and memsets; kernels that run at once count once."""
        kernels = sum(kernel.nanoseconds for kernel in self.kernels) - self.at_once
        return (kernels + sum(copy.nanoseconds for copy in (*self.copies, *self.memsets))) * 1e-9


def kernels_together(launches: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """The sums of kernels of one name and shape, in the order of their first launch."""
    sums: dict[tuple[object, ...], KernelUse] = {}
    for launch in launches:
        shape = (
            launch.name,
            launch.grid,
            launch.block,
            launch.registers,
            launch.shared,
            launch.local,
        )
        before = sums.get(shape)
        if before is None:
            sums[shape] = launch
            continue
        nanoseconds = before.nanoseconds + launch.nanoseconds
        sums[shape] = replace(
            before, launches=before.launches + launch.launches, nanoseconds=nanoseconds
        )
    return tuple(sums.values())


def copies_together(copies: Iterable[CopyUse]) -> tuple[CopyUse, ...]:
    """The sums of copies or memsets of one kind between the same kinds of memory, the longest first."""
    groups: dict[tuple[str, str, str], list[CopyUse]] = {}
    for one in copies:
        groups.setdefault((one.kind, one.source, one.destination), []).append(one)
    together = []
    for group in groups.values():
        count, nbytes = sum(copy.count for copy in group), sum(copy.nbytes for copy in group)
        nanoseconds = sum(copy.nanoseconds for copy in group)
        together.append(replace(group[0], count=count, nbytes=nbytes, nanoseconds=nanoseconds))
    # The sort is stable: equal times keep their order.
    return tuple(sorted(together, key=lambda copy: -copy.nanoseconds))
