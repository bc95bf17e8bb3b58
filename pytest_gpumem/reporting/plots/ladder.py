"""Latencies per access on a logarithmic scale: the steps from L2 over DRAM to the host's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import Frame, box, drawing, fitted, line, link, text, time_unit
from pytest_gpumem.units import format_time

_NAMES = 190.0
_STEP = 22.0


@dataclass(frozen=True)
class Rung:
    """One latency."""

    name: str
    target: str
    """Element of the page that tells more."""
    seconds: float
    """Of one access."""
    half_width: float | None = None
    """Half of its 95 % interval, in seconds."""


def ladder(rungs: Sequence[Rung]) -> Markup:
    """The plot of at least one latency, quickest first."""
    drawn = sorted(rungs, key=lambda rung: rung.seconds)
    frame = Frame(_STEP * len(drawn) + 50, left=_NAMES, top=8.0)
    unit = time_unit([rung.seconds for rung in drawn[:1]])
    x = frame.x(drawn[0].seconds / unit.factor / 2, drawn[-1].seconds / unit.factor * 2.2, log=True)
    parts = [frame.x_axis(x, f"{unit.name} an access, logarithmic")]
    for index, rung in enumerate(drawn):
        y = frame.top + (index + 0.5) * _STEP
        at = x(rung.seconds / unit.factor)
        said = f"{rung.name}: {format_time(rung.seconds)}" + (f" ± {format_time(rung.half_width)}" if rung.half_width else "")
        parts.append(link(rung.target, text(0, y + 4, fitted(rung.name, _NAMES - 8))))
        parts.append(box(frame.left, y - 7, at - frame.left, 14, "s0 bar", said))
        if rung.half_width:
            ends = [x(max(rung.seconds + sign * rung.half_width, rung.seconds / 2) / unit.factor) for sign in (-1, 1)]
            parts.append(line(ends[0], y, ends[1], y, "s1 whisker"))
        parts.append(text(at + 6, y + 4, format_time(rung.seconds)))
    return drawing(frame.height, parts, f"latency per access of {len(drawn)} rows")
