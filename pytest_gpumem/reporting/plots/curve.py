"""Figures over a number: a bandwidth against sizes, with what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import Frame, Unit, dot, drawing, fitted, from_zero, line, path, short, spanned, text

COLOURS = 6
"""Series that have a colour of their own: classes s0, s1 ... of the style sheet."""
_HEIGHT = 250.0
_MOST_INTERVAL = 1.2
"""Share of the largest figure up to which the ends of intervals widen the plot."""
_LOG_FROM = 20.0
"""Ratio of the largest to the smallest number from which on its axis is logarithmic."""


@dataclass(frozen=True)
class Point:
    """One figure."""

    x: float
    y: float
    low: float | None = None
    """Ends of its interval; None where there is none."""
    high: float | None = None
    tip: str = ""
    """What is said where the pointer rests on it."""


@dataclass(frozen=True)
class Series:
    """Figures of one kind, in the order of their numbers."""

    name: str
    points: tuple[Point, ...]
    predicted: bool = False
    """Worked out, not measured: drawn dashed, without dots."""


@dataclass(frozen=True)
class Ceiling:
    """What no figure should be above."""

    value: float
    name: str


def colours(series: Sequence[Series]) -> list[str]:
    """The class of each series; a predicted one has that of the measured one before it."""
    found: list[str] = []
    measured = 0
    for one in series:
        if one.predicted and found:
            found.append(found[-1])
        else:
            found.append(f"s{measured % COLOURS}")
            measured += 1
    return found


def curve(series: Sequence[Series], x_unit: str, unit: Unit, ceilings: Sequence[Ceiling], what: str) -> Markup:
    """The plot, without its legend, for which a page has more room.

    Args:
        series: each of at least one point.
        x_unit: of the numbers.
        unit: of the figures.
        ceilings: lines across.
        what: is read out in place of the plot.
    """
    frame = Frame(_HEIGHT)
    xs = sorted({point.x for one in series for point in one.points})
    log = xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM
    if log:
        pad = (xs[-1] / xs[0]) ** 0.04
        x = frame.x(xs[0] / pad, xs[-1] * pad, log=True)
    else:
        x = frame.x(*spanned(xs, margin=0.04, least=1e-9))
    # An interval that is wider than all figures would leave these no room; what of it is above the plot is not drawn.
    figures = [point.y for one in series for point in one.points]
    most = _MOST_INTERVAL * max(figures)
    figures += [min(point.high, most) for one in series for point in one.points if point.high is not None]
    low, high = from_zero([*figures, *(ceiling.value for ceiling in ceilings)])
    y = frame.y(low / unit.factor, high / unit.factor)
    parts = [frame.y_axis(y, unit.name), frame.x_axis(x, x_unit, xs if len(xs) <= 14 else None)]
    for ceiling in ceilings:
        level = y(ceiling.value / unit.factor)
        parts.append(line(frame.left, level, frame.right, level, "ceiling"))
        right = _free_side([(x(point.x), y(point.y / unit.factor)) for one in series for point in one.points], level - 8, frame)
        said = fitted(f"{ceiling.name} {unit.said(ceiling.value)}", 300)
        parts.append(text(frame.right if right else frame.left + 4, level - 4, said, anchor="end" if right else "start", style="unit"))
    for one, colour in zip(series, colours(series), strict=True):
        at = [(x(point.x), y(point.y / unit.factor)) for point in one.points]
        parts.append(path(at, f"{colour} curve{' predicted' if one.predicted else ''}"))
        if one.predicted:
            continue
        for point, (px, py) in zip(one.points, at, strict=True):
            if point.low is not None and point.high is not None:
                ends = max(point.low / unit.factor, y.low), min(point.high / unit.factor, y.high)
                parts.append(line(px, y(ends[0]), px, y(ends[1]), f"{colour} whisker"))
            tip = point.tip or f"{one.name}: {short(point.x)} {x_unit}, {unit.said(point.y)} {unit.name}"
            parts.append(dot(px, py, 3.2, f"{colour} dot", tip))
    return drawing(_HEIGHT, parts, what)


def _free_side(points: Sequence[tuple[float, float]], height: float, frame: Frame) -> bool:
    """Whether a text at a height is farther from all points on the right than on the left."""
    middle = (frame.left + frame.right) / 2
    left = min((abs(y - height) for x, y in points if x <= middle), default=frame.height)
    right = min((abs(y - height) for x, y in points if x >= middle), default=frame.height)
    return right >= min(left, 20.0)
