"""Page faults and migrations of managed memory during one launch."""

from __future__ import annotations

from msgspec import field

from pytest_gpumem.records.record import Bytes, Count, Record, Seconds

SHOWN_GROUPS = 32
"""Groups of GPU page faults that are kept with their addresses; the totals count all groups."""

CAUSES = ("prefetch", "fault", "speculation", "eviction", "access counters", "unknown")
"""Why pages move (CUPTI, `CUpti_ActivityUnifiedMemoryMigrationCause`): a call of `cudaMemPrefetchAsync`; a page fault; the driver fetches
neighbours of a page that faulted; the device needs room; the hardware's access counters ask for it; the driver gives no cause."""


class FaultGroup(Record, frozen=True):
    """GPU page faults that the driver handles together, as one line of nvprof's trace shows them (Unified memory, 2.7.2)."""

    address: int
    """Page that faults."""
    faults: int
    """Faults on it. All but one are duplicates, which the driver filters."""
    access: str
    """Access that faults: "read", "write", "atomic", "prefetch" or "unknown"."""


class PageCounts(Record, frozen=True):
    """Counts between two moments."""

    gpu_faults: Count = 0
    """Page faults of the GPU, duplicates included."""
    gpu_groups: Count = 0
    """Groups in which the driver handled them."""
    gpu_pages: Count = 0
    """Distinct pages that faulted on the GPU; the other faults are duplicates."""
    cpu_faults: Count = 0
    """Page faults of the host."""
    to_device: Bytes = 0
    """Bytes that moved from the host to the device."""
    to_host: Bytes = 0
    """Bytes that moved from the device to the host."""
    between_devices: Bytes = 0
    """Bytes that moved from one device to another."""
    mapped: Bytes | None = None
    """Bytes that the device mapped in place, without moving them; None where mappings are not counted."""
    causes: dict[str, Bytes] = field(default_factory=dict)
    """Bytes that moved, by cause: the keys are `CAUSES`."""
    to_device_seconds: Seconds = 0.0
    """Seconds in which at least one copy to the device was in progress."""
    to_host_seconds: Seconds = 0.0
    """Seconds in which at least one copy to the host was in progress."""
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
        return self.to_device / self.to_device_seconds if self.to_device and self.to_device_seconds else None

    @property
    def to_host_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the host; None where none did."""
        return self.to_host / self.to_host_seconds if self.to_host and self.to_host_seconds else None


class Migrations(Record, frozen=True):
    """One untimed counting pass of a measurement: pages are put back, then one launch runs."""

    before: PageCounts | None = None
    """Counts while inputs and pages are put back, which is not timed."""
    launch: PageCounts | None = None
    """Counts during the launch."""
    source: str = ""
    """Source of the counts, such as "CUPTI"."""
    not_counted: str | None = None
    """Why nothing was counted; `before` and `launch` are None then."""
