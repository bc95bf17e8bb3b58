"""A measurement: samples in seconds, the bytes that they move, and the conditions on the device."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise

from msgspec import UNSET, UnsetType, field

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.overlap import Overlap
from pytest_gpumem.records.record import (
    Bytes,
    Count,
    LaunchTimes,
    NotNegative,
    Placements,
    Record,
    Seconds,
    Sectors,
    Share,
)
from pytest_gpumem.records.what_ran import WhatRan

REPEATED = 3  # Requested over compulsory bytes from which on the compulsory bytes are no measure of the traffic of caches and memory
L2_MULTIPLES = 4  # Footprint over L2 from which on bytes must come from DRAM; below, output may stay dirty in L2 after the last event
MODES_APART = 0.01  # Least gap between two modes of placements, as a share of the latency
SCATTERS_APART = 6  # The same in shortest intervals that hold half of the placements
LEAST_FOR_MODES = 6  # Fewest placements that can have modes
MOST, MOST_OF_MANY, MANY = 0.75, 0.6, 16
"""Share of the placements that are in one mode, from which on the others are exceptions; the same of many, and how many are many. Two
processes must not count different modes: where 3 of 10 placements are exceptions, 10 of 16 are so by chance once in a hundred processes."""
NOTHING_RAN = 1.5
"""Latency over `floor` up to which nothing ran between two events; recorded: an empty kernel takes 2.6 times the floor on an H100."""


def modes_of(medians: Sequence[float]) -> tuple[int, ...]:
    """The mode of each placement, counted from the fastest, from their medians in seconds.

    In the order of their medians, neighbours are of two modes if the gap between them is 1 % or more, and 6 times the shortest interval
    that holds half of the medians: medians that scatter have no modes. Fewer than six placements are of one mode.
    """
    order = sorted(range(len(medians)), key=medians.__getitem__)
    if len(order) < LEAST_FOR_MODES:
        return (0,) * len(order)
    ordered = [medians[index] for index in order]
    half = (len(ordered) - 1) // 2
    scatter = min(high - low for low, high in zip(ordered, ordered[half:], strict=False))
    apart = max(MODES_APART * ordered[0], SCATTERS_APART * scatter)
    numbers = accumulate((int(high - low >= apart) for low, high in pairwise(ordered)), initial=0)
    mode_of = dict(zip(order, numbers, strict=True))
    return tuple(mode_of[index] for index in range(len(order)))


def without_exceptions(medians: Sequence[float]) -> tuple[float, ...]:
    """The medians of the mode that three quarters of the placements are in, of 16 or more three fifths; all medians where there is none."""
    modes = modes_of(medians)
    mode, count = Counter(modes).most_common(1)[0] if modes else (0, 0)
    most = MOST_OF_MANY if len(modes) >= MANY else MOST
    return tuple(
        median
        for median, own in zip(medians, modes, strict=True)
        if own == mode or count < most * len(modes)
    )


class MovedBytes(Record, frozen=True):
    """Compulsory bytes of one launch: every distinct byte that must be read or written, once."""

    reads: Bytes  # Distinct bytes read
    writes: Bytes  # Distinct bytes written
    link: bool = False  # True if the bytes cross the host link; a copy of N bytes then counts N, as link bandwidth is quoted
    declared: Bytes | None = None
    """Total bytes that the user declares, where reads and writes are not known apart."""

    @property
    def total(self) -> int:
        """Bytes that a bandwidth counts: as declared, or reads + writes, or the larger of the two over a link."""
        if self.declared is not None:
            return self.declared
        return max(self.reads, self.writes) if self.link else self.reads + self.writes


class Conditions(Record, frozen=True):
    """State of the device at one moment, from NVML or the simulated clock."""

    sm_clock_hz: NotNegative | None = None  # SM clock in hertz
    memory_clock_hz: NotNegative | None = None  # Memory clock in hertz
    temperature_c: float | None = None  # GPU temperature in degrees Celsius
    power_w: NotNegative | None = None  # Board power in watts
    throttle_reasons: tuple[str, ...] | None = ()
    """Active clock event reasons that slow the device, such as "sw_power_cap", without idle and application clocks; None where the driver
    does not report them"""
    other_processes: Count | None = None
    """Other compute processes on the device; None where the driver does not report them."""


class Window(Record, frozen=True):
    """The active access-policy window, as the driver reports it; of a single launch, as the driver received it."""

    nbytes: Bytes  # Bytes under the window
    hit_ratio: Share  # Share of the window's accesses with the property `hit`
    set_aside: Bytes  # Bytes of L2 set aside, as granted
    where: str = "stream"  # Carrier of the window: "stream", "graph" (its kernels) or "launch"
    hit: str = "persisting"  # L2 property of that share of the accesses: "persisting", "streaming" or "normal"
    miss: str = "streaming"  # L2 property of the other accesses: "streaming" or "normal"
    offset: Bytes = 0  # Bytes of the buffer before the window


class Provenance(Record, frozen=True):
    """When and where a process measured: processes of one session agree better than those of another hour or another card."""

    utc: str  # Start of the process's session, ISO 8601
    card: str | None = None  # UUID of the GPU; None where it has none


class Repeat(Record, frozen=True):
    """The same measurement in another process of the same run (`--gpumem-processes`)."""

    medians: LaunchTimes  # Seconds: median of each buffer placement
    overhead: Seconds | None = None
    """Seconds of launch overhead in that process, as `Measurement.overhead`."""


class NoShare(str, Enum):
    """Why a share of the device's DRAM peak means nothing for a measurement."""

    UNKNOWN_TRAFFIC = "unknown traffic"
    LINK = "host link"
    HOT = "hot"
    UNKNOWN_FOOTPRINT = "unknown footprint"
    SMALL_FOOTPRINT = "small footprint"
    UNKNOWN_PEAK = "unknown peak"


