"""Plots with a name on the left of each line: changes with their intervals, latencies per access, and work that overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.overlap import Overlap
from pytest_gpumem.reporting.plots import svg
from pytest_gpumem.units import format_time

MOST = 40  # changes that are drawn: the largest
_NAMES = 190.0  # units for the names of rows
_PARTS = 118.0  # units for the names of overlapping parts


@dataclass(frozen=True)
class Delta:
    """One row's change, as shares: +0.01 is 1 % slower."""

    name: str
    target: str  # element of the page about the row
    delta: float
    low: float
    high: float
    style: str  # class of its verdict: "pass", "fail", "measured" or "doubt"
    margin: float | None = None  # allowed slow-down; None if the row has no such limit


@dataclass(frozen=True)
class Rung:
    """The latency of one access in one row."""

    name: str
    target: str  # element of the page about the row
    seconds: float
    half_width: float | None = None  # half of its 95 % interval, in seconds


def _frame(count: int, step: float, names: float, top: float = 8.0) -> svg.Frame:
    """The frame of so many lines, each of `step` units."""
    return svg.Frame(step * count + top + svg.BOTTOM + 8, left=names, top=top)


def largest(deltas: Sequence[Delta]) -> list[Delta]:
    """The changes that are drawn, slowest first: rows that did not pass, then the largest changes."""
    most = sorted(deltas, key=lambda one: (one.style in ("pass", "measured"), -abs(one.delta)))[
        :MOST
    ]
    return sorted(most, key=lambda one: -one.delta)


def forest(deltas: Sequence[Delta]) -> Markup:
    """Changes against the baseline with their intervals, slowest first. At least one change."""
    step, drawn = 17.0, largest(deltas)
    frame = _frame(len(drawn), step, _NAMES, top=20.0)
    ends = [end for one in drawn for end in (one.low, one.high, one.delta)]
    low, high = min(*ends, -0.001), max(*ends, 0.001)
    # A limit far beyond all changes would leave them no room: it is named at the edge.
    high = max(
        [
            high,
            *(
                one.margin
                for one in drawn
                if one.margin is not None and one.margin <= 4 * (high - low)
            ),
        ]
    )
    pad = 0.05 * (high - low)
    x = frame.x(low - pad, high + pad, svg.Unit("% slower than the baseline", 0.01))
    parts = [frame.x_axis(x), svg.line(x(0), frame.top - 6, x(0), frame.bottom, "axis")]
    for index, one in enumerate(drawn):
        y = frame.top + (index + 0.5) * step
        tip = (
            f"{one.name}: {100 * one.delta:+.2f} %, {100 * one.low:+.2f} to {100 * one.high:+.2f} %"
        )
        if one.margin is not None and x.low < one.margin < x.high:
            parts.append(svg.line(x(one.margin), y - 5, x(one.margin), y + 5, "margin"))
        elif one.margin is not None and one.margin >= x.high:
            parts.append(
                svg.text(
                    frame.right,
                    y + 4,
                    f"allowed {100 * one.margin:.3g} % >",
                    anchor="end",
                    style="unit",
                )
            )
        parts.append(svg.link(one.target, svg.text(0, y + 4, svg.fitted(one.name, _NAMES - 8))))
        parts.append(
            svg.box(x(one.low), y - 2, x(one.high) - x(one.low), 4, f"{one.style} interval", tip)
        )
        parts.append(svg.dot(x(one.delta), y, 3.6, f"{one.style} dot", tip))
    if any(one.margin is not None for one in drawn):
        parts.append(
            svg.text(svg.WIDTH - 12, frame.top - 9, "| allowed", anchor="end", style="unit")
        )
    return svg.drawing(
        frame.height, parts, f"changes of {counted(len(drawn), 'row')} against the baseline"
    )


def ladder(rungs: Sequence[Rung]) -> Markup:
    """Latencies per access on a logarithmic scale, quickest first: L2, DRAM, the host's memory. At least one latency."""
    step, drawn = 22.0, sorted(rungs, key=lambda rung: rung.seconds)
    frame = _frame(len(drawn), step, _NAMES)
    unit = svg.time_unit([drawn[0].seconds])
    x = frame.x(drawn[0].seconds / 2, drawn[-1].seconds * 2.2, unit, log=True)
    parts = [frame.x_axis(x, f"{unit.name} an access, logarithmic")]
    for index, rung in enumerate(drawn):
        y, end = frame.top + (index + 0.5) * step, x(rung.seconds)
        tip = f"{rung.name}: {format_time(rung.seconds)}" + (
            f" ± {format_time(rung.half_width)}" if rung.half_width else ""
        )
        parts.append(svg.link(rung.target, svg.text(0, y + 4, svg.fitted(rung.name, _NAMES - 8))))
        parts.append(svg.box(frame.left, y - 7, end - frame.left, 14, "s0 bar", tip))
        if rung.half_width:
            left, right = (
                x(max(rung.seconds + sign * rung.half_width, rung.seconds / 2)) for sign in (-1, 1)
            )
            parts.append(svg.line(left, y, right, y, "s1 whisker"))
        parts.append(svg.text(end + 6, y + 4, format_time(rung.seconds)))
    return svg.drawing(frame.height, parts, f"latency per access of {counted(len(drawn), 'row')}")


def timeline(overlap: Overlap, latency: float) -> Markup:
    """Plot overlapping work: each part alone, their sum, the measured latency, and the bound of any overlap.
    `latency`: seconds of the overlapping work.
    """
    step = 26.0
    bars = [
        ("one after another", overlap.sequential, "s5 bar"),
        ("measured", latency, "s0 bar"),
        ("cannot beat", overlap.bound, "s2 bar"),
    ]
    if overlap.estimate is not None:
        bars.append(("guide's estimate", overlap.estimate, "s3 bar"))
    frame = _frame(len(bars) + 1, step, _PARTS)
    longest = [sum(part.seconds for part in overlap.parts), *(seconds for _, seconds, _ in bars)]
    x = frame.x(*svg.from_zero(longest), svg.time_unit(longest))
    parts = [frame.x_axis(x), svg.text(0, frame.top + 16, "parts, each alone")]
    start = 0.0
    for index, part in enumerate(overlap.parts):
        left, right = x(start), x(start + part.seconds)
        tip = f"{part.name}: {format_time(part.seconds)}"
        parts.append(
            svg.box(
                left, frame.top + 3, right - left - 1, step - 8, f"s{index % svg.COLOURS} bar", tip
            )
        )
        if right - left > 5 * svg.CHARACTER:
            parts.append(
                svg.text(
                    left + 4, frame.top + 16, svg.fitted(part.name, right - left - 8), style="onbar"
                )
            )
        start += part.seconds
    for index, (name, seconds, style) in enumerate(bars):
        y = frame.top + (index + 1) * step
        parts.append(svg.text(0, y + 16, svg.fitted(name, _PARTS)))
        parts.append(
            svg.box(
                frame.left,
                y + 3,
                x(seconds) - frame.left,
                step - 8,
                style,
                f"{name}: {format_time(seconds)}",
            )
        )
        parts.append(svg.text(frame.left + 6, y + 16, format_time(seconds), style="onbar"))
    parts.append(svg.line(x(latency), frame.top, x(latency), frame.bottom, "ceiling"))
    return svg.drawing(
        frame.height,
        parts,
        f"overlap of {counted(len(overlap.parts), 'part')}: {format_time(latency)}",
    )
