"""The memory that a test takes: sources report allocations into a log, and watches read it.

Single allocations tell the peak, and a library's counts what is kept and reserved. Where not all
allocations are reported, the peak is at least what the counts have shown. Blocks of `ours` are left
out: allocations of the harness.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from pytest_gpumem.devices.errors import DeviceError, NotCounted
from pytest_gpumem.devices.memory_events import (
    NOTHING,
    AllocationEvent,
    Change,
    Figures,
    MemoryLog,
    Series,
    Source,
    account,
    claim,
    live_of,
)
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.records.footprint import DRIVER, FIXTURES, Footprint, MemoryPlace, MemoryUse

Growth = dict[str, int]  # by library: bytes by which it uses more than before
_PLACES: dict[MemoryKind, MemoryPlace] = {
    MemoryKind.DEVICE: "device",
    MemoryKind.POOLED: "device",
    MemoryKind.MANAGED: "managed",
    MemoryKind.PINNED: "pinned",
    MemoryKind.REGISTERED: "pinned",
}


class Footprints:
    """The memory that this process takes on a device. `driver`: None on a simulated device, where
    only fixtures allocate. `context`: gives the number of the context, or None."""

    def __init__(
        self,
        driver: Source | None,
        libraries: Sequence[Source],
        context: Callable[[], int | None] = lambda: 0,
    ) -> None:
        self.driver, self._libraries, self._context_number = driver, libraries, context
        self.free_bytes: Callable[[], int | None] = lambda: None
        """Memory that would be free without that of fixtures and of the harness."""
        self.log = MemoryLog()
        self.running: dict[str, Source] = {}  # those that report
        self.reasons: dict[str, str] = {}  # by source, why it reports no single allocations
        self.watches: list[MemoryWatch] = []
        self._context: int | None = None  # number of the context with all handles of the sources
        self._sources: Sequence[Source] | None = None  # None: nothing is watched
        self._paused = False
        self._ours_before: dict[str, Figures] | None = None
        """What libraries counted when a block of `ours` began; None outside of such a block."""
        self._ours_first = 0  # changes in the log when it began
        self._at_stop: dict[str, Figures] = {}  # counts of libraries at `stop`
        self._buffers = 0  # given by fixtures
        for source in libraries if driver is None else (driver, *libraries):
            source.lost = partial(self._note_gap, source)

    def _note_gap(self, source: Source, why: str) -> None:
        for watch in self.watches:
            watch.gaps[source.name] = why
        if source is not self.driver:
            self.log.live[source.name].clear()

    def _gone(self) -> bool:
        """True if a use of the sources' handles, such as pools, is a segmentation fault."""
        number = self._context_number()
        if self._context is None:
            self._context = number
        return number != self._context

    def start(self, *, driver: bool, allow_kept: Sequence[str] = (), root: Path = Path()) -> None:
        """Have the sources report. `allow_kept`: lines below `root` whose memory is not kept."""
        self.stop()
        if self._gone():  # what it held went with it
            self.log, self._at_stop = MemoryLog(), {}
            self._context = self._context_number()
        self.log.allow(allow_kept, root)
        self.reasons.clear()
        self._sources = self._libraries
        if self.driver is not None and driver:
            self._sources = (self.driver, *self._libraries)
        elif self.driver is not None:
            why = "allocations of the driver are watched with --gpumem-footprint"
            self.reasons[self.driver.name] = why
        self.look()
        self._book_frees()
        for library, figures in self.figures().items():
            if library in self._at_stop and figures.used != self._at_stop[library].used:
                self.log.live[library].clear()  # what it freed since then is not known

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
        """Start the sources of libraries that have come into use."""
        if self._context is None:
            self._gone()  # notes the context that a test has made meanwhile
        if self._paused:
            return
        for source in self._sources or ():
            if source.name in self.running or not source.ready():
                continue
            self._start_source(source)
            self.running[source.name] = source
            if self._ours_before is None:
                for watch in self.watches:
                    watch.partly.add(source.name)

    def _start_source(self, source: Source) -> None:
        why = source.start(self.log)
        if why is not None:
            self.reasons[source.name] = why
            source.lost(why)

    def _book_frees(self) -> None:
        """Book frees of the driver's that nobody reported."""
        for event in list(self.log.live[DRIVER].values()):
            if self.driver is not None and not self.driver.alive(event):
                self.log.add(replace(event, at=time.perf_counter(), nbytes=0))

    def figures(self) -> dict[str, Figures]:
        """The counts of the sources in the context that `_gone` has seen last."""
        figures: dict[str, Figures] = {}
        if self._context is None:
            return figures
        for source in self.running.values():
            figures.update(source.figures())
        return figures

    def settle(self) -> None:
        """Bring the log up to now. Raises `DeviceError`."""
        if self._gone():
            why = "the device was reset (cudaDeviceReset): what its memory held went with it"
            raise DeviceError(why)
        self.look()
        if not self._paused:
            for source in self.running.values():
                source.drain()
        self.log.settle(ours=self._ours_before is not None)

    def watch(self) -> MemoryWatch:
        """Begin to watch. Raises `DeviceError` before `start`."""
        if self._sources is None:
            raise DeviceError("memory is not watched: start() comes first")
        self.settle()
        watch = MemoryWatch(self)
        self.watches.append(watch)
        return watch

    @contextmanager
    def ours(self) -> Iterator[Growth]:
        """A block whose allocations are the harness's; frees count. Yields a `Growth`, which is
        filled at the end of the outermost block."""
        growth: Growth = {}
        if self._sources is None or self._ours_before is not None or self._gone():
            yield growth
            return
        self._begin_ours()
        try:
            yield growth
        finally:
            self._end_ours(growth)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """As `ours`; buffers that fixtures give inside count until it ends."""
        with self.ours():
            yield
        for change in self.log.changes[self._ours_first :]:
            if change.nbytes > 0:
                change.event.owner = FIXTURES  # with an owner, it does not count

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `ours`, and no source takes time inside: for timed samples."""
        if self._paused:
            yield
            return
        with self.ours():
            self._pause()
            try:
                yield
            finally:
                self._resume()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside `paused`, a block that is watched."""
        if not self._paused or self._ours_before is None:
            yield
            return
        self._resume()
        self._end_ours({})
        try:
            yield
        finally:
            self._begin_ours()
            self._pause()

    def released(self, growth: Growth) -> None:
        """What `ours` took is about to be freed."""
        for library, nbytes in growth.items():
            for watch in self.watches:
                watch.leave_out(library, Figures(-nbytes))

    def _pause(self) -> None:
        for source in self.running.values():
            source.stop()
        self._paused = True

    def _resume(self) -> None:
        self._paused = False
        if self._ours_before is None or self._gone():
            return
        for name, source in self.running.items():
            if name not in self.reasons:
                self._start_source(source)
        for library, after in self.figures().items():
            freed = self._ours_before.get(library, NOTHING).used - after.used
            if freed > 0:  # of which allocations is not known
                unknown = AllocationEvent(0.0, (library, "device"), "use", 0, 0)
                self.log.changes.append(Change(-freed, unknown))
        self._book_frees()

    def _begin_ours(self) -> None:
        self.settle()
        self._ours_before = self.figures()
        self._ours_first = len(self.log.changes)

    def _end_ours(self, growth: Growth) -> None:
        """Have watches leave out what libraries took in the block, but not what they freed."""
        counts = self._ours_before
        try:
            if counts is None or self._gone():
                return
            self.settle()
        finally:
            self._ours_before = None
        freed = Counter[str]()
        for change in self.log.changes[self._ours_first :]:
            if change.nbytes < 0 and change.event.layer == "use":
                freed[change.event.series[0]] -= change.nbytes
        for library, after in self.figures().items():
            before = counts.get(library, NOTHING)
            grown = after.plus(before, -1)
            high = after.high if after.high > before.high else 0
            grown = grown._replace(used=grown.used + freed[library], high=high)
            for watch in self.watches:
                watch.leave_out(library, grown)
            if grown.used:
                growth[library] = grown.used

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        """A fixture gave the test memory; return a number for `gave_back`."""
        place = _PLACES.get(kind)
        if self._sources is None or self._paused or place is None:
            return 0
        self._buffers += 1
        self._emit(place, self._buffers, nbytes)
        return self._buffers

    def gave_back(self, number: int) -> None:
        if self._sources is not None and number:
            self._emit("device", number, 0)

    def _emit(self, place: MemoryPlace, number: int, nbytes: int) -> None:
        now, series = time.perf_counter(), (FIXTURES, place)
        self.log.emit(AllocationEvent(now, series, "fixture", number, nbytes))


