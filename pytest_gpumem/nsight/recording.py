"""The recording of a profiler by test: its ranges, and the sums of its kernels and copies of one kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from pytest_gpumem.ranges import MEASURE, labelled, phase
from pytest_gpumem.records.profile import Besides, TestProfile
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.uses import CopyUse, KernelUse


class BadReport(ValueError):
    """A profiler's file cannot be read: one line with the cause and, if there is one, the remedy."""


class RangePlace(NamedTuple):
    """A measurement of a test, by its ranges."""

    test: str
    """Name of the test's range."""
    label: str
    """Label in its range; empty outside of labelled ranges."""
    measured: bool
    """Inside of a measured launch."""


def place_of(ranges: Sequence[str]) -> RangePlace | None:
    """The place in a stack of ranges of the domain `gpumem`; None without any.
    `ranges`: their names, outermost first. The test's own range may be missing, if only a part of it was recorded.
    """
    if not ranges:
        return None
    # The innermost: a test that runs pytest itself has another test's ranges around it.
    measured = [name for name in ranges if name.endswith(f".{MEASURE}")]
    test = measured[-1].removesuffix(f".{MEASURE}") if measured else ranges[0].partition(".")[0]
    prefix = phase(test, "label.")
    label = next((name.removeprefix(prefix) for name in ranges if name.startswith(prefix)), "")
    return RangePlace(test, label, bool(measured))


def place_of_row(row: Row) -> RangePlace:
    """The place of the measured launches of a row."""
    prefix = phase(row.range_name, "label.")
    return RangePlace(row.range_name, labelled(row.range_name, row.label).removeprefix(prefix) if row.label else "", True)


@dataclass(frozen=True)
class Recording:
    """The content of one report."""

    profiles: tuple[TestProfile, ...]
    """One for each measurement and process, in the order of the session. A test with work outside of the ranges of its labels has one
    more, without kernels, for that work."""
    outside: Besides = field(default_factory=Besides)
    """Work outside of all tests."""
    notes: tuple[str, ...] = ()
    """Data that the report lacks, and how to record it."""
    tool: str = ""
    """ "nsys" or "ncu"."""
    tool_version: str = ""
    """Empty if the report does not have it."""

    def parts(self) -> Iterator[Besides]:
        """All work once: measured launches, the rest of each test, and work outside of tests."""
        for one in self.profiles:
            yield Besides(one.kernels, one.copies, one.memsets, one.migrations)
            yield one.rest
        yield self.outside


_Use = TypeVar("_Use", KernelUse, CopyUse)


def kernels_together(launches: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """The sums of kernels of one name and shape, the longest first."""
    groups: dict[tuple[object, ...], list[KernelUse]] = {}
    for one in launches:
        groups.setdefault((one.name, one.grid, one.block, one.registers, one.shared, one.local), []).append(one)
    return _longest_first(_one_kernel(group) for group in groups.values())


def _one_kernel(group: list[KernelUse]) -> KernelUse:
    asked = [None if one.l2_read is None or one.l2_written is None else one.l2_read + one.l2_written for one in group]
    return replace(
        group[0],
        launches=sum(one.launches for one in group),
        nanoseconds=sum(one.nanoseconds for one in group),
        dram_read=_sum(one.dram_read for one in group),
        dram_written=_sum(one.dram_written for one in group),
        l2_read=_sum(one.l2_read for one in group),
        l2_written=_sum(one.l2_written for one in group),
        l2_hit_rate=_mean([one.l2_hit_rate for one in group], asked),
        l2_read_hit_rate=_mean([one.l2_read_hit_rate for one in group], [one.l2_read for one in group]),
        sectors_per_request=_mean([one.sectors_per_request for one in group], [one.l2_read for one in group]),
        sectors_per_store=_mean([one.sectors_per_store for one in group], [one.l2_written for one in group]),
        used_of_load=_mean([one.used_of_load for one in group], [one.l2_read for one in group]),
        used_of_store=_mean([one.used_of_store for one in group], [one.l2_written for one in group]),
        l1_load=_sum(one.l1_load for one in group),
        l1_store=_sum(one.l1_store for one in group),
        occupancy=_mean([one.occupancy for one in group], [one.nanoseconds for one in group]),
        sm_clock_hz=_mean([one.sm_clock_hz for one in group], [one.nanoseconds for one in group]),
        memory_clock_hz=_mean([one.memory_clock_hz for one in group], [one.nanoseconds for one in group]),
    )


def copies_together(copies: Iterable[CopyUse]) -> tuple[CopyUse, ...]:
    """The sums of copies or memsets of one kind between the same kinds of memory, the longest first."""
    groups: dict[tuple[str, str, str], list[CopyUse]] = {}
    for one in copies:
        groups.setdefault((one.kind, one.source, one.destination), []).append(one)
    return _longest_first(
        replace(
            group[0],
            count=sum(one.count for one in group),
            nbytes=sum(one.nbytes for one in group),
            nanoseconds=sum(one.nanoseconds for one in group),
        )
        for group in groups.values()
    )


def clock(kernels: Iterable[KernelUse], which: str) -> float | None:
    """The mean of a clock over kernels, weighted by their time; `which` is "sm_clock_hz" or "memory_clock_hz"."""
    known = [kernel for kernel in kernels if getattr(kernel, which) is not None]
    return _mean([getattr(kernel, which) for kernel in known], [kernel.nanoseconds for kernel in known])


def _longest_first(uses: Iterable[_Use]) -> tuple[_Use, ...]:
    # The sort is stable: equal times keep their order.
    return tuple(sorted(uses, key=lambda one: -one.nanoseconds))


def _sum(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if any(one is None for one in known) else sum(one or 0 for one in known)


def _mean(figures: list[float | None], weights: list[int | None]) -> float | None:
    """A weighted mean; the plain one if a weight is unknown or 0, and None if a figure is unknown."""
    known = [one for one in figures if one is not None]
    if not known or len(known) < len(figures):
        return None
    whole = [one for one in weights if one]
    if len(whole) < len(weights):
        return sum(known) / len(known)
    return sum(value * weight for value, weight in zip(known, whole, strict=True)) / sum(whole)
