"""What a failing test shows: the verdict, what it rests on, and the conditions under which it was measured."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_gpumem.judging.finding import basis, bounds, change, counted
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.migrations import kernel_formula, sentences
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_bytes, format_rate, format_share, format_time


def report(row: Row, facts: DeviceFacts) -> str:
    """Several lines for the failure of one row; the first is the verdict's sentence."""
    row, facts = printable(row), printable(facts)
    lines = [f"{headline(row)}{row.verdict.reason}"]
    lines += [f"  {name:<11}{text}" for name, text in _facts(row, facts)]
    return "\n".join(lines)


def headline(row: Row) -> str:
    """What the report begins with, the verdict and whose it is: "FAIL (simulated) tests/test_a.py::test_copy: "."""
    simulated = " (simulated)" if row.verdict.simulated else ""
    return f"{row.verdict.outcome.value}{simulated} {row.key}: "


def _facts(row: Row, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    if row.measurement is not None:
        yield from _measured(row.measurement, facts)
    for name in LIMITS:
        if (written := getattr(row.limits, name)) is not None:
            yield "limit", f"{name} {written} ({row.limits.origin.get(name, 'origin unknown')})"
    if (past := row.verdict.comparison) is not None:
        low, high = bounds(past.low, past.high)
        yield (
            "baseline",
            f"{change(past.delta)} against {counted(past.processes, 'process')}, between {low} (99.9 %) "
            f"and {high} (99.5 %); catches {format_share(past.catches)}",
        )
    if row.measurement is not None:
        before, after = row.measurement.conditions
        yield "before", conditions_text(before)
        yield "after", conditions_text(after)
        for note in row.measurement.notes:
            yield "note", note
    yield "device", f"{facts.name}, driver {facts.driver or 'unknown'}, {facts.key}"


def _measured(measurement: Measurement, facts: DeviceFacts) -> Iterator[tuple[str, str]]:
    noise = f" ± {format_share(measurement.noise)} (95 %)" if measurement.noise is not None else ""
    yield "latency", f"{format_time(measurement.latency)}{noise}, {measurement.target}"
    if measurement.traffic is not None and measurement.bandwidth is not None:
        share = ""
        if measurement.no_share_of_peak(facts) is None:
            share = f", {format_share(measurement.bandwidth / facts.peak_bandwidth)} of peak"
        yield "bandwidth", f"{format_rate(measurement.bandwidth)} for {format_bytes(measurement.traffic.total)}{share}"
    if measurement.migrations is not None:
        yield "kernel", kernel_formula(measurement)
        for sentence in sentences(measurement.migrations):
            yield "pages", sentence
    spread = measurement.placement_spread
    shown = f", spread between placements {format_share(spread)}" if spread is not None else ""
    shown += f", {measurement.discarded} discarded" if measurement.discarded else ""
    yield "samples", f"{basis(measurement)}{shown}"
    yield "method", f"{measurement.mode}, {measurement.sampler} ({measurement.sampler_reason})"
    if (window := measurement.window) is not None:
        yield (
            "window",
            f"{format_bytes(window.nbytes)}, hit ratio {window.hit_ratio:.3g}, set-aside {format_bytes(window.set_aside)}",
        )


def conditions_text(conditions: Conditions) -> str:
    """One line such as "SM 1980 MHz, memory 2619 MHz, 41 C, 310 W, not throttled"; what the driver does not say is left out."""
    parts = [
        f"{text.format(value * scale)}"
        for text, value, scale in (
            ("SM {:.0f} MHz", conditions.sm_clock_hz, 1e-6),
            ("memory {:.0f} MHz", conditions.memory_clock_hz, 1e-6),
            ("{:.0f} C", conditions.temperature_c, 1),
            ("{:.0f} W", conditions.power_w, 1),
        )
        if value is not None
    ]
    reasons = ", ".join(conditions.throttle_reasons)
    parts.append(f"throttled: {reasons}" if reasons else "not throttled")
    if conditions.other_processes:
        parts.append(counted(conditions.other_processes, "other process"))
    return ", ".join(parts)
