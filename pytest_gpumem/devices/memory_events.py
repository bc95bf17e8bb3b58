"""The log of single allocations and frees that all sources write into, and the footprint that it adds up to. Pure.

Layers tell apart what must not count twice. The *driver* gives out memory. A library's pool takes *segments* of it. Inside them the
library's arrays are the *use*. An allocation of the driver that is no pool's segment is a use as well, and so is a *fixture*'s buffer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import attrgetter, itemgetter, sub
from types import MappingProxyType
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from pytest_gpumem.records.footprint import Course, MemoryPlace, MemoryUse
from pytest_gpumem.units import MiB

Layer = Literal["use", "segment", "driver", "fixture"]
Line = tuple[str, int, str]  # file, line and function
Series = tuple[str, MemoryPlace]  # library and kind of memory

NO_LINE: Line = ("", 0, "")

Growth = dict[Series, int]  # bytes by which libraries use more than before

POINTS = 200  # most points of one course
SEGMENT_DELAY = 1e-3  # seconds by which the clocks of two sources may differ: a pool reports its segment after the driver made it


class Figures(NamedTuple):
    """A library's own counts of one kind of memory, in bytes."""

    used: int | None  # in use by its arrays; None: the sum of the single allocations
    unused: int  # in its pool, and not in use
    segments: int | None = None  # of all segments of its pool; None where it has none
    high: int | None = None
    """The library's own high-water mark of what is in use; None where it has none."""
    single: bool = True  # its allocations are reported one by one
    allocations: int | None = None
    """Allocations up to now; they count where not all are reported one by one."""


NOTHING = Figures(0, 0)


