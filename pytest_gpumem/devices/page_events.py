"""Counts of page faults and migrations from the single events that CUPTI and Nsight Systems record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_gpumem.records.migrations import SHOWN_GROUPS, FaultGroup, PageCounts

TO_DEVICE, TO_HOST, BETWEEN_DEVICES = "to device", "to host", "between devices"
GPU_FAULT, CPU_FAULT, MAPPED = "GPU fault", "CPU fault", "mapped"


class PageEvent(NamedTuple):
    """One event."""

    kind: str
    """`TO_DEVICE`, `TO_HOST` or `BETWEEN_DEVICES` for pages that moved, `GPU_FAULT`, `CPU_FAULT` or `MAPPED`."""
    value: int
    """Bytes that moved or were mapped; faults on one page that the driver handled together; of a CPU fault it means nothing."""
    start: int
    """Nanoseconds."""
    end: int
    """Nanoseconds."""
    address: int
    """First page."""
    why: str
    """Cause of a migration, one of `records.migrations.CAUSES`, or access that faulted, as `FaultGroup.access`."""


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add events up. `maps`: True if mappings are recorded too."""
    by_kind: dict[str, list[PageEvent]] = {}
    for one in sorted(events, key=lambda e: e.start):
        by_kind.setdefault(one.kind, []).append(one)
    faults = by_kind.get(GPU_FAULT, [])
    down, up, across = (by_kind.get(way, []) for way in (TO_DEVICE, TO_HOST, BETWEEN_DEVICES))
    causes: dict[str, int] = {}
    for one in (*down, *up, *across):
        causes[one.why] = causes.get(one.why, 0) + one.value
    return PageCounts(
        gpu_faults=sum(one.value for one in faults),
        gpu_groups=len(faults),
        gpu_pages=len({one.address for one in faults}),
        cpu_faults=len(by_kind.get(CPU_FAULT, [])),
        to_device=sum(one.value for one in down),
        to_host=sum(one.value for one in up),
        between_devices=sum(one.value for one in across),
        mapped=sum(one.value for one in by_kind.get(MAPPED, [])) if maps else None,
        causes=causes,
        to_device_seconds=busy(down),
        to_host_seconds=busy(up),
        groups=tuple(FaultGroup(one.address, one.value, one.why) for one in faults[:SHOWN_GROUPS]),
    )


def busy(events: Sequence[PageEvent]) -> float:
    """Seconds in which at least one of the copies was in progress; the events are in the order of their starts."""
    total = until = 0
    for one in events:
        total += max(0, one.end - max(one.start, until))
        until = max(until, one.end)
    return total / 1e9
