"""What the pages of managed memory did during one launch: faults on both sides, bytes that moved, and why they moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import field

from pytest_gpumem.records.record import Record
from pytest_gpumem.units import format_bytes, format_rate, format_time

if TYPE_CHECKING:
    from pytest_gpumem.records.measurement import Measurement


SHOWN_GROUPS = 32
"""Groups of GPU page faults that are kept with their addresses; the totals count all."""

CAUSES = ("prefetch", "fault", "speculation", "eviction", "access counters", "unknown")
"""Why pages moved: a call of `cudaMemPrefetchAsync`; somebody touched them; the driver brought neighbours of a page that was touched; the
device needed room; the hardware's access counters asked; the driver does not say (CUPTI, `CUpti_ActivityUnifiedMemoryMigrationCause`)."""


class FaultGroup(Record, frozen=True):
    """GPU page faults that the driver handled together, as a line of nvprof's trace showed them (Unified memory, 2.7.2)."""

    address: int
    """Page that faulted."""
    faults: int
    """Faults on it: all but one are duplicates, which the driver filters."""
    access: str
    """What faulted: "read", "write", "atomic", "prefetch" or "unknown"."""


class PageCounts(Record, frozen=True):
    """What was counted between two moments."""

    gpu_faults: int = 0
    """Page faults of the GPU, duplicates included."""
    gpu_groups: int = 0
    """Groups in which the driver handled them."""
    gpu_pages: int = 0
    """Distinct pages that they were on; the rest are duplicates."""
    cpu_faults: int = 0
    """Page faults of the host."""
    to_device: int = 0
    """Bytes that moved from the host to the device."""
    to_host: int = 0
    """Bytes that moved from the device to the host."""
    between_devices: int = 0
    """Bytes that moved from one device to another."""
    mapped: int | None = None
    """Bytes that the device mapped where they were, without moving them; None where that is not counted."""
    causes: dict[str, int] = field(default_factory=dict)
    """Bytes that moved, by cause: keys are `CAUSES`."""
    to_device_seconds: float = 0.0
    """Seconds in which at least one copy to the device was under way."""
    to_host_seconds: float = 0.0
    """Seconds in which at least one copy to the host was under way."""
    groups: tuple[FaultGroup, ...] = ()
    """The first groups of GPU page faults, at most `SHOWN_GROUPS`, in the order in which they were handled."""

    @property
    def migrated(self) -> int:
        """Bytes that moved, all ways together."""
        return self.to_device + self.to_host + self.between_devices

    @property
    def duplicates(self) -> int:
        """GPU page faults on a page beyond the first."""
        return self.gpu_faults - self.gpu_pages

    @property
    def to_device_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the device; None where none did. It is the link's figure, not the kernel's."""
        return self.to_device / self.to_device_seconds if self.to_device and self.to_device_seconds else None

    @property
    def to_host_bandwidth(self) -> float | None:
        """Bytes per second while pages moved to the host; None where none did."""
        return self.to_host / self.to_host_seconds if self.to_host and self.to_host_seconds else None


class Migrations(Record, frozen=True):
    """One untimed counting pass of a measurement: pages are put back, then one launch runs."""

    before: PageCounts | None = None
    """While inputs and pages were put back, which is not timed."""
    launch: PageCounts | None = None
    """During the launch."""
    source: str = ""
    """What counted, such as "CUPTI"."""
    not_counted: str | None = None
    """Why nothing was counted; then `before` and `launch` are None."""


def kernel_formula(measurement: Measurement) -> str:
    """The bandwidth of the kernel as the text works it out: bytes that it reads and writes over its time, page faults included.

    Source: Unified memory, 2.7.1: bandwidth = bytes / seconds, for three operations on each element.
    """
    traffic, bandwidth, time = measurement.traffic, measurement.bandwidth, format_time(measurement.latency)
    if traffic is None or bandwidth is None:
        return f"{time}; its bytes are unknown (give `moved=`)"
    if traffic.declared is not None:
        said = f"{format_bytes(traffic.declared)} moved"
    else:
        said = f"({format_bytes(traffic.reads)} read + {format_bytes(traffic.writes)} written)"
    return f"{said} / {time} = {format_rate(bandwidth)}"


def sentences(migrations: Migrations) -> Iterator[str]:
    """What a counting pass found, in words."""
    if migrations.launch is None or migrations.before is None:
        yield f"not counted: {migrations.not_counted}"
        return
    yield f"one launch, counted by {migrations.source}: {said(migrations.launch)}"
    if migrations.before != PageCounts(mapped=migrations.before.mapped):
        yield f"before it, not timed: {said(migrations.before)}"


def said(counts: PageCounts) -> str:
    """Counts in words, all on one line."""
    faults = f"{counts.gpu_faults} GPU page faults"
    if counts.gpu_faults:
        faults += f" in {counts.gpu_groups} groups on {counts.gpu_pages} pages ({counts.duplicates} duplicates)"
    parts = [faults, f"{counts.cpu_faults} CPU page faults"]
    for nbytes, seconds, rate, way in (
        (counts.to_device, counts.to_device_seconds, counts.to_device_bandwidth, "to the device"),
        (counts.to_host, counts.to_host_seconds, counts.to_host_bandwidth, "to the host"),
    ):
        at = f" in {format_time(seconds)} = {format_rate(rate)}" if rate is not None else ""
        parts.append(f"{format_bytes(nbytes)} {way}{at}")
    if counts.between_devices:
        parts.append(f"{format_bytes(counts.between_devices)} between devices")
    if counts.mapped:
        parts.append(f"{format_bytes(counts.mapped)} mapped where it was")
    if counts.causes:
        parts.append("moved by " + ", ".join(f"{cause} {format_bytes(nbytes)}" for cause, nbytes in counts.causes.items() if nbytes))
    return ", ".join(parts)


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
