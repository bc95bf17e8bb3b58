"""From single allocations and frees to a footprint: the log that all sources write into, and the accounts of it. Pure.

Layers tell apart what must not count twice. The *driver* gives out memory. A library's pool takes *segments* of it. Inside them the
library's arrays are the *use*. An allocation of the driver that is no pool's segment is a use as well, and so is a *fixture*'s buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from pytest_gpumem.records.footprint import Course, MemoryPlace, MemoryUse, SizeCount

Layer = Literal["use", "segment", "driver", "fixture"]
Frame = tuple[str, int, str]  # file, line and function
Series = tuple[str, MemoryPlace]  # library and kind of memory

Growth = dict[Series, int]  # bytes by which libraries use more than before

POINTS = 200  # most points of one course
SEGMENT_DELAY = 1e-3  # seconds by which the clocks of two sources may differ: a pool reports its segment after the driver made it


class MemoryEvent(NamedTuple):
    """One allocation or free, as a source reports it."""

    at: float  # seconds on the clock of `time.perf_counter`
    series: Series
    layer: Layer
    address: int
    nbytes: int  # 0 for a free
    stack: tuple[Frame, ...] = ()  # Python frames of the allocation, the innermost last; empty unless asked for


class Figures(NamedTuple):
    """A library's own counts of one kind of memory, in bytes."""

    used: int | None  # in use by its arrays; None: the sum of the single allocations
    unused: int  # in its pool, and not in use
    segments: int | None = None  # of all segments of its pool; None where it has none
    high: int | None = None  # the library's own high-water mark of what is in use; None where it has none
    single: bool = True  # its allocations are reported one by one
    allocations: int | None = None  # allocations up to now, where they are counted and not reported one by one


class Allocated(Struct, eq=False, gc=False):
    """One allocation. A test may make thousands: the garbage collector need not look at them."""

    at: float
    series: Series
    layer: Layer
    address: int
    nbytes: int
    stack: tuple[Frame, ...] = ()
    owner: str | None = None  # of an allocation of the driver: the library whose pool took it

    @property
    def library(self) -> str:
        return self.series[0]

    @property
    def kind(self) -> MemoryPlace:
        return self.series[1]


Step = tuple[float, int, Allocated]
"""A change of the bytes in use: when, by how many bytes (below 0 for a free), and of which allocation."""


class MemoryLog:
    """The allocations of a process that are known, and the steps since the first open watch began."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._pending: list[MemoryEvent] = []
        self.emit: Callable[[MemoryEvent], None] = self._pending.append
        """Takes an event of a source; `settle` brings those of all sources in order."""
        self._live: dict[tuple[Layer, str], dict[int, Allocated]] = {}
        """By layer and library, then by address."""
        self._made: dict[int, list[Allocated]] = {}
        """By address: allocations of the driver since the first open watch began."""
        self.open = 0
        """Watches that are open."""
        self.cached: dict[int, Allocated] = {}
        """By address: allocations of the driver that a library keeps for reuse; they are no longer in use."""

    def settle(self, *, ours: bool = False) -> None:
        """Make steps of the events since the last call; to be called after every source has reported.
        `ours`: what was allocated since then is no test's, except for buffers of fixtures.
        """
        # This runs for each of a test's allocations, of which there may be thousands.
        segments: list[MemoryEvent] = []
        steps, last, living = self.steps, None, dict[int, Allocated]()
        for event in sorted(self._pending, key=itemgetter(0)):
            at, series, layer, address, nbytes, stack = event
            if layer == "segment":
                segments.append(event)
                continue
            if last is None or last[0] is not series or last[1] != layer:
                last = series, layer
                living = self._live.setdefault((layer, series[0]), {})
            if (before := living.pop(address, None)) is not None:
                steps.append((at, -before.nbytes, before))
            elif layer == "driver":
                self.cached.pop(address, None)
            if nbytes and (not ours or layer == "fixture"):
                living[address] = made = Allocated(at, series, layer, address, nbytes, stack)
                steps.append((at, nbytes, made))
                if layer == "driver":
                    self._made.setdefault(address, []).append(made)
        self._pending.clear()
        for event in segments:
            self._own(event)

    def _own(self, segment: MemoryEvent) -> None:
        """Give the driver's allocation that a pool took to its library."""
        for made in reversed(self._made.get(segment.address, [])):
            if made.owner is None and made.nbytes == segment.nbytes and made.at <= segment.at + SEGMENT_DELAY:
                made.owner = segment.series[0]
                return

    def forget(self, freed: Iterable[Allocated], at: float) -> None:
        """Book allocations as freed whose free nobody reported."""
        for one in freed:
            living = self._live[one.layer, one.library]
            if living.get(one.address) is one:
                del living[one.address]
                self.steps.append((at, -one.nbytes, one))
            elif self.cached.get(one.address) is one:
                del self.cached[one.address]

    def cache(self, kept: Iterable[Allocated], at: float) -> None:
        """Book allocations of the driver as kept for reuse."""
        for one in kept:
            self.forget([one], at)
            self.cached[one.address] = one

    def reuse(self, at: float) -> None:
        """Book all cached allocations as in use again."""
        for one in self.cached.values():
            self._live[one.layer, one.library][one.address] = again = replace(one, at=at)
            self.steps.append((at, again.nbytes, again))
        self.cached.clear()

    def shrink(self, series: Series, nbytes: int, at: float) -> None:
        """Book that a library uses less than its single allocations add up to: which of them were freed is unknown."""
        self.steps.append((at, -nbytes, Allocated(at, series, "use", 0, nbytes)))

    def living(self) -> list[Allocated]:
        """Allocations that live."""
        return [one for living in self._live.values() for one in living.values()]

    def closed(self) -> None:
        """One watch less; without a watch the steps are of no use."""
        self.open -= 1
        if self.open == 0:
            self.steps.clear()
            self._made.clear()


