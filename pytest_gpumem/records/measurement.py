"""A measurement: samples in seconds, the bytes that they move, and the conditions on the device."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Annotated, Any

from msgspec import Meta

from pytest_gpumem.records import (
    Bytes,
    Count,
    LaunchTimes,
    NotNegative,
    Placements,
    Record,
    Seconds,
    Share,
)
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.what_ran import Migrations, PageCounts, WhatRan

Pieces = Annotated[int, Meta(ge=1)]
NOTHING_TO_HIDE = 0.02  # share of the sequential time that is noise


class Part(Record, frozen=True):
    """One part, measured alone."""

    name: str  # Such as "host to device"
    seconds: Seconds  # Its latency alone, in seconds


class Overlap(Record, frozen=True):
    """Parts of work that overlaps. Times are in seconds, measured as the overlapping work is."""

    parts: tuple[Part, ...]
    """Each part alone."""
    sequential: Seconds
    """Seconds of all parts, one after another."""
    bound: Seconds
    """Seconds that no overlap can beat: the longest part, or the sum of the parts that share an
    engine."""
    streams: int
    """Streams that the work is spread over."""
    chunks: Pieces | None = None
    """Pieces that the data is cut into; None where the parts are whole and independent."""

    @property
    def estimate(self) -> float | None:
        """Estimate of the guide in seconds, tE + tT/n or tT + tE/n: the bound, and an n-th part of
        the rest (Best Practices Guide, 9.1.2). None where nothing is cut into pieces.
        """
        if self.chunks is None:
            return None
        rest = sum(part.seconds for part in self.parts) - self.bound
        return self.bound + rest / self.chunks

    @property
    def hideable(self) -> float | None:
        """Seconds that the best overlap hides: sequential less bound; None where this is next to
        nothing."""
        seconds = self.sequential - self.bound
        if seconds <= NOTHING_TO_HIDE * self.sequential:
            return None
        return seconds

    def hidden(self, latency: float) -> float | None:
        """Return the hidden share of the time that can be hidden: 0 at the sequential time, 1 at
        the bound, below 0 for slower than sequential. None where there is nothing to hide.
        `latency`: of the overlapping work, in seconds.
        """
        if self.hideable is None:
            return None
        return (self.sequential - latency) / self.hideable


class MovedBytes(Record, frozen=True):
    """Compulsory bytes of a launch: each distinct byte that must be read or written, once."""

    reads: Bytes  # Distinct bytes read
    writes: Bytes  # Distinct bytes written
    link: bool = False  # The bytes cross the host link, where a copy of N bytes counts N
    declared: Bytes | None = None
    """Total bytes that the user declares, where reads and writes are not known apart."""

    @property
    def total(self) -> int:
        """Bytes that a bandwidth counts: as declared, or reads + writes, or the larger of the two
        over a link."""
        if self.declared is not None:
            return self.declared
        return max(self.reads, self.writes) if self.link else self.reads + self.writes


def worst(conditions: Sequence[Conditions]) -> Conditions | None:
    """Return the least favourable figures, of those that the driver gave."""
    if not conditions:
        return None
    least: dict[str, Any] = {}
    for name in Conditions.__struct_fields__:
        values = [getattr(each, name) for each in conditions if getattr(each, name) is not None]
        if not values:
            least[name] = None
        elif name == "throttle_reasons":
            least[name] = tuple(dict.fromkeys(chain.from_iterable(values)))
        else:
            least[name] = min(values) if name.endswith("clock_hz") else max(values)
    return Conditions(**least)


class Window(Record, frozen=True):
    """The active access-policy window, as the driver reports it; of a single launch, as the driver
    received it."""

    nbytes: Bytes  # Bytes under the window
    hit_ratio: Share  # Share of the window's accesses with the property `hit`
    set_aside: Bytes  # Bytes of L2 set aside, as granted
    where: str = "stream"  # Carrier of the window: "stream", "graph" (its kernels) or "launch"
    hit: str = "persisting"
    """L2 property of that share of the accesses: "persisting", "streaming" or "normal"."""
    miss: str = "streaming"  # L2 property of the other accesses: "streaming" or "normal"
    offset: Bytes = 0  # Bytes of the buffer before the window


class Repeat(Record, frozen=True):
    """The same measurement in another process of the same run (`--gpumem-processes`)."""

    medians: LaunchTimes  # Seconds: median of each buffer placement
    overhead: Seconds | None = None
    """Seconds of launch overhead in that process, as `Measurement.overhead`."""


class Measurement(Record, frozen=True, dict=True):
    """One measurement: its samples by placement, and everything needed to judge and repeat it."""

    label: str  # Name of the measurement inside its test; empty where it is the only measurement
    target: str  # Name of the kernel or the callable
    mode: str  # State of the cache before each sample: "clean-cold", "dirty-cold" or "hot"
    sampler: str
    """Method of sampling: "blocked", "graph", "batched", "host" or "plain" (under a profiler)."""
    sampler_reason: str  # Why this sampler
    placements: Placements  # Seconds of each sample, an inner tuple per buffer placement
    half_width: Seconds | None
    """Half of the 95 % confidence interval of `latency` over placements, in seconds; None with
    fewer than two placements."""
    moved_bytes: MovedBytes | None  # Compulsory bytes of a launch, where they are known
    footprint: Bytes | None
    """Distinct bytes of the arguments that a launch touches; decides whether a share of the peak
    is meaningful."""
    floor: Seconds
    """Seconds that two events with nothing between them read: no latency below it is real."""
    conditions: tuple[Conditions, Conditions]  # After the first and the last group of samples
    discarded: Count = 0  # Samples under throttling, which are not among `placements`
    window: Window | None = None  # Access-policy window, if the stream had a window
    profiled: bool = False  # A profiler was attached: the times are not comparable
    checked: bool = False
    """The result of a launch was compared with a reference before and after timing."""
    notes: tuple[str, ...] = ()  # Remarks for the reader: why fewer placements, why not converged
    accesses_per_launch: Count | None = None
    """Dependent accesses of a launch, for a latency per access (pointer chase)."""
    overhead: Seconds | None = None
    """Seconds between two events with an empty launch between them: part of `latency`, and a
    property of the process. None where the sampler's readings contain it in another way."""
    during: Conditions | None = None
    """The least favourable conditions after any group of samples."""
    overlap: Overlap | None = None
    """The parts of work that overlaps, each measured alone (`gpu_work.together`, `staged_copy`)."""
    migrations: Migrations | None = None
    """Page faults and migrations of managed memory in an untimed pass."""
    what_ran: WhatRan | None = None
    """Kernels, copies, memsets and waits of a launch in an untimed pass."""
    sectors_per_request: NotNegative | None = None
    """Mean 32-byte sectors of a warp's request for 32 words of 4 bytes, from the access pattern: 4
    where all are coalesced, up to 32 (CUDA C++ Best Practices Guide, 9.2.1). None where it is
    unknown, and for copy engines and pointer chases."""
    requested: Bytes | None = None  # Bytes that the threads of a launch request, repeats counted
    card: str | None = None  # UUID of the GPU that measured; None where it has none
    further: tuple[Repeat, ...] = ()
    """The same measurement in further processes of the run, for comparisons."""
    work_seen: bool = True
    """False if no work was seen on the device: the time may be the host's alone."""
    busy: Share = 0.0
    """Share of the looks between samples at which other work kept the device busy."""
    launches_wait: bool = False  # `CUDA_LAUNCH_BLOCKING` made every launch wait
    host_time: Seconds | None = None
    """Seconds that the host takes to queue a launch: the median of the samples."""

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples in seconds, placement after placement."""
        return tuple(chain.from_iterable(self.placements))

    @functools.cached_property
    def medians(self) -> tuple[float, ...]:
        """Median of each placement in seconds."""
        return tuple(statistics.median(times) for times in self.placements)

    @property
    def counting(self) -> tuple[float, ...]:
        """Medians that `latency` is the mean of."""
        return self.counting_of(self.medians)

    def counting_of(self, medians: Sequence[float]) -> tuple[float, ...]:
        """Return the medians of a process that count: under a window without exceptional
        placements, which take 5 to 25 % longer."""
        return tuple(medians) if self.window is None else without_exceptions(medians)

    @property
    def latency(self) -> float:
        """Seconds of a launch: the mean over placements of each placement's median, without
        exceptional placements under a window."""
        return statistics.fmean(self.counting)

    @property
    def pages(self) -> PageCounts | None:
        """Page faults and migrations of a launch, where they were counted."""
        return None if self.migrations is None else self.migrations.launch

    @property
    def latency_per_access(self) -> float | None:
        """Seconds of a dependent access."""
        if not self.accesses_per_launch:
            return None
        return self.latency / self.accesses_per_launch

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of compulsory traffic, or None where the traffic is unknown."""
        if self.moved_bytes is None:
            return None
        return self.moved_bytes.total / self.latency

    @property
    def placement_spread(self) -> float | None:
        """Standard deviation of all placements' medians divided by their mean."""
        if len(self.placements) < 2:
            return None
        return statistics.stdev(self.medians) / statistics.fmean(self.medians)

    @property
    def noise(self) -> float | None:
        """Half-width of the confidence interval over the latency."""
        if self.half_width is None:
            return None
        return self.half_width / self.latency


