"""The memory that a test takes: sources report allocations into a log, and watches read it.

Each source gives single allocations, counts, or both. Allocations tell the peak, and counts
what is kept and reserved. Where a library's allocations are not all reported, its peak is at least
what its counts have shown, and the footprint says so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from msgspec.structs import replace

from pytest_gpumem.devices.kinds import DeviceError, MemoryKind, NotCounted
from pytest_gpumem.devices.memory_events import (
    NO_LINE,
    NOTHING,
    Accounts,
    AllocationEvent,
    Change,
    Figures,
    Growth,
    MemoryLog,
    Series,
    Source,
    account,
    claim,
    live_of,
    pool_growth,
)
from pytest_gpumem.devices.user_lines import line_of
from pytest_gpumem.records.footprint import DRIVER, FIXTURES, Footprint, MemoryPlace, MemoryUse


class Footprints:
    """The memory that all libraries of this process, and the driver, take on a device.

    `driver`: source of the driver's allocations; None on a simulated device, where only fixtures
    allocate.
    `libraries`: sources of the libraries.
    `context`: gives the number of the context; None while there is none.
    """

    def __init__(
        self,
        driver: Source | None,
        libraries: Sequence[Source],
        context: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.driver, self._libraries, self._number = driver, libraries, context
        self.free_bytes: Callable[[], int | None] = lambda: None
        """Memory of the device that would be free without that of fixtures and of the harness."""
        self.log = MemoryLog()
        self.running: dict[str, Source] = {}
        self.reasons: dict[str, str] = {}  # by source, why it reports no single allocations
        self.watches: list[MemoryWatch] = []
        self._context: int | None = None  # number of the context with all handles of the sources
        self._sources: tuple[Source, ...] | None = None
        """Sources that are watched once their libraries are in use; None: nothing is watched."""
        self._lines = self._paused = False
        self._before: dict[Series, Figures] | None = None
        """What libraries counted when a block of `ours` began; None outside of such a block."""
        self._first = 0  # changes in the log when it began
        self._at_stop: dict[Series, Figures] = {}  # what libraries counted at the last stop
        self._buffers = 0  # that fixtures gave
        for source in libraries if driver is None else (driver, *libraries):
            source.lost = partial(self._lost, source)

    def _lost(self, source: Source, why: str) -> None:
        for watch in self.watches:
            watch.gaps[source.name] = why
        if source is not self.driver:
            self.log.lose(source.name)

    def _gone(self) -> bool:
        """True if the context is gone: handles of it, such as pools, are segmentation faults."""
        number = self._number()
        if self._context is None:
            self._context = number
        return number != self._context

    @property
    def driver_is_watched(self) -> bool:
        """True if each allocation of the driver is reported."""
        if self.driver is None:
            return True
        return self.driver.name in self.running and self.driver.name not in self.reasons

    def start(self, *, driver: bool, lines: bool = False) -> None:
        """Have the sources report from now on. A second call changes what is watched.

        `driver`: watch the driver's allocations too, which takes some 3 us each.
        `lines`: keep the line of the user's code behind each allocation.
        """
        self.stop()
        number = self._number()
        if self._context not in (None, number):  # what it held went with it
            self.log, self._at_stop = MemoryLog(), {}
        self._context, self._lines = number, lines
        self._sources = tuple(self._libraries)
        self.reasons.clear()
        if self.driver is not None and driver:
            self._sources = (self.driver, *self._libraries)
        elif self.driver is not None:
            why = "allocations of the driver are watched with --gpumem-footprint"
            self.reasons[self.driver.name] = why
        self.look()
        self._forget_freed()
        for series, figures in self.figures().items():
            if series in self._at_stop and figures.used != self._at_stop[series].used:
                self.log.lose(series[0])  # what it freed since the last stop is not known

    def stop(self) -> None:
        try:
            if self.running and not self._gone():
                self._at_stop = self.figures()
        finally:
            for source in self.running.values():
                source.stop()
            self.running.clear()
            self._sources = None

    def look(self) -> None:
        """Watch libraries that have come into use too; else a read of a footprint does so."""
        self._gone()  # notes the context that a test has made meanwhile
        if self._paused:
            return
        for source in self._sources or ():
            if source.name not in self.running and source.ready():
                self._begin(source)
                self.running[source.name] = source

    def _begin(self, source: Source) -> None:
        """Have a source report, also again. No open watch has seen all if that begins or ends."""
        before = self.reasons.pop(source.name, None)
        why = source.start(self.log, self._lines)
        if why is not None:
            self.reasons[source.name] = why
        if source.name in self.running and why != before:
            source.lost(why or before or "")

    def _forget_freed(self) -> None:
        """Book what was freed of the driver's while nobody reported."""
        if self.driver is not None:
            freed = [event for event in self.log.of_driver() if not self.driver.alive(event)]
            self.log.forget(freed)

    def figures(self) -> dict[Series, Figures]:
        """Return the counts of all sources."""
        figures: dict[Series, Figures] = {}
        for source in self.running.values():
            figures.update(source.figures())
        return figures

    def settle(self, *, ours: bool = False) -> None:
        """Book what the sources have to report."""
        if self._gone():
            problem = "the device was reset (cudaDeviceReset): what its memory held went with it"
            raise DeviceError(problem)
        self.look()
        if not self._paused:
            for source in self.running.values():
                source.drain()
        self.log.settle(ours=ours or self._before is not None)

    def watch(self) -> MemoryWatch:
        """Begin to watch. Raises `DeviceError` before `start`."""
        if self._sources is None:
            raise DeviceError("memory is not watched: start() comes first")
        driver = self.running.get("" if self.driver is None else self.driver.name)
        if driver is not None and not self.driver_is_watched and not self._paused:
            self._begin(driver)  # whoever had CUPTI may have given it back
        self.settle()
        watch = MemoryWatch(self)
        self.watches.append(watch)
        return watch

    @contextmanager
    def ours(self) -> Iterator[Growth]:
        """A block whose allocations are no test's. Frees count wherever they happen.

        Yields the bytes by which libraries use more after the block; empty until it ends.
        """
        growth: Growth = {}
        if self._sources is None or self._before is not None or self._gone():
            yield growth
            return
        self._begin_ours()
        try:
            yield growth
        finally:
            growth.update(self._end_ours())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `ours`, and no source reports inside, so that none takes time: for timed samples."""
        with self.ours():
            if self._sources is None or self._paused:
                yield
                return
            self._pause()
            try:
                yield
            finally:
                self._resume()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside `paused`, a block that is watched."""
        if not self._paused:
            yield
            return
        self._resume()
        self._end_ours()
        try:
            yield
        finally:
            self._begin_ours()
            self._pause()

    def released(self, growth: Growth) -> None:
        """What was no test's, as `ours` gave it, is about to be freed: no open watch counts it."""
        for series, nbytes in growth.items():
            for watch in self.watches:
                watch.leave_out(series, Figures(-nbytes))

    def _pause(self) -> None:
        for source in self.running.values():
            source.stop()
        self._paused = True

    def _resume(self) -> None:
        """Watch again, and book what was freed unseen."""
        self._paused = False
        if self._before is None or self._gone():
            return
        for source in self.running.values():
            self._begin(source)
        for series, after in self.figures().items():
            less = self._before.get(series, NOTHING).used - after.used
            if less > 0:  # of which allocations is not known
                self.log.changes.append(Change(-less, series))
        self._forget_freed()

    def _begin_ours(self) -> None:
        self.settle()
        self._before, self._first = self.figures(), len(self.log.changes)

    def _end_ours(self) -> Growth:
        """Leave out by how much libraries grew in the block, without frees of the test's memory."""
        begin, self._before = self._before, None
        growth: Growth = {}
        if begin is None or self._gone():
            return growth
        self.settle(ours=True)
        freed: Growth = {}
        for change in self.log.changes[self._first :]:
            if change.nbytes < 0 and (change.of is None or change.of.layer == "use"):
                freed[change.series] = freed.get(change.series, 0) - change.nbytes
        for series, after in self.figures().items():
            before = begin.get(series, NOTHING)
            grown = after.minus(before)
            grown = grown._replace(used=grown.used + freed.get(series, 0))
            rose = after.high > before.high
            for watch in self.watches:
                watch.leave_out(series, grown._replace(high=after.high if rose else 0))
                if series not in begin:
                    watch.complete.add(series)
            if grown.used:
                growth[series] = grown.used
        return growth

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        """A fixture gave the test memory; return a number for `gave_back`.

        The number stays the same if the harness moves the memory.
        """
        place = _place(kind)
        if self._sources is None or self._paused or place is None:
            return 0
        self._buffers += 1
        number = self._buffers
        line = line_of(sys._getframe(1)) if self._lines else NO_LINE
        now = time.perf_counter()
        self.log.emit(AllocationEvent(now, (FIXTURES, place), "fixture", number, nbytes, line))
        return number

    def gave_back(self, number: int) -> None:
        """A fixture's memory is the test's no longer; a second call does nothing."""
        if self._sources is not None and number:
            now = time.perf_counter()
            self.log.emit(AllocationEvent(now, (FIXTURES, "device"), "fixture", number, 0))


