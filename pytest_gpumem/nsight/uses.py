"""Single launches, copies and memsets, added up into uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from pytest_gpumem.records.uses import CopyUse, KernelUse

_Use = TypeVar("_Use", KernelUse, CopyUse)


def kernels_together(launches: Iterable[KernelUse]) -> tuple[KernelUse, ...]:
    """Kernels with their launches of one shape added up, the longest first."""
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
    """Copies or memsets of one kind between the same kinds of memory added up, the longest first."""
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
    # What took equally long keeps the order in which it came.
    return tuple(sorted(uses, key=lambda one: -one.nanoseconds))


def _sum(figures: Iterable[int | None]) -> int | None:
    known = list(figures)
    return None if any(one is None for one in known) else sum(one or 0 for one in known)


def _mean(figures: list[float | None], weights: list[int | None]) -> float | None:
    """A weighted mean; of figures without a weight the plain one, and None where a figure is not known."""
    known = [one for one in figures if one is not None]
    if not known or len(known) < len(figures):
        return None
    whole = [one for one in weights if one]
    if len(whole) < len(weights):
        return sum(known) / len(known)
    return sum(value * weight for value, weight in zip(known, whole, strict=True)) / sum(whole)
