"""Records of what pages of managed memory did, one by one, and adding them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_gpumem.records.migrations import SHOWN_GROUPS, FaultGroup, PageCounts

TO_DEVICE, TO_HOST, BETWEEN_DEVICES = "to device", "to host", "between devices"
GPU_FAULT, CPU_FAULT, MAPPED = "GPU fault", "CPU fault", "mapped"


class PageEvent(NamedTuple):
    """One record."""

    kind: str
    """`TO_DEVICE`, `TO_HOST` or `BETWEEN_DEVICES` for pages that moved, `GPU_FAULT`, `CPU_FAULT` or `MAPPED`."""
    value: int
    """Bytes moved or mapped; of GPU faults how many the driver took together on one page; of a CPU fault nothing."""
    start: int
    """Nanoseconds."""
    end: int
    """Nanoseconds."""
    address: int
    """First page."""
    why: str
    """Why bytes moved, one of `migrations.CAUSES`, or what access faulted, as `FaultGroup.access`."""


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add records up.

    Args:
        events: all records, in any order.
        maps: whether mappings were recorded too.
    """
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
    """Seconds in which at least one of the copies was under way; they are in the order of their starts."""
    total = until = 0
    for one in events:
        total += max(0, one.end - max(one.start, until))
        until = max(until, one.end)
    return total / 1e9
