"""Single allocations and frees of all sources, and the footprint that they add up to. Pure.

Layers keep memory from counting twice. The *driver* gives out memory. A library's pool takes
*segments* of it. Inside them lie the library's arrays, the *use*. Memory of the driver that is no
pool's segment is a use as well, and so is a *fixture*'s buffer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType
from typing import Literal, NamedTuple

from msgspec import Struct

from pytest_gpumem.records.footprint import DRIVER, MemoryPlace, MemoryUse
from pytest_gpumem.units import MiB

Layer = Literal["use", "segment", "driver", "fixture"]
Line = tuple[str, int, str]  # file, line and function
Series = tuple[str, MemoryPlace]  # library and kind of memory

NO_LINE: Line = ("", 0, "")

Growth = dict[Series, int]  # bytes by which libraries use more than before

SEGMENT_DELAY = 1e-3
"""Seconds by which the clocks of two sources may differ: a pool reports its segment after the
driver made it."""
_PAGE = 2 * MiB  # in which device memory is mapped
_OWN_PAGES = 1 * MiB
"""Bytes from which on an allocation has pages of its own: 200 of 1 MiB + 512 B take 398 MiB (H100).
Smaller ones share pages."""


class Figures(NamedTuple):
    """A library's counts of one kind of memory, in bytes."""

    used: int | None  # in use by its arrays; None: the sum of the single allocations
    unused: int  # in its pool, and not in use
    segments: int | None = None  # of all segments of its pool; None where it has none
    high: int | None = None  # the library's high-water mark of what is in use, if it has one
    single: bool = True  # its allocations are reported one by one
    allocations: int | None = None
    """Allocations up to now; they count where not all are reported one by one."""

    def plus(self, other: Figures, sign: int = 1) -> Figures:
        """Return these figures with those of another added."""
        return self._replace(
            used=None if self.used is None else self.used + sign * (other.used or 0),
            unused=self.unused + sign * other.unused,
            segments=(self.segments or 0) + sign * (other.segments or 0),
            allocations=(self.allocations or 0) + sign * (other.allocations or 0),
        )

    def minus(self, other: Figures) -> Figures:
        """Return these figures with those of another taken away."""
        return self.plus(other, -1)


NOTHING = Figures(0, 0)


class AllocationEvent(Struct, eq=False, gc=False):
    """One allocation, or one free, which has 0 bytes, as a source reports it.

    A test may allocate thousands of times, a few microseconds each. Tuples would start the garbage
    collector, which does not know these.
    """

    at: float  # seconds on the clock of `time.perf_counter`
    series: Series
    layer: Layer
    address: int
    nbytes: int
    line: Line = NO_LINE  # the innermost of the user's code, where it is traced
    owner: str | None = None  # of an allocation of the driver: the library whose pool took it

    @property
    def library(self) -> str:
        return self.series[0]

    @property
    def kind(self) -> MemoryPlace:
        return self.series[1]


class Change(Struct, eq=False, gc=False):
    """Bytes in use that an allocation adds, or that a free takes away (below 0)."""

    nbytes: int
    series: Series
    of: AllocationEvent | None  # None: which allocations were freed is not known

    @property
    def owner(self) -> str | None:
        return None if self.of is None else self.of.owner


class LogMark(NamedTuple):
    """A place in a log."""

    changes: int = 0
    segments: Mapping[str, int] = MappingProxyType({})
    """By library: bytes of the segments that were reported, less those freed."""


_BEGIN = LogMark()


class MemoryLog:
    """The allocations of a process that are known, and changes since the first open watch began."""

    def __init__(self) -> None:
        self._pending: list[AllocationEvent] = []
        self.emit: Callable[[AllocationEvent], None] = self._pending.append
        """Takes an event of a source; `settle` books those of all sources in order."""
        self._changes: list[Change] = []
        self._live = defaultdict[str, dict[int, AllocationEvent]](dict)  # by library and address
        self._made: dict[int, list[AllocationEvent]] = {}
        """By address: allocations of the driver since the first open watch began."""
        self._segments = Counter[str]()
        self.open = 0  # watches

    def settle(self, *, ours: bool = False) -> None:
        """Book the events since the last call, once every source has reported.

        `ours`: what was allocated since then is no test's, except for buffers of fixtures.
        """
        pending = self._pending[:]  # other threads report meanwhile
        del self._pending[: len(pending)]
        begin = len(self._changes)
        segments = []
        for event in sorted(pending, key=attrgetter("at")):
            if event.layer == "segment":
                segments.append(event)
            else:
                self._book(event, ours)
        for segment in segments:
            self._own(segment)
        if ours:
            return
        for segment in segments:
            self._segments[segment.library] += segment.nbytes
        for change in self._changes[begin:]:
            if change.nbytes < 0 and change.owner is not None:
                self._segments[change.owner] += change.nbytes

    def _book(self, event: AllocationEvent, ours: bool) -> None:
        self._free(event.library, event.address)
        if not event.nbytes or (ours and event.layer != "fixture"):
            return
        self._live[event.library][event.address] = event
        self._changes.append(Change(event.nbytes, event.series, event))
        if event.layer == "driver":
            self._made.setdefault(event.address, []).append(event)

    def _free(self, library: str, address: int) -> None:
        """Book that the allocation at an address is freed, if there is one."""
        freed = self._live[library].pop(address, None)
        if freed is not None:
            self._changes.append(Change(-freed.nbytes, freed.series, freed))

    def _own(self, segment: AllocationEvent) -> None:
        """Give the driver's allocation that a pool took to its library."""
        for made in reversed(self._made.get(segment.address, [])):
            in_time = made.at <= segment.at + SEGMENT_DELAY
            if made.owner is None and made.nbytes == segment.nbytes and in_time:
                made.owner = segment.library
                return

    def mark(self) -> LogMark:
        """Return the place that the log has reached."""
        return LogMark(len(self._changes), dict(self._segments))

    def segments(self, library: str, mark: LogMark = _BEGIN) -> int:
        """Return the bytes by which the reported segments of a library grew since a mark."""
        return self._segments[library] - mark.segments.get(library, 0)

    def since(self, mark: LogMark = _BEGIN) -> list[Change]:
        """Return what was booked since a mark."""
        return self._changes[mark.changes :]

    def forget(self, freed: Iterable[AllocationEvent]) -> None:
        """Book allocations as freed whose free nobody reported."""
        for allocation in freed:
            self._free(allocation.library, allocation.address)

    def shrink(self, series: Series, nbytes: int) -> None:
        """Book that a library uses less, where it is not known which allocations were freed."""
        self._changes.append(Change(-nbytes, series, None))

    def lose(self, library: str) -> None:
        """Know no longer which allocations of a library live: frees were not reported."""
        self._live[library].clear()

    def of_driver(self) -> list[AllocationEvent]:
        """Return the allocations of the driver that live."""
        return list(self._live[DRIVER].values())

    def closed(self) -> None:
        """Count one watch less; without a watch, what changed is of no use."""
        self.open -= 1
        if self.open == 0:
            self._changes.clear()
            self._made.clear()


