"""What is known of one side of an explanation, as figures of a single launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pytest_gpumem.explain.pairing import OneKernel, by_name
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import CopyUse


@dataclass(frozen=True)
class Evidence:
    """One side: what was measured, and what a profiler counted besides."""

    measurement: Measurement
    facts: DeviceFacts
    profile: TestProfile | None = None
    """Counters of the same measurement, from a run under Nsight Compute."""
    trace: TestProfile | None = None
    """What it consists of, from a run under Nsight Systems."""


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
            return by_name(self._profile.kernels, self._profile.launches or 1)
        activity = self.measurement.activity
        if activity is not None and activity.not_counted is None:
            return by_name(activity.kernels, 1)
        return by_name(self._trace.kernels, self._trace.launches) if self._trace is not None and self._trace.launches else ()

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
