"""What was measured: samples in seconds, the traffic behind them, and the conditions they were taken under."""

from __future__ import annotations

import statistics

from msgspec import UNSET, UnsetType, field

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.overlap import Overlap
from pytest_gpumem.records.record import Record
from pytest_gpumem.records.uses import Activity
from pytest_gpumem.units import format_bytes

REPEATED = 3
"""Times that threads ask for the compulsory bytes from which on these say nothing of what caches and memory serve."""
L2_MULTIPLES = 4
"""Footprint over L2 from which bytes must come from DRAM; below, output may stay dirty in L2 beyond the last event."""


class Traffic(Record, frozen=True):
    """Compulsory bytes of one launch: every distinct byte that must be read or written, once."""

    reads: int
    """Distinct bytes read."""
    writes: int
    """Distinct bytes written."""
    link: bool = False
    """True if the bytes cross the host link; a copy of N bytes then counts N, as link bandwidth is quoted."""
    declared: int | None = None
    """Bytes that the user declared as moved, where reads and writes are not known apart; it then is the total."""

    @property
    def total(self) -> int:
        """Bytes that a bandwidth counts: as declared, or reads + writes, or the larger of the two over a link."""
        if self.declared is not None:
            return self.declared
        return max(self.reads, self.writes) if self.link else self.reads + self.writes


class Counted(Record, frozen=True):
    """Bytes that the hardware's counters saw one launch move: the mean over `launches`."""

    reads: int
    """Bytes read from DRAM."""
    writes: int
    """Bytes written to DRAM; what is still dirty in L2 when the launch ends is not among them."""
    l2_reads: int | None
    """Bytes that the SMs read from L2, in whole sectors of 32 bytes; None where they were not counted."""
    l2_writes: int | None
    """Bytes that the SMs wrote to L2, in whole sectors of 32 bytes; None where they were not counted."""
    launches: int
    """Launches that were counted."""
    source: str
    """What counted, such as "ncu"."""

    @property
    def total(self) -> int:
        """Bytes read from and written to DRAM."""
        return self.reads + self.writes


class Conditions(Record, frozen=True):
    """State of the device at one moment, from NVML or the simulated clock."""

    sm_clock_hz: float | None = None
    """SM clock in hertz."""
    memory_clock_hz: float | None = None
    """Memory clock in hertz."""
    temperature_c: float | None = None
    """GPU temperature in degrees Celsius."""
    power_w: float | None = None
    """Board power in watts."""
    throttle_reasons: tuple[str, ...] = ()
    """Active clock event reasons that slow the device, such as "sw_power_cap"; idle and application clocks are left out."""
    other_processes: int | None = None
    """Compute processes on the device besides this one; None where the driver does not say."""


class Window(Record, frozen=True):
    """The access-policy window that was active, as the driver gave it back; of a single launch, as the driver was given it."""

    nbytes: int
    """Bytes under the window."""
    hit_ratio: float
    """Share of the window's accesses that get the persisting property."""
    set_aside: int
    """Bytes of L2 set aside, as granted."""
    where: str = "stream"
    """What carried it: "stream", "graph" (its kernels) or "launch"."""
    hit: str = "persisting"
    """What that share of the accesses asked of L2: "persisting", "streaming" or "normal"."""
    miss: str = "streaming"
    """What the other accesses asked of L2: "streaming" or "normal"."""


class Controls(Record, frozen=True):
    """What control kernels read, which run no code of the project under test: a drift between two of these is the device's."""

    dram: float | None = None
    """Seconds of a read from DRAM; None where it was not measured."""
    l2: float | None = None
    """Seconds of a read from L2; None where it was not measured."""
    launch: float | None = None
    """Seconds between two events with an idle launch between them; None where it was not measured."""
    latency: float | None = None
    """Seconds of one of many dependent accesses to DRAM: cards of one model come with different memory; None where it was not measured."""
    source: str = ""
    """Which control kernels, as a digest of their source and of the arrays that they read: readings of others do not compare."""


class Taken(Record, frozen=True):
    """When and where a process measured: processes of one session agree better than those of another hour or another card."""

    utc: str
    """Start of the process's session, ISO 8601."""
    card: str | None = None
    """UUID of the GPU; None where it has none."""
    controls: Controls | None = None
    """Readings of the control kernels at the session's start; None where none were taken."""