class AllocationEvent(Struct, eq=False, gc=False):
    """One allocation, or one free, which has 0 bytes, as a source reports it.

    A test may allocate thousands of times, a few microseconds each: the garbage collector, which tuples would start, does not know these.
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


Step = tuple[float, int, AllocationEvent]
"""An allocation or a free of the driver or a fixture: when, by how many bytes (below 0 for a free), and of which allocation."""


class BytesInUse:
    """The bytes in use of one series, over time."""

    __slots__ = ("at", "living", "of", "total")

    def __init__(self) -> None:
        self.at: list[float] = []  # when it changed
        self.total: list[int] = []  # bytes in use afterwards
        self.of: list[
            AllocationEvent | None
        ] = []  # the allocation that was made or freed; None: unknown ones were freed
        self.living: dict[int, AllocationEvent] = {}  # by address

    def change(self, at: float, nbytes: int, of: AllocationEvent | None) -> None:
        """Book an allocation, or a free with `nbytes` below 0."""
        self.at.append(at)
        self.total.append(nbytes + (self.total[-1] if self.total else 0))
        self.of.append(of)

    def since(self, place: int) -> BytesInUse:
        """What follows some changes, from 0 bytes on."""
        found = BytesInUse()
        before = self.total[place - 1] if 0 < place <= len(self.total) else 0
        found.at, found.of = self.at[place:], self.of[place:]
        found.total = (
            [total - before for total in self.total[place:]] if before else self.total[place:]
        )
        return found

    def changes(self) -> list[int]:
        """Bytes of each allocation and, below 0, of each free."""
        return list(map(sub, self.total, (0, *self.total)))

    def live(self, until: int | None = None) -> list[AllocationEvent]:
        """The allocations that live after some changes, or after all."""
        found: dict[int, AllocationEvent] = {}
        for change, of in zip(self.changes()[:until], self.of, strict=False):
            if of is not None and change > 0:
                found[id(of)] = of
            else:
                found.pop(id(of), None)
        return list(found.values())

    def memory_use(self, series: Series, at_peak: int) -> MemoryUse:
        made = Counter([change for change in self.changes() if change > 0])
        return MemoryUse(
            *series,
            peak=max(0, *self.total),
            at_peak=max(0, at_peak),
            kept=self.total[-1],
            allocations=made.total(),
            largest=max(made, default=0),
        )


class LogMark(NamedTuple):
    """A place in a log."""

    steps: int = 0
    uses: Mapping[Series, int] = MappingProxyType({})  # changes of each series
    segments: Mapping[str, int] = MappingProxyType(
        {}
    )  # bytes of the segments of each library that were reported, less those freed


_BEGIN = LogMark()


class MemoryLog:
    """The allocations of a process that are known, and what changed since the first open watch began."""

    def __init__(self) -> None:
        self._pending: list[AllocationEvent] = []
        self.emit: Callable[[AllocationEvent], None] = self._pending.append
        """Takes an event of a source; `settle` brings those of all sources in order."""
        self._steps: list[Step] = []
        self._uses: dict[Series, BytesInUse] = {}
        """What the arrays of libraries use."""
        self._live: dict[tuple[Layer, int], AllocationEvent] = {}
        """By layer and address, allocations of the driver and of fixtures."""
        self._made: dict[int, list[AllocationEvent]] = {}
        """By address: allocations of the driver since the first open watch began."""
        self.open = 0
        """Watches that are open."""
        self.cached: dict[int, AllocationEvent] = {}
        """By address: allocations of the driver that a library keeps for reuse; they are no longer in use."""
        self._segments = Counter[str]()
        """By library: bytes of the segments that were reported, less those that the driver freed."""

    def settle(self, *, ours: bool = False) -> None:
        """Book the events since the last call; to be called after every source has reported.
        `ours`: what was allocated since then is no test's, except for buffers of fixtures.
        """
        segments: list[AllocationEvent] = []
        last: Series | None = None
        use = BytesInUse()
        pending = self._pending[:]  # other threads report meanwhile
        del self._pending[: len(pending)]
        begun = len(self._steps)
        for event in sorted(pending, key=attrgetter("at")):
            if event.layer == "use":
                if event.series is not last:
                    last, use = event.series, self._uses.setdefault(event.series, BytesInUse())
                    living, when, total, of = use.living, use.at, use.total, use.of
                    now = total[-1] if total else 0
                if (before := living.pop(event.address, None)) is not None:
                    now -= before.nbytes
                    when.append(event.at)
                    total.append(now)
                    of.append(before)
                if event.nbytes and not ours:
                    living[event.address] = event
                    now += event.nbytes
                    when.append(event.at)
                    total.append(now)
                    of.append(event)
            elif event.layer == "segment":
                segments.append(event)
            else:
                self._step(event, ours)
        for event in segments:
            self._own(event)
        if not ours:
            for event in segments:
                self._segments[event.library] += event.nbytes
            for _at, change, one in self._steps[begun:]:
                if change < 0 and one.owner is not None:
                    self._segments[one.owner] += change

    def _step(self, event: AllocationEvent, ours: bool) -> None:
        """Book an event of the driver or of a fixture."""
        if (freed := self._live.pop((event.layer, event.address), None)) is not None:
            self._steps.append((event.at, -freed.nbytes, freed))
        elif event.layer == "driver":
            self.cached.pop(event.address, None)
        if event.nbytes and (event.layer == "fixture" or not ours):
            self._live[event.layer, event.address] = event
            self._steps.append((event.at, event.nbytes, event))
            if event.layer == "driver":
                self._made.setdefault(event.address, []).append(event)

    def _own(self, segment: AllocationEvent) -> None:
        """Give the driver's allocation that a pool took to its library."""
        for made in reversed(self._made.get(segment.address, [])):
            if (
                made.owner is None
                and made.nbytes == segment.nbytes
                and made.at <= segment.at + SEGMENT_DELAY
            ):
                made.owner = segment.library
                return

    def mark(self) -> LogMark:
        """The place that the log has reached."""
        return LogMark(
            len(self._steps),
            {series: len(use.at) for series, use in self._uses.items()},
            dict(self._segments),
        )

    def segments(self, library: str, mark: LogMark = _BEGIN) -> int:
        """Bytes by which the segments of a library grew since a mark, as far as they were reported."""
        return self._segments[library] - mark.segments.get(library, 0)

    def since(self, mark: LogMark = _BEGIN) -> tuple[list[Step], dict[Series, BytesInUse]]:
        """What was booked since a mark."""
        return self._steps[mark.steps :], {
            series: use.since(mark.uses.get(series, 0)) for series, use in self._uses.items()
        }

    def forget(self, freed: Iterable[AllocationEvent], at: float) -> None:
        """Book allocations of the driver as freed whose free nobody reported."""
        for one in freed:
            if self._live.get((one.layer, one.address)) is one:
                del self._live[one.layer, one.address]
                self._steps.append((at, -one.nbytes, one))
            elif self.cached.get(one.address) is one:
                del self.cached[one.address]

    def cache(self, kept: Iterable[AllocationEvent], at: float) -> None:
        """Book allocations of the driver as kept for reuse."""
        for one in kept:
            self.forget([one], at)
            self.cached[one.address] = one

    def reuse(self, at: float) -> None:
        """Book all cached allocations as in use again."""
        for one in self.cached.values():
            self._live[one.layer, one.address] = again = replace(one, at=at)
            self._steps.append((at, again.nbytes, again))
        self.cached.clear()

    def shrink(self, series: Series, nbytes: int, at: float) -> None:
        """Book that a library uses less than its single allocations add up to: which of them were freed is unknown."""
        self._uses.setdefault(series, BytesInUse()).change(at, -nbytes, None)

    def lose(self, library: str) -> None:
        """Know no longer which allocations of a library live: frees were not reported."""
        for (of, _kind), use in self._uses.items():
            if of == library:
                use.living.clear()

    def of_driver(self) -> list[AllocationEvent]:
        """Allocations of the driver that live."""
        return [one for (layer, _address), one in self._live.items() if layer == "driver"]

    def closed(self) -> None:
        """One watch less; without a watch, what changed is of no use."""
        self.open -= 1
        if self.open == 0:
            self._steps.clear()
            self._made.clear()
            for series, use in self._uses.items():
                self._uses[series] = BytesInUse()
                self._uses[series].living = use.living


