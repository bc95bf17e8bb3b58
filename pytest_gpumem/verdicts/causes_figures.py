"""What is known of one side of an explanation, as figures of a single launch, and how the kernels of two sides belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import CopyUse, KernelUse


@dataclass(frozen=True)
class Evidence:
    """One side: what was measured, and what a profiler counted besides."""

    measurement: Measurement
    facts: DeviceFacts
    profile: TestProfile | None = None
    """Counters of the same measurement, from a run under Nsight Compute."""
    trace: TestProfile | None = None
    """What it consists of, from a run under Nsight Systems."""


@dataclass(frozen=True)
class OneKernel:
    """All launches of one kernel within a single measured launch, whatever their shapes."""

    name: str
    count: float
    """Launches."""
    seconds: float
    """Running time of all of them, as the tool that watched saw it."""
    dram_read: float | None
    """Bytes."""
    dram_written: float | None
    """Bytes."""
    asked: float | None
    """Bytes that the SMs asked of L2, reads and writes, in whole sectors."""
    hit_rate: float | None
    """Share of what was asked of L2 that it had."""
    sectors: tuple[float | None, float | None]
    """Sectors of one load and of one store of a warp."""
    used: tuple[float | None, float | None]
    """Share of the sectors' bytes that loads and stores use."""
    occupancy: float | None
    """Achieved, 0 to 1."""
    blocks: int
    """Of its largest shape."""
    threads: int
    """Threads of a block of that shape."""
    registers: int | None
    local: int | None
    """Bytes of local memory of a thread."""

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return None if self.dram_read is None or self.dram_written is None else self.dram_read + self.dram_written

    def share(self, part: float) -> OneKernel:
        """The same kernel launched `part` times as often."""

        def scaled(figure: float | None) -> float | None:
            return None if figure is None else figure * part

        return OneKernel(
            self.name, self.count * part, self.seconds * part, scaled(self.dram_read), scaled(self.dram_written), scaled(self.asked),
            self.hit_rate, self.sectors, self.used, self.occupancy, self.blocks, self.threads, self.registers, self.local,
        )  # fmt: skip


class Figures:
    """One side's evidence as figures of one launch."""

    def __init__(self, evidence: Evidence) -> None:
        self.measurement = evidence.measurement
        self.facts = evidence.facts
        self._profile = evidence.profile
        self._trace = evidence.trace

    @property
    def latency(self) -> float:
        """Seconds of one launch."""
        return self.measurement.latency

    @property
    def window(self) -> Window | None:
        """The access-policy window."""
        return self.measurement.window

    @property
    def set_aside(self) -> int | None:
        """Bytes of L2 set aside, with or without a window; None where nobody asked."""
        if self.window is not None:
            return self.window.set_aside
        return self.measurement.activity.set_aside if self.measurement.activity is not None else None

    @cached_property
    def kernels(self) -> tuple[OneKernel, ...]:
        """What ran on the SMs, in the order in which it first did, as far as known; with counters where a profiler counted."""
        if self._profile is not None and self._profile.kernels:
            return _by_name(self._profile.kernels, self._profile.launches or 1)
        activity = self.measurement.activity
        if activity is not None and activity.not_counted is None:
            return _by_name(activity.kernels, 1)
        return _by_name(self._trace.kernels, self._trace.launches) if self._trace is not None and self._trace.launches else ()

    @property
    def knows_kernels(self) -> bool:
        """Whether anybody watched which kernels ran."""
        activity = self.measurement.activity
        watched = activity is not None and activity.not_counted is None
        return watched or self._trace is not None or bool(self._profile is not None and self._profile.kernels)

    @property
    def counted(self) -> bool:
        """Whether a profiler counted DRAM bytes of every kernel."""
        return bool(self.kernels) and all(kernel.dram is not None for kernel in self.kernels)

    @cached_property
    def copies(self) -> tuple[CopyUse, ...] | None:
        """Copies and memsets of one launch; None where nobody watched."""
        activity = self.measurement.activity
        if activity is not None and activity.not_counted is None:
            return (*activity.copies, *activity.memsets)
        trace = self._trace
        if trace is not None and trace.launches:
            return tuple(_each(copy, trace.launches) for copy in (*trace.copies, *trace.memsets))
        return None

    @cached_property
    def pages(self) -> PageCounts | None:
        """What pages of managed memory did during one launch; None where that was not counted."""
        migrations = self.measurement.migrations
        if migrations is not None and migrations.launch is not None:
            return migrations.launch
        trace = self._trace
        if trace is None or trace.migrations is None or not trace.launches:
            return None
        return _page_share(trace.migrations, trace.launches)

    @property
    def prefetched(self) -> int:
        """Bytes that went to the device ahead of a launch, while pages were put back."""
        migrations = self.measurement.migrations
        return migrations.before.to_device if migrations is not None and migrations.before is not None else 0

    @property
    def host_memory(self) -> dict[str, str]:
        """Kind of memory by name, of arguments that are not plain device memory."""
        activity = self.measurement.activity
        return dict(activity.arguments) if activity is not None else {}

    def clock(self, of: Callable[[Conditions], float | None]) -> float | None:
        """A clock in hertz while samples were taken: the least seen between them, else the larger of before and after."""
        if self.measurement.during is not None and (seen := of(self.measurement.during)) is not None:
            return seen
        known = [clock for conditions in self.measurement.conditions if (clock := of(conditions)) is not None]
        return max(known, default=None)

    @property
    def compulsory(self) -> int | None:
        """Declared bytes of one launch that DRAM serves; None where unknown or where a link serves them."""
        traffic = self.measurement.traffic
        return None if traffic is None or traffic.link else traffic.total


