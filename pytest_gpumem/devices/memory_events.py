"""Single allocations and frees of all sources of memory, and what they add up to. Pure.

Layers keep memory from counting twice. The *driver* gives out memory. A library's pool takes
*segments* of it. Inside them lie the library's arrays, the *use*. Memory of the driver that is no
pool's segment is a use as well, and so is a *fixture*'s buffer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Literal, NamedTuple

from msgspec import Struct

from pytest_gpumem.records.footprint import DRIVER, MemoryPlace, MemoryUse

Layer = Literal["use", "segment", "driver", "fixture"]
Line = tuple[str, int, str]  # file, line and function
Series = tuple[str, MemoryPlace]  # library and kind of memory
Growth = dict[Series, int]  # bytes by which libraries use more than before

NO_LINE: Line = ("", 0, "")
SEGMENT_DELAY = 1e-3  # seconds by which the clocks of a pool and of the driver may differ


class Figures(NamedTuple):
    """A library's counts of one kind of memory, in bytes."""

    used: int = 0  # in use by its arrays; 0 of a watched driver, whose allocations add up
    unused: int = 0  # in its pool, and not in use
    segments: int = 0  # of all segments of its pool
    high: int = 0  # the library's high-water mark of what is in use, if it has one
    single: bool = True  # each allocation is reported
    allocations: int = 0  # up to now; they count where not each is reported

    def plus(self, other: Figures, sign: int = 1) -> Figures:
        """Return the sums with other figures, and the larger high-water mark."""
        return self._replace(
            used=self.used + sign * other.used,
            unused=self.unused + sign * other.unused,
            segments=self.segments + sign * other.segments,
            allocations=self.allocations + sign * other.allocations,
            high=max(self.high, other.high),
        )

    def minus(self, other: Figures) -> Figures:
        """Return by how much these figures are larger."""
        return self.plus(other, -1)


NOTHING = Figures()


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
    line: Line = NO_LINE  # the innermost of the user's code, where `allow_kept` asks for it
    owner: str | None = None  # of an allocation of the driver: the library whose pool took it


class Change(Struct, eq=False, gc=False):
    """Bytes that an allocation adds, or that a free takes away (below 0)."""

    nbytes: int
    series: Series
    of: AllocationEvent | None = None  # None: which allocations were freed is not known

    @property
    def counts(self) -> bool:
        """False for a pool's segment: the arrays in it count."""
        return self.of is None or (self.of.owner is None and self.of.layer != "segment")


class MemoryLog:
    """The allocations of a process that are known, and changes since the first open watch began."""

    def __init__(self) -> None:
        self._pending: list[AllocationEvent] = []
        self.emit: Callable[[AllocationEvent], None] = self._pending.append
        """Takes an event of a source; `settle` books those of all sources in order."""
        self.changes: list[Change] = []
        self._live = defaultdict[str, dict[int, AllocationEvent]](dict)  # by library and address
        self._made = defaultdict[int, list[AllocationEvent]](list)
        """By address: allocations of the driver since the first open watch began."""

    def settle(self, *, ours: bool = False) -> None:
        """Book the events since the last call, once every source has reported.

        `ours`: what was allocated since then is no test's, except for buffers of fixtures.
        """
        pending = self._pending[:]  # other threads report meanwhile
        del self._pending[: len(pending)]
        segments = []
        for event in sorted(pending, key=attrgetter("at")):
            if event.layer == "segment":
                segments.append(event)
                continue
            self._free(event.series[0], event.address)
            if event.nbytes and (event.layer == "fixture" or not ours):
                self._book(event)
        for segment in segments:
            self._give(segment)
            if not ours:
                self.changes.append(Change(segment.nbytes, segment.series, segment))

    def _book(self, event: AllocationEvent) -> None:
        self._live[event.series[0]][event.address] = event
        self.changes.append(Change(event.nbytes, event.series, event))
        if event.layer == "driver":
            self._made[event.address].append(event)

    def _free(self, library: str, address: int) -> None:
        freed = self._live[library].pop(address, None)
        if freed is not None:
            self.changes.append(Change(-freed.nbytes, freed.series, freed))

    def _give(self, segment: AllocationEvent) -> None:
        """Give the driver's allocation that a pool took to its library."""
        for made in reversed(self._made.get(segment.address, ())):
            in_time = made.at <= segment.at + SEGMENT_DELAY
            if made.owner is None and made.nbytes == segment.nbytes and in_time:
                made.owner = segment.series[0]
                return

    def forget(self, freed: Iterable[AllocationEvent]) -> None:
        """Book allocations of the driver as freed whose free nobody reported."""
        for allocation in freed:
            self._free(DRIVER, allocation.address)

    def lose(self, library: str) -> None:
        """Know no longer which allocations of a library live: frees were not reported."""
        self._live[library].clear()

    def of_driver(self) -> list[AllocationEvent]:
        """Return the allocations of the driver that live."""
        return list(self._live[DRIVER].values())

    def clear(self) -> None:
        """Drop the changes: no watch is open."""
        self.changes.clear()
        self._made.clear()


