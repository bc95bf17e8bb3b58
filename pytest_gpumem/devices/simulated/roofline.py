"""The time of work on the simulated device: a roofline with seeded noise.

A kernel takes a launch's time plus that of its slowest part: bytes over the bandwidth of what
serves them (DRAM; L2 for arrays that an earlier launch left there; the host link), cycles of the
SMs, or a chain of dependent accesses. Page faults and migrations come on top.

The pages of a managed allocation lie together. Advice matters where it keeps pages on the host
(CUDA C++ Programming Guide, Data Usage Hints).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any

from pytest_gpumem.devices.protocol import AccessProperty, Advice, Allocation, WindowSpec
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.kernels.kernel import SECTORS_COALESCED, Access
from pytest_gpumem.records.what_ran import PageCounts
from pytest_gpumem.units import KiB, MiB

PAGE_BYTES = 64 * KiB  # of a page fault of the GPU
HOST_PAGE_BYTES = 16 * MiB // 48  # that a page fault of the host brings
GROUP_PAGES = 6  # page faults that the driver handles together
SHARED_FAULTS = 16  # of the warps that touch a page at once


class Pages:
    """The pages of a managed allocation."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self.place: str | None = None  # "host" or "device"; None: untouched
        self.mapped = False  # the device has those on the host mapped
        self._prefers_host = False
        self._accessed_by_device = False

    def advise(self, advice: Advice, to_host: bool, *, on: bool) -> None:
        if advice is Advice.PREFERRED_LOCATION:
            self._prefers_host = on and to_host
            self.mapped = False
        elif advice is Advice.ACCESSED_BY and not to_host:
            self._accessed_by_device = self.mapped = on

    def prefetch(self, nbytes: float, *, to_host: bool) -> float:
        """The seconds of the link."""
        place = "host" if to_host else "device"
        before, self.place = self.place, place
        if before in (None, place):
            return 0.0
        self.mapped = self.mapped and to_host
        return self._roofline.migrate(place, nbytes, "prefetch")

    def touched_by_host(self, nbytes: float) -> float:
        """The seconds that the host loses."""
        before, self.place = self.place, "host"
        if before != "device":
            return 0.0
        self._roofline.page_counts["cpu_faults"] += math.ceil(nbytes / HOST_PAGE_BYTES)
        return self._roofline.migrate("host", nbytes, "fault")

    def touched_by_device(self, nbytes: float, *, page_by_page: bool) -> tuple[float, float]:
        """The seconds that a launch loses, and the bytes of the link."""
        if self.place is None:
            self.place = "host" if self._prefers_host else "device"
        if self.place == "device":
            return 0.0, 0.0
        if self.mapped:
            return 0.0, nbytes
        counts, pages = self._roofline.page_counts, math.ceil(nbytes / PAGE_BYTES)
        counts["gpu_pages"] += pages
        counts["gpu_faults"] += pages if page_by_page else pages * SHARED_FAULTS
        counts["gpu_groups"] += math.ceil(pages / GROUP_PAGES)
        seconds = pages * self._roofline.sheet.fault
        if self._prefers_host or self._accessed_by_device:
            self.mapped = True
            counts["mapped"] += round(nbytes)
            return seconds, nbytes
        self.place = "device"
        return seconds + self._roofline.migrate("device", nbytes, "fault"), 0.0


@dataclass(eq=False)
class Use:
    """The accesses of a launch to an allocation, in bytes that move."""

    allocation: Allocation
    distinct: float = 0.0  # for the distinct bytes touched
    repeated: float = 0.0  # for the same bytes again
    lines: float = 0.0  # in L2, until the next launch comes to the same ones
    page_by_page: bool = False
    through_l1: bool = False

    def add(self, access: Access) -> None:
        """Add an access, whose bytes count times its sectors over those of a coalesced request."""
        factor = max(1.0, access.sectors_per_request / SECTORS_COALESCED)
        # Sectors of an array are no more than the array.
        distinct = min(access.footprint * factor, self.allocation.nbytes)
        self.distinct += distinct
        self.repeated += max(0.0, access.requested * factor - distinct)
        self.lines = max(self.lines, distinct)
        if access.onward:
            self.lines = float(self.allocation.nbytes)
        self.page_by_page |= access.page_by_page
        self.through_l1 |= access.through_l1


@dataclass(frozen=True, eq=False)
class Traffic:
    """A launch as the roofline sees it."""

    uses: tuple[Use, ...]
    chain: float  # dependent accesses to its first array, in series
    computing: float  # seconds for which the SMs are busy
    elsewhere: float  # bytes of device memory outside buffers
    nbytes: float  # of device memory, in all
    placement: float  # factor of its time for where the buffers lie


