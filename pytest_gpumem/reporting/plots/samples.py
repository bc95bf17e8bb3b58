"""Plots of one measurement: its samples placement by placement, and its latency over earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.reporting.plots.svg import WIDTH, Frame, Scale, dot, drawing, line, number, points, spanned, text, time_unit, tips
from pytest_gpumem.units import format_time

MOST = 96
"""Samples that are drawn. Of more, the extremes of neighbours are drawn: no outlier and no drift is lost."""
MOST_INTERVAL = 1.2
"""Share of the largest value up to which the ends of intervals widen a plot."""
_FEW = 60
"""Samples up to which their dots are larger."""
_HEIGHT = 132.0
_BINS = 20
_HISTOGRAM = 78.0
"""Units for the histogram on the right."""


def strip(placements: Sequence[Sequence[float]], medians: Sequence[float]) -> Markup:
    """Samples in the order in which they were taken, with a histogram. A horizontal line is a placement's median.

    Args:
        placements: seconds of each sample, one sequence for each placement, none empty.
        medians: of each placement.
    """
    samples = [sample for placement in placements for sample in placement]
    frame = Frame(_HEIGHT, top=16.0, right=WIDTH - _HISTOGRAM)
    unit = time_unit(samples)
    y, x = frame.y(*spanned(samples), unit), frame.x(-0.5, len(samples) - 0.5)
    dots: list[tuple[float, float]] = []
    lines, shades, first = [], [], 0
    each = max(2, MOST // len(placements))
    for index, (placement, median) in enumerate(zip(placements, medians, strict=True)):
        left, right = x(first - 0.5), x(first + len(placement) - 0.5)
        if index % 2:
            shades.append(f"M{number(left)} {number(frame.top)}H{number(right)}V{number(frame.bottom)}H{number(left)}z")
        dots += [(x(first + place), y(sample)) for place, sample in thinned(placement, each)]
        lines.append(f"M{number(left)} {number(y(median))}H{number(right)}")
        first += len(placement)
    parts = [f'<path class="shade" d="{"".join(shades)}"/>' if shades else "", frame.y_axis(y, "latency")]
    few = " few" if len(dots) <= _FEW else ""
    parts.append(f'<path class="s1 median" d="{"".join(lines)}"/><path class="s0 sample{few}" d="{points(dots)}"/>')
    parts.append(_histogram(samples, frame, y))
    many = f"{len(samples)} samples" + (f" on {len(placements)} placements" if len(placements) > 1 else "")
    parts.append(text((frame.left + frame.right) / 2, frame.bottom + 16, f"{many}, in the order taken", anchor="middle", style="unit"))
    return drawing(_HEIGHT - 12, parts, f"{many} in {unit.name}")


def thinned(samples: Sequence[float], most: int) -> list[tuple[int, float]]:
    """At most so many samples with their indices: the smallest and the largest of each run of neighbours."""
    if len(samples) <= most:
        return list(enumerate(samples))
    runs = most // 2
    kept = []
    for run in range(runs):
        places = range(run * len(samples) // runs, (run + 1) * len(samples) // runs)
        ends = {min(places, key=samples.__getitem__), max(places, key=samples.__getitem__)}
        kept += [(place, samples[place]) for place in sorted(ends)]
    return kept


def _histogram(samples: Sequence[float], frame: Frame, y: Scale) -> str:
    counts = [0] * _BINS
    for sample in samples:
        counts[min(_BINS - 1, int((sample - y.low) / (y.high - y.low) * _BINS))] += 1
    left, room, step = round(frame.right) + 8, _HISTOGRAM - 20, (frame.bottom - frame.top) / _BINS
    bars = []
    for index, count in enumerate(counts):
        if count:
            middle = frame.bottom - (index + 0.5) * step
            bars.append(f"M{left} {number(middle)}h{max(1, round(room * count / max(counts)))}")
    return f'<path class="s0 bins" d="{"".join(bars)}"/>'


@dataclass(frozen=True)
class Past:
    """One row's measurement in an earlier run."""

    utc: datetime
    latency: float
    """Seconds of one launch."""
    half_width: float | None = None
    """Half of its 95 % interval, in seconds."""
    revision: str | None = None
    """Of the code that was measured."""
    file: bool = False
    """True if it is from a file of results, of any time and any number of processes; False if from a process of the baseline."""


def origin(past: Sequence[Past]) -> str:
    """Where a history is from: "3 files", "1 earlier process", or both."""
    files = sum(one.file for one in past)
    parts = ((files, "file"), (len(past) - files, "earlier process"))
    return " and ".join(counted(count, thing) for count, thing in parts if count)


def history(past: Sequence[Past], now: float, half_width: float | None) -> Markup:
    """Latencies of earlier runs in their order, whatever time lies between them, with this run at the right.

    Args:
        past: oldest first, at least one.
        now: seconds, measured in this run.
        half_width: of its 95 % interval, in seconds.
    """
    frame = Frame(_HEIGHT, top=16.0)
    values = [*(one.latency for one in past), now]
    most = MOST_INTERVAL * max(values)
    halves = [*(one.half_width or 0.0 for one in past), half_width or 0.0]
    ends = [(max(value - half, 0.0), min(value + half, max(most, value))) for value, half in zip(values, halves, strict=True)]
    unit = time_unit(values)
    y = frame.y(*spanned([end for pair in ends for end in pair], least=0.002 * now), unit)
    x = frame.x(-0.5, len(past) + 0.5)
    parts = [frame.y_axis(y, "latency")]
    if whiskers := [f"M{x(index):.0f} {y(low):.0f}V{y(high):.0f}" for index, (low, high) in enumerate(ends[:-1]) if high > low]:
        parts.append(f'<path class="s0 whisker" d="{"".join(whiskers)}"/>')
    thread = "L".join(f"{x(index):.0f} {y(value):.0f}" for index, value in enumerate(values))
    parts.append(f'<path class="s0 thread" d="M{thread}"{tips(_tip(one) for one in past)}/>')
    right, (low, high) = x(len(past)), ends[-1]
    if high > low:
        parts.append(line(right, y(low), right, y(high), "s1 whisker"))
    parts.append(dot(right, y(now), 4, "s1 dot", f"this run {format_time(now)}"))
    first, last = f"{past[0].utc:%Y-%m-%d}", f"{past[-1].utc:%Y-%m-%d}"
    parts.append(text(frame.left, frame.bottom + 16, first))
    if last != first:
        parts.append(text(min(x(len(past) - 1), frame.right - 64), frame.bottom + 16, last, anchor="end"))
    parts.append(text(frame.right, frame.bottom + 16, "this run", anchor="end", style="unit"))
    return drawing(_HEIGHT - 12, parts, f"latency over {origin(past)}, in {unit.name}")


def _tip(one: Past) -> str:
    revision = f" {one.revision[:7]}" if one.revision else ""
    return f"{one.utc:%m-%d}{revision} {format_time(one.latency)}"
