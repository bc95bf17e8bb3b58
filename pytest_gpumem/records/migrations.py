"""Page faults and migrations of managed memory: of one launch, and as counted from the single events of CUPTI and Nsight Systems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import field

from pytest_gpumem.records.record import Bytes, Count, Record, Seconds

SHOWN_GROUPS = 32
"""Groups of GPU page faults that are kept with their addresses; the totals count all groups."""

CAUSES = ("prefetch", "fault", "speculation", "eviction", "access counters", "unknown")
"""Why pages move (CUPTI, `CUpti_ActivityUnifiedMemoryMigrationCause`): a call of `cudaMemPrefetchAsync`; a page fault; the driver fetches
neighbours of a page that faulted; the device needs room; the hardware's access counters ask for it; the driver gives no cause."""


class FaultGroup(Record, frozen=True):
    """GPU page faults that the driver handles together, as one line of nvprof's trace shows them (Unified memory, 2.7.2)."""

    address: int  # Page that faults
    faults: int  # Faults on it. All but one are duplicates, which the driver filters.
    access: str  # Access that faults: "read", "write", "atomic", "prefetch" or "unknown"


class PageCounts(Record, frozen=True):
    """Counts between two moments."""

    gpu_faults: Count = 0  # Page faults of the GPU, duplicates included
    gpu_groups: Count = 0  # Groups in which the driver handled them
    gpu_pages: Count = 0  # Distinct pages that faulted on the GPU; the other faults are duplicates
    cpu_faults: Count = 0  # Page faults of the host
    to_device: Bytes = 0  # Bytes that moved from the host to the device
    to_host: Bytes = 0  # Bytes that moved from the device to the host
    between_devices: Bytes = 0  # Bytes that moved from one device to another
    mapped: Bytes | None = None
    """Bytes that the device mapped in place, without moving them; None where mappings are not
    counted."""
    causes: dict[str, Bytes] = field(
        default_factory=dict
    )  # Bytes that moved, by cause: the keys are `CAUSES`
    to_device_seconds: Seconds = 0.0
    """Seconds in which at least one copy to the device was in progress."""
    to_host_seconds: Seconds = 0.0  # Seconds in which at least one copy to the host was in progress
    groups: tuple[FaultGroup, ...] = ()
    """The first groups of GPU page faults, at most `SHOWN_GROUPS`, in the order in which the driver handled them."""

    @property
    def migrated(self) -> int:
        """Bytes that moved, in all directions."""
        return self.to_device + self.to_host + self.between_devices

    @property
    def duplicates(self) -> int:
        """GPU page faults on a page after its first."""
        return self.gpu_faults - self.gpu_pages

    @property
    def to_device_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the device; None where none did. It is the rate of the link, not of the kernel."""
        return (
            self.to_device / self.to_device_seconds
            if self.to_device and self.to_device_seconds
            else None
        )

    @property
    def to_host_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the host; None where none did."""
        return (
            self.to_host / self.to_host_seconds if self.to_host and self.to_host_seconds else None
        )


class Migrations(Record, frozen=True):
    """One untimed counting pass of a measurement: pages are put back, then one launch runs."""

    before: PageCounts | None = None
    """Counts while inputs and pages are put back, which is not timed."""
    launch: PageCounts | None = None  # Counts during the launch
    source: str = ""  # Source of the counts, such as "CUPTI"
    not_counted: str | None = None  # Why nothing was counted; `before` and `launch` are None then


TO_DEVICE, TO_HOST, BETWEEN_DEVICES = "to device", "to host", "between devices"
GPU_FAULT, CPU_FAULT, MAPPED = "GPU fault", "CPU fault", "mapped"


class PageEvent(NamedTuple):
    """One event."""

    kind: str  # `TO_DEVICE`, `TO_HOST` or `BETWEEN_DEVICES` for pages that moved, `GPU_FAULT`, `CPU_FAULT` or `MAPPED`
    value: int  # Bytes that moved or were mapped; faults on one page that the driver handled together; of a CPU fault it means nothing
    start: int  # Nanoseconds
    end: int  # Nanoseconds
    address: int  # First page
    why: str  # Cause of a migration, one of `records.migrations.CAUSES`, or access that faulted, as `FaultGroup.access`


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add events up. `maps`: True if mappings are recorded too."""
    by_kind: dict[str, list[PageEvent]] = {}
    for one in sorted(events, key=lambda e: e.start):
        by_kind.setdefault(one.kind, []).append(one)
    faults = by_kind.get(GPU_FAULT, [])
    down, up, across = (by_kind.get(way, []) for way in (TO_DEVICE, TO_HOST, BETWEEN_DEVICES))
    causes: dict[str, int] = {}
    for one in (*down, *up, *across):
        causes[one.why] = causes.get(one.why, 0) + one.value
    return PageCounts(
        gpu_faults=sum(one.value for one in faults),
        gpu_groups=len(faults),
        gpu_pages=len({one.address for one in faults}),
        cpu_faults=len(by_kind.get(CPU_FAULT, [])),
        to_device=sum(one.value for one in down),
        to_host=sum(one.value for one in up),
        between_devices=sum(one.value for one in across),
        mapped=sum(one.value for one in by_kind.get(MAPPED, [])) if maps else None,
        causes=causes,
        to_device_seconds=busy(down),
        to_host_seconds=busy(up),
        groups=tuple(FaultGroup(one.address, one.value, one.why) for one in faults[:SHOWN_GROUPS]),
    )


def busy(events: Sequence[PageEvent]) -> float:
    """Seconds in which at least one of the copies was in progress; the events are in the order of their starts."""
    total = until = 0
    for one in events:
        total += max(0, one.end - max(one.start, until))
        until = max(until, one.end)
    return total / 1e9
