"""The evidence of one side as figures of a single launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from msgspec.structs import asdict, replace

from pytest_gpumem.explain.pairing import KernelFigures, by_name
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Window
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import Activity, CopyUse


@dataclass(frozen=True)
class Evidence:
    """One measurement of one side, with the profiles of the same test."""

    measurement: Measurement
    facts: DeviceFacts
    profile: TestProfile | None = None
    """Counters of a run under Nsight Compute."""
    trace: TestProfile | None = None
    """Kernels, copies and pages of a run under Nsight Systems."""


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
        """Bytes of L2 set aside, with or without a window; None if unknown."""
        if self.window is not None:
            return self.window.set_aside
        return self.measurement.activity.set_aside if self.measurement.activity is not None else None

    @property
    def _watched(self) -> Activity | None:
        """The launch that CUPTI watched."""
        activity = self.measurement.activity
        return activity if activity is not None and activity.not_counted is None else None

    @cached_property
    def kernels(self) -> tuple[KernelFigures, ...]:
        """The kernels of a launch in their order, as far as known; with counters if a profiler counted."""
        if self._profile is not None and self._profile.kernels:
            return by_name(self._profile.kernels, self._profile.launches or 1)
        if self._watched is not None:
            return by_name(self._watched.kernels, 1)
        return by_name(self._trace.kernels, self._trace.launches) if self._trace is not None and self._trace.launches else ()

    @property
    def knows_kernels(self) -> bool:
        """True if `kernels` was recorded at all."""
        return self._watched is not None or self._trace is not None or bool(self._profile is not None and self._profile.kernels)

    @property
    def counted(self) -> bool:
        """True if a profiler counted DRAM bytes of every kernel."""
        return bool(self.kernels) and all(kernel.dram is not None for kernel in self.kernels)

    @cached_property
    def copies(self) -> tuple[CopyUse, ...] | None:
        """Copies and memsets of one launch; None if they were not recorded."""
        if self._watched is not None:
            return (*self._watched.copies, *self._watched.memsets)
        trace = self._trace
        if trace is None or not trace.launches:
            return None
        return tuple(_copy_of_launch(copy, trace.launches) for copy in (*trace.copies, *trace.memsets))

    @cached_property
    def pages(self) -> PageCounts | None:
        """Faults and migrations of managed memory during one launch; None if they were not counted."""
        migrations = self.measurement.migrations
        if migrations is not None and migrations.launch is not None:
            return migrations.launch
        trace = self._trace
        return _pages_of_launch(trace.migrations, trace.launches) if trace and trace.migrations and trace.launches else None

    @property
    def prefetched(self) -> int:
        """Bytes that moved to the device before a launch, while pages were put back."""
        migrations = self.measurement.migrations
        return migrations.before.to_device if migrations is not None and migrations.before is not None else 0

    @property
    def host_memory(self) -> dict[str, str]:
        """Kind of memory by name, of arguments that are not plain device memory."""
        activity = self.measurement.activity
        return dict(activity.arguments) if activity is not None else {}

    def clock(self, of: Callable[[Conditions], float | None]) -> float | None:
        """A clock in hertz while sampling: the lowest between samples, else the higher one of before and after."""
        if self.measurement.during is not None and (seen := of(self.measurement.during)) is not None:
            return seen
        known = [clock for conditions in self.measurement.conditions if (clock := of(conditions)) is not None]
        return max(known, default=None)

    @property
    def compulsory(self) -> int | None:
        """Declared bytes of one launch to and from DRAM; None if unknown, or if they cross a link."""
        traffic = self.measurement.traffic
        return None if traffic is None or traffic.link else traffic.total


def _copy_of_launch(copy: CopyUse, launches: int) -> CopyUse:
    count, nbytes, nanoseconds = (round(one / launches) for one in (copy.count, copy.nbytes, copy.nanoseconds))
    return CopyUse(copy.kind, copy.source, copy.destination, count, nbytes, nanoseconds)


def _pages_of_launch(counts: PageCounts, launches: int) -> PageCounts:
    totals = {name: value for name, value in asdict(counts).items() if isinstance(value, (int, float))}
    each = {name: round(value / launches) if isinstance(value, int) else value / launches for name, value in totals.items()}
    return replace(PageCounts(), **each, causes={cause: round(nbytes / launches) for cause, nbytes in counts.causes.items()})
