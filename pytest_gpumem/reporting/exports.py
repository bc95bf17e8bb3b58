"""Rows for other programs: as plain values, as CSV (RFC 4180), in the Bencher Metric Format, and in that of github-action-benchmark.

CSV has SI units, shares as fractions, and empty fields where unknown. In the formats of chart services every name ends with the device's
key, so that no line of a chart mixes cards, or a simulated device with a real one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


def figures(row: Row, facts: DeviceFacts) -> dict[str, Any]:
    """The figures of a row without its samples, as plain values in SI units: of `extra_info`, JUnit and CSV.
    `facts`: of the run's device.
    """
    device, measurement, comparison = row.measured_on(facts), row.measurement, row.verdict.comparison
    found: dict[str, Any] = {
        "device": device.key,
        "simulated": row.verdict.simulated or device.simulated,
        "verdict": row.verdict.outcome.value,
        "reason": row.verdict.reason,
        "failed": row.failed,
        "range": row.range_name,
    }
    known: dict[str, Any] = {"label": row.label or None}  # those that are left out where they are unknown
    if measurement is not None:
        found |= {
            "target": measurement.target,
            "latency_s": measurement.latency,
            "half_width_s": measurement.half_width,
            "bandwidth_bytes_per_s": measurement.bandwidth,
            "samples": sum(map(len, measurement.placements)),
            "placements": len(measurement.placements),
            "mode": measurement.mode,
            "sampler": measurement.sampler,
            "profiled": measurement.profiled,
        }
        known["card_variant_dram_latency_s"] = None if measurement.controls is None else measurement.controls.latency
        known["share_of_peak"] = measurement.share_of_peak(device)
        if measurement.migrations is not None and (counts := measurement.migrations.launch) is not None:
            found |= {"gpu_page_faults": counts.gpu_faults, "cpu_page_faults": counts.cpu_faults, "migrated_bytes": counts.migrated}
    if row.extra:
        found["extra"] = row.extra
    if (footprint := row.footprint) is not None and footprint.watched:
        found |= {"peak_bytes": footprint.peak, "allocations": footprint.allocations}
        if footprint.ended:  # until then nothing is kept, only in use
            found |= {"kept_bytes": footprint.kept, "reserved_bytes": footprint.reserved}
    if comparison is not None:
        found |= {"delta": comparison.delta, "delta_low": comparison.low, "delta_high": comparison.high, "catches": comparison.catches}
    return found | {name: value for name, value in known.items() if value is not None}


PROPERTY = "gpumem"  # name, and prefix of the names, of the JUnit properties

READABLE = (
    *("verdict", "reason", "latency_s", "half_width_s", "bandwidth_bytes_per_s", "share_of_peak"),
    *("delta", "delta_low", "delta_high", "catches", "mode", "sampler", "device", "simulated"),
)
"""Figures that have a JUnit property of their own."""


def properties(row: Row, facts: DeviceFacts) -> list[tuple[str, object]]:
    """JUnit properties: the figures as JSON, and those that a person looks for, each on its own.
    `facts`: of the session's device.
    """
    suffix, found = f"[{row.label}]" if row.label else "", figures(row, facts)
    return [
        (f"{PROPERTY}{suffix}", json.dumps(found)),
        *((f"{PROPERTY}_{name}{suffix}", found[name]) for name in READABLE if found.get(name) is not None),
    ]


def _fields(row: Row, facts: DeviceFacts) -> list[object]:
    code = row.verdict.code.value if row.verdict.code is not None else None
    found = {"label": row.label, **figures(row, facts), "test": row.nodeid, "outcome": row.verdict.outcome.value, "code": code}
    return [found.get(name) for name in _HEADINGS]


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
        scale = 1e9 if measure == "latency" else 1.0
        ends = {} if interval is None else dict(zip(("lower_value", "upper_value"), interval, strict=True))
        metric = {key: scale * figure for key, figure in {"value": value, **ends}.items()}
        found.setdefault(printable(name), {})[printable(measure)] = metric
    return json.dumps(found, indent=1) + "\n"


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