@dataclass(frozen=True)
class Accounts:
    """What `account` finds."""

    peak: int  # most bytes of device memory in use at once
    driver_peak: int  # most bytes of device memory that the driver gave out at once, in whole pages
    uses: Mapping[Series, MemoryUse]
    courses: tuple[Course, ...]
    changes: Mapping[Series, tuple[BytesInUse, int]]
    """What each series used, and how many of its changes lie up to the peak."""

    @property
    def at_peak(self) -> tuple[AllocationEvent, ...]:
        """Allocations of the interval that lived at the peak, largest first."""
        return _largest_first(
            one for use, until in self.changes.values() for one in use.live(until)
        )

    @property
    def kept(self) -> tuple[AllocationEvent, ...]:
        """Allocations of the interval that live at its end, largest first."""
        return _largest_first(one for use, _ in self.changes.values() for one in use.live())


def _largest_first(found: Iterable[AllocationEvent]) -> tuple[AllocationEvent, ...]:
    return tuple(sorted(found, key=lambda one: -one.nbytes))


_PAGE = 2 * MiB  # in which device memory is mapped
_OWN_PAGES = 1 * MiB
"""Bytes from which on an allocation has pages of its own: 200 of 1 MiB + 512 B take 398 MiB (H100). Smaller ones share pages."""


