"""Figures over a number, such as a bandwidth over sizes, with their ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.reporting.plots.runs import MOST_INTERVAL
from pytest_gpumem.reporting.plots.svg import Frame, Unit, dot, drawing, fitted, from_zero, line, path, short, spanned, text

COLOURS = 6
"""Series that have a colour of their own: classes s0, s1 ... of the style sheet."""
_HEIGHT = 250.0
_LOG_FROM = 20.0  # ratio of the largest to the smallest number from which on its axis is logarithmic


@dataclass(frozen=True)
class Point:
    """One figure."""

    x: float
    y: float
    low: float | None = None  # lower end of its interval; None if there is none
    high: float | None = None
    tip: str = ""  # shown while the pointer rests on it


@dataclass(frozen=True)
class Series:
    """Figures of one kind, in the order of their numbers."""

    name: str
    points: tuple[Point, ...]
    predicted: bool = False  # calculated, not measured: drawn dashed, without dots


@dataclass(frozen=True)
class Ceiling:
    """A bound of the figures."""

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


def curve(series: Sequence[Series], x_unit: str, unit: Unit, ceilings: Sequence[Ceiling], description: str, y_name: str = "") -> Markup:
    """The plot, without its legend, for which a page has more room.
    `series`: each of at least one point.
    `ceilings`: lines across.
    `description`: for screen readers.
    """
    frame = Frame(_HEIGHT)
    xs = sorted({point.x for one in series for point in one.points})
    if xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM:
        pad = (xs[-1] / xs[0]) ** 0.04
        x = frame.x(xs[0] / pad, xs[-1] * pad, Unit(x_unit), log=True)
    else:
        x = frame.x(*spanned(xs, margin=0.04, least=1e-9), Unit(x_unit))
    # Where an interval is wider than all figures, its upper end is not drawn: the figures would have no room.
    figures = [point.y for one in series for point in one.points]
    most = MOST_INTERVAL * max(figures)
    figures += [min(point.high, most) for one in series for point in one.points if point.high is not None]
    y = frame.y(*from_zero([*figures, *(ceiling.value for ceiling in ceilings)]), unit)
    parts = [frame.y_axis(y, y_name), frame.x_axis(x, ticks=xs if len(xs) <= 14 else None)]
    for ceiling in ceilings:
        level = y(ceiling.value)
        parts.append(line(frame.left, level, frame.right, level, "ceiling"))
        right = _free_side([(x(point.x), y(point.y)) for one in series for point in one.points], level - 8, frame)
        name = fitted(f"{ceiling.name} {unit.text(ceiling.value)}", 300)
        parts.append(text(frame.right if right else frame.left + 4, level - 4, name, anchor="end" if right else "start", style="unit"))
    for one, colour in zip(series, colours(series), strict=True):
        parts.append(path([(x(point.x), y(point.y)) for point in one.points], f"{colour} curve{' predicted' if one.predicted else ''}"))
        for point in () if one.predicted else one.points:
            if point.low is not None and point.high is not None:
                parts.append(line(x(point.x), y(max(point.low, y.low)), x(point.x), y(min(point.high, y.high)), f"{colour} whisker"))
            tip = point.tip or f"{one.name}: {short(point.x)} {x_unit}, {unit.text(point.y)} {unit.name}"
            parts.append(dot(x(point.x), y(point.y), 3.2, f"{colour} dot", tip))
    return drawing(_HEIGHT, parts, description)


def _free_side(points: Sequence[tuple[float, float]], height: float, frame: Frame) -> bool:
    """True if a text at a height is farther from all points on the right than on the left."""
    middle = (frame.left + frame.right) / 2
    left = min((abs(y - height) for x, y in points if x <= middle), default=frame.height)
    right = min((abs(y - height) for x, y in points if x >= middle), default=frame.height)
    return right >= min(left, 20.0)
