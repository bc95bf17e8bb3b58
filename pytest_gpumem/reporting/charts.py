"""Rows for services that keep charts of benchmarks: the Bencher Metric Format, and the custom format of github-action-benchmark.

Every name ends with the device's key, so that no line of a chart mixes cards, or a simulated device with a real one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row


def bencher(rows: Iterable[Row], device: DeviceFacts) -> str:
    """JSON by the name of a row: its latency in nanoseconds, as Bencher's built-in measure has it, and its bandwidth in bytes per second,
    each with the 95 % interval (https://bencher.dev/docs/reference/bencher-metric-format/)."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, measured in _measured(rows, device):
        low, high = measured.latency - (measured.half_width or 0.0), measured.latency + (measured.half_width or 0.0)
        known = measured.half_width is not None and low > 0
        found[name] = {"latency": _metric(1e9, measured.latency, (low, high) if known else None)}
        if measured.traffic is not None:
            total = measured.traffic.total
            found[name]["bandwidth"] = _metric(1.0, total / measured.latency, (total / high, total / low) if known else None)
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
            "extra": f"{device.name}, driver {device.driver or 'unknown'}, {measured.mode}",
        }
        for name, measured in _measured(rows, device)
    ]
    return json.dumps(found, indent=1) + "\n"


def _measured(rows: Iterable[Row], device: DeviceFacts) -> Iterator[tuple[str, Measurement]]:
    """Rows with times that mean something: not of tests that failed by themselves, nor of a session under a profiler."""
    for row in rows:
        if row.measurement is not None and not row.measurement.profiled and row.test_error is not True:
            yield printable(f"{row.key} @ {device.key}"), row.measurement
