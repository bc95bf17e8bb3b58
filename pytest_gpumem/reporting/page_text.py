"""Page faults and migrations of managed memory in words, and the kernel's bandwidth beside them."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.migrations import Migrations, PageCounts
from pytest_gpumem.units import format_bytes, format_rate, format_time


def kernel_formula(measurement: Measurement) -> str:
    """Bandwidth of the kernel: bytes that it reads and writes over its time, page faults included.

    Source: Unified memory, 2.7.1: bandwidth = bytes / seconds, for three operations on each element.
    """
    traffic, bandwidth, time = measurement.traffic, measurement.bandwidth, format_time(measurement.latency)
    if traffic is None or bandwidth is None:
        return f"{time}; its bytes are unknown (give `moved=`)"
    if traffic.declared is not None:
        moved = f"{format_bytes(traffic.declared)} moved"
    else:
        moved = f"({format_bytes(traffic.reads)} read + {format_bytes(traffic.writes)} written)"
    return f"{moved} / {time} = {format_rate(bandwidth)}"


def migrations_text(migrations: Migrations) -> Iterator[str]:
    """Sentences about a counting pass."""
    if migrations.launch is None or migrations.before is None:
        yield f"not counted: {migrations.not_counted}"
        return
    yield f"one launch, counted by {migrations.source}: {page_counts_text(migrations.launch)}"
    if migrations.before != PageCounts(mapped=migrations.before.mapped):
        yield f"before it, not timed: {page_counts_text(migrations.before)}"


def page_counts_text(counts: PageCounts) -> str:
    """All counts on one line."""
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
