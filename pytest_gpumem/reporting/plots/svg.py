"""What drawings are made of: numbers in few characters, texts that are escaped, and the element around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 480
"""Units across a drawing. It is shown at the width of its column: on a telephone a unit is three quarters of a pixel."""
CHARACTER = 6.9
"""Units across a character of the drawings' font, on average."""


def number(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text


def text(x: float, y: float, said: str, *, anchor: str = "start", style: str = "") -> str:
    """A line of text; `anchor` is "start", "middle" or "end"."""
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    css = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{at}{css}>{escape(said)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """A straight line."""
    return f'<path class="{style}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def points(at: Iterable[tuple[float, float]]) -> str:
    """The path of many dots, to a unit: each is a line of no length with round ends, and lies relative to the one before."""
    parts, last_x, last_y = [], 0, 0
    for x, y in at:
        dx, dy = round(x) - last_x, round(y) - last_y
        parts.append(f"m{dx}{'' if dy < 0 else ' '}{dy}h0")
        last_x, last_y = last_x + dx, last_y + dy
    return "".join(parts)


def tips(said: Iterable[str]) -> str:
    """The attribute of a line from which the page's script makes what shows where the pointer rests on the line's points, in their order.

    An element for each point would be most of a page with many tests.
    """
    return f' data-tips="{escape("|".join(one.replace("|", "/") for one in said))}"'


def path(at: Iterable[tuple[float, float]], style: str) -> str:
    """A line through points."""
    return f'<path class="{style}" d="M{"L".join(f"{number(x)} {number(y)}" for x, y in at)}"/>'


def box(x: float, y: float, width: float, height: float, style: str, tip: str = "") -> str:
    """A filled rectangle; `tip` shows where the pointer rests on it."""
    shape = f'<rect class="{style}" x="{number(x)}" y="{number(y)}" width="{number(max(width, 0.5))}" height="{number(height)}"'
    return f"{shape}><title>{escape(tip)}</title></rect>" if tip else f"{shape}/>"


def dot(x: float, y: float, radius: float, style: str, tip: str = "") -> str:
    """A filled circle."""
    shape = f'<circle class="{style}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"'
    return f"{shape}><title>{escape(tip)}</title></circle>" if tip else f"{shape}/>"


def link(target: str, inside: str) -> str:
    """What leads to an element of the page."""
    return f'<a href="#{escape(target)}">{inside}</a>'


def drawing(height: float, inside: Iterable[str], what: str) -> Markup:
    """The whole drawing; `what` is read out in its place."""
    # What is inside was made by this module's functions, which escape every text.
    return Markup(f'<svg viewBox="0 0 {WIDTH} {number(height)}" role="img" aria-label="{escape(what)}">{"".join(inside)}</svg>')


def fitted(said: str, units: float) -> str:
    """A text that takes at most so many units: the middle goes."""
    most = max(5, int(units / CHARACTER))
    if len(said) <= most:
        return said
    end = (most - 1) * 2 // 3
    return f"{said[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{said[len(said) - end :]}"


_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_RATES = (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3), ("B/s", 1.0))


_MANY = 5000.0
"""Ratio of the ends of a logarithmic scale from which on only powers of ten are labelled."""


@dataclass(frozen=True)
class Unit:
    """What figures of an axis are divided by."""

    name: str
    factor: float

    def said(self, value: float) -> str:
        """A figure without its unit, in at most four digits."""
        return short(value / self.factor)


def time_unit(values: Sequence[float]) -> Unit:
    """The unit in which the largest of some times, in seconds, has one to three digits before the point."""
    return _unit(values, _TIMES)


def rate_unit(values: Sequence[float]) -> Unit:
    """The same for bytes per second; GB/s up to 10 TB/s, as datasheets have it."""
    return Unit("GB/s", 1e9) if 1e9 <= max(values, default=0.0) < 1e13 else _unit(values, _RATES)


def _unit(values: Sequence[float], ladder: tuple[tuple[str, float], ...]) -> Unit:
    most = max(values, default=0.0)
    return Unit(*next((step for step in ladder if most >= step[1]), ladder[-1]))


def short(value: float) -> str:
    """A figure in at most four digits, without an exponent where it can be done."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if 1000 <= abs(value) < (1e9 if value == round(value) else 1e6) else f"{value:.4g}"


@dataclass(frozen=True)
class Scale:
    """A range of values on a range of coordinates."""

    low: float
    high: float
    start: float
    """Coordinate of `low`."""
    end: float
    """Coordinate of `high`."""
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + self._share(value) * (self.end - self.start)

    def _share(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round values within the range, at most seven or so."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            steps = (1, 2, 5) if self.high / self.low < _MANY else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
        else:
            step = nice_step((self.high - self.low) / 5)
            found = [index * step for index in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in found if self.low * (1 - 1e-9) <= tick <= self.high * (1 + 1e-9)] if self.log else found


def nice_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10 ... times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def spanned(values: Sequence[float], *, margin: float = 0.05, least: float = 0.0) -> tuple[float, float]:
    """A range that holds all values with a margin on both sides; `least` is its least width."""
    low, high = min(values), max(values)
    width = max(high - low, least, abs(high) * 1e-6, 1e-300)
    middle = (low + high) / 2
    half = width / 2 * (1 + 2 * margin)
    return middle - half, middle + half


def from_zero(values: Sequence[float]) -> tuple[float, float]:
    """A range from zero to a little above the largest value."""
    return 0.0, max(max(values, default=0.0), 1e-300) * 1.08


LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 20.0, 34.0
"""Units around the plot."""


@dataclass(frozen=True)
class Frame:
    """Where a plot lies."""

    height: float
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP

    @property
    def bottom(self) -> float:
        return self.height - BOTTOM

    def x(self, low: float, high: float, log: bool = False) -> Scale:
        """From left to right."""
        return Scale(low, high, self.left, self.right, log)

    def y(self, low: float, high: float, log: bool = False) -> Scale:
        """From the bottom up."""
        return Scale(low, high, self.bottom, self.top, log)

    def y_axis(self, scale: Scale, unit: str, said: Callable[[float], str] = short) -> str:
        """Lines across the plot, with their values on the left and the unit above them."""
        at = [(round(scale(tick)), said(tick)) for tick in scale.ticks]
        grid = "".join(f"M{number(self.left)} {y}H{number(self.right)}" for y, _ in at)
        labels = "".join(text(self.left - 5, y + 4, label) for y, label in at)
        above = text(self.left - 5, self.top - 8, unit, style="unit")
        return f'<path class="grid" d="{grid}"/><g text-anchor="end">{labels}{above}</g>'

    def x_axis(self, scale: Scale, unit: str, ticks: Sequence[float] | None = None, said: Callable[[float], str] = short) -> str:
        """Values below the plot where they do not meet, and the unit under them."""
        drawn, free = [], -1e9
        for tick in ticks if ticks is not None else scale.ticks:
            label, at = said(tick), scale(tick)
            half = len(label) * CHARACTER / 2
            if at - half >= free and at + half <= WIDTH + 2:
                drawn.append(line(at, self.bottom, at, self.bottom + 4, "axis") + text(at, self.bottom + 15, label, anchor="middle"))
                free = at + half + 6
        middle = (self.left + self.right) / 2
        return (
            line(self.left, self.bottom, self.right, self.bottom, "axis")
            + "".join(drawn)
            + text(middle, self.bottom + 29, unit, anchor="middle", style="unit")
        )
