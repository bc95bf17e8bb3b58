"""What overlaps: the parts one after another, what was measured, and what no overlap can beat."""

from __future__ import annotations

from markupsafe import Markup

from pytest_gpumem.records.overlap import Overlap
from pytest_gpumem.reporting.plots.curve import COLOURS
from pytest_gpumem.reporting.plots.svg import CHARACTER, Frame, box, drawing, fitted, from_zero, line, text, time_unit
from pytest_gpumem.units import format_time

_NAMES = 118.0
_STEP = 26.0


def timeline(overlap: Overlap, latency: float) -> Markup:
    """The plot.

    Args:
        overlap: the parts, each measured alone, and bounds.
        latency: seconds of the overlapping work.
    """
    alone = sum(part.seconds for part in overlap.parts)
    bars = [("measured", latency, "s0 bar"), ("cannot beat", overlap.bound, "s2 bar")]
    if overlap.estimate is not None:
        bars.append(("guide's estimate", overlap.estimate, "s3 bar"))
    frame = Frame(_STEP * (len(bars) + 2) + 50, left=_NAMES, top=8.0)
    longest = [alone, overlap.sequential, *(seconds for _, seconds, _ in bars)]
    unit = time_unit(longest)
    low, high = from_zero(longest)
    x = frame.x(low / unit.factor, high / unit.factor)
    parts = [frame.x_axis(x, unit.name)]
    y, begun = frame.top, 0.0
    parts.append(text(0, y + 16, "parts, each alone"))
    for index, part in enumerate(overlap.parts):
        left, right = x(begun / unit.factor), x((begun + part.seconds) / unit.factor)
        said = f"{part.name}: {format_time(part.seconds)}"
        parts.append(box(left, y + 3, right - left - 1, _STEP - 8, f"s{index % COLOURS} bar", said))
        if right - left > 5 * CHARACTER:
            parts.append(text(left + 4, y + 16, fitted(part.name, right - left - 8), style="onbar"))
        begun += part.seconds
    for name, seconds, style in [("one after another", overlap.sequential, "s5 bar"), *bars]:
        y += _STEP
        parts.append(text(0, y + 16, fitted(name, _NAMES)))
        parts.append(box(frame.left, y + 3, x(seconds / unit.factor) - frame.left, _STEP - 8, style, f"{name}: {format_time(seconds)}"))
        parts.append(text(frame.left + 6, y + 16, format_time(seconds), style="onbar"))
    at = x(latency / unit.factor)
    parts.append(line(at, frame.top, at, frame.bottom, "ceiling"))
    return drawing(frame.height, parts, f"overlap of {len(overlap.parts)} parts: {format_time(latency)}")
