"""Plots of one row's samples and its history, and of a whole suite: its latency over runs, and its bandwidth over the bytes of a launch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.row import Past
from pytest_gpumem.reporting.plots import svg
from pytest_gpumem.units import format_rate, format_time, short_bytes

MOST = 96  # samples that are drawn. Of more, the extremes of neighbours are drawn: no outlier and no drift is lost.
MOST_INTERVAL = 1.2  # share of the largest value up to which the ends of intervals widen a plot
_FEW = 60  # samples up to which their dots are larger
_HEIGHT = 132.0
_BINS = 20
_HISTOGRAM = 78.0  # units for the histogram on the right


def strip(placements: Sequence[Sequence[float]], medians: Sequence[float]) -> Markup:
    """Samples in the order in which they were taken, with a histogram. A horizontal line is a placement's median.
    `placements`: seconds of each sample, one sequence for each placement, none empty.
    `medians`: of each placement.
    """
    samples = [sample for placement in placements for sample in placement]
    frame = svg.Frame(_HEIGHT, top=16.0, right=svg.WIDTH - _HISTOGRAM)
    unit = svg.time_unit(samples)
    y, x = frame.y(*svg.spanned(samples), unit), frame.x(-0.5, len(samples) - 0.5)
    dots: list[tuple[float, float]] = []
    lines, shades, first = [], [], 0
    each = max(2, MOST // len(placements))
    for index, (placement, median) in enumerate(zip(placements, medians, strict=True)):
        left, right = x(first - 0.5), x(first + len(placement) - 0.5)
        if index % 2:
            shades.append(
                f"M{svg.number(left)} {svg.number(frame.top)}H{svg.number(right)}V{svg.number(frame.bottom)}H{svg.number(left)}z"
            )
        dots += [(x(first + place), y(sample)) for place, sample in thinned(placement, each)]
        lines.append(f"M{svg.number(left)} {svg.number(y(median))}H{svg.number(right)}")
        first += len(placement)
    parts = [
        f'<path class="shade" d="{"".join(shades)}"/>' if shades else "",
        frame.y_axis(y, "latency"),
    ]
    few = " few" if len(dots) <= _FEW else ""
    parts.append(
        f'<path class="s1 median" d="{"".join(lines)}"/><path class="s0 sample{few}" d="{svg.points(dots)}"/>'
    )
    parts.append(_histogram(samples, frame, y))
    many = counted(len(samples), "sample") + (
        f" on {len(placements)} placements" if len(placements) > 1 else ""
    )
    parts.append(
        svg.text(
            (frame.left + frame.right) / 2,
            frame.bottom + 16,
            f"{many}, in the order taken",
            anchor="middle",
            style="unit",
        )
    )
    return svg.drawing(_HEIGHT - 12, parts, f"{many} in {unit.name}")


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


def _histogram(samples: Sequence[float], frame: svg.Frame, y: svg.Scale) -> str:
    counts = [0] * _BINS
    for sample in samples:
        counts[min(_BINS - 1, int((sample - y.low) / (y.high - y.low) * _BINS))] += 1
    left, room, step = round(frame.right) + 8, _HISTOGRAM - 20, (frame.bottom - frame.top) / _BINS
    bars = []
    for index, count in enumerate(counts):
        if count:
            middle = frame.bottom - (index + 0.5) * step
            bars.append(f"M{left} {svg.number(middle)}h{max(1, round(room * count / max(counts)))}")
    return f'<path class="s0 bins" d="{"".join(bars)}"/>'


def history(past: Sequence[Past], now: float, half_width: float | None) -> Markup:
    """Latencies of earlier runs in their order, whatever time lies between them, with this run at the right.
    `past`: oldest first, at least one.
    `now`: seconds, measured in this run.
    `half_width`: of its 95 % interval, in seconds.
    """
    frame = svg.Frame(_HEIGHT, top=16.0)
    values = [*(one.latency for one in past), now]
    most = MOST_INTERVAL * max(values)
    halves = [*(one.half_width or 0.0 for one in past), half_width or 0.0]
    ends = [
        (max(value - half, 0.0), min(value + half, max(most, value)))
        for value, half in zip(values, halves, strict=True)
    ]
    unit = svg.time_unit(values)
    y = frame.y(*svg.spanned([end for pair in ends for end in pair], least=0.002 * now), unit)
    x = frame.x(-0.5, len(past) + 0.5)
    parts = [frame.y_axis(y, "latency")]
    if whiskers := [
        f"M{x(index):.0f} {y(low):.0f}V{y(high):.0f}"
        for index, (low, high) in enumerate(ends[:-1])
        if high > low
    ]:
        parts.append(f'<path class="s0 whisker" d="{"".join(whiskers)}"/>')
    thread = "L".join(f"{x(index):.0f} {y(value):.0f}" for index, value in enumerate(values))
    parts.append(f'<path class="s0 thread" d="M{thread}"{svg.tips(_tip(one) for one in past)}/>')
    right, (low, high) = x(len(past)), ends[-1]
    if high > low:
        parts.append(svg.line(right, y(low), right, y(high), "s1 whisker"))
    parts.append(svg.dot(right, y(now), 4, "s1 dot", f"this run {format_time(now)}"))
    first, last = f"{past[0].utc:%Y-%m-%d}", f"{past[-1].utc:%Y-%m-%d}"
    parts.append(svg.text(frame.left, frame.bottom + 16, first))
    if last != first:
        parts.append(
            svg.text(min(x(len(past) - 1), frame.right - 64), frame.bottom + 16, last, anchor="end")
        )
    parts.append(svg.text(frame.right, frame.bottom + 16, "this run", anchor="end", style="unit"))
    return svg.drawing(
        _HEIGHT - 12, parts, f"latency over {counted(len(past), 'earlier run')}, in {unit.name}"
    )


def _tip(one: Past) -> str:
    revision = f" {one.revision[:7]}" if one.revision else ""
    return f"{one.utc:%m-%d}{revision} {format_time(one.latency)}"


_SUITE_HEIGHT = 220.0


@dataclass(frozen=True)
class EarlierRun:
    """An earlier run of a suite: its rows' latencies over those of this run, less 1."""

    utc: datetime
    middle: float  # the median row
    low: float  # the smallest change of any row
    high: float
    rows: int
    revision: str | None = None