# Modes of placements: groups that take equally long. `Measurement.mode` is of the cache.

MODES_APART = 0.01  # least gap between two modes, as a share of the latency
SCATTERS_APART = 6  # the same, in shortest intervals that hold half of the placements
LEAST_FOR_MODES = 6  # fewest placements that can have modes
MOST, MOST_OF_MANY, MANY = 0.75, 0.6, 16
"""A mode with the share `MOST` of the placements is the usual one, and the others are exceptions.
From `MANY` placements on, `MOST_OF_MANY` is enough. With less, two processes might count different
modes."""


def modes_of(medians: Sequence[float]) -> tuple[int, ...]:
    """Return the mode of each placement, counted from the fastest. `medians`: in seconds.

    In the order of the medians, a gap of `MODES_APART` and of `SCATTERS_APART` begins a new mode.
    """
    modes = [0] * len(medians)
    if len(medians) < LEAST_FOR_MODES:
        return tuple(modes)
    ordered = sorted(medians)
    half = (len(ordered) - 1) // 2
    # The shortest interval that holds half of the medians.
    scatter = min(high - low for low, high in zip(ordered, ordered[half:], strict=False))
    apart = max(MODES_APART * ordered[0], SCATTERS_APART * scatter)
    order = sorted(range(len(medians)), key=medians.__getitem__)
    mode = 0
    for before, index in pairwise(order):
        if medians[index] - medians[before] >= apart:
            mode += 1
        modes[index] = mode
    return tuple(modes)


def without_exceptions(medians: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of the usual mode, or all medians where there is none."""
    modes = modes_of(medians)
    if not modes:
        return ()
    usual, count = Counter(modes).most_common(1)[0]
    most = MOST_OF_MANY if len(modes) >= MANY else MOST
    if count < most * len(modes):
        return tuple(medians)
    return tuple(median for median, mode in zip(medians, modes, strict=True) if mode == usual)


# Student's t distribution. SciPy has it; it is larger than this package.


@functools.cache
def quantile(confidence: float, freedom: int) -> float:
    """Return the value that is not exceeded with a confidence from 0.5 on, to nine digits."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < 2 * confidence - 1:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, freedom) < 2 * confidence - 1:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, freedom: int) -> float:
    """Probability of a value between -t and t (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.sin(angle)
    if odd:
        term *= math.cos(angle)
    total = 0.0
    for index in range(freedom // 2):
        total += term
        above = 2 * index + 1 + odd
        term *= math.cos(angle) ** 2 * above / (above + 1)
    return 2 / math.pi * (angle + total) if odd else total
