"""What is known of a row, as terms and texts: for the text of a failed test, and for a page."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_gpumem.judging.finding import (
    basis,
    change,
    mark,
    no_share_of_peak,
    share_of_peak,
    window_text,
)
from pytest_gpumem.judging.footprint import waits_text
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import Migrations
from pytest_gpumem.reporting.row import broken_limits, latencies_text, why_lines
from pytest_gpumem.reporting.terminal import columns, hanging, wrapped
from pytest_gpumem.units import counted, format_rate, format_share, format_time, short_bytes

COALESCED = 4  # sectors of 32 bytes of a coalesced request for 32 words of 4 bytes

Details = Iterator[tuple[str, str]]


def details(row: Row, facts: DeviceFacts) -> Details:
    """Terms and texts in reading order: limits, change, measurement, memory."""
    for name in LIMITS:
        written = getattr(row.limits, name)
        if written is not None:
            origin = row.limits.origin.get(name, "origin unknown")
            yield "limit", f"{name} {written} ({origin})"
    if row.verdict.change is not None:
        yield "change", f"{change(row.verdict.change)}, {latencies_text(row)}".rstrip(", ")
    for line in why_lines(row):
        yield "why", line
    if row.measurement is not None:
        yield from _of_measurement(row.measurement, facts)
    for name, value in row.extra.items():
        yield "extra", f"{name} {value:.6g}"
    if row.footprint is not None:
        yield from _of_footprint(row.footprint)


def failure_text(rows: Collection[Row], facts: DeviceFacts, *, whole: bool) -> str:
    """The text of a test that fails by these rows: in whole, or the reasons alone."""
    width, texts = columns(), []
    for row in rows:
        if whole:
            texts.append(_failure(row, facts, width))
        else:
            verdict = printable(f"{row.verdict.reason} ({row.key})")
            texts.append("\n".join(wrapped(verdict, width, indent="")))
    for row in printable(list(rows)):
        lines: list[str] = []
        for line in why_lines(row):
            sentence = f"  {line}" if lines else f"why: {row.key}: {line}"
            lines += wrapped(sentence, width, indent="    ")
        if lines:
            texts.append("\n".join(lines))
    return "\n\n".join(texts)


def _failure(row: Row, facts: DeviceFacts, width: int) -> str:
    row, facts = printable(row), printable(facts)
    lines = []
    broken = broken_limits(row)
    for line in "\n".join(broken).splitlines():
        lines += hanging("", line, width)
    verdict = f"{row.verdict.outcome.word}{mark(row.verdict.simulated)}"
    terms = [("verdict", f"{verdict}, {row.key}")]
    if row.verdict.reason not in broken:
        terms.append(("reason", row.verdict.reason))
    for term, text in details(row, facts):
        if term not in ("limit", "change", "why"):
            terms.append((term, text))
    terms.append(("device", f"{name_and_driver(facts)}, {facts.key}"))
    room = max(len(term) for term, _ in terms) + 2
    for term, text in terms:
        lines += hanging(f"  {term:<{room}}", text, width)
    return "\n".join(lines)


def _of_measurement(measurement: Measurement, facts: DeviceFacts) -> Details:
    latency = format_time(measurement.latency)
    if measurement.noise is not None:
        latency += f" ± {format_share(measurement.noise)} (95 %)"
    latency += f", {measurement.target}"
    if measurement.host_time is not None:
        latency += f"; the host takes {format_time(measurement.host_time)} to queue it"
    yield "latency", latency
    if not measurement.checked:
        yield "unchecked", "no check compared the result of a launch with a reference"
    yield from _of_traffic(measurement, facts)
    if measurement.window is not None:
        yield "window", window_text(measurement.window)
    samples = basis(measurement)
    if measurement.placement_spread is not None:
        samples += f", spread between placements {format_share(measurement.placement_spread)}"
    yield "samples", samples
    yield "method", f"{measurement.mode}, sampler {measurement.sampler}"
    overlap = measurement.overlap
    if overlap is not None:
        hidden = overlap.hidden(measurement.latency)
        if hidden is not None:
            share, streams = format_share(hidden), counted(overlap.streams, "stream")
            times = f"in turn {format_time(overlap.sequential)}, bound {format_time(overlap.bound)}"
            yield "overlap", f"{share} of what can be hidden, {streams}: {times}"
    conditions = conditions_text(measurement.during or measurement.conditions[1])
    if conditions:
        yield "conditions", conditions
    for note in measurement.notes:
        yield "note", note


def _of_traffic(measurement: Measurement, facts: DeviceFacts) -> Details:
    moved, bandwidth = measurement.moved_bytes, measurement.bandwidth
    if moved is not None and bandwidth is not None:
        text = f"{format_rate(bandwidth)} for {short_bytes(moved.total)}"
        if moved.total == moved.reads + moved.writes:
            text += f" ({short_bytes(moved.reads)} read, {short_bytes(moved.writes)} written)"
        share = share_of_peak(measurement, facts)
        if share is not None:
            text += f", {format_share(share)} of peak"
        else:
            text += f"; no share of peak: {no_share_of_peak(measurement, facts)}"
        yield "bandwidth", text
    if measurement.migrations is not None:
        yield "pages", migrations_text(measurement.migrations)
    sectors = measurement.sectors_per_request
    if sectors not in (None, COALESCED):
        yield "access pattern", f"{sectors:.3g} sectors a request ({COALESCED} where coalesced)"


def conditions_text(conditions: Conditions) -> str:
    """Such as "SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, not throttled", or empty."""
    parts = []
    if conditions.sm_clock_hz is not None:
        parts.append(f"SM {conditions.sm_clock_hz / 1e6:.0f} MHz")
    if conditions.memory_clock_hz is not None:
        parts.append(f"memory {conditions.memory_clock_hz / 1e6:.0f} MHz")
    if conditions.temperature_c is not None:
        parts.append(f"{conditions.temperature_c:.0f} C")
    if conditions.power_w is not None:
        parts.append(f"{conditions.power_w:.0f} W")
    if conditions.throttle_reasons:
        parts.append(f"THROTTLED: {', '.join(conditions.throttle_reasons)}")
    elif parts and conditions.throttle_reasons is not None:
        parts.append("not throttled")
    if conditions.other_processes:
        parts.append(counted(conditions.other_processes, "other process").upper())
    return ", ".join(parts)


def migrations_text(migrations: Migrations) -> str:
    counts = migrations.launch
    if counts is None:
        return f"not counted: {migrations.not_counted}"
    faults = f"{counted(counts.gpu_faults, 'GPU page fault')}, {counts.cpu_faults} of the CPU"
    to_device, to_host = short_bytes(counts.to_device), short_bytes(counts.to_host)
    moved = f"{to_device} to the device, {to_host} to the host"
    return f"a launch, counted by {migrations.source}: {faults}, {moved}"


def _of_footprint(footprint: Footprint) -> Details:
    if footprint.watched:
        peak = _by_library(footprint.peak, footprint, "peak")
        if footprint.allocations:
            count = counted(footprint.allocations, "allocation")
            peak += f", {count}, the largest {short_bytes(footprint.largest)}"
        yield "peak memory", peak
        if footprint.ended:
            yield "kept", _by_library(footprint.kept, footprint, "kept")
        if footprint.ended and footprint.reserved:
            reserved = _by_library(footprint.reserved, footprint, "reserved")
            yield "reserved", f"{reserved}; pools hold it and nobody uses it"
    for reason in footprint.not_watched:
        yield "not watched", reason
    if footprint.waits is not None:
        yield "waits", footprint.waits.not_read or waits_text(footprint.waits) or "none"


def _by_library(total: int, footprint: Footprint, name: str) -> str:
    uses = [use for use in footprint.uses if getattr(use, name) > 0]
    uses.sort(key=lambda use: -getattr(use, name))
    parts = []
    for use in uses:
        part = use.library
        if use.kind != "device":
            part += f" {use.kind}"
        if len(uses) > 1:
            part += f" {short_bytes(getattr(use, name))}"
        parts.append(part)
    if not parts:
        return short_bytes(total)
    return f"{short_bytes(total)} ({', '.join(parts)})"


def name_and_driver(facts: DeviceFacts) -> str:
    text = f"{facts.name}{mark(facts.simulated)}"
    if facts.driver:
        text += f", driver {facts.driver}"
    return text