@dataclass(frozen=True)
class Total:
    """Several kernels of one side together."""

    kernels: tuple[OneKernel, ...]

    @property
    def seconds(self) -> float:
        """Running time as it was watched."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def count(self) -> float:
        """Launches."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def dram_read(self) -> float | None:
        """Bytes."""
        return _sum(kernel.dram_read for kernel in self.kernels)

    @property
    def dram_written(self) -> float | None:
        """Bytes."""
        return _sum(kernel.dram_written for kernel in self.kernels)

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return _sum(kernel.dram for kernel in self.kernels)

    @property
    def asked(self) -> float | None:
        """Bytes asked of L2 by the SMs."""
        return _sum(kernel.asked for kernel in self.kernels)

    @property
    def hit_rate(self) -> float | None:
        """L2 hit rate, weighted by what was asked."""
        return self._mean(lambda kernel: kernel.hit_rate)

    @property
    def occupancy(self) -> float | None:
        """Achieved occupancy, weighted by time."""
        known = [(kernel.occupancy, kernel.seconds) for kernel in self.kernels if kernel.occupancy is not None]
        weight = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / weight if weight else None

    def sectors(self, which: int) -> float | None:
        """Sectors of one load (0) or store (1)."""
        return self._mean(lambda kernel: kernel.sectors[which])

    def used(self, which: int) -> float | None:
        """Share of the sectors' bytes that loads (0) or stores (1) use."""
        return self._mean(lambda kernel: kernel.used[which])

    def _mean(self, figure: Callable[[OneKernel], float | None]) -> float | None:
        known = [(value, kernel.asked if kernel.asked is not None else kernel.seconds) for kernel in self.kernels
                 if (value := figure(kernel)) is not None]  # fmt: skip
        weight = sum(each for _, each in known)
        return sum(value * each for value, each in known) / weight if weight else None


@dataclass(frozen=True)
class Paired:
    """The kernels of two sides: those that do the same work, and those that only head runs."""

    base: Total
    head: Total
    added: tuple[OneKernel, ...]
    """Kernels of head, or further launches of one, that base has no counterpart for."""
    replaced: tuple[OneKernel, ...]
    """Kernels of base that `added` stands for, such as a fused one that was split; empty where nothing went."""


