"""One row over the processes or files that hold it: latency by day, with what is measured now at the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import Frame, dot, drawing, line, spanned, text, time_unit, tips
from pytest_gpumem.units import format_time

_HEIGHT = 132.0
_MOST_INTERVAL = 1.2
"""Share of the largest latency up to which the ends of intervals widen the plot."""


@dataclass(frozen=True)
class Past:
    """What was measured of a row in another run."""

    utc: datetime
    latency: float
    """Seconds of one launch."""
    half_width: float | None = None
    """Half of its 95 % interval, in seconds."""
    revision: str | None = None
    """Of the code that was measured."""
    file: bool = False
    """It is from a file of results, of whatever time and however many processes; else from a process of the baseline."""


def of_what(past: Sequence[Past]) -> str:
    """Where a history is from, in words: "3 files", "1 earlier process", or both."""
    files = sum(one.file for one in past)
    processes = len(past) - files
    parts = [f"{files} file{'s' * (files != 1)}"] if files else []
    parts += [f"{processes} earlier process{'es' * (processes != 1)}"] if processes else []
    return " and ".join(parts)


def history(past: Sequence[Past], now: float, half_width: float | None) -> Markup:
    """The plot. Processes stand side by side, whatever time lies between them.

    Args:
        past: oldest first, at least one.
        now: seconds, measured in this run.
        half_width: of its 95 % interval, in seconds.
    """
    frame = Frame(_HEIGHT, top=16.0)
    values = [one.latency for one in past]
    most = _MOST_INTERVAL * max(*values, now)
    ends = [_ends(one.latency, one.half_width, most) for one in past]
    here = _ends(now, half_width, most)
    unit = time_unit([*values, now])
    y = frame.y(*spanned([end / unit.factor for pair in (*ends, here) for end in pair], least=0.002 * now / unit.factor))
    x = frame.x(-0.5, len(past) + 0.5)
    at = [(x(index), y(value / unit.factor)) for index, value in enumerate(values)]
    whiskers = [
        f"M{px:.0f} {y(low / unit.factor):.0f}V{y(high / unit.factor):.0f}"
        for (px, _), (low, high) in zip(at, ends, strict=True)
        if high > low
    ]
    parts = [frame.y_axis(y, unit.name)]
    if whiskers:
        parts.append(f'<path class="s0 whisker" d="{"".join(whiskers)}"/>')
    thread = "L".join(f"{px:.0f} {py:.0f}" for px, py in (*at, (x(len(past)), y(now / unit.factor))))
    parts.append(f'<path class="s0 thread" d="M{thread}"{tips(_tip(one) for one in past)}/>')
    right = x(len(past))
    if here[1] > here[0]:
        parts.append(line(right, y(here[0] / unit.factor), right, y(here[1] / unit.factor), "s1 whisker"))
    parts.append(dot(right, y(now / unit.factor), 4, "s1 dot", f"this run {format_time(now)}"))
    first, last = f"{past[0].utc:%Y-%m-%d}", f"{past[-1].utc:%Y-%m-%d}"
    parts.append(text(frame.left, frame.bottom + 16, first))
    if last != first:
        parts.append(text(min(x(len(past) - 1), frame.right - 64), frame.bottom + 16, last, anchor="end"))
    parts.append(text(frame.right, frame.bottom + 16, "this run", anchor="end", style="unit"))
    return drawing(_HEIGHT - 12, parts, f"latency over {of_what(past)}, in {unit.name}")


def _ends(value: float, half_width: float | None, most: float) -> tuple[float, float]:
    """The ends of an interval as far as they are drawn."""
    half = half_width or 0.0
    return max(value - half, 0.0), min(value + half, max(most, value))


def _tip(one: Past) -> str:
    of = f" {one.revision[:7]}" if one.revision else ""
    return f"{one.utc:%m-%d}{of} {format_time(one.latency)}"
