"""Rows as a screen leaves them."""

from __future__ import annotations

from typing import Any

from measurements import measurement

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, Row, Verdict

OUTCOMES = {
    **dict.fromkeys((Code.SLOWER, Code.CREPT, Code.FASTER, Code.TOO_MUCH_MEMORY), Outcome.FAIL),
    **dict.fromkeys((Code.NO_BASELINE, Code.ACCEPTED), Outcome.NEW),
}
"""Of codes that are not UNDECIDED."""


def row(verdict: Code | Outcome = Outcome.PASS, name: str = "a", delta: float | None = 0.03, label: str = "", **limits: Any) -> Row:
    made = measurement(label=label, placements=((1e-3, 1e-3), (1e-3, 1e-3)), half_width=1e-9)
    outcome, code = (verdict, None) if isinstance(verdict, Outcome) else (OUTCOMES.get(verdict, Outcome.UNDECIDED), verdict)
    comparison = None if delta is None else Comparison(delta, delta, delta, 0.01, 3)
    held = Limits(**{"max_regression": "1%", **limits})
    said = Verdict(outcome, f"said by the screen of {name}", comparison, code=code)
    return Row(f"t.py::{name}", held, said, made, label, failed=outcome is Outcome.FAIL)