def turns(past: Mapping[str, Sequence[Past]], now: Mapping[str, float]) -> list[EarlierRun]:
    """Earlier runs, oldest first, each by the same rows, which are at least half of this run's. A run with too few of them is left out.
    `past`: by key, measurements of earlier runs.
    `now`: by key, seconds in this run.
    """
    found: dict[tuple[datetime, str | None], dict[str, float]] = {}
    for key, seconds in now.items():
        for one in past.get(key, ()):
            found.setdefault((one.utc, one.revision), {})[key] = one.latency / seconds - 1
    common, runs = set(now), list[tuple[datetime, str | None]]()
    for run in sorted(found, key=lambda run: run[0], reverse=True):
        if 2 * len(both := common & found[run].keys()) >= len(now):
            common, runs = both, [run, *runs]
    shares = [[found[run][key] for key in common] for run in runs]
    return [
        EarlierRun(utc, statistics.median(of), min(of), max(of), len(of), revision)
        for (utc, revision), of in zip(runs, shares, strict=True)
    ]


def trend(past: Sequence[EarlierRun]) -> Markup:
    """Earlier runs against this one, which is at zero on the right. At least one earlier run."""
    rows = counted(past[0].rows, "row")
    frame = svg.Frame(_SUITE_HEIGHT)
    ends = [end for one in past for end in (one.low, one.high)]
    y = frame.y(*svg.spanned([*ends, 0.0], least=0.002), svg.Unit("%", 0.01))
    x = frame.x(-0.5, len(past) + 0.5)
    parts = [
        frame.y_axis(y, "latency against this run"),
        svg.line(frame.left, y(0.0), frame.right, y(0.0), "axis"),
    ]
    parts += [
        svg.line(x(index), y(one.low), x(index), y(one.high), "s0 whisker")
        for index, one in enumerate(past)
    ]
    parts.append(
        svg.path(
            [
                (x(index), y(value))
                for index, value in enumerate([*(one.middle for one in past), 0.0])
            ],
            "s0 curve",
        )
    )
    for index, one in enumerate(past):
        revision = f" {one.revision[:7]}" if one.revision else ""
        spread = f"{100 * one.low:+.2f} to {100 * one.high:+.2f} %"
        tip = f"{one.utc:%Y-%m-%d}{revision}: median {100 * one.middle:+.2f} %, {spread}, {rows}"
        parts.append(svg.dot(x(index), y(one.middle), 3.6, "s0 dot", tip))
    parts.append(svg.dot(x(len(past)), y(0.0), 4, "s1 dot", f"this run, {rows}"))
    parts.append(svg.text(frame.left, frame.bottom + 16, f"{past[0].utc:%Y-%m-%d}"))
    parts.append(
        svg.text(
            (frame.left + frame.right) / 2,
            frame.bottom + 16,
            "runs, oldest first",
            anchor="middle",
            style="unit",
        )
    )
    parts.append(svg.text(frame.right, frame.bottom + 16, "this run", anchor="end", style="unit"))
    return svg.drawing(
        _SUITE_HEIGHT - 12, parts, f"latency of {rows} over {counted(len(past), 'earlier run')}"
    )