class Measurement(Record, frozen=True, dict=True):
    """One measurement: its samples by placement, and everything needed to judge and repeat it."""

    label: str
    """Name of the measurement inside its test; empty for the only one."""
    target: str
    """Name of the kernel or the callable."""
    mode: str
    """State of the cache before each sample: "clean-cold", "dirty-cold" or "hot"."""
    sampler: str
    """Method of sampling: "blocked", "graph", "batched", "host" or "plain" (under a profiler)."""
    sampler_reason: str
    """Why this sampler."""
    placements: Placements
    """Seconds of each sample, one inner tuple per buffer placement."""
    half_width: Seconds | None
    """Half of the 95 % confidence interval of `latency` over placements, in seconds; None with fewer than two placements."""
    moved_bytes: MovedBytes | None
    """Compulsory bytes of one launch, where they are known."""
    footprint: Bytes | None
    """Distinct bytes of the arguments that one launch touches; decides whether a share of the peak is meaningful."""
    floor: Seconds
    """Seconds that two events with nothing between them read: no latency below it is real."""
    conditions: tuple[Conditions, Conditions]
    """Before the first and after the last sample."""
    discarded: Count = 0
    """Samples under throttling, which are not among `placements`."""
    window: Window | None = None
    """Access-policy window, if the stream had one."""
    profiled: bool = False
    """A profiler was attached: the times are not comparable."""
    checked: bool = False
    """The result of one launch was compared with a reference before and after timing."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader: why fewer placements, why not converged."""
    accesses_per_launch: Count | None = None
    """Dependent accesses of one launch, for a latency per access (pointer chase)."""
    overhead: Seconds | None = None
    """Seconds between two events with an empty launch between them, in this process: part of `latency`, and no property of the target. It
    differs between processes by some 60 ns (H200), which a comparison of two processes subtracts. None where the sampler's readings contain
    it in another way."""
    during: Conditions | None = None
    """The least favourable conditions between the first and the last sample."""
    kernel_source: str | None = None
    """SHA-256 of the source file of a catalogue kernel; None for a copy and for user code."""
    overlap: Overlap | None = None
    """The parts of work that overlaps, each measured alone (`gpu_work.together`, `staged_copy`)."""
    migrations: Migrations | None = None
    """Page faults and migrations of managed memory in an untimed pass (`count_pages=True`, a limit on pages, or where `what_ran` is recorded)."""
    what_ran: WhatRan | None = None
    """Kernels with their machine code, copies, allocations and waits of one launch in an untimed pass; None without such a pass."""
    sectors_per_request: Sectors | None = None
    """Mean 32-byte sectors of a warp's request for 32 words of 4 bytes, predicted from the access pattern: 4 where all are coalesced, up to
    32 (CUDA C++ Best Practices Guide, 9.2.1). None where the pattern is unknown, and where there are no such requests: a copy engine, a
    chain of accesses that one thread follows."""
    requested: Bytes | None = None
    """Bytes that the threads of one launch request, repeats counted; None where `sectors_per_request` is None."""
    provenance: Provenance | None = field(name="taken", default=None)
    """When and on which card; None in results of versions that did not record it."""
    managed: bool = False
    """Pages of managed memory were put back before every sample."""
    further: tuple[Repeat, ...] = ()
    """The same measurement in further processes of the run: comparisons take the mean over all processes, the other figures are of this one
    alone."""
    work_seen: bool | UnsetType = UNSET
    """False if no work was seen on the timed stream, a default stream or elsewhere on the device: the time may be the host's alone. Written
    only then."""
    outside: Seconds | UnsetType = UNSET
    """Work of one launch that runs outside of the timed interval, such as on a stream of its own, in seconds: `latency` lacks it. Written
    only where there is some."""
    busy: Share | UnsetType = UNSET
    """Share of the looks before, between and after the samples at which other work kept the device busy. Written only where one did."""
    launches_wait: bool | UnsetType = UNSET
    """True if the environment made every launch wait for the device (`CUDA_LAUNCH_BLOCKING`). Written only then."""
    host_time: Seconds | UnsetType = UNSET
    """Seconds that the host takes to queue one launch: the median of the samples. Absent if no launch is queued by itself."""
    ran_at_hz: NotNegative | UnsetType = UNSET
    """SM clock that really ran just before the samples, in hertz, by the device's own timer: the median. Not written where it is
    unknown."""

    took: dict[str, Seconds] | UnsetType = UNSET
    """Seconds of each phase of this measurement: "check", "warm-up", "placements", "samples", "passes"."""

    @property
    def repeat(self) -> Repeat:
        """The part of this measurement that `further` of another process's measurement keeps."""
        return Repeat(self.medians, self.overhead)

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples in seconds, placement after placement, each in the order of sampling."""
        return tuple(s for placement in self.placements for s in placement)

    @cached_property  # a row of a session asks for it some ten times, and so do those of its history
    def medians(self) -> tuple[float, ...]:
        """Median of each placement in seconds."""
        return tuple([p[0] if len(p) == 1 else statistics.median(p) for p in self.placements])

    @property
    def modes(self) -> tuple[int, ...]:
        """The mode of each placement, counted from the fastest (`modes_of`)."""
        return modes_of(self.medians)

    @property
    def counting(self) -> tuple[float, ...]:
        """Medians that `latency` is the mean of: all; under a window without those of exceptional placements."""
        return self.counting_of(self.medians)

    def counting_of(self, medians: Sequence[float]) -> tuple[float, ...]:
        """The same of medians of the same row in another process.

        Under a window, lines of the table overflow some sets of the set-aside at some placements and not at others: the same launch takes
        5 to 25 % longer there (`ci/records/nvidia-h200/l2_placements.json`).
        """
        return tuple(medians) if self.window is None else without_exceptions(medians)

    @property
    def latency(self) -> float:
        """Seconds of one launch: the mean over placements of each placement's median, without exceptional placements under a window."""
        return statistics.fmean(self.counting)

    @property
    def latency_per_access(self) -> float | None:
        """Seconds of one dependent access."""
        return self.latency / self.accesses_per_launch if self.accesses_per_launch else None

    @property
    def latency_per_access_interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of `latency_per_access` over placements: low and high, in seconds; None with fewer than two."""
        if not self.accesses_per_launch or self.half_width is None:
            return None
        return (self.latency - self.half_width) / self.accesses_per_launch, (
            self.latency + self.half_width
        ) / self.accesses_per_launch

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of compulsory traffic, or None where the traffic is unknown."""
        return self.moved_bytes.total / self.latency if self.moved_bytes is not None else None

    @property
    def asked_bandwidth(self) -> float | None:
        """Bytes per second that the threads request, if they request the compulsory bytes `REPEATED` times or more; None otherwise.

        Caches and memory together supply them. `bandwidth` of such a launch counts every byte once, and looks slow.
        """
        if (
            self.requested is None
            or self.moved_bytes is None
            or self.requested < REPEATED * self.moved_bytes.total
        ):
            return None
        return self.requested / self.latency

    def not_of_dram(self, facts: DeviceFacts) -> NoShare | None:
        """Why the bytes of a launch need not cross the DRAM bus, or are unknown; None if they cross it."""
        if self.moved_bytes is None:
            return NoShare.UNKNOWN_TRAFFIC
        if self.moved_bytes.link:
            return NoShare.LINK
        if self.mode == "hot":
            return NoShare.HOT
        if self.footprint is None:
            return NoShare.UNKNOWN_FOOTPRINT
        return NoShare.SMALL_FOOTPRINT if self.footprint < L2_MULTIPLES * facts.l2_bytes else None

    def no_share_of_peak(self, facts: DeviceFacts) -> NoShare | None:
        """Why a share of the device's DRAM peak would mean nothing for this measurement; None if it means something."""
        return self.not_of_dram(facts) or (None if facts.dram_peak else NoShare.UNKNOWN_PEAK)

    def share_of_peak(self, facts: DeviceFacts) -> float | None:
        """Bandwidth over the device's DRAM peak, or None where `no_share_of_peak` has a reason."""
        if self.bandwidth is None or self.no_share_of_peak(facts) is not None:
            return None
        return self.bandwidth / facts.dram_peak

    @property
    def placement_spread(self) -> float | None:
        """Standard deviation of all placements' medians over their mean."""
        return (
            statistics.stdev(self.medians) / statistics.fmean(self.medians)
            if len(self.placements) > 1
            else None
        )

    @property
    def noise(self) -> float | None:
        """Half-width of the confidence interval over the latency."""
        return self.half_width / self.latency if self.half_width is not None else None


