"""The memory that a test takes: sources report allocations into a log, and watches read it.

Each source gives single allocations, its own counts, or both. Allocations tell the peak, and counts
what is kept and reserved. Where a library's allocations are not all reported, its peak is at least
what its counts have shown, and the footprint says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pytest_gpumem.devices.allocation_sites import line_of
from pytest_gpumem.devices.errors import DeviceError
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.memory_events import (
    NO_LINE,
    NOTHING,
    AllocationEvent,
    Figures,
    Growth,
    LogMark,
    MemoryLog,
    Series,
)
from pytest_gpumem.devices.open_watch import OpenWatch
from pytest_gpumem.devices.sources import Sources
from pytest_gpumem.devices.watches import Footprints as FootprintsFacet
from pytest_gpumem.devices.watches import MemoryWatch
from pytest_gpumem.records.footprint import FIXTURES, MemoryPlace


class SourceFootprints(Sources):
    """Begins and ends watches over sources, and pauses them."""

    _first = LogMark()  # what the log had reached when a block of `ours` began
    _buffers = 0  # that fixtures gave
    _left: Mapping[Series, Figures] = {}  # what libraries counted at the last stop

    def start(self, *, driver: bool, lines: bool = False) -> None:
        self.stop()
        number = self._number()
        if self._context not in (None, number):  # what it held went with it
            self.log, self.drift, self._left = MemoryLog(), {}, {}
        self._context, self.lines = number, lines
        self.sources = tuple(self.libraries)
        self.reasons.clear()
        if self.driver is not None and driver:
            self.sources = (self.driver, *self.libraries)
        elif self.driver is not None:
            why = "allocations of the driver are watched with --gpumem-footprint"
            self.reasons[self.driver.name] = why
        self.look()
        self._forget_freed()
        for series, figures in self.figures().items():
            if series in self._left and figures.used != self._left[series].used:
                self.log.lose(series[0])  # what it freed since the last stop is not known

    def _forget_freed(self) -> None:
        """Book what was freed of the driver's while nobody reported."""
        if self.driver is not None:
            freed = [event for event in self.log.of_driver() if not self.driver.alive(event)]
            self.log.forget(freed)

    def stop(self) -> None:
        try:
            if self.running and not self.gone():
                self._left = self.figures()
        finally:
            for source in self.running.values():
                source.stop()
            self.running.clear()
            self.sources = None

    def watch(self) -> MemoryWatch:
        if self.sources is None:
            raise DeviceError("memory is not watched: start() comes first")
        driver = self.running.get("" if self.driver is None else self.driver.name)
        if driver is not None and not self.driver_is_watched and not self.are_paused:
            self.begin(driver)  # whoever had CUPTI may have given it back
        self.settle()
        return OpenWatch(self)

    @contextmanager
    def ours(self) -> Iterator[Growth]:
        growth: Growth = {}
        if self.sources is None or self.before is not None or self.gone():
            yield growth
            return
        self._begin_ours()
        drift = dict(self.drift)
        try:
            yield growth
        finally:
            self._end_ours()
            for series, now in self.drift.items():
                more = (now.used or 0) - (drift.get(series, NOTHING).used or 0)
                if more:
                    growth[series] = more

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.ours():
            if self.sources is None or self.are_paused:
                yield
                return
            self._pause()
            try:
                yield
            finally:
                self._resume()

    def released(self, growth: Growth) -> None:
        for series, nbytes in growth.items():
            self.drift[series] = self.drift.get(series, NOTHING).minus(Figures(nbytes, 0))

    @contextmanager
    def resumed(self) -> Iterator[None]:
        if not self.are_paused:
            yield
            return
        self._resume()
        self._end_ours()
        try:
            yield
        finally:
            self._begin_ours()
            self._pause()

    def _pause(self) -> None:
        for source in self.running.values():
            source.stop()
        self.are_paused = True

    def _resume(self) -> None:
        """Watch again, and book what was freed unseen."""
        self.are_paused = False
        if self.gone() or self.before is None:
            return
        for source in self.running.values():
            self.begin(source)
        for series, after in self.figures().items():
            less = (self.before.get(series, NOTHING).used or 0) - (after.used or 0)
            if less > 0:
                self.log.shrink(series, less)
        self._forget_freed()

    def _begin_ours(self) -> None:
        self.settle()
        self.before, self._first = self.figures(), self.log.mark()

    def _end_ours(self) -> None:
        """Book by how much libraries grew in the block, without frees of the test's memory."""
        begin, self.before = self.before, None
        if begin is None or self.gone():
            return
        self.settle(ours=True)
        freed: Growth = {}
        for change in self.log.since(self._first):
            if change.nbytes < 0 and (change.of is None or change.of.layer == "use"):
                freed[change.series] = freed.get(change.series, 0) - change.nbytes
        for series, after in self.figures().items():
            before = begin.get(series, NOTHING)
            growth = after.minus(before).plus(Figures(freed.get(series, 0), 0))
            self.drift[series] = self.drift.get(series, NOTHING).plus(growth)
            if (after.high or 0) > (before.high or 0):
                self.high_in_ours[series] = after.high or 0
            if series not in begin:
                self.since_ours.add(series)

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        place = _place(kind)
        if self.sources is None or self.are_paused or place is None:
            return 0
        self._buffers += 1
        number = self._buffers
        line = line_of(sys._getframe(1)) if self.lines else NO_LINE
        now = time.perf_counter()
        self.log.emit(AllocationEvent(now, (FIXTURES, place), "fixture", number, nbytes, line))
        return number

    def gave_back(self, number: int) -> None:
        if self.sources is not None and number:
            now = time.perf_counter()
            self.log.emit(AllocationEvent(now, (FIXTURES, "device"), "fixture", number, 0))


def _place(kind: MemoryKind) -> MemoryPlace | None:
    """Return the place as in a footprint; None for memory that does not belong there."""
    if kind.on_device:
        return "device"
    if kind.managed:
        return "managed"
    return "pinned" if kind.locked else None


_: type[FootprintsFacet] = SourceFootprints
