"""Pages of managed memory: where they are, how advice changes that, and what each access counts.

The pages of an allocation lie together. Rules of advice: CUDA C++ Programming Guide, Data Usage
Hints; CUDA Runtime API, cudaMemAdvise and cudaMemDiscardBatchAsync.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pytest_gpumem.devices.protocol import Advice
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.records.migrations import SHOWN_GROUPS, FaultGroup, PageCounts
from pytest_gpumem.units import KiB, MiB

PAGE_BYTES = 64 * KiB  # of a page fault of the GPU
POPULATED_BYTES = 2 * MiB  # that the device maps at a first touch
HOST_PAGE_BYTES = 16 * MiB // 48  # that a page fault of the host brings
GROUP_PAGES = 6  # page faults that the driver handles together
SHARED_FAULTS = 16  # of the warps that touch a page at once


@dataclass(frozen=True)
class Touched:
    """Bytes that an access by the device moved or mapped."""

    moved: float = 0.0  # copied from the host
    evicted: float = 0.0  # copied to the host to make room
    fresh: float = 0.0  # touched for the first time
    faulted: float = 0.0  # whose pages faulted
    mapped: float = 0.0  # mapped where they are, on the host
    remote: float = 0.0  # read or written across the link


@dataclass
class Pages:
    """The pages of one managed allocation."""

    room: float = math.inf  # bytes that the device can hold of them
    place: str | None = None  # "host", "device", or "both" for read-only copies; None: untouched
    mapped: bool = False  # the device has those on the host mapped
    discarded: bool = False  # they are on the host, without content
    read_mostly: bool = False
    preferred: str | None = None  # "host" or "device"
    accessed_by_device: bool = False

    def advise(self, advice: Advice, to_host: bool, *, on: bool) -> None:
        """Set or unset an advice; nothing moves, but two copies end as a single copy."""
        if advice is Advice.READ_MOSTLY:
            self.read_mostly = on
            if not on and self.place == "both":
                self.place = self.preferred or "host"
        elif advice is Advice.PREFERRED_LOCATION:
            self.preferred = None
            if on:
                self.preferred = "host" if to_host else "device"
            self.mapped = False
        elif not to_host:
            self.accessed_by_device = self.mapped = on

    def discard(self) -> None:
        """Drop the content; the pages stay where they are."""
        self.discarded = self.place == "host"

    def to_device(self, nbytes: float) -> Touched:
        """Prefetch to the device. It undoes a discard, so that the content is copied."""
        if self.place is None:
            self.place = "device"
            return Touched(fresh=nbytes)
        if self.place != "host":
            return Touched()
        self.place = "both" if self.read_mostly else "device"
        self.mapped = self.discarded = False
        return Touched(moved=nbytes, evicted=max(0.0, nbytes - self.room))

    def to_host(self, nbytes: float, *, writes: bool = False) -> float:
        """Prefetch to the host, or an access by it. Return the bytes that cross the link."""
        before, self.place = self.place, "host"
        self.discarded = False
        if before in ("device", "both") and self.read_mostly and not writes:
            self.place = "both"
        return nbytes if before == "device" else 0.0

    def touched_by_device(self, nbytes: float, *, writes: bool) -> Touched:
        """A launch touches `nbytes` of them."""
        before = self.place
        if before is None and self.preferred == "host":
            before = self.place = "host"
        if before is None:
            self.place = "device"
            return Touched(fresh=nbytes)
        if before == "both":
            if not writes:
                return Touched()
            self.place = "device"
            return Touched(faulted=nbytes)  # the copy on the host is dropped
        beyond = max(0.0, nbytes - self.room)
        if before == "device":
            # The least recently used page goes first: where some are too many, each is gone.
            if not beyond:
                return Touched()
            return Touched(moved=nbytes, evicted=nbytes, faulted=nbytes)
        if self.accessed_by_device or self.preferred == "host":
            if self.mapped:
                return Touched(remote=nbytes)
            self.mapped = True
            return Touched(mapped=nbytes, faulted=nbytes, remote=nbytes)
        self.place = "device"
        if self.discarded:
            self.discarded = False
            return Touched(faulted=nbytes)
        if self.read_mostly and not writes:
            self.place = "both"
        return Touched(moved=nbytes, evicted=beyond, faulted=nbytes)


class PageLog:
    """Counts faults and migrations, and gives their time: so much a page, and the link's a byte."""

    def __init__(self, sheet: Datasheet) -> None:
        self._sheet = sheet
        self._bandwidth = sheet.link_bandwidth * sheet.migration_share
        self._clear()

    def _clear(self) -> None:
        self._counts: Counter[str] = Counter()  # by the field of `PageCounts`
        self._seconds = {"to_device": 0.0, "to_host": 0.0}
        self._causes: Counter[str] = Counter()
        self._groups: list[FaultGroup] = []

    def take(self) -> PageCounts:
        """Return the counts since the last call."""
        counts = PageCounts(
            **{"mapped": 0, **self._counts},
            causes=dict(self._causes),
            to_device_seconds=self._seconds["to_device"],
            to_host_seconds=self._seconds["to_host"],
            groups=tuple(self._groups),
        )
        self._clear()
        return counts

    def touched(self, address: int, touched: Touched, *, writes: bool, page_by_page: bool) -> float:
        """A launch touched pages. Return the seconds that it lost."""
        faulting = math.ceil(touched.faulted / PAGE_BYTES)
        populated = math.ceil(touched.fresh / POPULATED_BYTES)
        each = 1 if page_by_page else SHARED_FAULTS
        groups = math.ceil((faulting + populated) / GROUP_PAGES)
        self._counts["gpu_pages"] += faulting + populated
        self._counts["gpu_faults"] += (faulting + populated) * each
        self._counts["gpu_groups"] += groups
        self._counts["mapped"] += round(touched.mapped)
        for number in range(min(groups, SHOWN_GROUPS - len(self._groups))):
            page = address + number * GROUP_PAGES * PAGE_BYTES
            self._groups.append(FaultGroup(page, GROUP_PAGES * each, "write" if writes else "read"))
        seconds = faulting * self._sheet.fault + populated * self._sheet.populate
        seconds += self.moved("to_device", touched.moved, "fault")
        return seconds + self.moved("to_host", touched.evicted, "eviction")

    def prefetched(self, touched: Touched) -> float:
        """A prefetch to the device. Return its seconds."""
        seconds = self.moved("to_device", touched.moved, "prefetch")
        seconds += self.moved("to_host", touched.evicted, "eviction")
        return seconds + touched.fresh / POPULATED_BYTES * self._sheet.populate

    def host_touched(self, nbytes: float) -> float:
        """The host touched pages that were on the device. Return the seconds that it lost."""
        self._counts["cpu_faults"] += math.ceil(nbytes / HOST_PAGE_BYTES)
        return self.moved("to_host", nbytes, "fault")

    def moved(self, direction: str, nbytes: float, cause: str) -> float:
        """Pages moved. Return the seconds that the link needs."""
        if not nbytes:
            return 0.0
        seconds = nbytes / self._bandwidth
        self._counts[direction] += round(nbytes)
        self._seconds[direction] += seconds
        self._causes[cause] += round(nbytes)
        return seconds