class _Account:
    """Running figures of one series."""

    __slots__ = ("bytes", "made", "points")

    def __init__(self) -> None:
        self.bytes = 0
        self.made: list[int] = []  # bytes of each allocation
        self.points: list[tuple[float, int]] = []

    def use(self, series: Series, at_peak: int) -> MemoryUse:
        sizes = Counter([(nbytes - 1).bit_length() for nbytes in self.made])
        return MemoryUse(
            *series,
            peak=max(0, max(self.points, key=itemgetter(1))[1]),
            at_peak=max(0, at_peak),
            kept=self.bytes,
            allocations=len(self.made),
            allocated=sum(self.made),
            largest=max(self.made, default=0),
            sizes=tuple(SizeCount(1 << bits, count) for bits, count in sorted(sizes.items())),
        )


@dataclass(frozen=True)
class Accounts:
    """What `account` finds."""

    peak: int  # most bytes of device memory in use at once
    driver_peak: int  # most bytes of device memory that the driver gave out at once
    uses: Mapping[Series, MemoryUse]
    courses: tuple[Course, ...]
    steps: Sequence[Step]  # of the interval
    peak_steps: int  # those of them up to the peak

    @property
    def at_peak(self) -> tuple[Allocated, ...]:
        """Allocations of the interval that lived at the peak, largest first."""
        return live_of(self.steps[: self.peak_steps])

    @property
    def kept(self) -> tuple[Allocated, ...]:
        """Allocations of the interval that live at its end, largest first."""
        return live_of(self.steps)


def account(steps: Sequence[Step], begin: float) -> Accounts:
    """Add up the steps of an interval. `begin`: when the interval began, on the steps' clock."""
    # As `MemoryLog.settle`, this runs for each allocation.
    found: dict[Series, _Account] = {}
    series, one, on_device = None, _Account(), False
    device = peak = peak_steps = driver = driver_peak = 0
    for number, (at, change, of) in enumerate(steps, 1):
        if of.layer != "use":
            if of.kind == "device":
                driver += change
                driver_peak = max(driver_peak, driver)
            if of.owner is not None:  # its pool's arrays count
                continue
        if of.series is not series:
            series = of.series
            one = found.setdefault(series, _Account())
            on_device = series[1] == "device"
        one.bytes = now = one.bytes + change
        one.points.append((at, now))
        if change > 0:
            one.made.append(change)
            if on_device:
                device += change
                if device > peak:
                    peak, peak_steps = device, number
        elif on_device:
            device += change
    at_peak: Counter[Series] = Counter()
    for _, change, of in steps[:peak_steps]:
        if of.owner is None:
            at_peak[of.series] += change
    uses = {series: one.use(series, at_peak[series]) for series, one in found.items()}
    courses = tuple(Course(*series, tuple((max(0.0, at - begin), now) for at, now in thinned(one.points))) for series, one in found.items())
    return Accounts(peak, driver_peak, uses, courses, steps, peak_steps)


def thinned(points: Sequence[tuple[float, int]], most: int = POINTS) -> tuple[tuple[float, int], ...]:
    """At most some `most` points: the highest of each of as many runs, and the last of all."""
    if len(points) <= most:
        return tuple(points)
    length = -(-len(points) // (most - 1))
    return (*(max(points[at : at + length], key=itemgetter(1)) for at in range(0, len(points), length)), points[-1])


def claim(steps: Sequence[Step], library: str, nbytes: int) -> bool:
    """Give a pool that reports only the sum of its segments the allocations of the driver that make it up.
    `library`: the pool's.
    `nbytes`: by which its segments grew over the interval, beyond those that are known.
    Returns true if some of the allocations that still live add up to `nbytes`, the largest first; or if there are none, as of a pool that
    maps its memory, which the driver does not report. Else some may count twice.
    """
    found: list[Allocated] = []
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


def claim_handles(steps: Sequence[Step], library: str, sizes: Sequence[int]) -> int:
    """Give a library the allocations of the driver that belong to its handles.
    `library`: whose handles.
    `sizes`: bytes of each allocation that one handle makes.
    Returns the bytes that it got.
    """
    free: dict[int, list[Allocated]] = {}
    for one in live_of(steps):
        if one.layer == "driver" and one.kind == "device":
            free.setdefault(one.nbytes, []).append(one)
    wanted = Counter(sizes)
    count = min((len(free.get(size, ())) // number for size, number in wanted.items()), default=0)
    for size, number in wanted.items():
        for one in free.get(size, ())[: count * number]:
            one.owner = library
    return count * sum(sizes)


def owned(steps: Sequence[Step], library: str, kind: MemoryPlace) -> int:
    """Bytes by which the known segments of a library's pool grew."""
    return sum(change for _, change, of in steps if of.owner == library and of.kind == kind)


def live_of(steps: Sequence[Step]) -> tuple[Allocated, ...]:
    """Allocations of these steps that were not freed by them, largest first; without segments of pools."""
    living: dict[int, Allocated] = {}
    for _, change, of in steps:
        if change > 0:
            living[id(of)] = of
        else:
            living.pop(id(of), None)
    return tuple(sorted((one for one in living.values() if one.owner is None), key=lambda one: -one.nbytes))
