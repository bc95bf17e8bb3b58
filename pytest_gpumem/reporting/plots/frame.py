"""Axes: grid, labels and units around a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_gpumem.reporting.plots.scales import Scale, short
from pytest_gpumem.reporting.plots.svg import CHARACTER, WIDTH, line, number, text

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
