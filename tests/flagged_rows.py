"""Rows as a screen leaves them."""

from __future__ import annotations

from typing import Any

from measurements import measurement

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict

OUTCOMES = {
    **dict.fromkeys((Code.SLOWER, Code.CREPT, Code.TOO_MUCH_MEMORY), Outcome.FAIL),
    Code.NO_BASELINE: Outcome.NEW,
}
"""Of codes that are not UNDECIDED."""
LIMIT_OF: dict[Code | None, str] = {
    None: "max_latency",
    Code.TOO_MUCH_MEMORY: "max_peak",
    Code.CONDITIONS: "",
}
"""The limit that a result is about, where it is not `max_regression`."""


def row(
    verdict: Code | Outcome = Outcome.PASS,
    name: str = "a",
    delta: float | None = 0.03,
    label: str = "",
    **limits: Any,
) -> Row:
    made = measurement(label=label, placements=((1e-3, 1e-3), (1e-3, 1e-3)), half_width=1e-9)
    outcome, code = (
        (verdict, None)
        if isinstance(verdict, Outcome)
        else (OUTCOMES.get(verdict, Outcome.UNDECIDED), verdict)
    )
    comparison = None if delta is None else Comparison(delta, 0.01, processes=3)
    held = Limits(**{"max_regression": "1%", **limits})
    reason = f"said by the screen of {name}"
    results = (
        ()
        if outcome.quiet
        else (LimitResult(LIMIT_OF.get(code, "max_regression"), outcome, code, reason),)
    )
    said = Verdict(outcome, reason, comparison, code=code, limits=results)
    return Row(f"t.py::{name}", held, said, made, label, failed=outcome is Outcome.FAIL)
