"""Shapes, scales and axes of the plots, as SVG. Every text is escaped, and coordinates are short."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Folder of the page's template, style sheet and script."""
COLOURS = 6  # series that have a colour of their own: classes s0, s1 ... of the style sheet
WIDTH = 480  # units across a drawing, which takes the width of its column: on a telephone a unit is three quarters of a pixel
CHARACTER = 6.9  # units across a character of the drawings' font, on average


@cache
def static(name: str) -> str:
    """The text of a file of `TEMPLATES`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def text(x: float, y: float, content: str, *, anchor: str = "start", style: str = "") -> str:
    """A line of text; `anchor` is "start", "middle" or "end"."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    css = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{at}{css}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<path class="{style}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def points(at: Iterable[tuple[float, float]]) -> str:
    """The path of many dots, to a unit: each is a line of no length with round ends, relative to the dot before."""
    parts, last_x, last_y = [], 0, 0
    for x, y in at:
        dx, dy = round(x) - last_x, round(y) - last_y
        parts.append(f"m{dx}{'' if dy < 0 else ' '}{dy}h0")
        last_x, last_y = last_x + dx, last_y + dy
    return "".join(parts)


def tips(texts: Iterable[str]) -> str:
    """The attribute of a line with the tips of its points, in their order; the page's script makes elements of them. An element for each
    point in the page itself would be most of a page with many tests."""
    return f' data-tips="{escape("|".join(one.replace("|", "/") for one in texts))}"'


def path(at: Iterable[tuple[float, float]], style: str) -> str:
    """A line through points."""
    return f'<path class="{style}" d="M{"L".join(f"{number(x)} {number(y)}" for x, y in at)}"/>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    """A filled rectangle; `tip` shows while the pointer rests on it."""
    shape = f'x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.5))}" height="{number(height)}"'
    return _tipped("rect", style, shape, tip)


def dot(x: float, y: float, radius: float, style: str, tip: str = "") -> str:
    """A filled circle."""
    return _tipped("circle", style, f'cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"', tip)


def _tipped(element: str, style: str, shape: str, tip: str) -> str:
    start = f'<{element} class="{style}" {shape}'
    return f"{start}><title>{escape(tip)}</title></{element}>" if tip else f"{start}/>"


def link(target: str, inside: str) -> str:
    """A link to an element of the page."""
    return f'<a href="#{escape(target)}">{inside}</a>'


def drawing(height: float, inside: Iterable[str], description: str) -> Markup:
    """The whole drawing; screen readers read the description."""
    # The functions of this module made what is inside, and escaped every text.
    start = f'<svg viewBox="0 0 {WIDTH} {number(height)}" role="img" aria-label="{escape(description)}">'
    return Markup(f"{start}{''.join(inside)}</svg>")


def fitted(content: str, units: float) -> str:
    """A text of at most so many units, without its middle where it is longer."""
    most = max(5, int(units / CHARACTER))
    if len(content) <= most:
        return content
    end = (most - 1) * 2 // 3
    return f"{content[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{content[len(content) - end :]}"


_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_RATES = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3), ("B/s", 1.0))
_BYTES = tuple(
    (name, 1024.0**power)
    for name, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1), ("B", 0))
)
_MANY = 5000.0
"""Ratio of the ends of a logarithmic scale from which on only powers of ten have labels."""


@dataclass(frozen=True)
class Unit:
    """The unit of an axis."""

    name: str
    factor: float = 1.0
    """The unit in the unit of the values: 1e-6 for microseconds of values in seconds."""

    def text(self, value: float) -> str:
        """A value in this unit, in at most four digits, without the unit's name."""
        return short(value / self.factor)


def time_unit(values: Sequence[float]) -> Unit:
    """The unit in which the largest of some times, in seconds, has one to three digits before the point."""
    return _unit(values, _TIMES)


def rate_unit(values: Sequence[float]) -> Unit:
    """The same for bytes per second; GB/s up to 10 TB/s, as in datasheets."""
    return Unit("GB/s", 1e9) if 1e9 <= max(values, default=0.0) < 1e13 else _unit(values, _RATES)


