"""Plots of memory: the bytes in use over the time of a test, and the tests that take and keep most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.footprint import Course, Footprint, Phase
from pytest_gpumem.reporting.plots import svg
from pytest_gpumem.units import short_bytes

MOST = 10  # tests in a plot of the largest
_HEIGHT = 190.0

Points = Sequence[tuple[float, float]]


def series(footprint: Footprint) -> tuple[tuple[str, Points], ...]:
    """The lines of `memory_course`, each with its name: of every library and kind, and of all device memory where there are several."""
    drawn = sorted(
        footprint.timeline, key=lambda one: -max((nbytes for _, nbytes in one.points), default=0)
    )
    named = [
        (one.library if one.kind == "device" else f"{one.library}, {one.kind}", one.points)
        for one in drawn
    ]
    on_device = [one for one in drawn if one.kind == "device"]
    return (
        (("all device memory", _together(on_device)), *named)
        if len(on_device) > 1
        else tuple(named)
    )


def legend(footprint: Footprint) -> tuple[tuple[str, str], ...]:
    """Class and name of each line of `memory_course`."""
    return tuple(
        (f"s{place % svg.COLOURS}", name) for place, (name, _) in enumerate(series(footprint))
    )


def memory_course(footprint: Footprint) -> Markup:
    """Bytes in use over the time of a test, of each library and kind of memory; a dashed line at the peak, and phases in turn shaded."""
    lines = series(footprint)
    values = [float(footprint.peak), *(nbytes for _, points in lines for _, nbytes in points)]
    end = max(footprint.seconds, *(at for _, points in lines for at, _ in points), 1e-9)
    frame = svg.Frame(_HEIGHT)
    x, y = (
        frame.x(0.0, end, svg.time_unit([end])),
        frame.y(min(0.0, *values), svg.from_zero(values)[1], svg.bytes_unit(values)),
    )
    parts = [*_phases(footprint, frame, x), frame.y_axis(y)]
    if footprint.peak > 0:
        parts.append(
            svg.line(frame.left, y(footprint.peak), frame.right, y(footprint.peak), "ceiling")
        )
    for place, (_, points) in enumerate(lines):
        parts.append(
            f'<path class="s{place % svg.COLOURS} curve" d="{_steps(points, x, y, end)}"/>'
        )
    parts.append(frame.x_axis(x))
    return svg.drawing(
        _HEIGHT,
        parts,
        f"bytes in use over {counted(len(lines), 'line')}; peak {short_bytes(footprint.peak)}",
    )


def _phases(footprint: Footprint, frame: svg.Frame, x: svg.Scale) -> Iterator[str]:
    """The phases of the test above the plot, every second one shaded, and its labelled parts, which lie in them, inside."""
    parts = {
        id(one)
        for one in footprint.phases
        if any(_within(one, other) for other in footprint.phases)
    }
    for index, phase in enumerate(
        sorted(footprint.phases, key=lambda one: (id(one) in parts, one.begin))
    ):
        left, right = x(phase.begin), x(phase.end)
        if id(phase) in parts:
            yield svg.line(left, frame.top + 2, right, frame.top + 2, "axis")
        elif index % 2:
            shade = f"M{svg.number(left)} {svg.number(frame.top)}H{svg.number(right)}V{svg.number(frame.bottom)}H{svg.number(left)}z"
            yield f'<path class="shade" d="{shade}"/>'
        name = svg.fitted(phase.name, right - left)
        if right - left > 24:
            above = frame.top + 14 if id(phase) in parts else frame.top - 4
            yield svg.text((left + right) / 2, above, name, anchor="middle", style="unit")


def _within(one: Phase, other: Phase) -> bool:
    return (
        one is not other
        and other.begin <= one.begin
        and one.end <= other.end
        and one.end - one.begin < other.end - other.begin
    )


def _steps(points: Points, x: svg.Scale, y: svg.Scale, end: float) -> str:
    """A path that stays at a value until the next."""
    drawn = [f"M{svg.number(x(0.0))} {svg.number(y(0.0))}"]
    drawn += [f"H{svg.number(x(at))}V{svg.number(y(nbytes))}" for at, nbytes in points]
    return "".join([*drawn, f"H{svg.number(x(end))}"])


def _together(courses: Sequence[Course]) -> Points:
    """The sum of several courses, at the times of all."""
    changes: list[tuple[float, float]] = []
    for course in courses:
        last = 0.0
        for at, nbytes in course.points:
            changes.append((at, nbytes - last))
            last = nbytes
    found: list[tuple[float, float]] = []
    together = 0.0
    for at, change in sorted(changes, key=lambda change: change[0]):
        together += change
        found.append((at, together))
    return found


@dataclass(frozen=True)
class BytesOfTest:
    """The bytes of one test."""

    name: str
    target: str  # element of the page that its name links to
    nbytes: int
    before: int | None = None  # bytes in the baseline; None if unknown


def memory_bars(tests: Sequence[BytesOfTest]) -> Markup:
    """A bar for each test, the largest first, with a mark at the bytes of the baseline where they differ; at most `MOST` tests."""
    shown = sorted(tests, key=lambda one: -one.nbytes)[:MOST]
    height, room = (
        33.0 * len(shown) + 8,
        svg.WIDTH - (90.0 if all(one.before in (None, one.nbytes) for one in shown) else 160.0),
    )
    most = max(max(one.nbytes, one.before or 0) for one in shown)
    parts = []
    for index, one in enumerate(shown):
        top = 33.0 * index + 4
        width = room * one.nbytes / most
        parts.append(svg.link(one.target, svg.text(0, top + 10, svg.fitted(one.name, svg.WIDTH))))
        parts.append(svg.box(0, top + 16, width, 9, "s0 bar"))
        if one.before is None or one.before == one.nbytes:
            parts.append(svg.text(width + 5, top + 24, short_bytes(one.nbytes)))
            continue
        mark = room * one.before / most
        parts.append(svg.line(mark, top + 14, mark, top + 27, "margin"))
        parts.append(
            svg.text(
                max(width, mark) + 5,
                top + 24,
                f"{short_bytes(one.nbytes)}, was {short_bytes(one.before)}",
            )
        )
    return svg.drawing(height, parts, f"bytes of {counted(len(shown), 'test')}, the largest first")
