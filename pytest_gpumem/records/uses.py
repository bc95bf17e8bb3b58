"""Kernels, copies and memsets: all launches of one shape or all copies of one kind, with their counters."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from pytest_gpumem.records.record import Bytes, Count, Launches, Nanoseconds, Record

COPY_KINDS = ("H2D", "D2H", "D2D", "P2P", "H2H", "H2A", "A2H", "A2A", "A2D", "D2A", "other")
"""Direction of a copy: host, device, array, or one device to another ("P2P"). Migrations of managed memory are not among them; they are in
`TestProfile.migrations`."""

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

    name: str
    """Demangled name, with its template and parameter types where the tool gives them."""
    grid: tuple[int, int, int]
    """Blocks in x, y and z."""
    block: tuple[int, int, int]
    """Threads of a block in x, y and z."""
    launches: Launches
    """Launches with this shape."""
    nanoseconds: Nanoseconds
    """Running time in nanoseconds, summed over `launches`."""
    registers: int | None = None
    """Registers of a thread."""
    shared: int | None = None
    """Bytes of shared memory of a block, static and dynamic together."""
    local: int | None = None
    """Bytes of local memory of a thread: spilled registers and stack."""
    dram_read: int | None = None
    """Bytes read from DRAM, summed over `launches`."""
    dram_written: int | None = None
    """Bytes written to DRAM, summed over `launches`."""
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
    sectors_per_store: float | None = None
    """The same for stores to global memory."""
    used_of_load: float | None = None
    """Share of the bytes of these sectors that the threads load, 0 to 1: 1 for adjacent elements, 0.5 at a stride of two. Wider elements
    take more sectors too; this share tells them from scattered ones."""
    used_of_store: float | None = None
    """The same for stores to global memory."""
    l1_load: int | None = None
    """Bytes of the sectors that loads of global memory touch, before L1 serves any of them, summed over `launches`."""
    l1_store: int | None = None
    """The same for stores to global memory."""
    occupancy: float | None = None
    """Achieved occupancy, 0 to 1: active warps over the most that an SM can have, the mean over the time in which SMs were active."""
    sm_clock_hz: float | None = None
    """SM clock in hertz while it ran, the mean over `launches`."""
    memory_clock_hz: float | None = None
    """Memory clock in hertz while it ran, the mean over `launches`."""

    @property
    def nanoseconds_each(self) -> float:
        """Running time of one launch in nanoseconds."""
        return self.nanoseconds / self.launches


class CopyUse(Record, frozen=True):
    """All copies of one kind between the same kinds of memory, or all memsets of one kind of memory."""

    kind: str
    """One of `COPY_KINDS`; "memset" for a memset."""
    source: str
    """Memory that is read, one of `MEMORY_KINDS`; "" for a memset."""
    destination: str
    """Memory that is written, one of `MEMORY_KINDS`."""
    count: Count
    """Number of copies or memsets."""
    nbytes: Bytes
    """Bytes, summed over `count`."""
    nanoseconds: Nanoseconds
    """Running time in nanoseconds, summed over `count`; copies that overlap count each."""


class Activity(Record, frozen=True):
    """One untimed pass of a measurement (`--gpumem-explain`) that traces a single launch.

    Tracing slows a launch down: its times compare the parts with each other and are not the latency of the launch.
    """

    kernels: tuple[KernelUse, ...] = ()
    """Kernels of the launch in the order of their first launch; hardware counters are None."""
    copies: tuple[CopyUse, ...] = ()
    """Copies of the launch, the longest first."""
    memsets: tuple[CopyUse, ...] = ()
    """Memsets of the launch, the longest first."""
    at_once: Nanoseconds = 0
    """Nanoseconds in which two kernels or more ran, by their starts and ends."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Name and kind of memory of each buffer argument that is not plain device memory, such as ("source", "pageable")."""
    set_aside: int | None = None
    """Bytes of L2 that are set aside, whether or not a window uses them; None where this is unknown."""
    source: str = ""
    """Source of the trace: "CUPTI" or "the model"."""
    not_counted: str | None = None
    """Why kernels, copies and memsets were not traced; they are empty then."""
