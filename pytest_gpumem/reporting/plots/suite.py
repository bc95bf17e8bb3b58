"""Plots of a whole suite: its latency over runs, and its bandwidth over the bytes of a launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.reporting.plots.samples import Past
from pytest_gpumem.reporting.plots.svg import Frame, Unit, dot, drawing, from_zero, line, path, rate_unit, spanned, text
from pytest_gpumem.units import format_bytes, format_rate

_HEIGHT = 220.0


@dataclass(frozen=True)
class Turn:
    """An earlier run of a suite: its rows' latencies over those of this run, less 1."""

    utc: datetime
    middle: float
    """The median row."""
    low: float
    """The smallest change of any row."""
    high: float
    rows: int
    revision: str | None = None


def turns(past: Mapping[str, Sequence[Past]], now: Mapping[str, float]) -> list[Turn]:
    """The earlier runs that have at least half of this run's rows, oldest first.

    Args:
        past: by key, measurements of earlier runs.
        now: by key, seconds in this run.
    """
    found: dict[tuple[datetime, str | None], list[float]] = {}
    for key, seconds in now.items():
        for one in past.get(key, ()):
            found.setdefault((one.utc, one.revision), []).append(one.latency / seconds - 1)
    kept = {run: shares for run, shares in found.items() if 2 * len(shares) >= len(now)}
    return [
        Turn(utc, statistics.median(shares), min(shares), max(shares), len(shares), revision)
        for (utc, revision), shares in sorted(kept.items(), key=lambda one: one[0][0])
    ]


def trend(past: Sequence[Turn], rows: int) -> Markup:
    """Earlier runs against this one, which is at zero on the right. At least one earlier run."""
    frame = Frame(_HEIGHT)
    ends = [end for one in past for end in (one.low, one.high)]
    y = frame.y(*spanned([*ends, 0.0], least=0.002), Unit("%", 0.01))
    x = frame.x(-0.5, len(past) + 0.5)
    parts = [frame.y_axis(y, "latency against this run"), line(frame.left, y(0.0), frame.right, y(0.0), "axis")]
    parts += [line(x(index), y(one.low), x(index), y(one.high), "s0 whisker") for index, one in enumerate(past)]
    parts.append(path([(x(index), y(value)) for index, value in enumerate([*(one.middle for one in past), 0.0])], "s0 curve"))
    for index, one in enumerate(past):
        revision = f" {one.revision[:7]}" if one.revision else ""
        spread = f"{100 * one.low:+.2f} to {100 * one.high:+.2f} %"
        tip = f"{one.utc:%Y-%m-%d}{revision}: median {100 * one.middle:+.2f} %, {spread}, {one.rows} rows"
        parts.append(dot(x(index), y(one.middle), 3.6, "s0 dot", tip))
    parts.append(dot(x(len(past)), y(0.0), 4, "s1 dot", f"this run, {rows} rows"))
    parts.append(text(frame.left, frame.bottom + 16, f"{past[0].utc:%Y-%m-%d}"))
    parts.append(text((frame.left + frame.right) / 2, frame.bottom + 16, "runs, oldest first", anchor="middle", style="unit"))
    parts.append(text(frame.right, frame.bottom + 16, "this run", anchor="end", style="unit"))
    return drawing(_HEIGHT - 12, parts, f"latency of {rows} rows over {counted(len(past), 'earlier run')}")


@dataclass(frozen=True)
class Load:
    """One row: the bytes that a launch moves, and its bandwidth."""

    name: str
    nbytes: int
    bandwidth: float
    dram: bool
    """Its footprint is too large for L2, so DRAM serves it."""


def roofline(loads: Sequence[Load], peak: float | None) -> Markup:
    """Bandwidth over the bytes of a launch, with the largest bandwidth of DRAM that this run measured on this card. At least two rows.

    Args:
        loads: of rows whose bytes do not cross the host link.
        peak: of the datasheet, bytes per second; None if it is unknown.
    """
    frame = Frame(_HEIGHT + 30)
    sizes, unit = [one.nbytes for one in loads], rate_unit([one.bandwidth for one in loads])
    ceilings = list(_ceilings(loads, peak))
    y = frame.y(*from_zero([*(one.bandwidth for one in loads), *(value for value, _ in ceilings)]), unit)
    x = frame.x(min(sizes) / 1.5, max(sizes) * 1.5, Unit("MiB", 2.0**20), log=True)
    axis = frame.x_axis(x, "MiB that a launch moves, logarithmic")
    parts = [frame.y_axis(y, "bandwidth"), axis]
    for index, (value, name) in enumerate(ceilings):
        parts.append(line(frame.left, y(value), frame.right, y(value), "ceiling"))
        # The lower line has its name below it, so that the names of near lines stay apart.
        below = 12 if value < max(of for of, _ in ceilings) else -4
        side = ("start", frame.left + 4) if index == 0 else ("end", frame.right)
        parts.append(text(side[1], y(value) + below, f"{name} {unit.text(value)}", anchor=side[0], style="unit"))
    for one in loads:
        tip = f"{one.name}: {format_rate(one.bandwidth)} of {format_bytes(one.nbytes)}"
        parts.append(dot(x(one.nbytes), y(one.bandwidth), 3.2, f"{'s0' if one.dram else 's1'} dot", tip))
    return drawing(frame.height, parts, f"bandwidth of {len(loads)} rows over the bytes of a launch")


def _ceilings(loads: Sequence[Load], peak: float | None) -> Iterator[tuple[float, str]]:
    measured = max((one.bandwidth for one in loads if one.dram), default=0.0)
    if measured > 0 and math.isfinite(measured):
        yield measured, "most measured in DRAM"
    if peak:
        yield peak, "peak of the datasheet"
