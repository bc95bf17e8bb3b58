"""Rows as a screen leaves them."""

from __future__ import annotations

from pytest_gpumem.records.measurement import Conditions, Limits, Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Outcome, Verdict


def row(outcome: Outcome = Outcome.PASS, name: str = "a", delta: float | None = 0.03, label: str = "", **limits: str) -> Row:
    measurement = Measurement(
        label=label,
        target="copy",
        mode="clean-cold",
        sampler="graph",
        sampler_reason="",
        placements=((1e-3, 1e-3), (1e-3, 1e-3)),
        half_width=1e-9,
        traffic=None,
        footprint=None,
        floor=1e-6,
        conditions=(Conditions(), Conditions()),
    )
    comparison = None if delta is None else Comparison(delta, delta, delta, 0.01, 3)
    verdict = Verdict(outcome, f"said by the screen of {name}", comparison)
    held = Limits(**{"max_regression": "1%", **limits})
    return Row(f"t.py::{name}", held, verdict, measurement, label, failed=outcome is Outcome.FAIL)
