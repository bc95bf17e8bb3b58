"""Page faults and migrations, as CUPTI reports them, added up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pytest_gpumem.records.migrations import PageCounts

_MOVES = ("to_device", "to_host", "between_devices")


class PageEvent(NamedTuple):
    """One event of CUPTI."""

    kind: str  # field of `PageCounts`, such as "to_device"
    value: int  # bytes, or faults on one page that the driver handled together
    start: int  # nanoseconds
    end: int  # nanoseconds
    address: int  # first page
    why: str  # cause of a migration, or access that faulted


def page_counts(events: Sequence[PageEvent], *, maps: bool) -> PageCounts:
    """Add events up. `maps`: True if mappings are recorded too."""
    totals: dict[str, Any] = dict.fromkeys((*_MOVES, "gpu_faults", "cpu_faults", "mapped"), 0)
    seconds, until = dict.fromkeys(_MOVES, 0.0), dict.fromkeys(_MOVES, 0)
    causes: dict[str, int] = {}
    pages = []  # of each group of GPU faults
    for event in sorted(events, key=lambda event: event.start):
        totals[event.kind] += 1 if event.kind == "cpu_faults" else event.value
        if event.kind == "gpu_faults":
            pages.append(event.address)
        if event.kind in _MOVES:
            causes[event.why] = causes.get(event.why, 0) + event.value
            begin = max(event.start, until[event.kind])  # copies that overlap count once
            seconds[event.kind] += max(0, event.end - begin) / 1e9
            until[event.kind] = max(until[event.kind], event.end)
    if not maps:
        totals["mapped"] = None
    return PageCounts(
        **totals,
        gpu_groups=len(pages),
        gpu_pages=len(set(pages)),
        causes=causes,
        to_device_seconds=seconds["to_device"],
        to_host_seconds=seconds["to_host"],
    )
