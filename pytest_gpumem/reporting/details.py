"""Everything that is known about one row, as pairs of a term and a text: the section of a test in the HTML report."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpumem.judging.traffic import account, size
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.migrations import kernel_formula, sentences
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.cells import access_interval, sectors
from pytest_gpumem.reporting.groups import COALESCED
from pytest_gpumem.units import format_bytes, format_rate, format_share, format_shares, format_time

_MEDIANS = 24
"""Placements whose medians are spelled out."""


def details(row: Row, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    """Terms and texts, in the order in which they are read."""
    yield "test", row.key
    yield "verdict", row.verdict.reason
    for name in LIMITS:
        if (written := getattr(row.limits, name)) is not None:
            yield "limit", f"{name} {written} ({row.limits.origin.get(name, 'origin unknown')})"
    if (past := row.verdict.comparison) is not None:
        low, high = format_shares(*(_plain(end) for end in (past.low, past.high)))
        yield (
            "change",
            f"{format_share(_plain(past.delta), sign=True)} against {past.processes} processes, between {low} (99.9 %) and "
            f"{high} (99.5 %); catches {format_share(past.catches)}",
        )
    for what in row.changed:
        yield "changed since", what
    if row.measurement is not None:
        yield from _measured(row.measurement, facts)


def _measured(measurement: Measurement, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    noise = f" ± {format_share(measurement.noise)}" if measurement.noise is not None else ""
    yield "latency", f"{format_time(measurement.latency)}{noise}, {measurement.target}"
    if (interval := access_interval(measurement)) is not None:
        yield "95 % interval", interval
    yield from _traffic(measurement, facts)
    if measurement.migrations is not None:
        yield "kernel", kernel_formula(measurement)
        for sentence in sentences(measurement.migrations):
            yield "pages", sentence
    if (asked := sectors(measurement)) is not None:
        yield "access pattern", f"{asked} ({COALESCED} where coalesced)"
    if (window := measurement.window) is not None:
        yield "window", f"{format_bytes(window.nbytes)}, hit ratio {window.hit_ratio:.3g}, set-aside {format_bytes(window.set_aside)}"
    spread = measurement.placement_spread
    apart = f", {format_share(spread)} apart (standard deviation)" if spread else ""
    more = f" and {len(measurement.medians) - _MEDIANS} more" if len(measurement.medians) > _MEDIANS else ""
    yield "placements", ", ".join(format_time(median) for median in measurement.medians[:_MEDIANS]) + more + apart
    thrown = f", {measurement.discarded} discarded under throttling" if measurement.discarded else ""
    yield "samples", f"{len(measurement.samples)}{thrown}"
    yield "method", f"{measurement.mode}, {measurement.sampler}: {measurement.sampler_reason}"
    if measurement.overlap is not None and (hidden := measurement.overlap.hidden(measurement.latency)) is not None:
        yield "overlap", f"{format_share(hidden)} of what can be hidden, {measurement.overlap.streams} streams"
    yield from _conditions(measurement)
    if measurement.taken is not None:
        yield "taken", " ".join(part for part in (measurement.taken.utc, measurement.taken.card) if part)
    for note in measurement.notes:
        yield "note", note


def _traffic(measurement: Measurement, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    traffic, bandwidth = measurement.traffic, measurement.bandwidth
    if traffic is not None and bandwidth is not None:
        apart = "" if traffic.declared is not None else f" ({size(traffic.reads)} read, {size(traffic.writes)} written)"
        share = measurement.share_of_peak(facts)
        peak = f", {format_share(share)} of peak" if share is not None else f"; no share of peak: {measurement.no_share_of_peak(facts)}"
        yield "bandwidth", f"{format_rate(bandwidth)} for {size(traffic.total)}{apart}{peak}"
    if (said := account(measurement, facts)) is not None:
        yield "traffic", said.sentence


def _conditions(measurement: Measurement) -> Iterator[tuple[str, str]]:
    """Clocks and what else was seen before, during and after the samples, once where it is the same."""
    before, after = measurement.conditions
    told: dict[str, list[str]] = {}
    for name, conditions in (("before", before), ("worst", measurement.during), ("after", after)):
        if conditions is not None and (said := conditions_text(conditions)):
            told.setdefault(said, []).append(name)
    for said, names in told.items():
        yield ", ".join(names), said


def conditions_text(conditions: Conditions) -> str:
    """ "SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, throttled: sw_power_cap"; empty where the driver says nothing."""
    figures = (
        ("SM {:.0f} MHz", conditions.sm_clock_hz, 1e-6),
        ("memory {:.0f} MHz", conditions.memory_clock_hz, 1e-6),
        ("{:.0f} C", conditions.temperature_c, 1.0),
        ("{:.0f} W", conditions.power_w, 1.0),
    )
    parts = [text.format(value * scale) for text, value, scale in figures if value is not None]
    if conditions.throttle_reasons:
        parts.append(f"throttled: {', '.join(conditions.throttle_reasons)}")
    if conditions.other_processes:
        parts.append(f"{conditions.other_processes} other processes")
    return ", ".join(parts)


def _plain(share: float) -> float:
    """A share without what floating point leaves of equal figures."""
    return share if abs(share) > 1e-6 else 0.0