class Roofline:
    """The times, and the state on which they depend."""

    def __init__(self, sheet: Datasheet, seed: int) -> None:
        self.sheet = sheet
        self.facts = sheet.facts()
        self._seed = seed
        self._random = Random(seed)
        self.pages: dict[int, Pages] = {}  # of managed allocations, by their identity
        self.page_counts: dict[str, Any] = defaultdict(int)  # by the field of `PageCounts`
        self._causes: dict[str, int] = defaultdict(int)  # bytes of migrations
        self.set_aside = sheet.default_set_aside
        self.persisting = False  # lines persist in L2
        self._hot: dict[int, float] = {}  # bytes in L2 by allocation, least recently used first
        self._dram = sheet.dram_peak * sheet.dram_share
        self._link = sheet.link_bandwidth * sheet.link_share

    def traffic(
        self,
        accesses: Iterable[tuple[Access, Allocation]],
        chain: float = 0,
        cycles: float = 0,
        elsewhere: float = 0,
    ) -> Traffic:
        uses: dict[int, Use] = {}
        for access, allocation in accesses:
            uses.setdefault(id(allocation), Use(allocation)).add(access)
        addresses = tuple(use.allocation.address for use in uses.values())
        nbytes = elsewhere
        nbytes += sum(use.lines for use in uses.values() if not use.allocation.kind.on_host)
        placement, computing = 1.0, cycles / self.sheet.sm_clock
        if nbytes:  # else all is beyond the link
            # The spread of placements as on an H100: 2.1 % up to 6 MiB, 0.37 % for 96 MiB.
            spread = 0.021 * min(1.0, (6 * MiB / nbytes) ** 0.626) * min(1.0, 96 * MiB / nbytes)
            z = Random(repr((self._seed, addresses))).gauss(0.0, 1.0)
            placement = math.exp(spread * min(3.0, max(-3.0, z)))
        return Traffic(tuple(uses.values()), chain, computing, elsewhere, nbytes, placement)

    def kernel(self, traffic: Traffic, window: WindowSpec | None = None) -> float:
        """Return the seconds of a launch; leave L2 and pages as the launch leaves them."""
        faults = l2 = link = 0.0
        dram = traffic.elsewhere
        for use in traffic.uses:
            pages = self.pages.get(id(use.allocation))
            if pages is not None:
                if pages.place == "host":
                    self.forget(use.allocation)
                lost, linked = pages.touched_by_device(use.lines, page_by_page=use.page_by_page)
                faults += lost
                link += linked
        latency = 0.0
        if traffic.chain:
            latency = self._latency(traffic.uses[0], on_link=link > 0)
        for use in traffic.uses:
            if use.allocation.kind.on_host:
                link += use.distinct + use.repeated
            elif id(use.allocation) in self._hot:
                l2 += use.distinct + use.repeated
            elif use.lines <= self.sheet.l2_bytes:
                dram += use.distinct
                l2 += use.repeated
            else:
                dram += use.distinct + use.repeated
        slowest = max(
            dram / self._dram,
            l2 / self.sheet.l2_bandwidth,
            link / self._link,
            traffic.chain * latency,
            traffic.computing,
        )
        self._leave_in_l2(traffic)
        if window is not None and window.hit is not AccessProperty.STREAMING:
            persists = window.hit is AccessProperty.PERSISTING
            self.persisting = persists and self.set_aside > 0
        return self._noisy(self.sheet.launch + faults + slowest) * traffic.placement

    def _noisy(self, seconds: float) -> float:
        """A time with the spread of launches: 0.3 % for a microsecond down to 0.05 %."""
        spread = 0.0005 + 0.0025 / (1.0 + seconds / 10e-6)
        return seconds * math.exp(self._random.gauss(0.0, spread))

    def _latency(self, use: Use, *, on_link: bool) -> float:
        if use.allocation.kind.on_host or on_link:
            return self.sheet.link_latency
        if use.through_l1 and use.allocation.nbytes <= self.sheet.shared_bytes_per_sm:
            return self.sheet.l1_latency
        if id(use.allocation) in self._hot:
            return self.sheet.l2_latency
        return self.sheet.dram_latency

    def _leave_in_l2(self, traffic: Traffic) -> None:
        """Keep lines in L2; the oldest make room."""
        if traffic.nbytes > self.sheet.l2_bytes:
            self._hot.clear()
            return
        for use in traffic.uses:
            if use.allocation.kind.on_host:
                continue
            self.forget(use.allocation)
            self._hot[id(use.allocation)] = use.lines
            total = sum(self._hot.values())
            while total > self.sheet.l2_bytes:
                total -= self._hot.pop(next(iter(self._hot)))

    def forget(self, allocation: Allocation) -> None:
        """Drop memory from L2 that was freed, moved, or not written by a kernel."""
        self._hot.pop(id(allocation), None)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int) -> float:
        for memory in (destination, source):
            if id(memory) in self.pages:
                self.pages[id(memory)].place = "device"
        self.forget(destination)
        if not (source.kind.on_host or destination.kind.on_host):
            rate = self._dram / 2  # read and written
        elif not (source.kind.pageable or destination.kind.pageable):
            rate = self._link
        elif source.kind.on_host:
            rate = self.sheet.pageable_to_device
        else:
            rate = self.sheet.pageable_to_host
        return self._noisy(self.sheet.copy_start + nbytes / rate)

    def prefetch(self, allocation: Allocation, to_host: bool) -> float:
        self.forget(allocation)
        moving = self.pages[id(allocation)].prefetch(allocation.nbytes, to_host=to_host)
        return self._noisy(moving + self.sheet.launch)

    def host_access(self, allocation: Allocation) -> float:
        """The seconds that managed pages need to come to the host."""
        self.forget(allocation)
        pages = self.pages.get(id(allocation))
        return 0.0 if pages is None else pages.touched_by_host(allocation.nbytes)

    def migrate(self, place: str, nbytes: float, cause: str) -> float:
        """Count a migration to "device" or "host". Return the seconds of the link."""
        seconds = nbytes / (self.sheet.link_bandwidth * self.sheet.migration_share)
        if nbytes:
            self.page_counts[f"to_{place}"] += round(nbytes)
            self.page_counts[f"to_{place}_seconds"] += seconds
            self._causes[cause] += round(nbytes)
        return seconds

    def take_page_counts(self) -> PageCounts:
        """The faults and migrations since the last call."""
        counts = PageCounts(**{"mapped": 0, **self.page_counts}, causes=dict(self._causes))
        self.page_counts.clear()
        self._causes.clear()
        return counts