@dataclass(frozen=True)
class Accounts:
    """The sums of an interval of a log."""

    peak: int  # most bytes of device memory in use at once
    uses: Mapping[Series, MemoryUse]
    changes: Sequence[Change]

    @property
    def kept(self) -> tuple[AllocationEvent, ...]:
        """Allocations of the interval that live at its end, largest first."""
        return live_of(self.changes)


def account(changes: Sequence[Change]) -> Accounts:
    """Add up an interval of a log."""
    uses = defaultdict[Series, list[int]](list)  # bytes of each change
    device = peak = 0
    for change in changes:
        if not change.counts:
            continue
        uses[change.series].append(change.nbytes)
        if change.series[1] == "device":
            device += change.nbytes
            peak = max(peak, device)
    records = {series: _memory_use(series, sizes) for series, sizes in uses.items()}
    return Accounts(peak, records, changes)


def _memory_use(series: Series, changes: Sequence[int]) -> MemoryUse:
    allocated = [nbytes for nbytes in changes if nbytes > 0]
    return MemoryUse(
        *series,
        peak=max(0, *accumulate(changes)),
        kept=sum(changes),
        allocations=len(allocated),
        largest=max(allocated, default=0),
    )


def claim(changes: Sequence[Change], series: Series, grown: int) -> bool:
    """Give a pool the driver's allocations that it took and did not report as segments.

    `grown`: bytes by which the segments of the pool grew over the interval.
    Returns True if allocations that still live add up to it, taken largest first; or if there are
    none, as of a pool that maps its memory, which is not reported. Else some count twice.
    """
    missing = grown - pool_growth(changes, series)
    if missing <= 0:
        return True
    live = [event for event in live_of(changes) if event.series == (DRIVER, "device")]
    taken = []
    for event in live:
        if event.nbytes <= missing:
            taken.append(event)
            missing -= event.nbytes
    if missing:
        return not live
    for event in taken:
        event.owner = series[0]
    return True


def pool_growth(changes: Sequence[Change], series: Series, *, reported: bool = False) -> int:
    """Return by how much a pool's known segments grew.

    `reported`: what the library has reported counts, else what the driver is known to have made.
    """
    grown = 0
    for change in changes:
        event = change.of
        if event is None or event.series[1] != series[1]:
            continue
        counts = event.owner == series[0]
        if reported and change.nbytes > 0:
            counts = event.layer == "segment" and event.series == series
        if counts:
            grown += change.nbytes
    return grown


def live_of(changes: Iterable[Change]) -> tuple[AllocationEvent, ...]:
    """Return what these changes allocate and do not free, largest first; no segments of pools."""
    living: dict[int, AllocationEvent] = {}
    for change in changes:
        if change.of is None or not change.counts:
            continue
        if change.nbytes > 0:
            living[id(change.of)] = change.of
        else:
            living.pop(id(change.of), None)
    return tuple(sorted(living.values(), key=attrgetter("nbytes"), reverse=True))


class Source(ABC):
    """Something that reports memory: the driver, or the allocator of a library."""

    name: str  # as in `Footprint.watched`
    lost: Callable[[str], None]
    """Takes the reason when it did not report for a while. A watch that is open then is not read;
    of a library, by its counts alone."""

    @abstractmethod
    def ready(self) -> bool:
        """True if its library is in use. Imports nothing."""

    def start(self, log: MemoryLog, lines: bool) -> str | None:
        """Report into `log` from now on, also after a `stop`.

        Returns the reason if it cannot report single allocations. Its figures count all the same.
        """
        return None

    def drain(self) -> None:
        """Report what has happened up to now, where it is not reported at once."""
        return

    def figures(self) -> Mapping[Series, Figures]:
        """The library's counts now."""
        return {}

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
        """Give back what it keeps for reuse and cannot tell from what is used.

        `kept`: allocations of the driver that live, and that no pool is known to have made.
        Returns False if nothing has changed.
        """
        return False

    def alive(self, allocated: AllocationEvent) -> bool:
        """False if an allocation is surely freed: frees inside `paused` were not reported."""
        return True

    def stop(self) -> None:
        """Report no longer."""
        return