class MemoryWatch:
    """The memory that is taken from its begin on. Watches may lie inside each other."""

    def __init__(self, footprints: Footprints) -> None:
        self._footprints, self._log = footprints, footprints.log
        self._mark = len(footprints.log.changes)
        self._before = footprints.figures()
        """What libraries counted at the begin, and grew by since in blocks of `ours`."""
        driver, reasons = footprints.driver, footprints.reasons
        self._driver_watched = driver is None or (
            driver.name in footprints.running and driver.name not in reasons
        )
        self._free = None if self._driver_watched else footprints.free_bytes()
        self._account = account(())  # at the last read
        self._peaks: dict[str, int] = {}  # by library: most bytes in use at any read
        self.gaps: dict[str, str] = {}  # by source: why it did not report all the time
        self.partly = set[str]()  # libraries that were in use before they reported

    def leave_out(self, library: str, growth: Figures) -> None:
        self._before[library] = self._before.get(library, NOTHING).plus(growth)
        if self._free is not None:
            self._free -= growth.used + growth.unused

    def read(self) -> Footprint:
        """The footprint so far."""
        footprints = self._footprints
        footprints.settle()
        driver = footprints.driver
        for watch in footprints.watches:  # also of a part: the driver may report no more
            if driver is not None and driver.name in watch.gaps:
                raise NotCounted(watch.gaps[driver.name])
        changes = self._log.changes[self._mark :]
        if self.gaps:
            changes = [change for change in changes if change.event.series[0] not in self.gaps]
        if self.gaps or self._account.number != len(changes):
            self._account = account(changes)
        figures = footprints.figures()
        reasons = {**self.gaps, **footprints.reasons}
        not_watched = [f"{name}: {why}" for name, why in reasons.items()]

        # What pools took of the driver's allocations, and for arrays that nobody reported.
        bounds: dict[str, int] = {}  # most bytes of arrays, where some were not reported
        for library, after in figures.items():
            if not after.segments:
                continue
            before = self._before.get(library, NOTHING)
            grown = after.segments - before.segments
            taken, reported = self._account.taken[library], self._account.reported[library]
            missing = grown - taken
            if self._driver_watched and missing > 0:
                if not claim(changes, library, missing):
                    which = "which allocations of the driver its pool is made of"
                    not_watched.append(f"{library}: {which}: they count as CUDA's too")
                self._account = account(changes)
            if not after.high and grown > reported:
                bounds[library] = before.unused + max(grown, taken)

        # Allocations, completed by counts.
        peak, uses = self._account.peak, dict(self._account.uses)
        unknown = 0  # bytes by which the peak may be larger
        for library, after in figures.items():
            nothing = MemoryUse(library, "device")
            use = self._with_counts(uses.get((library, "device"), nothing), after)
            more = self._unknown_peak(use, after)
            if more is not None:
                why = "its peak, which is below an earlier one of this process"
                not_watched.append(f"{library}: {why}")
                unknown += more
            if use != nothing:
                uses[library, "device"] = use

        # Where not each allocation was seen, the peak of all is at least that of each.
        peaks = {use.library: use.peak for use in uses.values() if use.kind == "device"}
        peak = max(peak, *peaks.values(), 0)
        most = peak + unknown
        for library, nbytes in bounds.items():
            why = "arrays of a thread that ran before, or that Python did not begin"
            not_watched.append(f"{library}: {why}: its pool grew for them")
            most = max(most, nbytes + sum(peaks.values()) - peaks.get(library, 0))
        shown = self._without_allowed(uses.values(), changes)
        return Footprint(
            peak=peak,
            peak_bound=most if most > peak else None,
            uses=tuple(sorted(shown, key=lambda use: (use.kind, -use.peak, use.library))),
            driver_watched=self._driver_watched,
            bound=self._bound(uses.values()),
            watched=("fixtures", *footprints.running),
            not_watched=tuple(not_watched),
        )

    def _reports_each(self, library: str, after: Figures) -> bool:
        return after.single and library not in self.gaps and library not in self.partly

    def _with_counts(self, use: MemoryUse, after: Figures) -> MemoryUse:
        """Complete what was reported by a library's counts."""
        library = use.library
        before = self._before.get(library, NOTHING)
        grown = after.plus(before, -1)
        use = replace(use, reserved=grown.unused)
        if library != DRIVER or not self._driver_watched:
            peak = max(use.peak, grown.used, self._peaks.get(library, 0))
            self._peaks[library] = peak
            use = replace(use, kept=grown.used, peak=peak)
        if self._reports_each(library, after):
            return use
        if after.allocations:
            use = replace(use, allocations=grown.allocations)
        if after.high > before.high:
            use = replace(use, peak=max(use.peak, after.high - before.used))
        return use

    def _unknown_peak(self, use: MemoryUse, after: Figures) -> int | None:
        """By how much the peak of a use may be larger; None if it is known."""
        before = self._before.get(use.library, NOTHING)
        if not after.high or after.high > before.high or self._reports_each(use.library, after):
            return None
        if after.allocations and not use.allocations:
            return None
        return max(0, after.high - before.used - use.peak)

    def _without_allowed(
        self, uses: Iterable[MemoryUse], changes: Iterable[Change]
    ) -> Iterable[MemoryUse]:
        """Leave out of what is kept what lines of `allow_kept` allocated."""
        if self._log.allows is None:
            return uses
        allowed, others = Counter[Series](), Counter[Series]()
        for event in live_of(changes):
            counts = allowed if event.allowed else others
            counts[event.series] += event.nbytes
        shown = []
        for use in uses:
            series, kept = (use.library, use.kind), use.kept
            if kept > 0:
                # A free that the log missed counts as that of an allowed line.
                kept = max(kept - allowed[series], min(kept, others[series]))
            shown.append(replace(use, kept=kept, allowed=use.kept - kept))
        return shown

    def _bound(self, uses: Iterable[MemoryUse]) -> int | None:
        """Bytes by which free memory shrank beyond what is known."""
        if self._free is None:
            return None
        now = self._footprints.free_bytes()
        if now is None:
            return None
        known = 0
        for use in uses:
            if use.kind == "device" and use.library != FIXTURES:
                known += use.kept + use.reserved
        return max(0, self._free - now - known)

    def settle(self) -> None:
        """Have all sources give back what they keep for reuse."""
        self._footprints.settle()
        for source in self._footprints.running.values():
            source.settle()

    def close(self) -> None:
        self._footprints.watches.remove(self)
        if not self._footprints.watches:
            self._log.clear()