class Limits(Record, frozen=True):
    """Limits of a measurement and of the memory of a test, as written; None is no limit."""

    min_bandwidth: str | None = None  # Least bandwidth: "2.4 TB/s" or "85% of peak"
    max_latency: str | None = None  # Longest latency: "12 us"
    max_gpu_page_faults: str | None = None  # Most page faults of the GPU during one launch: "0"
    max_migrated: str | None = None
    """Most bytes of managed memory that move during one launch: "64 MiB"."""
    max_kernels: str | None = None  # Most kernels in one launch: "3"
    max_copies: str | None = None  # Most copies in one launch: "1"
    max_copied_bytes: str | None = None  # Most bytes that copies move in one launch: "64 MiB"
    max_waits: str | None = None  # Most times that the host waits for the device in one launch: "0"
    max_spill: str | None = None
    """Most bytes of local memory of a thread, over the kernels of one launch: "0 B"."""
    min_overlap: str | None = None  # Least hidden share of the time that overlap can hide: "80%"
    max_regression: str | None = None
    """Largest slow-down against the baseline: "1%" or "1% + 0.2 us"."""
    faster_than: str | None = None
    """Another measurement of the same test that must be slower: "faulting", or "20 x faulting"."""
    max_peak: str | None = None  # Most bytes of device memory in use at once: "2 GiB"
    max_kept: str | None = None  # Most bytes still in use after the test: "0 B"
    max_peak_regression: str | None = None
    """Largest growth of the peak against the baseline: "0 B" or "5%"."""
    origin: dict[str, str] = field(default_factory=dict)
    """Source of each limit: "marker", "--gpumem-max-regression", "gpumem_max_latency in pytest.ini", "call"."""
