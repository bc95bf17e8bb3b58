"""Allocations and frees that sources of memory report, and what they add up to. Pure.

A library's pool takes *segments* from the driver, and gives out parts of them for *use*. The parts
count; a segment, and the driver's allocation that it is, does not.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from pytest_gpumem.devices.user_lines import Line, is_named, line_of
from pytest_gpumem.records.footprint import DRIVER, MemoryPlace, MemoryUse

Series = tuple[str, MemoryPlace]  # library and kind of memory

SEGMENT_DELAY = 1e-3  # seconds by which the clocks of a pool and of the driver may differ


class Figures(NamedTuple):
    """A library's counts of its device memory, in bytes."""

    used: int = 0  # in use by its arrays; 0 of a watched driver, whose allocations add up
    unused: int = 0  # in its pool, and not in use
    segments: int = 0  # of all segments of its pool
    high: int = 0  # the library's high-water mark of what is in use, if it has one
    single: bool = True  # each allocation is reported
    allocations: int = 0  # up to now; they count where not each is reported

    def plus(self, other: Figures, sign: int = 1) -> Figures:
        return Figures(
            self.used + sign * other.used,
            self.unused + sign * other.unused,
            self.segments + sign * other.segments,
            max(self.high, other.high),
            self.single,
            self.allocations + sign * other.allocations,
        )


NOTHING = Figures()


class AllocationEvent(Struct, eq=False, gc=False):
    """An allocation, or a free, which has 0 bytes. A test may make thousands: tuples would start
    the garbage collector, which does not know these."""

    at: float  # seconds on the clock of `time.perf_counter`
    series: Series
    layer: Literal["use", "segment", "driver", "fixture"]
    address: int
    nbytes: int
    allowed: bool = False  # `allow_kept` names the line that allocated it
    owner: str | None = None  # of a segment, and of what the driver allocated for one: the library


class Change(Struct, eq=False, gc=False):
    """Bytes that an allocation adds, or that its free takes away (below 0)."""

    nbytes: int
    event: AllocationEvent


class MemoryLog:
    """The allocations of a process that are known, and changes since the first open watch began."""

    def __init__(self) -> None:
        self._pending: list[AllocationEvent] = []
        self.add: Callable[[AllocationEvent], None] = self._pending.append
        self.emit = self.add  # for the thread that allocates, in the line that does
        self.allows: Callable[[Line], bool] | None = None
        self.changes: list[Change] = []
        self.live = defaultdict[str, dict[int, AllocationEvent]](dict)  # by library and address
        self._made = defaultdict[int, list[AllocationEvent]](list)
        """By address: allocations of the driver since the first open watch began."""

    def allow(self, patterns: Sequence[str], root: Path) -> None:
        """Mark from now on what lines of `allow_kept` allocate."""
        self.allows, self.emit = None, self.add
        if patterns:
            self.allows = partial(is_named, patterns=patterns, root=root)
            self.emit = self._emit_marked

    def _emit_marked(self, event: AllocationEvent) -> None:
        if event.nbytes and self.allows is not None:
            event.allowed = self.allows(line_of(sys._getframe(1)))
        self.add(event)

    def settle(self, *, ours: bool = False) -> None:
        """Book the events since the last call, once every source has reported. `ours`: what was
        allocated since then is no test's, except for buffers of fixtures."""
        pending = self._pending[:]  # other threads report meanwhile
        del self._pending[: len(pending)]
        pending.sort(key=attrgetter("at"))
        changes, segments = self.changes, []
        for event in pending:
            library, nbytes = event.series[0], event.nbytes
            if event.layer == "segment":
                event.owner = library
                segments.append(event)
                continue
            live = self.live[library]
            freed = live.pop(event.address, None)
            if freed is not None:
                changes.append(Change(-freed.nbytes, freed))
            if not nbytes or (ours and event.layer != "fixture"):
                continue
            live[event.address] = event
            changes.append(Change(nbytes, event))
            if event.layer == "driver":
                self._made[event.address].append(event)
        for segment in segments:
            self._give(segment)
            if not ours:
                changes.append(Change(segment.nbytes, segment))

    def _give(self, segment: AllocationEvent) -> None:
        """Give the driver's allocation that a pool took to its library."""
        for made in reversed(self._made.get(segment.address, ())):
            in_time = made.at <= segment.at + SEGMENT_DELAY
            if made.owner is None and made.nbytes == segment.nbytes and in_time:
                made.owner = segment.series[0]
                return

    def clear(self) -> None:
        self.changes.clear()
        self._made.clear()


