"""Page faults and migrations of managed memory: counts of a launch, added up from events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import field

from pytest_gpumem.records import Bytes, Count, Record, Seconds

_MOVES = ("to_device", "to_host", "between_devices")


class PageCounts(Record, frozen=True):
    """Counts between two moments."""

    gpu_faults: Count = 0  # Page faults of the GPU, duplicates included
    gpu_groups: Count = 0  # Groups in which the driver handled them
    gpu_pages: Count = 0  # Distinct pages that faulted on the GPU; the other faults are duplicates
    cpu_faults: Count = 0  # Page faults of the host
    to_device: Bytes = 0  # Bytes that moved from the host to the device
    to_host: Bytes = 0  # Bytes that moved from the device to the host
    between_devices: Bytes = 0  # Bytes that moved between devices
    mapped: Bytes | None = None
    """Bytes that the device mapped in place, without moving them; None where mappings are not
    counted."""
    causes: dict[str, Bytes] = field(default_factory=dict)
    """Bytes that moved, by cause: "prefetch", "fault", "speculation", "eviction", "access
    counters", "unknown"."""
    to_device_seconds: Seconds = 0.0
    """Seconds in which at least one copy to the device was in progress."""
    to_host_seconds: Seconds = 0.0  # Seconds in which at least one copy to the host was in progress

    @property
    def migrated(self) -> int:
        """Bytes that moved, in all directions."""
        return self.to_device + self.to_host + self.between_devices

    @property
    def to_device_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the device, which is the link's rate, or None."""
        if not self.to_device or not self.to_device_seconds:
            return None
        return self.to_device / self.to_device_seconds

    @property
    def to_host_bandwidth(self) -> float | None:
        """The same to the host."""
        if not self.to_host or not self.to_host_seconds:
            return None
        return self.to_host / self.to_host_seconds


class Migrations(Record, frozen=True):
    """An untimed pass that counts: pages are put back, then a launch runs."""

    before: PageCounts | None = None
    """Counts while inputs and pages are put back, which is not timed."""
    launch: PageCounts | None = None  # Counts during the launch
    source: str = ""  # Source of the counts, such as "CUPTI"
    not_counted: str | None = None  # Why nothing was counted; `before` and `launch` are None then


class PageEvent(NamedTuple):
    """One event of CUPTI."""

    kind: str  # field of `PageCounts`, such as "to_device"
    value: int  # bytes, or faults on one page that the driver handled together
    start: int  # nanoseconds
    end: int  # nanoseconds
    address: int  # first page
    why: str  # cause of a migration, or access that faulted


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add events up. `maps`: True if mappings are recorded too."""
    totals, last_end = Counter[str](), Counter[str]()
    seconds = dict.fromkeys(_MOVES, 0.0)
    causes: dict[str, int] = {}
    pages = []  # of each group of GPU faults
    if maps:
        totals["mapped"] = 0
    for event in sorted(events, key=lambda event: event.start):
        # A record of the CPU: one fault.
        totals[event.kind] += 1 if event.kind == "cpu_faults" else event.value
        if event.kind == "gpu_faults":
            pages.append(event.address)
        if event.kind in _MOVES:
            causes[event.why] = causes.get(event.why, 0) + event.value
            begin = max(event.start, last_end[event.kind])  # copies that overlap count once
            seconds[event.kind] += max(0, event.end - begin) / 1e9
            last_end[event.kind] = max(last_end[event.kind], event.end)
    return PageCounts(
        **totals,
        gpu_groups=len(pages),
        gpu_pages=len(set(pages)),
        causes=causes,
        to_device_seconds=seconds["to_device"],
        to_host_seconds=seconds["to_host"],
    )
