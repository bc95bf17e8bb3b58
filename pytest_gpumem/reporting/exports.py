"""Rows in the formats of other programs: CSV (RFC 4180), the Bencher Metric Format, and that of github-action-benchmark.

CSV has SI units, shares as fractions, and empty fields where unknown. In the formats of chart services every name ends with the device's
key, so that no line of a chart mixes cards, or a simulated device with a real one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
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
    return written([(*_HEADINGS, *extra), *((*_fields(row, row.measured_on(device)), *map(row.extra.get, extra)) for row in rows)])


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


def bencher(rows: Iterable[Row], device: DeviceFacts) -> str:
    """Latencies and bandwidths of the rows in the Bencher Metric Format, each with the 95 % interval."""
    return bmf(figure for name, _, measured in _measured(rows, device) for figure in _figures(name, measured))


def _figures(name: str, measured: Measurement) -> Iterator[tuple[str, str, float, tuple[float, float] | None]]:
    low, high = measured.latency - (measured.half_width or 0.0), measured.latency + (measured.half_width or 0.0)
    known = measured.half_width is not None and low > 0
    yield name, "latency", measured.latency, (low, high) if known else None
    if measured.traffic is not None:
        total = measured.traffic.total
        yield name, "bandwidth", total / measured.latency, (total / high, total / low) if known else None


def bmf(figures: Iterable[tuple[str, str, float, tuple[float, float] | None]]) -> str:
    """JSON of the Bencher Metric Format: names, measures, values in SI units, and their intervals where they are known.

    Latencies become nanoseconds, as Bencher's built-in measure has them (https://bencher.dev/docs/reference/bencher-metric-format/).
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, measure, value, interval in figures:
        found.setdefault(printable(name), {})[printable(measure)] = _metric(1e9 if measure == "latency" else 1.0, value, interval)
    return json.dumps(found, indent=1) + "\n"


def _metric(scale: float, value: float, interval: tuple[float, float] | None) -> dict[str, float]:
    metric = {"value": scale * value}
    if interval is not None:
        metric |= {"lower_value": scale * interval[0], "upper_value": scale * interval[1]}
    return metric


def github_action_benchmark(rows: Iterable[Row], device: DeviceFacts) -> str:
    """A JSON list for its tool `customSmallerIsBetter`: latencies in microseconds (https://github.com/benchmark-action)."""
    found = [
        {
            "name": name,
            "unit": "us",
            "value": 1e6 * measured.latency,
            "range": f"± {1e6 * (measured.half_width or 0.0):.4g}",
            "extra": f"{own.name}, driver {own.driver or 'unknown'}, {measured.mode}",
        }
        for name, own, measured in _measured(rows, device)
    ]
    return json.dumps(found, indent=1) + "\n"


def _measured(rows: Iterable[Row], device: DeviceFacts) -> Iterator[tuple[str, DeviceFacts, Measurement]]:
    """Name, GPU and measurement of rows with times that mean something: not of tests that failed by themselves, nor under a profiler."""
    for row in rows:
        if row.measurement is not None and not row.measurement.profiled and row.test_error is not True:
            own = row.measured_on(device)
            yield printable(f"{row.key} @ {own.key}"), own, row.measurement
