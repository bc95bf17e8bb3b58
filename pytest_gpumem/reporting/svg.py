"""A chart of curves as SVG. Every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 520, 230  # units of a chart
LEFT, RIGHT, TOP, BOTTOM = 78, 506, 12, 206  # edges of its plot
COLOURS = 4  # classes s0, s1 ... of the style sheet
CHARACTER = 7.0  # units across a character, on average
LOG_FROM = 20.0  # ratio of the largest to the smallest x from which on the axis is logarithmic


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str  # of x
    tip: str  # shown while the pointer rests on it
    half_width: float = 0.0  # of its interval


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'


def _path(style: str, places: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{style}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>'


def ticks(high: float) -> list[float]:
    """Round values from zero to `high`, at most six."""
    step = 10.0 ** math.floor(math.log10(high / 5))
    for factor in (1, 2, 5, 10):
        if high / (step * factor) <= 6:
            step *= factor
            break
    return [index * step for index in range(int(high / step * (1 + 1e-9)) + 1)]


def curves(
    series: Sequence[Sequence[Point]], write: Callable[[float], str], description: str
) -> Markup:
    """Curves, from zero, with the intervals of their points. `write`: the text of a figure."""
    points = [point for of in series for point in of]
    high = max(point.y + point.half_width for point in points) * 1.08 or 1.0
    xs = sorted({point.x for point in points})
    log = xs[0] > 0 and xs[-1] / xs[0] >= LOG_FROM

    def x_of(value: float) -> float:
        low, most = xs[0], xs[-1]
        if log:
            low, most, value = math.log(low), math.log(most), math.log(value)
        share = (value - low) / ((most - low) or 1.0)
        return round(LEFT + 20 + share * (RIGHT - LEFT - 40), 1)

    def y_of(value: float) -> float:
        return round(BOTTOM - max(value, 0.0) / high * (BOTTOM - TOP), 1)

    parts = []
    for tick in ticks(high):
        parts.append(_path("grid", [(LEFT, y_of(tick)), (RIGHT, y_of(tick))]))
        parts.append(_text(LEFT - 6, y_of(tick) + 4, write(tick) if tick else "0", "end"))
    free = 0.0
    for point in sorted(points, key=lambda point: point.x):
        half = len(point.label) * CHARACTER / 2
        if x_of(point.x) - half >= free:
            parts.append(_text(x_of(point.x), BOTTOM + 16, point.label, "middle"))
            free = x_of(point.x) + half + 6
    for index, of in enumerate(series):
        colour = f"s{index % COLOURS}"
        parts.append(_path(f"{colour} curve", [(x_of(point.x), y_of(point.y)) for point in of]))
        for point in of:
            x, half = x_of(point.x), point.half_width
            if half:
                ends = [(x, y_of(point.y - half)), (x, y_of(point.y + half))]
                parts.append(_path(colour, ends))
            circle = f'<circle class="{colour} dot" cx="{x}" cy="{y_of(point.y)}" r="3.4">'
            parts.append(f"{circle}<title>{escape(point.tip)}</title></circle>")
    # This module made what is inside, and escaped every text.
    start = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(description)}">'
    return Markup(f"{start}{''.join(parts)}</svg>")