@dataclass(frozen=True)
class Load:
    """One row: the bytes that a launch moves, and its bandwidth."""

    name: str
    nbytes: int
    bandwidth: float
    dram: bool  # its footprint is too large for L2, so DRAM serves it


def roofline(loads: Sequence[Load], peak: float | None) -> Markup:
    """Bandwidth over the bytes of a launch, with the largest bandwidth of DRAM that this run measured on this card. At least two rows.
    `loads`: of rows whose bytes do not cross the host link.
    `peak`: of the datasheet, bytes per second; None if it is unknown.
    """
    frame = svg.Frame(_SUITE_HEIGHT + 30)
    sizes, unit = [one.nbytes for one in loads], svg.rate_unit([one.bandwidth for one in loads])
    ceilings = list(_ceilings(loads, peak))
    y = frame.y(
        *svg.from_zero([*(one.bandwidth for one in loads), *(value for value, _ in ceilings)]), unit
    )
    x = frame.x(min(sizes) / 1.5, max(sizes) * 1.5, svg.Unit("MiB", 2.0**20), log=True)
    axis = frame.x_axis(x, "MiB that a launch moves, logarithmic")
    parts = [frame.y_axis(y, "bandwidth"), axis]
    for index, (value, name) in enumerate(ceilings):
        parts.append(svg.line(frame.left, y(value), frame.right, y(value), "ceiling"))
        # The lower line has its name below it, so that the names of near lines stay apart.
        below = 12 if value < max(of for of, _ in ceilings) else -4
        side = ("start", frame.left + 4) if index == 0 else ("end", frame.right)
        parts.append(
            svg.text(
                side[1],
                y(value) + below,
                f"{name} {unit.text(value)}",
                anchor=side[0],
                style="unit",
            )
        )
    for one in loads:
        tip = f"{one.name}: {format_rate(one.bandwidth)} of {short_bytes(one.nbytes)}"
        parts.append(
            svg.dot(x(one.nbytes), y(one.bandwidth), 3.2, f"{'s0' if one.dram else 's1'} dot", tip)
        )
    return svg.drawing(
        frame.height, parts, f"bandwidth of {counted(len(loads), 'row')} over the bytes of a launch"
    )


def _ceilings(loads: Sequence[Load], peak: float | None) -> Iterator[tuple[float, str]]:
    measured = max((one.bandwidth for one in loads if one.dram), default=0.0)
    if measured > 0 and math.isfinite(measured):
        yield measured, "most measured in DRAM"
    if peak:
        yield peak, "peak of the datasheet"