def pair(base: Sequence[OneKernel], head: Sequence[OneKernel]) -> Paired:
    """Put kernels of the same name together; those of other names in their order where there are as many, else they were added."""
    names = {kernel.name for kernel in base} & {kernel.name for kernel in head}
    common_base, common_head, added = [], [], []
    for kernel in base:
        if kernel.name in names:
            common_base.append(kernel)
    for kernel in head:
        if kernel.name in names:
            was = next(one for one in base if one.name == kernel.name)
            if kernel.count > was.count > 0:
                common_head.append(kernel.share(was.count / kernel.count))
                added.append(kernel.share(1 - was.count / kernel.count))
            else:
                common_head.append(kernel)
    gone = tuple(kernel for kernel in base if kernel.name not in names)
    new = tuple(kernel for kernel in head if kernel.name not in names)
    if sum(kernel.count for kernel in new) > sum(kernel.count for kernel in gone):
        return Paired(Total(tuple(common_base)), Total(tuple(common_head)), (*added, *new), gone)
    return Paired(Total((*common_base, *gone)), Total((*common_head, *new)), tuple(added), ())


def _by_name(uses: Sequence[KernelUse], launches: int) -> tuple[OneKernel, ...]:
    found: dict[str, list[KernelUse]] = {}
    for use in uses:
        found.setdefault(use.name, []).append(use)
    return tuple(_one(name, same, launches) for name, same in found.items())


def _one(name: str, uses: Sequence[KernelUse], launches: int) -> OneKernel:
    def each(figure: Callable[[KernelUse], int | None]) -> float | None:
        total = _sum(figure(use) for use in uses)
        return None if total is None else total / launches

    def mean(figure: Callable[[KernelUse], float | None]) -> float | None:
        known = [(value, use.nanoseconds) for use in uses if (value := figure(use)) is not None]
        weight = sum(time for _, time in known)
        return sum(value * time for value, time in known) / weight if weight else None

    largest = max(uses, key=lambda use: use.nanoseconds)
    return OneKernel(
        name=name,
        count=sum(use.launches for use in uses) / launches,
        seconds=sum(use.nanoseconds for use in uses) / launches / 1e9,
        dram_read=each(lambda use: use.dram_read),
        dram_written=each(lambda use: use.dram_written),
        asked=each(lambda use: None if use.l2_read is None or use.l2_written is None else use.l2_read + use.l2_written),
        hit_rate=mean(lambda use: use.l2_hit_rate),
        sectors=(mean(lambda use: use.sectors_per_request), mean(lambda use: use.sectors_per_store)),
        used=(mean(lambda use: use.used_of_load), mean(lambda use: use.used_of_store)),
        occupancy=mean(lambda use: use.occupancy),
        blocks=largest.grid[0] * largest.grid[1] * largest.grid[2],
        threads=largest.block[0] * largest.block[1] * largest.block[2],
        registers=largest.registers,
        local=largest.local,
    )


def _each(copy: CopyUse, launches: int) -> CopyUse:
    count, nbytes, nanoseconds = (round(one / launches) for one in (copy.count, copy.nbytes, copy.nanoseconds))
    return CopyUse(copy.kind, copy.source, copy.destination, count, nbytes, nanoseconds)


def _page_share(counts: PageCounts, launches: int) -> PageCounts:
    return PageCounts(
        gpu_faults=round(counts.gpu_faults / launches),
        gpu_groups=round(counts.gpu_groups / launches),
        gpu_pages=round(counts.gpu_pages / launches),
        cpu_faults=round(counts.cpu_faults / launches),
        to_device=round(counts.to_device / launches),
        to_host=round(counts.to_host / launches),
        between_devices=round(counts.between_devices / launches),
        mapped=None if counts.mapped is None else round(counts.mapped / launches),
        causes={cause: round(nbytes / launches) for cause, nbytes in counts.causes.items()},
        to_device_seconds=counts.to_device_seconds / launches,
        to_host_seconds=counts.to_host_seconds / launches,
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    known = list(figures)
    return None if not known or any(one is None for one in known) else sum(one or 0 for one in known)