def bytes_unit(values: Sequence[float]) -> Unit:
    """The binary unit in which the largest of some bytes has one to four digits before the point."""
    return _unit(values, _BYTES)


def _unit(values: Sequence[float], units: tuple[tuple[str, float], ...]) -> Unit:
    most = max(values, default=0.0)
    return Unit(*next((unit for unit in units if most >= unit[1]), units[-1]))


def short(value: float) -> str:
    """A figure in at most four digits, without an exponent where that is possible."""
    if value == 0:
        return "0"
    return (
        f"{value:.0f}"
        if 1000 <= abs(value) < (1e9 if value == round(value) else 1e6)
        else f"{value:.4g}"
    )


@dataclass(frozen=True)
class Scale:
    """Maps values to coordinates."""

    low: float
    high: float
    start: float  # coordinate of `low`
    end: float  # coordinate of `high`
    log: bool = False
    unit: Unit = Unit("")

    def __call__(self, value: float) -> float:
        share = (
            math.log(value / self.low) / math.log(self.high / self.low)
            if self.log
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Values within the range that are round in `unit`, at most seven or so."""
        low, high = self.low / self.unit.factor, self.high / self.unit.factor
        if self.log:
            decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            steps = (1, 2, 5) if high / low < _MANY else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
            found = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        else:
            step = nice_step((high - low) / 5)
            found = [
                index * step
                for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
            ]
        return [tick * self.unit.factor for tick in found]


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10 ... times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def spanned(
    values: Sequence[float], *, margin: float = 0.05, least: float = 0.0
) -> tuple[float, float]:
    """A range of all values with a margin on both sides; `least` is its least width."""
    low, high = min(values), max(values)
    width = max(high - low, least, abs(high) * 1e-6, 1e-300)
    middle = (low + high) / 2
    half = width / 2 * (1 + 2 * margin)
    return middle - half, middle + half


def from_zero(values: Sequence[float]) -> tuple[float, float]:
    """A range from zero to a little above the largest value."""
    return 0.0, max(max(values, default=0.0), 1e-300) * 1.08


LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 20.0, 34.0  # units around a plot


@dataclass(frozen=True)
class Frame:
    """The area of a plot within its drawing."""

    height: float  # of the drawing
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, low: float, high: float, unit: Unit = Unit(""), *, log: bool = False) -> Scale:
        """From left to right."""
        return Scale(low, high, self.left, self.right, log, unit)

    def y(self, low: float, high: float, unit: Unit = Unit("")) -> Scale:
        """From the bottom up."""
        return Scale(low, high, self.bottom, self.top, unit=unit)

    def y_axis(self, scale: Scale, name: str = "") -> str:
        """Lines across the plot, with their values on the left, and the name and the unit of the figures above them."""
        at = [(round(scale(tick)), scale.unit.text(tick)) for tick in scale.ticks]
        grid = "".join(f"M{number(self.left)} {y}H{number(self.right)}" for y, _ in at)
        labels = "".join(text(self.left - 5, y + 4, label) for y, label in at)
        above = text(
            0,
            self.top - 8,
            ", ".join(part for part in (name, scale.unit.name) if part),
            style="unit",
        )
        return f'<path class="grid" d="{grid}"/><g text-anchor="end">{labels}</g>{above}'

    def x_axis(self, scale: Scale, title: str = "", ticks: Sequence[float] | None = None) -> str:
        """Values below the plot where they do not overlap, and under them a title, by default the unit."""
        drawn, free = [], -1e9
        for tick in ticks if ticks is not None else scale.ticks:
            label, at = scale.unit.text(tick), scale(tick)
            half = len(label) * CHARACTER / 2
            if at - half >= free and at + half <= WIDTH + 2:
                drawn.append(
                    line(at, self.bottom, at, self.bottom + 4, "axis")
                    + text(at, self.bottom + 15, label, anchor="middle")
                )
                free = at + half + 6
        middle = (self.left + self.right) / 2
        return (
            line(self.left, self.bottom, self.right, self.bottom, "axis")
            + "".join(drawn)
            + text(
                middle, self.bottom + 29, title or scale.unit.name, anchor="middle", style="unit"
            )
        )
