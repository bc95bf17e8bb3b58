"""Rows and devices that the tests of baselines store."""

from __future__ import annotations

from typing import Any

from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.accepted import Acceptance, Acceptances, AcceptedChange, Scope
from pytest_gpumem.baselines.history import RunFile, SavedRow
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits, Measurement, MovedBytes
from pytest_gpumem.records.row import Comparison, Row, Verdict

A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
SIMULATED = replace(H100, simulated=True)

MEASURED = (
    "mode",
    "sampler",
    "target",
    "profiled",
    "conditions",
    "overhead",
    "kernel_source",
    "provenance",
    "notes",
)
"""Arguments of `row` that belong to its measurement."""


def every(past: Measurement) -> bool:
    """Of `Baseline.history`: every measurement can be compared."""
    return True


def row(
    name: str = "test_triad",
    *,
    latency: float = 268e-6,
    outcome: Outcome = Outcome.PASS,
    **changes: Any,
) -> Row:
    measured = {key: changes.pop(key) for key in MEASURED if key in changes}
    around = ((latency, latency * 1.001), (latency, latency * 0.999))
    triad = {
        "target": "triad",
        "sampler": "graph",
        "moved_bytes": MovedBytes(2, 1),
        "footprint": 3,
        "floor": 1.28e-6,
        "half_width": 1e-7,
    }
    given = {
        "nodeid": f"tests/test_a.py::{name}",
        "limits": Limits(),
        "verdict": Verdict(outcome, "because"),
        "measurement": measurement(placements=around, **triad | measured),
    }
    return Row(**{**given, **changes})


def meant(key: str, reason: str = "why", who: str = "ada", size: str = "10%") -> Acceptances:
    """An accepted slow-down of a row."""
    return Acceptances([Acceptance(key, reason, who, (AcceptedChange(key, Scope.TIME, size),))])


def run(*rows: SavedRow) -> RunFile:
    """The file of a run with these rows, at least one."""
    process = rows[0].process
    return RunFile(process.device.key, process, rows)


def improved(
    delta: float, high: float, written: str | None = "1%", *, measured: int = 3, **changes: Any
) -> Row:
    """A row that passed with a gain: `delta` and the upper end of its interval, as shares, over so many processes."""
    verdict = Verdict(
        Outcome.PASS,
        "because",
        Comparison(delta, 2 * delta - high, high, 0.008, 5, measured=measured),
    )
    return row(verdict=verdict, limits=Limits(max_regression=written), **changes)
