"""Pages of managed memory: where they are, how advice changes that, and what each access counts.

Pages are bytes, not a list: a launch that touches a share of an allocation touches that share of what lies on each side. Rules of
advice: CUDA C++ Programming Guide, Data Usage Hints; CUDA Runtime API, cudaMemAdvise and cudaMemDiscardBatchAsync.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from pytest_gpumem.devices.protocol import Advice
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.records.migrations import SHOWN_GROUPS, FaultGroup, PageCounts

PAGE_BYTES = 64 * 1024  # bytes of one GPU page fault


@dataclass(frozen=True)
class TouchedBytes:
    """Bytes that an access by the device moved or mapped."""

    moved: float = 0.0  # copied from the host
    evicted: float = 0.0  # copied to the host to make room
    fresh: float = 0.0  # mapped on the device without a copy: touched for the first time
    dropped: float = 0.0  # the same for discarded pages, each after a fault of its own
    mapped: float = 0.0  # mapped where they were, on the host, after a fault
    unshared: float = 0.0  # whose copies on the host were dropped by a write, after a fault
    remote: float = 0.0  # read or written on the host, across the link


@dataclass
class Pages:
    """The places of the pages of one managed allocation, in bytes; pages without a place were never touched."""

    nbytes: int
    room: float = math.inf  # bytes that the device can hold of them
    on_host: float = 0.0
    on_device: float = 0.0
    on_both: float = 0.0  # read-only copies on both sides
    mapped: float = 0.0  # of those on the host, mapped by the device
    discarded: float = 0.0  # of those on the host, without content
    read_mostly: bool = False
    preferred: str | None = None  # "host" or "device"
    accessed_by_device: bool = False

    @property
    def untouched(self) -> float:
        return max(0.0, self.nbytes - self.on_host - self.on_device - self.on_both)

    def advise(self, advice: Advice, to_host: bool, *, on: bool) -> None:
        """Set or unset an advice; nothing moves. Without ReadMostly, copies on both sides become one."""
        if advice is Advice.READ_MOSTLY:
            self.read_mostly = on
            if not on:
                kept, self.on_both = self.on_both, 0.0
                if self.preferred == "device":
                    self.on_device += kept
                else:
                    self.on_host += kept
        elif advice is Advice.PREFERRED_LOCATION:
            self.preferred = ("host" if to_host else "device") if on else None
            if self.preferred != "host" and not self.accessed_by_device:
                self.mapped = 0.0  # the next touch moves them
        elif not to_host:
            self.accessed_by_device = on
            self.mapped = self.on_host if on else 0.0

    def discard(self) -> None:
        """No content is of use; where the pages are stays as it is."""
        self.discarded = self.on_host

    def to_device(self) -> TouchedBytes:
        """A prefetch to the device. It undoes a discard, so the content is copied."""
        moved, fresh = self.on_host, self.untouched
        self._arrive(moved, fresh, copies=self.read_mostly)
        self.on_host = self.mapped = self.discarded = 0.0
        return TouchedBytes(moved=moved, fresh=fresh, evicted=self._evict())

    def to_host(self, *, writes: bool = False) -> float:
        """A prefetch to the host, or the host reads or writes everything; gives the bytes that cross the link."""
        moved = self.on_device
        if self.read_mostly and not writes:
            self.on_both += self.on_device
            self.on_host = self.nbytes - self.on_both
        else:
            self.on_host, self.on_both = float(self.nbytes), 0.0
        self.on_device = 0.0
        # Pages that did not move stay mapped, as on an H200.
        self.mapped = self.on_host if self.accessed_by_device else self.mapped
        self.discarded = 0.0
        return moved

    def touched_by_device(self, share: float, *, writes: bool) -> TouchedBytes:
        """A launch touches a share of the pages."""
        host, untouched = self.on_host * share, self.untouched
        populated = (
            min(untouched, max(0.0, share * self.nbytes - host - self.on_device - self.on_both))
            if share < 1.0
            else untouched
        )
        unshared = self.on_both * share if writes else 0.0
        self.on_both -= unshared
        self.on_device += unshared
        if self.accessed_by_device or self.preferred == "host":
            # Never touched pages come into being where they are preferred; the others stay on the host and are mapped.
            stays = populated if self.preferred == "host" else 0.0
            self.on_host += stays
            newly = 0.0 if self.accessed_by_device else max(0.0, host + stays - self.mapped)
            self.mapped = max(self.mapped, host + stays)
            self.on_device += populated - stays
            return TouchedBytes(
                fresh=populated - stays,
                mapped=newly,
                unshared=unshared,
                remote=host + stays,
                evicted=self._evict(),
            )
        dropped = self.discarded * share
        moved = host - dropped
        again = 0.0
        if self.nbytes > self.room:
            # Least recently used first, and more than fits: each page is evicted before its next use.
            again = min(self.on_device, share * self.nbytes)
            moved, self.on_device = moved + again, self.on_device - again
        self.on_host -= host
        self.discarded -= dropped
        self._arrive(moved, dropped + populated, copies=self.read_mostly and not writes)
        return TouchedBytes(
            moved=moved,
            fresh=populated,
            dropped=dropped,
            unshared=unshared,
            evicted=again + self._evict(),
        )

    def _arrive(self, moved: float, fresh: float, *, copies: bool) -> None:
        if copies:
            self.on_both += moved
        else:
            self.on_device += moved
        self.on_device += fresh

    def _evict(self) -> float:
        excess = max(0.0, self.on_device + self.on_both - self.room)
        self.on_device -= excess
        self.on_host += excess
        return excess


class PageLog:
    """Counts migrations and faults, and gives their time."""

    def __init__(self, sheet: Datasheet) -> None:
        self._sheet = sheet
        self._clear()

    def _clear(self) -> None:
        self._counts = defaultdict[str, float](float)  # by the field of `PageCounts`
        self._causes = defaultdict[str, float](float)
        self._shown: list[FaultGroup] = []

    @property
    def bandwidth(self) -> float:
        """The rate of migrations across the link, in bytes per second."""
        return self._sheet.pinned_bandwidth * self._sheet.migration_share

    def take(self) -> PageCounts:
        """Counts since the last call."""
        counts = self._counts
        faults = round(counts["gpu_faults"])
        found = PageCounts(
            gpu_faults=faults,
            gpu_groups=round(counts["gpu_groups"]),
            gpu_pages=faults,  # no duplicates here: the model does not know which warps touch a page together
            cpu_faults=round(counts["cpu_faults"]),
            to_device=round(counts["to_device"]),
            to_host=round(counts["to_host"]),
            mapped=round(counts["mapped"]),
            causes={cause: round(nbytes) for cause, nbytes in self._causes.items()},
            to_device_seconds=counts["to_device_seconds"],
            to_host_seconds=counts["to_host_seconds"],
            groups=tuple(self._shown),
        )
        self._clear()
        return found

    def faulted(
        self, address: int, touched: TouchedBytes, *, writes: bool, page_by_page: bool
    ) -> float:
        """A launch touched pages; gives the seconds that it lost."""
        sheet = self._sheet
        counted = sheet.page_by_page_faults if page_by_page else 1.0
        seconds = 0.0
        each = sheet.fault_group_time
        for nbytes, at_once, time in (
            (touched.moved, sheet.fault_group_bytes, each),
            (touched.mapped, sheet.fault_group_bytes, each),
            (touched.unshared, PAGE_BYTES, sheet.collapse_time),
            (touched.dropped, PAGE_BYTES, each),
        ):
            if nbytes > 0.0:
                groups = max(1.0, nbytes / at_once)
                seconds += groups * time
                self._groups(address, nbytes, counted * groups, writes)
        if touched.moved > 0.0:
            faults = math.floor(
                max(1.0, touched.moved / sheet.fault_group_bytes) * sheet.faults_per_group
            )
            faulted = min(touched.moved, float(faults * PAGE_BYTES))
            seconds += self._crossed("to_device", faulted, "fault") + self._crossed(
                "to_device", touched.moved - faulted, "speculation"
            )
        if touched.evicted > 0.0:
            seconds += self._crossed("to_host", touched.evicted, "eviction")
        if touched.fresh > 0.0:
            groups = max(1.0, touched.fresh / sheet.populate_bytes)
            seconds += groups * sheet.populate_time
            self._groups(address, touched.fresh, counted * groups, writes)
        self._counts["mapped"] += touched.mapped
        return seconds

    def prefetched(self, touched: TouchedBytes) -> float:
        """A prefetch to the device; gives its seconds."""
        seconds = self._crossed("to_device", touched.moved, "prefetch") if touched.moved else 0.0
        seconds += self._crossed("to_host", touched.evicted, "eviction") if touched.evicted else 0.0
        return seconds + touched.fresh / self._sheet.populate_bytes * self._sheet.populate_time

    def prefetched_to_host(self, moved: float) -> float:
        """A prefetch to the host; gives its seconds."""
        return self._crossed("to_host", moved, "prefetch") if moved else 0.0

    def host_touched(self, moved: float) -> float:
        """The host touched pages that were on the device; gives the seconds that it lost."""
        if not moved:
            return 0.0
        self._counts["cpu_faults"] += max(1, round(moved / self._sheet.cpu_fault_bytes))
        return self._crossed("to_host", moved, "fault")

    def _groups(self, address: int, nbytes: float, groups: float, writes: bool) -> None:
        count = math.ceil(groups)
        faults = min(groups * self._sheet.faults_per_group, max(1.0, nbytes / PAGE_BYTES))
        self._counts["gpu_groups"] += count
        self._counts["gpu_faults"] += faults
        shown = range(min(count, SHOWN_GROUPS - len(self._shown)))
        access = "write" if writes else "read"
        self._shown += [
            FaultGroup(address + int(i * nbytes / count), max(1, round(faults / count)), access)
            for i in shown
        ]

    def _crossed(self, way: str, nbytes: float, cause: str) -> float:
        seconds = nbytes / self.bandwidth
        self._counts[way] += nbytes
        self._counts[f"{way}_seconds"] += seconds
        self._causes[cause] += nbytes
        return seconds
