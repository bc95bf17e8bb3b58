"""Pages of managed memory: where they are, and what each access counts and costs.

The pages of an allocation lie together. Advice matters where it keeps pages on the host (CUDA C++
Programming Guide, Data Usage Hints); other advice is taken and changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from pytest_gpumem.devices.protocol import Advice
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import KiB, MiB

PAGE_BYTES = 64 * KiB  # of a page fault of the GPU
HOST_PAGE_BYTES = 16 * MiB // 48  # that a page fault of the host brings
GROUP_PAGES = 6  # page faults that the driver handles together
SHARED_FAULTS = 16  # of the warps that touch a page at once


class PageLog:
    """Counts faults and migrations, and gives their time: so much a page, and the link's a byte."""

    def __init__(self, sheet: Datasheet) -> None:
        self._fault = sheet.fault
        self._bandwidth = sheet.link_bandwidth * sheet.migration_share
        self._clear()

    def _clear(self) -> None:
        self.counts: Counter[str] = Counter(mapped=0)  # by the field of `PageCounts`
        self.seconds = {"to_device": 0.0, "to_host": 0.0}
        self._causes: Counter[str] = Counter()

    def take(self) -> PageCounts:
        """Return the counts since the last call."""
        fields: dict[str, Any] = dict(self.counts)
        for direction, seconds in self.seconds.items():
            fields[f"{direction}_seconds"] = seconds
        counts = PageCounts(**fields, causes=dict(self._causes))
        self._clear()
        return counts

    def faulted(self, nbytes: float, *, page_by_page: bool) -> float:
        """Pages faulted on the GPU. Return the seconds that it lost."""
        pages = math.ceil(nbytes / PAGE_BYTES)
        self.counts["gpu_pages"] += pages
        self.counts["gpu_faults"] += pages if page_by_page else pages * SHARED_FAULTS
        self.counts["gpu_groups"] += math.ceil(pages / GROUP_PAGES)
        return pages * self._fault

    def moved(self, direction: str, nbytes: float, cause: str) -> float:
        """Pages moved. Return the seconds that the link needs."""
        seconds = nbytes / self._bandwidth
        if nbytes:
            self.counts[direction] += round(nbytes)
            self.seconds[direction] += seconds
            self._causes[cause] += round(nbytes)
        return seconds


class Pages:
    """The pages of one managed allocation."""

    def __init__(self, log: PageLog) -> None:
        self._log = log
        self.place: str | None = None  # "host" or "device"; None: untouched
        self.mapped = False  # the device has those on the host mapped
        self._prefers_host = False
        self._accessed_by_device = False

    def advise(self, advice: Advice, to_host: bool, *, on: bool) -> None:
        """Set or unset an advice; nothing moves."""
        if advice is Advice.PREFERRED_LOCATION:
            self._prefers_host = on and to_host
            self.mapped = False
        elif advice is Advice.ACCESSED_BY and not to_host:
            self._accessed_by_device = self.mapped = on

    def prefetch(self, nbytes: float, *, to_host: bool) -> float:
        """Prefetch to a place. Return the seconds of the link."""
        place = "host" if to_host else "device"
        before, self.place = self.place, place
        if before in (None, place):
            return 0.0
        if not to_host:
            self.mapped = False
        return self._log.moved(f"to_{place}", nbytes, "prefetch")

    def touched_by_host(self, nbytes: float) -> float:
        """The host touches `nbytes` of them. Return the seconds that it loses."""
        before, self.place = self.place, "host"
        if before != "device":
            return 0.0
        self._log.counts["cpu_faults"] += math.ceil(nbytes / HOST_PAGE_BYTES)
        return self._log.moved("to_host", nbytes, "fault")

    def touched_by_device(self, nbytes: float, *, page_by_page: bool) -> tuple[float, float]:
        """A launch touches `nbytes`. Return the seconds that it loses, and bytes of the link."""
        if self.place is None:
            self.place = "host" if self._prefers_host else "device"
        if self.place == "device":
            return 0.0, 0.0
        if self.mapped:
            return 0.0, nbytes
        seconds = self._log.faulted(nbytes, page_by_page=page_by_page)
        if self._prefers_host or self._accessed_by_device:
            self.mapped = True
            self._log.counts["mapped"] += round(nbytes)
            return seconds, nbytes
        self.place = "device"
        return seconds + self._log.moved("to_device", nbytes, "fault"), 0.0