class Account(NamedTuple):
    """What changes add up to, in bytes."""

    number: int  # of changes
    peak: int  # most bytes of device memory in use at once
    uses: dict[Series, MemoryUse]
    taken: Mapping[str, int]  # by library: of the driver's allocations that its pool took
    reported: Mapping[str, int]  # and of the segments that it reported


def account(changes: Sequence[Change]) -> Account:
    sizes = defaultdict[Series, list[int]](list)
    on_device = []
    taken, reported = Counter[str](), Counter[str]()
    for change in changes:
        event, nbytes = change.event, change.nbytes
        if event.owner is None:
            sizes[event.series].append(nbytes)
            if event.series[1] == "device":
                on_device.append(nbytes)
        elif event.layer == "segment":
            reported[event.owner] += nbytes
        else:
            taken[event.owner] += nbytes
            reported[event.owner] += min(nbytes, 0)
    uses = {}
    for series, of_series in sizes.items():
        allocated = [nbytes for nbytes in of_series if nbytes > 0]
        uses[series] = MemoryUse(
            *series,
            peak=max(accumulate(of_series, initial=0)),
            kept=sum(of_series),
            allocations=len(allocated),
            largest=max(allocated, default=0),
        )
    return Account(len(changes), max(accumulate(on_device, initial=0)), uses, taken, reported)


def live_of(changes: Iterable[Change]) -> list[AllocationEvent]:
    """What these changes allocate and do not free, largest first; no segments of pools."""
    living = dict[AllocationEvent, int]()
    for change in changes:
        if change.nbytes <= 0:
            living.pop(change.event, None)
        elif change.event.owner is None:
            living[change.event] = change.nbytes
    return sorted(living, key=attrgetter("nbytes"), reverse=True)


def claim(changes: Iterable[Change], library: str, missing: int) -> bool:
    """Give a pool `missing` bytes of the driver's that it took and did not report as segments.
    False if live allocations, taken largest first, do not add up to them; where none live, the pool
    maps its memory, which is not reported."""
    live = [event for event in live_of(changes) if event.series == (DRIVER, "device")]
    taken = []
    for event in live:
        if event.nbytes <= missing:
            taken.append(event)
            missing -= event.nbytes
    if missing:
        return not live
    for event in taken:
        event.owner = library
    return True


class Source:
    """Something that reports memory: the driver, or the allocator of a library."""

    name: str  # as in `Footprint.watched`
    lost: Callable[[str], None]
    """Takes the reason when it did not report for a while. A watch that is open then is not read;
    of a library, by its counts alone."""

    def ready(self) -> bool:
        """True if its library is in use. Imports nothing."""
        return True

    def start(self, log: MemoryLog) -> str | None:
        """Report into `log` from now on, also after a `stop`. Returns why it cannot report single
        allocations, or None."""

    def drain(self) -> None:
        """Report what has happened up to now, where it is not reported at once."""

    def figures(self) -> Mapping[str, Figures]:
        """Counts now, by library. Not called before there is a context."""
        return {}

    def settle(self) -> None:
        """Give back what it keeps for reuse and cannot tell from what is used."""

    def alive(self, allocated: AllocationEvent) -> bool:
        """False if an allocation is surely freed: frees inside `paused` were not reported."""
        return True

    def stop(self) -> None:
        """Report no longer."""
