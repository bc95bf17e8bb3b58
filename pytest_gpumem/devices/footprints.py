"""The facet `footprints` of both devices: sources report allocations into one log, and watches read their footprint from it."""

from __future__ import annotations

import itertools
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from pytest_gpumem.devices.allocation_sites import line_of
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.memory_events import (
    NO_LINE,
    NOTHING,
    Accounts,
    AllocationEvent,
    BytesInUse,
    Figures,
    Growth,
    LogMark,
    MemoryLog,
    Series,
    Step,
    account,
    claim,
    live_of,
    owned,
)
from pytest_gpumem.devices.protocol import DeviceError, MemoryWatch, NotCounted
from pytest_gpumem.devices.protocol import Footprints as FootprintsFacet
from pytest_gpumem.records.footprint import DRIVER, FIXTURES, Footprint, MemoryPlace, MemoryUse


def _minus(one: Figures, other: Figures) -> Figures:
    return _plus(
        one,
        Figures(
            -(other.used or 0),
            -other.unused,
            -(other.segments or 0),
            allocations=-(other.allocations or 0),
        ),
    )


def _plus(one: Figures, other: Figures) -> Figures:
    used = None if one.used is None else one.used + (other.used or 0)
    segments, made = (
        (one.segments or 0) + (other.segments or 0),
        (one.allocations or 0) + (other.allocations or 0),
    )
    return Figures(used, one.unused + other.unused, segments, allocations=made)


class Source(ABC):
    """Something that reports memory: the driver, or the allocator of one library."""

    name: str  # as in `Footprint.watched`
    method: str  # as `MemoryUse.source`
    gaps: tuple[str, ...] = ()
    """Why it did not report for a while, each time. A watch that was open then is not read; of a library, by the figures alone."""

    def note_gap(self, why: str) -> None:
        """Add to `gaps`."""
        self.gaps = (*self.gaps, why)

    @abstractmethod
    def ready(self) -> bool:
        """True if its library is in use. Imports nothing."""

    def start(self, log: MemoryLog, lines: bool) -> str | None:
        """Report into `log` from now on; the reason if single allocations cannot be reported. Its figures count all the same. It is called
        again after each `stop`."""
        return None

    def drain(self) -> None:
        """Report what has happened up to now, where it is not reported at once."""
        return

    def figures(self) -> Mapping[Series, Figures]:
        """The library's own counts now."""
        return {}

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
        """Give back what it keeps for reuse and cannot tell from what is used; False if nothing has changed.
        `kept`: allocations of the driver that live, and that no pool is known to have made.
        """
        return False

    def cached(self) -> int:
        """Page-locked blocks that it keeps for reuse, each of which is one allocation of the driver."""
        return 0

    def alive(self, allocated: AllocationEvent) -> bool:
        """False if one of its allocations is surely freed: frees inside `paused` were not reported."""
        return True

    def stop(self) -> None:
        """Report no longer."""
        return


