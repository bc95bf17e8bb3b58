"""From values to coordinates, and the values at which an axis is labelled. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
