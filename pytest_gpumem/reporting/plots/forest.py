"""Changes against the baseline, each with its interval, slowest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import WIDTH, Frame, box, dot, drawing, fitted, line, link, text

MOST = 40
"""Rows that are drawn: those that changed most."""
_NAMES = 190.0
_STEP = 17.0


@dataclass(frozen=True)
class Delta:
    """One row's change, as shares: +0.01 is 1 % slower."""

    name: str
    target: str
    """Element of the page that tells more."""
    delta: float
    low: float
    high: float
    kind: str
    """Class of its verdict: "pass", "fail" or "doubt"."""
    margin: float | None = None
    """Allowed slow-down; None where the row is held to none."""


def shown(deltas: Sequence[Delta]) -> list[Delta]:
    """Those that are drawn, slowest first."""
    most = sorted(deltas, key=lambda one: (one.kind == "pass", -abs(one.delta)))[:MOST]
    return sorted(most, key=lambda one: -one.delta)


def forest(deltas: Sequence[Delta]) -> Markup:
    """The plot of at least one change."""
    drawn = shown(deltas)
    frame = Frame(_STEP * len(drawn) + 62, left=_NAMES)
    ends = [100 * end for one in drawn for end in (one.low, one.high, one.delta)]
    low, high = min(*ends, -0.1), max(*ends, 0.1)
    pad = 0.05 * (high - low)
    x = frame.x(low - pad, high + pad)
    parts = [frame.x_axis(x, "% slower than the baseline"), line(x(0), frame.top - 6, x(0), frame.bottom, "axis")]
    for index, one in enumerate(drawn):
        y = frame.top + (index + 0.5) * _STEP
        tip = f"{one.name}: {100 * one.delta:+.2f} %, {100 * one.low:+.2f} to {100 * one.high:+.2f} %"
        if one.margin is not None and x.low < 100 * one.margin < x.high:
            parts.append(line(x(100 * one.margin), y - 5, x(100 * one.margin), y + 5, "margin"))
        parts.append(link(one.target, text(0, y + 4, fitted(one.name, _NAMES - 8))))
        left, right = x(100 * one.low), x(100 * one.high)
        parts.append(
            box(left, y - 2, right - left, 4, f"{one.kind} interval", tip) + dot(x(100 * one.delta), y, 3.6, f"{one.kind} dot", tip)
        )
    if any(one.margin is not None for one in drawn):
        parts.append(text(WIDTH - 12, frame.top - 9, "| allowed", anchor="end", style="unit"))
    return drawing(frame.height, parts, f"changes of {len(drawn)} rows against the baseline")