@dataclass(frozen=True)
class Accounts:
    """The sums of an interval of a log."""

    peak: int  # most bytes of device memory in use at once
    driver_peak: int  # most bytes of device memory that the driver gave out at once, in whole pages
    uses: Mapping[Series, MemoryUse]
    changes: Sequence[Change]
    until_peak: int  # changes up to the peak

    @property
    def at_peak(self) -> tuple[AllocationEvent, ...]:
        """Allocations of the interval that lived at the peak, largest first."""
        return live_of(self.changes[: self.until_peak])

    @property
    def kept(self) -> tuple[AllocationEvent, ...]:
        """Allocations of the interval that live at its end, largest first."""
        return live_of(self.changes)


def account(changes: Sequence[Change]) -> Accounts:
    """Add up an interval of a log."""
    uses = defaultdict[Series, list[int]](list)  # bytes of each change
    last: Series = ("", "device")
    use: list[int] = []
    device = peak = until_peak = 0
    pages = shared = driver_peak = 0
    for number, change in enumerate(changes, 1):
        of = change.of
        if of is not None and of.layer != "use" and of.kind == "device":
            if of.nbytes >= _OWN_PAGES:
                count = math.ceil(of.nbytes / _PAGE)
                pages += count if change.nbytes > 0 else -count
            else:
                shared += change.nbytes
            driver_peak = max(driver_peak, (pages + math.ceil(shared / _PAGE)) * _PAGE)
        if of is not None and of.owner is not None:
            continue  # the arrays of its pool count
        if change.series is not last:
            last = change.series
            use = uses[last]
        use.append(change.nbytes)
        if last[1] == "device":
            device += change.nbytes
            if device > peak:
                peak, until_peak = device, number
    at_peak = Counter[Series]()
    for change in changes[:until_peak]:
        if change.owner is None:
            at_peak[change.series] += change.nbytes
    records = {}
    for series, use in uses.items():
        records[series] = _memory_use(series, use, at_peak[series])
    return Accounts(peak, driver_peak, records, changes, until_peak)


def _memory_use(series: Series, changes: Sequence[int], at_peak: int) -> MemoryUse:
    sizes = Counter(nbytes for nbytes in changes if nbytes > 0)
    return MemoryUse(
        *series,
        peak=max(0, *accumulate(changes)),
        at_peak=max(0, at_peak),
        kept=sum(changes),
        allocations=sizes.total(),
        largest=max(sizes, default=0),
    )


def claim(changes: Sequence[Change], library: str, nbytes: int) -> bool:
    """Give a pool that reports only the sum of its segments the driver's allocations behind it.

    `nbytes`: by which its segments grew over the interval, beyond those that are known.
    Returns True if allocations that still live add up to it, taken largest first; or if there are
    none, as of a pool that maps its memory, which is not reported. Else some count twice.
    """
    live = [event for event in live_of(changes) if event.layer == "driver"]
    live = [event for event in live if event.kind == "device"]
    taken = []
    for event in live:
        if event.nbytes <= nbytes:
            taken.append(event)
            nbytes -= event.nbytes
    if nbytes:
        return not live
    for event in taken:
        event.owner = library
    return True


def pool_sizes(changes: Sequence[Change], series: Series) -> list[int]:
    """Return the bytes of the known segments of a library's pool, over an interval from 0 on."""
    sizes = [0]
    for change in changes:
        if change.owner == series[0] and change.series[1] == series[1]:
            sizes.append(sizes[-1] + change.nbytes)
    return sizes


def live_of(changes: Iterable[Change]) -> tuple[AllocationEvent, ...]:
    """Return what these changes allocate and do not free, largest first; no segments of pools."""
    living: dict[int, AllocationEvent] = {}
    for change in changes:
        if change.of is None or change.owner is not None:
            continue
        if change.nbytes > 0:
            living[id(change.of)] = change.of
        else:
            living.pop(id(change.of), None)
    return tuple(sorted(living.values(), key=attrgetter("nbytes"), reverse=True))
