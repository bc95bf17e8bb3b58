"""Rows and devices that the tests of baselines store."""

from __future__ import annotations

from typing import Any

from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.records.row import Row, Verdict

A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
SIMULATED = replace(H100, simulated=True)

MEASURED = "mode sampler target profiled conditions overhead notes moved_bytes window"
"""Arguments of `row` that belong to its measurement."""


def row(
    name: str = "test_triad",
    *,
    latency: float = 268e-6,
    outcome: Outcome = Outcome.PASS,
    **changes: Any,
) -> Row:
    measured = {key: changes.pop(key) for key in MEASURED.split() if key in changes}
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
