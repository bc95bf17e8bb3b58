"""Rows as CSV: a line each, figures in SI units, shares as fractions, empty where unknown (RFC 4180)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row

_HEADINGS = (
    *("test", "label", "outcome", "code", "failed", "latency_s", "half_width_s", "bandwidth_bytes_per_s", "share_of_peak"),
    *("delta", "delta_low", "delta_high", "catches", "samples", "placements", "mode", "sampler", "peak_bytes", "kept_bytes"),
    *("device", "simulated", "reason"),
)


def of_rows(rows: Iterable[Row], device: DeviceFacts) -> str:
    """The rows of a run. Each of the figures that tests added has a column of its name behind the others."""
    rows = list(rows)
    extra = list(dict.fromkeys(name for row in rows for name in row.extra))
    return written([(*_HEADINGS, *extra), *((*_fields(row, device), *map(row.extra.get, extra)) for row in rows)])


def written(lines: Iterable[Sequence[object]]) -> str:
    """Lines of fields as CSV. A field that a spreadsheet would take for a formula begins with an apostrophe."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[_field(one) for one in line] for line in lines])
    return text.getvalue()


def _field(value: object) -> object:
    if not isinstance(value, str):
        return value
    plain = printable(value)
    return f"'{plain}" if plain.startswith(("=", "+", "-", "@")) else plain


def _fields(row: Row, device: DeviceFacts) -> list[object]:
    verdict, measurement, comparison = row.verdict, row.measurement, row.verdict.comparison
    figures: list[object] = [None] * 4
    how: list[object] = [None] * 4
    if measurement is not None:
        share = measurement.share_of_peak(device)
        figures = [measurement.latency, measurement.half_width, measurement.bandwidth, share]
        how = [len(measurement.samples), len(measurement.placements), measurement.mode, measurement.sampler]
    change: list[object] = [None] * 4
    if comparison is not None:
        change = [comparison.delta, comparison.low, comparison.high, comparison.catches]
    code = verdict.code.value if verdict.code is not None else None
    last = [device.key, verdict.simulated or device.simulated, verdict.reason]
    footprint = row.footprint if row.footprint is not None and row.footprint.watched else None
    memory = [None, None] if footprint is None else [footprint.peak, footprint.kept]
    return [row.nodeid, row.label, verdict.outcome.value, code, row.failed, *figures, *change, *how, *memory, *last]
