"""What a failed test says in its report: the figure, the limit, the margin, the samples and the conditions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_bytes, format_rate, format_share, format_time

_PACKAGE = Path(__file__).resolve().parent.parent


def explain(rows: Sequence[Row]) -> str:
    """The text of a failure: one paragraph for each row that failed."""
    return "\n\n".join(_paragraph(row) for row in rows)


def _paragraph(row: Row) -> str:
    outcome = row.verdict.outcome.value + (" (simulated)" if row.verdict.simulated else "")
    name = f"[{row.label}] " if row.label else ""
    lines = [f"gpumem: {name}{outcome}: {row.verdict.reason}"]
    if row.measurement is not None:
        lines += [f"  {line}" for line in _figures(row.measurement)]
    limits = {"min_bandwidth": row.limits.min_bandwidth, "max_latency": row.limits.max_latency, "max_regression": row.limits.max_regression}
    held = [f'{limit} = "{value}" ({row.limits.origin.get(limit, "unknown origin")})' for limit, value in limits.items() if value is not None]
    if held:
        lines.append(f"  limits: {', '.join(held)}")
    return "\n".join(lines)


def _figures(measurement: Measurement) -> list[str]:
    noise = f" ± {format_share(measurement.noise)}" if measurement.noise is not None else ""
    bandwidth = f", {format_rate(measurement.bandwidth)}" if measurement.bandwidth is not None else ""
    lines = [
        f"{measurement.target}: latency {format_time(measurement.latency)}{noise}{bandwidth}",
        f"samples: {len(measurement.samples)} on {len(measurement.placements)} placements, {measurement.mode}, "
        f"{measurement.sampler} ({measurement.sampler_reason}); fastest {format_time(min(measurement.samples))}, "
        f"slowest {format_time(max(measurement.samples))}" + (f"; {measurement.discarded} discarded" if measurement.discarded else ""),
    ]
    if measurement.window is not None:
        window = measurement.window
        lines.append(
            f"window: {format_bytes(window.nbytes)}, hit ratio {window.hit_ratio:.3g}, set-aside {format_bytes(window.set_aside)}"
        )
    before, after = measurement.conditions
    lines.append(f"conditions before: {_conditions(before)}")
    lines.append(f"conditions after: {_conditions(after)}")
    lines += [f"note: {note}" for note in measurement.notes]
    return lines


def _conditions(conditions: Conditions) -> str:
    parts = []
    if conditions.sm_clock_hz is not None:
        parts.append(f"SM {conditions.sm_clock_hz / 1e6:.0f} MHz")
    if conditions.memory_clock_hz is not None:
        parts.append(f"memory {conditions.memory_clock_hz / 1e6:.0f} MHz")
    if conditions.temperature_c is not None:
        parts.append(f"{conditions.temperature_c:.0f} °C")
    if conditions.power_w is not None:
        parts.append(f"{conditions.power_w:.0f} W")
    parts.append(f"throttled by {', '.join(conditions.throttle_reasons)}" if conditions.throttle_reasons else "not throttled")
    if conditions.other_processes:
        parts.append(f"{conditions.other_processes} other processes")
    return ", ".join(parts)


def where(traceback: TracebackType | None, test_file: Path, root: Path) -> str:
    """`file:line: ` of the user's own line that led to an error; empty if there is none."""
    found = ""
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        theirs = file.is_relative_to(root) and "site-packages" not in file.parts and not file.is_relative_to(_PACKAGE)
        if file == test_file or theirs:
            shown = file.relative_to(root) if file.is_relative_to(root) else file
            found = f"{shown}:{traceback.tb_lineno}: "
        traceback = traceback.tb_next
    return found