class MemoryWatch:
    """The memory that is taken from its begin on. Watches may lie inside each other."""

    def __init__(self, footprints: Footprints) -> None:
        self._footprints, self._log, self._driver = footprints, footprints.log, footprints.driver
        self._mark = len(footprints.log.changes)
        self._before = footprints.figures()
        """What libraries counted at the begin, and what they grew by since in blocks of `ours`."""
        self._free = None if footprints.driver_is_watched else footprints.free_bytes()
        self._accounts = account(())
        self._most: dict[Series, int] = {}  # by library: most bytes in use when it was read
        self.gaps: dict[str, str] = {}  # by source: why it did not report all the time
        self.complete = set(self._before)  # all allocations of these libraries were reported

    def leave_out(self, series: Series, growth: Figures) -> None:
        """Leave out what is no test's."""
        self._before[series] = self._before.get(series, NOTHING).plus(growth)
        if self._free is not None and series[1] == "device":
            self._free -= growth.used + growth.unused

    def read(self) -> Footprint:
        """Return the footprint so far. Waits for no work.

        What pools keep for reuse is `reserved`, not `kept`.
        """
        footprints = self._footprints
        footprints.settle()
        if self._driver is not None and self._driver.name in self.gaps:
            raise NotCounted(self.gaps[self._driver.name])
        since = self._log.changes[self._mark :]
        changes = [change for change in since if change.series[0] not in self.gaps]
        figures = footprints.figures()
        pools = {series: after for series, after in figures.items() if after.segments}
        reasons = {**self.gaps, **footprints.reasons}
        not_watched = [f"{name}: {why}" for name, why in reasons.items()]
        driver = footprints.driver_is_watched
        for series, after in pools.items():
            grown = after.segments - self._before.get(series, NOTHING).segments
            if driver and not claim(changes, series, grown):
                which = "which allocations of the driver its pool is made of"
                not_watched.append(f"{series[0]}: {which}: they count as CUDA's too")
        self._accounts = accounts = account(changes)
        uses, unknown = dict(accounts.uses), 0
        for series, after in figures.items():
            use, more = self._counted(uses.get(series, MemoryUse(*series)), series, after)
            if more is not None:
                why = "its peak, which is below an earlier one of this process"
                not_watched.append(f"{series[0]}: {why}")
                unknown += more
            if use != MemoryUse(*series):
                uses[series] = use
        # Where not each allocation was seen, the peak of all is at least that of each.
        peaks = {series: use.peak for series, use in uses.items() if series[1] == "device"}
        peak = max(accounts.peak, *peaks.values(), 0)
        most = peak + unknown
        for series, after in pools.items():
            unseen = self._unseen(changes, series, after)
            if unseen is not None:
                why = "arrays of a thread that ran before, or that Python did not begin"
                not_watched.append(f"{series[0]}: {why}: its pool grew for them")
                most = max(most, unseen + sum(peaks.values()) - peaks.get(series, 0))
        return Footprint(
            peak=peak,
            peak_bound=most if most > peak else None,
            uses=tuple(sorted(uses.values(), key=_order)),
            driver_watched=driver,
            bound=self._bound(uses.values()),
            watched=("fixtures", *footprints.running),
            not_watched=tuple(not_watched),
        )

    def _counted(
        self, use: MemoryUse, series: Series, after: Figures
    ) -> tuple[MemoryUse, int | None]:
        """Complete what was reported by a library's counts.

        Returns by how many bytes its peak may be larger too; None if the peak is known.
        """
        before = self._before.get(series, NOTHING)
        grown = after.minus(before)
        kept, peak, allocations, unknown = use.kept, use.peak, use.allocations, None
        single = after.single and series[0] not in self.gaps and series in self.complete
        if after.allocations and not single:
            allocations = grown.allocations
        if series[0] != DRIVER or not self._footprints.driver_is_watched:
            kept = grown.used
            self._most[series] = peak = max(peak, kept, self._most.get(series, 0))
        if after.high and not single:
            high = after.high - before.used
            if after.high > before.high:
                peak = max(peak, high)
            elif not after.allocations or allocations:
                unknown = max(0, high - peak)
        use = replace(use, kept=kept, reserved=grown.unused, peak=peak, allocations=allocations)
        return use, unknown

    def _unseen(self, changes: Sequence[Change], series: Series, after: Figures) -> int | None:
        """Return the most bytes that a library's arrays took, where the pool grew unreported.

        Its arrays were not reported then either. None for a library with a high-water mark.
        """
        before = self._before.get(series, NOTHING)
        grown = after.segments - before.segments
        if after.high or grown <= pool_growth(changes, series, reported=True):
            return None
        return before.unused + max(grown, pool_growth(changes, series))

    def _bound(self, uses: Iterable[MemoryUse]) -> int | None:
        """Return what the free memory of the device tells beyond what is known."""
        now = None if self._free is None else self._footprints.free_bytes()
        if self._free is None or now is None:
            return None
        known = 0
        for use in uses:
            if use.kind == "device" and use.library != FIXTURES:
                known += use.kept + use.reserved
        return max(0, self._free - now - known)

    def accounts(self) -> Accounts:
        """The single allocations behind the last `read`."""
        return self._accounts

    def settle(self) -> bool:
        """Have libraries give back what they keep for reuse and cannot tell from what is used.

        Such as page-locked memory. False if nothing changed: a `read` gives what the last gave.
        """
        self._footprints.settle()
        live = live_of(self._log.changes[self._mark :])
        kept = [event for event in live if event.layer == "driver"]
        changed = False
        for source in self._footprints.running.values():
            changed = source.settle(kept) or changed
        return changed

    def close(self) -> None:
        watches = self._footprints.watches
        if self in watches:
            watches.remove(self)
            if not watches:
                self._log.clear()


def _order(use: MemoryUse) -> tuple[str, int, str]:
    return use.kind, -use.peak, use.library


def _place(kind: MemoryKind) -> MemoryPlace | None:
    """Return the place as in a footprint; None for memory that does not belong there."""
    if kind.on_device:
        return "device"
    if kind.managed:
        return "managed"
    return "pinned" if kind.locked else None