def account(steps: Sequence[Step], uses: Mapping[Series, BytesInUse], begin: float) -> Accounts:
    """Add up an interval of a log. `begin`: when it began, on the clock of the events."""
    found = dict(uses)
    pages = shared = driver_peak = 0
    for at, change, of in steps:
        if of.kind == "device":
            if of.nbytes >= _OWN_PAGES:
                pages += -(-of.nbytes // _PAGE) * (1 if change > 0 else -1)
            else:
                shared += change
            driver_peak = max(driver_peak, (pages - -shared // _PAGE) * _PAGE)
        if of.owner is None:  # else the arrays of its pool count
            found.setdefault(of.series, BytesInUse()).change(at, change, of)
    found = {series: use for series, use in found.items() if use.at}
    peak, until = _peak({series: use for series, use in found.items() if series[1] == "device"})
    changes = {series: (use, until(use)) for series, use in found.items()}
    memory_uses = {
        series: use.memory_use(series, use.total[last - 1] if last else 0)
        for series, (use, last) in changes.items()
    }
    courses = tuple(
        Course(
            *series,
            tuple(
                [(at - begin if at > begin else 0.0, now) for at, now in thinned(use.at, use.total)]
            ),
        )
        for series, use in found.items()
    )
    return Accounts(peak, driver_peak, memory_uses, courses, changes)


def _peak(uses: Mapping[Series, BytesInUse]) -> tuple[int, Callable[[BytesInUse], int]]:
    """The most bytes that some series use together, and what counts the changes of a series up to that time."""
    if not uses:
        return 0, lambda _: 0
    if len(uses) == 1:
        (only,) = uses.values()
        peak = max(only.total)
        place = only.total.index(peak) + 1 if peak > 0 else 0
        when, places = (only.at[place - 1] if place else float("-inf")), {id(only): place}
    else:
        changes = sorted(
            (
                (at, change, id(use))
                for use in uses.values()
                for at, change in zip(use.at, use.changes(), strict=True)
            ),
            key=itemgetter(0),
        )
        totals = list(accumulate(change for _, change, _ in changes))
        peak = max(totals)
        place = totals.index(peak) + 1 if peak > 0 else 0
        when, places = (
            (changes[place - 1][0] if place else float("-inf")),
            Counter(of for _, _, of in changes[:place]),
        )
    return max(
        0, peak
    ), lambda use: places[id(use)] if id(use) in places else bisect_right(use.at, when)


def thinned(
    at: Sequence[float], total: Sequence[int], most: int = POINTS
) -> tuple[tuple[float, int], ...]:
    """At most some `most` points of a course: the highest of each of as many runs, and the last of all."""
    if len(at) <= most:
        return tuple(zip(at, total, strict=True))
    length = -(-len(at) // (most - 1))
    runs = zip_longest(*[iter(total)] * length, fillvalue=total[-1])
    highest = map(total.index, map(max, runs), range(0, len(at), length))
    return tuple((at[place], total[place]) for place in (*highest, len(at) - 1))


def claim(steps: Sequence[Step], library: str, nbytes: int) -> bool:
    """Give a pool that reports only the sum of its segments the allocations of the driver that make it up.
    `library`: the pool's.
    `nbytes`: by which its segments grew over the interval, beyond those that are known.
    Returns true if some of the allocations that still live add up to `nbytes`, the largest first; or if there are none, as of a pool that
    maps its memory, which the driver does not report. Else some may count twice.
    """
    found: list[AllocationEvent] = []
    left = nbytes
    live = [one for one in live_of(steps) if one.layer == "driver" and one.kind == "device"]
    for one in live:
        if one.nbytes <= left:
            found.append(one)
            left -= one.nbytes
    if left == 0:
        for one in found:
            one.owner = library
    return left == 0 or not live


def owned(steps: Sequence[Step], library: str, kind: MemoryPlace) -> int:
    """Bytes by which the known segments of a library's pool grew."""
    return sum(change for _, change, of in steps if of.owner == library and of.kind == kind)


def live_of(steps: Sequence[Step]) -> tuple[AllocationEvent, ...]:
    """Allocations of these steps that were not freed by them, largest first; without segments of pools."""
    living: dict[int, AllocationEvent] = {}
    for _, change, of in steps:
        if change > 0:
            living[id(of)] = of
        else:
            living.pop(id(of), None)
    return _largest_first(one for one in living.values() if one.owner is None)
