"""Samples of one measurement: in the order in which they were taken, placement by placement, and how often each time was read."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from pytest_gpumem.reporting.plots.svg import WIDTH, Frame, drawing, number, points, spanned, text, time_unit

MOST = 96
"""Samples that are drawn; of more the extremes of neighbours, so that no outlier and no drift is lost."""
_FEW = 60
"""Samples up to which their dots are larger."""
_HEIGHT = 132.0
_BINS = 20
_HISTOGRAM = 78.0
"""Units for the histogram on the right."""


def strip(placements: Sequence[Sequence[float]], medians: Sequence[float]) -> Markup:
    """The plot. A horizontal line is a placement's median.

    Args:
        placements: seconds of each sample, one sequence for each placement, none empty.
        medians: of each placement.
    """
    samples = [sample for placement in placements for sample in placement]
    frame = Frame(_HEIGHT, top=16.0, right=WIDTH - _HISTOGRAM)
    unit = time_unit(samples)
    y = frame.y(*spanned([sample / unit.factor for sample in samples]))
    x = frame.x(-0.5, len(samples) - 0.5)
    dots: list[tuple[float, float]] = []
    lines, shades, first = [], [], 0
    each = max(2, MOST // len(placements))
    for index, (placement, median) in enumerate(zip(placements, medians, strict=True)):
        left, right = x(first - 0.5), x(first + len(placement) - 0.5)
        if index % 2:
            shades.append(f"M{number(left)} {number(frame.top)}H{number(right)}V{number(frame.bottom)}H{number(left)}z")
        for place, sample in thinned(placement, each):
            dots.append((x(first + place), y(sample / unit.factor)))
        lines.append(f"M{number(left)} {number(y(median / unit.factor))}H{number(right)}")
        first += len(placement)
    parts = [f'<path class="shade" d="{"".join(shades)}"/>' if shades else "", frame.y_axis(y, unit.name)]
    few = " few" if len(dots) <= _FEW else ""
    parts.append(f'<path class="s1 median" d="{"".join(lines)}"/><path class="s0 sample{few}" d="{points(dots)}"/>')
    parts.append(_histogram([sample / unit.factor for sample in samples], frame, y.low, y.high))
    many = f"{len(samples)} samples" + (f" on {len(placements)} placements" if len(placements) > 1 else "")
    parts.append(text((frame.left + frame.right) / 2, frame.bottom + 16, f"{many}, in the order taken", anchor="middle", style="unit"))
    return drawing(_HEIGHT - 12, parts, f"{many} in {unit.name}")


def thinned(samples: Sequence[float], most: int) -> list[tuple[int, float]]:
    """At most so many samples with their places: of each run of neighbours the smallest and the largest."""
    if len(samples) <= most:
        return list(enumerate(samples))
    runs = most // 2
    kept = []
    for run in range(runs):
        places = range(run * len(samples) // runs, (run + 1) * len(samples) // runs)
        ends = {min(places, key=samples.__getitem__), max(places, key=samples.__getitem__)}
        kept += [(place, samples[place]) for place in sorted(ends)]
    return kept


def _histogram(samples: Sequence[float], frame: Frame, low: float, high: float) -> str:
    counts = [0] * _BINS
    for sample in samples:
        counts[min(_BINS - 1, int((sample - low) / (high - low) * _BINS))] += 1
    left, room, step = round(frame.right) + 8, _HISTOGRAM - 20, (frame.bottom - frame.top) / _BINS
    bars = []
    for index, count in enumerate(counts):
        if count:
            middle = frame.bottom - (index + 0.5) * step
            bars.append(f"M{left} {number(middle)}h{max(1, round(room * count / max(counts)))}")
    return f'<path class="s0 bins" d="{"".join(bars)}"/>'