class SourceFootprints:
    """Watches over sources.
    `driver`: source of the driver's allocations; None on a simulated device.
    `libraries`: sources of the libraries.
    `context`: gives the number of the context; None while there is none.
    """

    def __init__(
        self,
        driver: Source | None,
        libraries: Sequence[Source],
        context: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._driver, self._libraries, self._number = driver, libraries, context
        self.free_bytes: Callable[[], int | None] = lambda: None
        """Memory of the device that would be free without that of fixtures and of the harness; None where it means nothing."""
        self._context: int | None = None  # number of the context with all handles of the sources
        self._left: dict[Series, Figures] = {}  # what libraries counted at the last stop
        self._log = MemoryLog()
        self._wanted: tuple[Source, ...] | None = None
        """Sources that are watched as soon as their libraries are in use; None: nothing is watched."""
        self._running: dict[str, Source] = {}
        self._reasons: dict[str, str] = {}
        """By source, why it reports no single allocations."""
        self._lost: dict[
            str, int
        ] = {}  # by library: gaps after which it is no longer known which of its allocations live
        self._lines = False
        self._paused = False
        self._before: dict[Series, Figures] | None = None
        """What libraries counted when a block of `ours` began; None outside of such a block."""
        self._first = LogMark()  # what the log had reached then
        self._drift: dict[Series, Figures] = {}
        """Bytes that libraries used and held more after such blocks than before, since the start."""
        self._since_ours: set[Series] = set()
        """Libraries that came into use in such a block, so that all that counts of them was reported."""
        self._high_in_ours: dict[Series, int] = {}
        """High-water marks of libraries that rose in such a block."""
        self._numbers = itertools.count(1)

    def start(self, *, driver: bool, lines: bool = False) -> None:
        self.stop()
        number = self._number()
        if self._context not in (None, number):  # what it held went with it
            self._log, self._left, self._drift = MemoryLog(), {}, {}
        self._context = number
        also = (self._driver,) if driver and self._driver is not None else ()
        self._wanted, self._lines = (*also, *self._libraries), lines
        self._reasons.clear()
        if not driver and self._driver is not None:
            self._reasons[self._driver.name] = (
                "allocations of the driver are watched with --gpumem-footprint"
            )
        self.look()
        self._forget_freed()
        for series, figures in self._figures().items():
            if (
                series in self._left and figures.used != self._left[series].used
            ):  # which are freed is not known
                self._log.lose(series[0])

    def _forget_freed(self) -> None:
        """Book what was freed of the driver's while nobody reported."""
        if self._driver is not None:
            live = (*self._log.of_driver(), *self._log.cached.values())
            self._log.forget(
                [one for one in live if not self._driver.alive(one)], time.perf_counter()
            )

    def _gone(self) -> bool:
        """True if the context is gone: a handle of it, such as that of a pool, is a segmentation fault."""
        number = self._number()
        if self._context is None:
            self._context = number
        return number != self._context

    def stop(self) -> None:
        try:
            if self._running and not self._gone():
                self._left = self._figures()
        finally:
            for source in self._running.values():
                source.stop()
            self._running.clear()
            self._wanted = None

    @property
    def driver_is_watched(self) -> bool:
        """True if each allocation of the driver is reported, as on a simulated device, where only fixtures allocate."""
        return self._driver is None or (
            self._driver.name in self._running and self._driver.name not in self._reasons
        )

    def look(self) -> None:
        self._gone()  # notes the context that a test has made meanwhile
        if self._paused:
            return
        for source in self._wanted or ():
            if source.name not in self._running and source.ready():
                self._start(source)
                self._running[source.name] = source

    def _start(self, source: Source) -> None:
        """Have a source report, also again. A watch that is open when it begins or ends to report single allocations has not seen all."""
        had, why = self._reasons.pop(source.name, None), source.start(self._log, self._lines)
        if why is not None:
            self._reasons[source.name] = why
        if source.name in self._running and why != had:
            source.note_gap(why or had or "")

    def _settle(self, *, ours: bool = False) -> None:
        if self._gone():
            raise DeviceError(
                "the device was reset (cudaDeviceReset): what its memory held went with it"
            )
        self.look()
        if not self._paused:
            for source in self._running.values():
                source.drain()
        self._log.settle(ours=ours or self._before is not None)
        for source in self._libraries:
            if self._lost.get(source.name, 0) != len(source.gaps):
                self._lost[source.name] = len(source.gaps)
                self._log.lose(source.name)

    def _figures(self) -> dict[Series, Figures]:
        return {
            series: figures
            for source in self._running.values()
            for series, figures in source.figures().items()
        }

    def watch(self) -> MemoryWatch:
        if self._wanted is None:
            raise DeviceError("memory is not watched: start() comes first")
        if (
            self._driver is not None
            and self._driver.name in self._running
            and not self.driver_is_watched
            and not self._paused
        ):
            self._start(self._driver)  # whoever had CUPTI may have given it back
        self._settle()
        return _Watch(self)

    @contextmanager
    def ours(self) -> Iterator[Growth]:
        growth: Growth = {}
        if self._wanted is None or self._before is not None or self._gone():
            yield growth
            return
        self._begin_ours()
        drift = dict(self._drift)
        try:
            yield growth
        finally:
            self._end_ours()
            for series, now in self._drift.items():
                if (used := (now.used or 0) - (drift.get(series, NOTHING).used or 0)) != 0:
                    growth[series] = used

    @contextmanager
    def paused(self) -> Iterator[None]:
        with self.ours():
            if self._wanted is None or self._paused:
                yield
                return
            self._pause()
            try:
                yield
            finally:
                self._resume()

    def released(self, growth: Growth) -> None:
        for series, nbytes in growth.items():
            self._drift[series] = _plus(self._drift.get(series, NOTHING), Figures(-nbytes, 0))

    @contextmanager
    def resumed(self) -> Iterator[None]:
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

    def _pause(self) -> None:
        for source in self._running.values():
            source.stop()
        self._paused = True

    def _resume(self) -> None:
        """Watch again, and book what was freed unseen."""
        self._paused = False
        if self._gone():
            return
        for source in self._running.values():
            self._start(source)
        assert self._before is not None
        for series, after in self._figures().items():
            if (less := (self._before.get(series, NOTHING).used or 0) - (after.used or 0)) > 0:
                self._log.shrink(series, less, time.perf_counter())
        self._forget_freed()

    def _begin_ours(self) -> None:
        self._settle()
        self._before, self._first = self._figures(), self._log.mark()

    def _end_ours(self) -> None:
        """Book by how much libraries grew in the block. What was freed there of the test's memory is no part of it."""
        assert self._before is not None
        if self._gone():
            self._before = None
            return
        self._settle(ours=True)
        _steps, uses = self._log.since(self._first)
        for series, after in self._figures().items():
            before = self._before.get(series, NOTHING)
            growth = _minus(after, before)
            if growth.used is not None:
                freed = -sum(
                    change for change in uses.get(series, BytesInUse()).changes() if change < 0
                )
                growth = growth._replace(used=growth.used + freed)
            self._drift[series] = _plus(self._drift.get(series, NOTHING), growth)
            if (after.high or 0) > (before.high or 0):
                self._high_in_ours[series] = after.high or 0
            if series not in self._before:
                self._since_ours.add(series)
        self._before = None

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        place = _place(kind)
        if self._wanted is None or self._paused or place is None:
            return 0
        number = next(self._numbers)
        line = line_of(sys._getframe(1)) if self._lines else NO_LINE
        self._log.emit(
            AllocationEvent(time.perf_counter(), (FIXTURES, place), "fixture", number, nbytes, line)
        )
        return number

    def gave_back(self, number: int) -> None:
        if self._wanted is not None and number:
            self._log.emit(
                AllocationEvent(time.perf_counter(), (FIXTURES, "device"), "fixture", number, 0)
            )


def _place(kind: MemoryKind) -> MemoryPlace | None:
    """The kind of memory of a footprint; None for what is no memory of this GPU and not page-locked."""
    if kind.on_device:
        return "device"
    if kind.managed:
        return "managed"
    return "pinned" if kind.locked else None


class _Watch:
    """The memory from now on."""

    def __init__(self, of: SourceFootprints) -> None:
        self._of = of
        of._log.open += 1
        self._gaps_before: dict[str, int] = {}
        self._mark = of._log.mark()
        self._begin = time.perf_counter()
        self._figures = of._figures()
        self._drift = dict(of._drift)
        self._free = None if of.driver_is_watched or not of._wanted else of.free_bytes()
        self._cached = self._cached_now()
        self._accounts = account((), {}, self._begin)
        self._most: dict[Series, int] = {}  # by library: most bytes in use when it was read
        self._closed = False
        self._gaps_before = {source.name: len(source.gaps) for source in of._wanted or ()}

    def _gaps(self) -> dict[str, str]:
        """By source: why it did not report all the time since the begin."""
        sources = self._of._wanted or ()
        return {
            source.name: source.gaps[-1]
            for source in sources
            if len(source.gaps) > self._gaps_before.get(source.name, 0)
        }

    def read(self) -> Footprint:
        of = self._of
        of._settle()
        if of._driver is not None and of._driver.name in (gaps := self._gaps()):
            raise NotCounted(gaps[of._driver.name])
        self._take_back()
        gaps = self._gaps()
        (steps, changes), after = of._log.since(self._mark), of._figures()
        changes = {series: use for series, use in changes.items() if series[0] not in gaps}
        driver = of.driver_is_watched
        not_watched = [f"{name}: {why}" for name, why in {**gaps, **of._reasons}.items()]
        if driver:
            not_watched += self._claim_pools(steps, after)
        self._accounts = found = account(steps, changes, self._begin)
        uses, unknown = dict(found.uses), 0
        for series, figures in after.items():
            use, unseen = self._by_figures(
                series,
                figures._replace(single=figures.single and series[0] not in gaps),
                uses.get(series, MemoryUse(*series)),
            )
            if unseen is not None:
                not_watched.append(
                    f"{series[0]}: its peak, which is below an earlier one of this process"
                )
                unknown += unseen
            if use != MemoryUse(*series):
                uses[series] = use
        # Where allocations were not seen one by one, the peak of all is at least that of each.
        least = max((use.peak for use in uses.values() if use.kind == "device"), default=0)
        peak = max(found.peak, least)
        most = peak + unknown
        for series, taken in self._unseen(steps, after):
            not_watched.append(
                f"{series[0]}: arrays of a thread that ran before, or that Python did not begin: its pool grew for them"
            )
            most = max(
                most,
                taken
                + sum(
                    use.peak for of, use in uses.items() if use.kind == "device" and of != series
                ),
            )
        return Footprint(
            peak=peak,
            peak_bound=most if most > peak else None,
            uses=tuple(
                sorted(
                    (self._with_source(use) for use in uses.values()),
                    key=lambda use: (use.kind, -use.peak, use.library),
                )
            ),
            driver_peak=found.driver_peak if driver else None,
            bound=self._bound(uses),
            watched=("fixtures", *of._running),
            not_watched=tuple(not_watched),
            seconds=self.seconds(),
            timeline=found.courses,
        )

    def _nobodys(self, series: Series) -> Figures:
        """By which a library grew in pauses since the begin."""
        return _minus(self._of._drift.get(series, NOTHING), self._drift.get(series, NOTHING))

    def _take_back(self) -> None:
        """Note that blocks of a cache are in use again, if some are. Which, tells the driver once the others are freed."""
        of = self._of
        if of._log.cached and self._cached_now() < self._cached:
            for source in of._running.values():
                source.settle(tuple(of._log.cached.values()))
            of._settle()
            of._log.reuse(time.perf_counter())
            self._cached = self._cached_now()

    def _claim_pools(self, steps: Sequence[Step], after: Mapping[Series, Figures]) -> Iterator[str]:
        """Give each library the allocations of the driver that its pool grew by; why that is not known of some."""
        for series, figures in after.items():
            library, kind = series
            if figures.segments is not None:
                missing = self._grown(series, figures) - owned(steps, library, kind)
                if missing > 0 and not claim(steps, library, missing):
                    yield f"{library}: which allocations of the driver its pool is made of: they count as CUDA's too"

    def _unseen(
        self, steps: Sequence[Step], after: Mapping[Series, Figures]
    ) -> Iterator[tuple[Series, int]]:
        """Libraries without a high-water mark whose pool has segments that nobody reported, so that their arrays were not reported either;
        each with the most bytes that its pool can have given out beyond those before."""
        for series, figures in after.items():
            grown = self._grown(series, figures)
            if figures.high is None and grown > self._of._log.segments(series[0], self._mark):
                of_pool = itertools.accumulate(
                    change for _, change, of in steps if of.owner == series[0]
                )
                yield series, self._figures.get(series, NOTHING).unused + max(grown, *of_pool, 0)

    def _grown(self, series: Series, figures: Figures) -> int:
        """Bytes by which the segments of a library's pool grew since the begin."""
        before = self._figures.get(series, NOTHING)
        return (
            (figures.segments or 0) - (before.segments or 0) - (self._nobodys(series).segments or 0)
        )

    def _by_figures(
        self, series: Series, figures: Figures, use: MemoryUse
    ) -> tuple[MemoryUse, int | None]:
        """What a library took by its own figures, beside what was seen one by one; and the bytes by which its peak may be larger, None if
        it is known."""
        before, nobodys = self._figures.get(series, NOTHING), self._nobodys(series)
        kept, peak, allocations, unknown = use.kept, use.peak, use.allocations, None
        # Where the library came into use meanwhile, not all of its allocations were seen.
        single = figures.single and series in {*self._figures, *self._of._since_ours}
        made = (
            None
            if figures.allocations is None
            else figures.allocations - (before.allocations or 0) - (nobodys.allocations or 0)
        )
        if made is not None and not single:
            allocations = made
        if figures.used is not None:
            kept = figures.used - (before.used or 0) - (nobodys.used or 0)
            self._most[series] = peak = max(peak, kept, self._most.get(series, 0))
        if figures.high is not None and not single:
            high = figures.high - (before.used or 0) - (nobodys.used or 0)
            if figures.high > max(before.high or 0, self._of._high_in_ours.get(series, 0)):
                peak = max(peak, high)
            elif figures.high and (made is None or made):
                unknown = max(0, high - peak)
        unused = figures.unused - before.unused - nobodys.unused
        return replace(use, kept=kept, reserved=unused, peak=peak, allocations=allocations), unknown

    def _with_source(self, use: MemoryUse) -> MemoryUse:
        if use.library == FIXTURES:
            return replace(use, source="fixtures")
        name = (
            self._of._driver.name
            if use.library == DRIVER and self._of._driver is not None
            else use.library
        )
        source = next((one for one in self._of._wanted or () if one.name == name), None)
        return use if source is None else replace(use, source=source.method)

    def _bound(self, uses: Mapping[Series, MemoryUse]) -> int | None:
        """What the free memory of the device tells beyond what is known."""
        now = self._of.free_bytes() if self._free is not None else None
        if self._free is None or now is None:
            return None
        nobodys = [self._nobodys(series) for series in self._of._drift if series[1] == "device"]
        known = sum((one.used or 0) + one.unused for one in nobodys)
        known += sum(
            use.kept + use.reserved
            for use in uses.values()
            if use.kind == "device" and use.library != FIXTURES
        )
        return max(0, self._free - now - known)

    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def accounts(self) -> Accounts:
        return self._accounts

    def settle(self) -> bool:
        of = self._of
        of._settle()
        kept = [one for one in live_of(of._log.since(self._mark)[0]) if one.layer == "driver"]
        locked = [one for one in kept if one.kind == "pinned"]
        changed = False
        # To free a cache of page-locked memory costs the next test much more than a look: it is done only where blocks are in use.
        if locked and self._cached_now() - self._cached == len(locked):
            of._log.cache(locked, time.perf_counter())
            self._cached += len(locked)
            kept = [one for one in kept if one not in locked]
            changed = True
        for source in of._running.values():
            changed = source.settle(kept) or changed
        return changed

    def _cached_now(self) -> int:
        return sum(source.cached() for source in self._of._running.values())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._of._log.closed()


_: type[FootprintsFacet] = SourceFootprints