NOTHING_RAN = 1.5
"""Times `floor` up to which nothing can have run between two events: an empty kernel takes 2.6 times the floor on an H100."""


class Repeat(Record, frozen=True):
    """The same measurement in another process of the same run (`--gpumem-processes`)."""

    medians: tuple[float, ...]
    """Seconds: median of each buffer placement."""
    overhead: float | None = None
    """Seconds of launch overhead in that process, as `Measurement.overhead`."""
    controls: Controls | None = None
    """Readings of the control kernels in that process; None where none were taken."""


class Measurement(Record, frozen=True):
    """One measurement: its samples by placement, and everything needed to judge and repeat it."""

    label: str
    """What tells it apart inside its test; empty for the only one."""
    target: str
    """What was launched: the kernel's or the callable's name."""
    mode: str
    """State of the cache before each sample: "clean-cold", "dirty-cold" or "hot"."""
    sampler: str
    """How samples were taken: "blocked", "batched", "host" or "plain" (under a profiler); "graph" in results of earlier versions."""
    sampler_reason: str
    """Why this sampler."""
    placements: tuple[tuple[float, ...], ...]
    """Seconds of each sample, one inner tuple per buffer placement."""
    half_width: float | None
    """Half of the 95 % confidence interval of `latency` over placements, in seconds; None with fewer than two placements."""
    traffic: Traffic | None
    """Compulsory bytes of one launch, where they are known."""
    footprint: int | None
    """Distinct bytes of the arguments that one launch touches; decides whether a share of the peak is meaningful."""
    floor: float
    """Seconds that two events with nothing between them read: no latency below it is real."""
    conditions: tuple[Conditions, Conditions]
    """Before the first and after the last sample."""
    discarded: int = 0
    """Samples taken under throttling, not among `placements`."""
    window: Window | None = None
    """Access-policy window, if the stream had one."""
    profiled: bool = False
    """A profiler was attached: the times are not comparable."""
    checked: bool = False
    """The result of one launch was compared with a reference before and after timing."""
    notes: tuple[str, ...] = ()
    """What a reader must know besides: why fewer placements, why not converged."""
    accesses_per_launch: int | None = None
    """Dependent accesses of one launch, for a latency per access (pointer chase)."""
    overhead: float | None = None
    """Seconds that a launch which does nothing reads between two events in this process: part of `latency`, and no property of what was
    measured. It differs between processes by some 60 ns (H200), which a comparison of two processes takes out. None where the sampler's
    readings contain it in another way."""
    during: Conditions | None = None
    """The least favourable conditions seen between the first and the last sample."""
    counted: Counted | None = None
    """What counters saw a launch of the same test and label move, where `gpumem traffic` has counted it."""
    kernel_source: str | None = None
    """SHA-256 of the source file of a catalogue kernel; None for a copy and for anybody else's code."""
    overlap: Overlap | None = None
    """The parts of work that overlaps, each measured alone (`gpu_work.together`, `staged_copy`)."""
    migrations: Migrations | None = None
    """Page faults and migrations of managed memory in an untimed pass, where it was asked for (`--gpumem-count-pages`)."""
    activity: Activity | None = None
    """Kernels, copies and memsets of one launch in an untimed pass, where it was asked for (`--gpumem-explain`)."""
    sectors_per_request: float | None = None
    """Mean 32-byte sectors of a warp's request for 32 words of 4 bytes, predicted from the access pattern: 4 where all are coalesced, up to
    32 (CUDA C++ Best Practices Guide, 9.2.1). None where the pattern is unknown, and where there are no such requests: a copy engine, a
    chain of accesses that one thread follows."""
    requested: int | None = None
    """Bytes that the threads of one launch ask for, repeats counted; None where `sectors_per_request` is."""
    taken: Taken | None = None
    """When and on which card; None in results from before this was recorded."""
    managed: bool = False
    """Pages of managed memory were put back before every sample."""
    further: tuple[Repeat, ...] = ()
    """The same measurement in further processes of the run: comparisons take the mean over all processes, the other figures are of this one
    alone."""
    work_seen: bool | UnsetType = UNSET
    """False if no work was seen on the timed stream, a default stream or elsewhere on the device: the time may be the host's alone. Written
    only then."""

    @property
    def controls(self) -> Controls | None:
        """Readings of the control kernels in its process; None where none were taken."""
        return self.taken.controls if self.taken is not None else None

    @property
    def repeat(self) -> Repeat:
        """What a measurement of another process takes of this one."""
        return Repeat(self.medians, self.overhead, self.controls)

    @property
    def samples(self) -> tuple[float, ...]:
        """All samples in seconds, placement after placement, each in the order in which they were taken."""
        return tuple(s for placement in self.placements for s in placement)

    @property
    def medians(self) -> tuple[float, ...]:
        """Median of each placement in seconds."""
        return tuple(statistics.median(p) for p in self.placements)

    @property
    def latency(self) -> float:
        """Seconds of one launch: the mean over placements of each placement's median."""
        return statistics.fmean(self.medians)

    @property
    def latency_per_access(self) -> float | None:
        """Seconds of one dependent access."""
        return self.latency / self.accesses_per_launch if self.accesses_per_launch else None

    @property
    def latency_per_access_interval(self) -> tuple[float, float] | None:
        """The 95 % confidence interval of `latency_per_access` over placements: low and high, in seconds; None with fewer than two."""
        if not self.accesses_per_launch or self.half_width is None:
            return None
        return (self.latency - self.half_width) / self.accesses_per_launch, (self.latency + self.half_width) / self.accesses_per_launch

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of compulsory traffic, or None where the traffic is unknown."""
        return self.traffic.total / self.latency if self.traffic is not None else None

    @property
    def asked_bandwidth(self) -> float | None:
        """Bytes per second that the threads ask for, where they ask for the compulsory bytes `REPEATED` times or more; else None.

        Caches and memory serve it together. `bandwidth` of such a launch counts every byte once, and looks as if they were slow.
        """
        if self.requested is None or self.traffic is None or self.requested < REPEATED * self.traffic.total:
            return None
        return self.requested / self.latency

    def no_share_of_peak(self, facts: DeviceFacts) -> str | None:
        """Why a share of the device's DRAM peak would mean nothing for this measurement; None if it means something."""
        if self.traffic is None:
            return "its traffic is unknown (give `moved=`)"
        if self.traffic.link:
            return "its bytes cross the host link, not the memory bus"
        if self.mode == "hot":
            return "in hot mode L2 serves what it can"
        if self.footprint is None:
            return "its footprint is unknown"
        if self.footprint < L2_MULTIPLES * facts.l2_bytes:
            return f"its footprint of {format_bytes(self.footprint)} is below {L2_MULTIPLES} x L2 ({format_bytes(facts.l2_bytes)})"
        return None

    def share_of_peak(self, facts: DeviceFacts) -> float | None:
        """Bandwidth over the device's DRAM peak, or None where `no_share_of_peak` has a reason."""
        if self.bandwidth is None or self.no_share_of_peak(facts) is not None:
            return None
        return self.bandwidth / facts.peak_bandwidth

    @property
    def placement_spread(self) -> float | None:
        """Standard deviation of the placements' medians over their mean."""
        return statistics.stdev(self.medians) / self.latency if len(self.placements) > 1 else None

    @property
    def noise(self) -> float | None:
        """Half-width of the confidence interval over the latency."""
        return self.half_width / self.latency if self.half_width is not None else None


class Limits(Record, frozen=True):
    """What a measurement is held to. None means: no such limit."""

    min_bandwidth: str | None = None
    """Least bandwidth, as written: "2.4 TB/s" or "85% of peak"."""
    max_latency: str | None = None
    """Longest latency, as written: "12 us"."""
    max_gpu_page_faults: str | None = None
    """Most page faults of the GPU during one launch, as written: "0"."""
    max_migrated: str | None = None
    """Most bytes that managed memory moves during one launch, as written: "64 MiB"."""
    min_overlap: str | None = None
    """Least share of the time that overlap can hide which is to be hidden, as written: "80%"."""
    max_regression: str | None = None
    """Largest slow-down against the baseline, as written: "1%" or "1% + 0.2 us"."""
    fail_if_faster: str | None = None
    """Gain against the baseline from which on the baseline counts as stale, as written: "5%"."""
    faster_than: str | None = None
    """Another measurement of the same test that this one must beat, as written: "faulting", or "20 x faulting"."""
    origin: dict[str, str] = field(default_factory=dict)
    """Where each limit came from: "marker", "--gpumem-max-regression", "gpumem_max_latency in pytest.ini", "call"."""
