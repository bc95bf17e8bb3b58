"""Rows of one test that differ in a number, as curves over that number: every parametrised test may become a plot. Pure.

The number is a word of a test's parameters or of a measurement's label: "stride 8", "0.25 of L2", "264-8MiB", "1/6 of L2". Sizes have
units. If several numbers differ, the curve is over the one with the most values, and each setting of the others is a series.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter

from markupsafe import Markup

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.groups import COALESCED, function_of
from pytest_gpumem.reporting.plots import svg
from pytest_gpumem.reporting.plots.runs import MOST_INTERVAL
from pytest_gpumem.units import MiB, format_bytes, format_rate, format_time, parse_bytes

_HEIGHT = 250.0
_LOG_FROM = 20.0
"""Ratio of the largest to the smallest number from which on its axis is logarithmic."""


@dataclass(frozen=True)
class PlotPoint:
    """One figure."""

    x: float
    y: float
    low: float | None = None  # lower end of its interval; None if there is none
    high: float | None = None
    tip: str = ""  # shown while the pointer rests on it


@dataclass(frozen=True)
class Series:
    """Figures of one kind, in the order of their numbers."""

    name: str
    points: tuple[PlotPoint, ...]
    predicted: bool = False  # calculated, not measured: drawn dashed, without dots


@dataclass(frozen=True)
class Ceiling:
    """A bound of the figures."""

    value: float
    name: str


def colours(series: Sequence[Series]) -> list[str]:
    """The class of each series; a predicted one has that of the measured one before it."""
    found: list[str] = []
    measured = 0
    for one in series:
        if one.predicted and found:
            found.append(found[-1])
        else:
            found.append(f"s{measured % svg.COLOURS}")
            measured += 1
    return found


def curve(
    series: Sequence[Series],
    x_unit: str,
    unit: svg.Unit,
    ceilings: Sequence[Ceiling],
    description: str,
    y_name: str = "",
) -> Markup:
    """The plot, without its legend, for which a page has more room.
    `series`: each of at least one point.
    `ceilings`: lines across.
    `description`: for screen readers.
    """
    frame = svg.Frame(_HEIGHT)
    points = [point for one in series for point in one.points]
    xs = sorted({point.x for point in points})
    x = _x_axis(frame, xs, x_unit)
    # Where an interval is wider than all figures, its upper end is not drawn: the figures would have no room.
    figures = [point.y for point in points]
    most = MOST_INTERVAL * max(figures)
    figures += [min(point.high, most) for point in points if point.high is not None]
    y = frame.y(*svg.from_zero([*figures, *(ceiling.value for ceiling in ceilings)]), unit)
    parts = [frame.y_axis(y, y_name), frame.x_axis(x, ticks=xs if len(xs) <= 14 else None)]
    places = [(x(point.x), y(point.y)) for point in points]
    for ceiling in ceilings:
        parts += _ceiling(
            f"{ceiling.name} {unit.text(ceiling.value)}", y(ceiling.value), places, frame
        )
    for one, colour in zip(series, colours(series), strict=True):
        parts.append(
            svg.path(
                [(x(point.x), y(point.y)) for point in one.points],
                f"{colour} curve{' predicted' if one.predicted else ''}",
            )
        )
        for point in () if one.predicted else one.points:
            if point.low is not None and point.high is not None:
                parts.append(
                    svg.line(
                        x(point.x),
                        y(max(point.low, y.low)),
                        x(point.x),
                        y(min(point.high, y.high)),
                        f"{colour} whisker",
                    )
                )
            tip = (
                point.tip
                or f"{one.name}: {svg.short(point.x)} {x_unit}, {unit.text(point.y)} {unit.name}"
            )
            parts.append(svg.dot(x(point.x), y(point.y), 3.2, f"{colour} dot", tip))
    return svg.drawing(_HEIGHT, parts, description)


def _free_side(points: Sequence[tuple[float, float]], height: float, frame: svg.Frame) -> bool:
    """True if a text at a height is farther from all points on the right than on the left."""
    middle = (frame.left + frame.right) / 2
    left = min((abs(y - height) for x, y in points if x <= middle), default=frame.height)
    right = min((abs(y - height) for x, y in points if x >= middle), default=frame.height)
    return right >= min(left, 20.0)


LEAST = 3  # values of the number that a curve needs
MOST_SERIES = 12  # curves in one plot. With more, nobody can tell them apart.
_SIZE = r"(?:[KMGT]iB|[kKMGT]?B)"
_NUMBER = re.compile(
    rf"(?<![\w.])(-?\d{{1,15}}(?:\.\d{{1,15}})?(?:/[1-9]\d{{0,8}})?)(?:\s?({_SIZE}))?(?![\w.])"
)
_BYTES_NAME = "MiB"
_UNNAMED = "parameter"
_PEAK_SHOWN = 0.15  # share of the peak that a curve must reach for the peak to be drawn. A lower curve would be flat at the bottom.

_FIGURES = (
    ("latency per access", attrgetter("latency_per_access"), svg.time_unit, format_time),
    ("asked bandwidth", attrgetter("asked_bandwidth"), svg.rate_unit, format_rate),
    ("bandwidth", attrgetter("bandwidth"), svg.rate_unit, format_rate),
    ("latency", attrgetter("latency"), svg.time_unit, format_time),
)
"""Name, value, unit of an axis and text of the figures that a plot may show. It shows the first that all its rows have."""


@dataclass(frozen=True)
class FamilyPlot:
    """One plot: the rows of a test over one number."""

    function: str  # id of the test function
    x_unit: str  # of the number, such as "MiB", "stride" or "of L2"
    y_name: str  # name of the figures: "bandwidth", "asked bandwidth", "latency per access" or "latency"
    unit: svg.Unit  # of the figures
    series: tuple[Series, ...]
    ceilings: tuple[Ceiling, ...]


@dataclass(frozen=True)
class _SplitName:
    """Parameters and label of a row, split at its numbers."""

    row: Row
    measurement: Measurement
    words: tuple[str, ...]  # the texts between the numbers: one more than there are numbers
    numbers: tuple[str, ...]  # as they are written
    values: tuple[float, ...]  # sizes in MiB
    sizes: tuple[bool, ...]


def families(rows: Sequence[Row], facts: DeviceFacts) -> list[FamilyPlot]:
    """A plot for each test that has at least three rows over a number, in the order of the rows."""
    tests: dict[str, list[_SplitName]] = {}
    for row in rows:
        if row.measurement is not None:
            tests.setdefault(function_of(row), []).append(_read(row, row.measurement))
    return [
        family
        for function, reads in tests.items()
        if (family := _family(function, reads, facts)) is not None
    ]


def _read(row: Row, measurement: Measurement) -> _SplitName:
    parameters = row.nodeid[len(function_of(row)) :].removeprefix("[").removesuffix("]")
    # A dash after a letter or a digit separates two parameters, or is a hyphen; any other is a sign.
    parameters = re.sub(r"(?<=[\w.\])])-", ", ", parameters)
    described = ", ".join(part for part in (parameters, row.label) if part)
    words, numbers, values, sizes, end = [], [], [], [], 0
    for match in _NUMBER.finditer(described):
        written, start = match[1], match.start()
        words.append(described[end:start])
        numbers.append(described[start : match.end()])
        value = float(Fraction(written))
        values.append(value * parse_bytes(f"1 {match[2]}") / MiB if match[2] else value)
        sizes.append(match[2] is not None)
        end = match.end()
    return _SplitName(
        row, measurement, (*words, described[end:]), tuple(numbers), tuple(values), tuple(sizes)
    )


def _x_axis(frame: svg.Frame, xs: Sequence[float], unit: str) -> svg.Scale:
    if xs[0] > 0 and xs[-1] / xs[0] >= _LOG_FROM:
        pad = (xs[-1] / xs[0]) ** 0.04
        return frame.x(xs[0] / pad, xs[-1] * pad, svg.Unit(unit), log=True)
    return frame.x(*svg.spanned(xs, margin=0.04, least=1e-9), svg.Unit(unit))


def _ceiling(
    name: str, level: float, places: Sequence[tuple[float, float]], frame: svg.Frame
) -> Iterator[str]:
    """A line across at a level, with its name where it hides no point. `places`: of the points."""
    yield svg.line(frame.left, level, frame.right, level, "ceiling")
    right = _free_side(places, level - 8, frame)
    at, anchor = (frame.right, "end") if right else (frame.left + 4, "start")
    yield svg.text(at, level - 4, svg.fitted(name, 300), anchor=anchor, style="unit")


def _by_series(
    reads: Sequence[_SplitName],
) -> tuple[dict[str, list[tuple[float, _SplitName]]], Counter[str]]:
    """The rows with their numbers by the name of their series, and how many series have each unit."""
    places = _places(reads)
    by_series: dict[tuple[str, str], list[tuple[float, _SplitName]]] = {}
    for read in reads:
        place = places.get(read.words)
        if place is not None:
            by_series.setdefault((_without(read, place), _unit_of(read, place)), []).append(
                (read.values[place], read)
            )
    units = Counter(unit for _, unit in by_series)
    found = {
        ", ".join(part for part in (name, unit if len(units) > 1 else "") if part): sorted(
            points, key=lambda point: point[0]
        )
        for (name, unit), points in by_series.items()
    }
    return found, units


def _family(function: str, reads: list[_SplitName], facts: DeviceFacts) -> FamilyPlot | None:
    found, units = _by_series(reads)
    longest = max((len({x for x, _ in points}) for points in found.values()), default=0)
    if longest < LEAST or len(found) > MOST_SERIES:
        return None
    measured = [read.measurement for points in found.values() for _, read in points]
    y_name, value, unit_of, figure_text = next(
        figure for figure in _FIGURES if all(figure[1](one) for one in measured)
    )
    unit = unit_of([value(one) for one in measured])
    x_unit = units.most_common(1)[0][0]
    series = []
    for name, points in sorted(
        found.items()
    ):  # sorted, so that series have the same colours in the plots of several tests
        drawn = tuple(
            _point(x, read, value, figure_text, rate="bandwidth" in y_name) for x, read in points
        )
        # A single series has the name of the figure.
        series.append(Series((name or y_name) if len(found) > 1 else y_name, drawn))
        if "bandwidth" in y_name and (predicted := _predicted(points, drawn)) is not None:
            words = f"{name}: " if name else ""
            words += f"if the time grew with the sectors of a request ({COALESCED} where coalesced)"
            series.append(Series(words, predicted, predicted=True))
    return FamilyPlot(
        function,
        x_unit,
        y_name,
        unit,
        tuple(series),
        tuple(_ceilings(measured, series, y_name, facts)),
    )


def _places(reads: Sequence[_SplitName]) -> dict[tuple[str, ...], int]:
    """By the words of rows, the index of the number that the curve is over: the first of those with the most values."""
    by_words: dict[tuple[str, ...], list[_SplitName]] = {}
    for read in reads:
        by_words.setdefault(read.words, []).append(read)
    found = {}
    for words, alike in by_words.items():
        counts = [
            len({read.values[place] for read in alike}) for place in range(len(alike[0].numbers))
        ]
        if counts and max(counts) > 1:
            found[words] = counts.index(max(counts))
    return found


def _without(read: _SplitName, place: int) -> str:
    """Parameters and label of a row without its number: the name of its series."""
    pieces = []
    for index, word in enumerate(read.words):
        pieces.append(word)
        if index < len(read.numbers):
            pieces.append("\0" if index == place else read.numbers[index])
    # The words next to the number are what it counts.
    before, _, after = "".join(pieces).partition("\0")
    kept = [part for part in (*before.split(",")[:-1], *after.split(",")[1:]) if part.strip()]
    return ", ".join(part.strip() for part in kept)


def _unit_of(read: _SplitName, place: int) -> str:
    """The unit of a number, by the words next to it."""
    before, after = read.words[place].rpartition(",")[2], read.words[place + 1].partition(",")[0]
    words = " ".join(word for word in (before.strip(" -_=[]"), after.strip(" -_=[]")) if word)
    if read.sizes[place]:
        return f"{_BYTES_NAME} {words}".strip()
    return words or _UNNAMED


def _point(
    x: float,
    read: _SplitName,
    value: Callable[[Measurement], float],
    figure_text: Callable[[float], str],
    *,
    rate: bool,
) -> PlotPoint:
    y, noise, sectors = (
        value(read.measurement),
        read.measurement.noise or 0.0,
        read.measurement.sectors_per_request,
    )
    low = high = None
    if noise and rate:
        # Bytes over the ends of the latency's interval.
        low, high = y / (1 + noise), y / (1 - noise) if noise < 1 else None
    elif noise:
        low, high = y * (1 - noise), y * (1 + noise)
    pattern = f", {sectors:.3g} sectors a request" if sectors else ""
    apart = read.row.key[len(function_of(read.row)) :]
    return PlotPoint(x, y, low, high, f"{apart}: {figure_text(y)}{pattern}")


def _predicted(
    points: Sequence[tuple[float, _SplitName]], drawn: Sequence[PlotPoint]
) -> tuple[PlotPoint, ...] | None:
    """The bandwidth if the time grew with the sectors of a request, from the best coalesced figure; None if sectors do not differ."""
    sectors = [read.measurement.sectors_per_request for _, read in points]
    known = [one for one in sectors if one is not None]
    if len(known) < len(sectors) or len(set(known)) < 2:
        return None
    least = min(known)
    best = max(point.y for point, count in zip(drawn, known, strict=True) if count == least)
    return tuple(
        PlotPoint(point.x, best * least / count) for point, count in zip(drawn, known, strict=True)
    )


def _ceilings(
    measured: Sequence[Measurement], series: Sequence[Series], y_name: str, facts: DeviceFacts
) -> Iterator[Ceiling]:
    if "bandwidth" not in y_name:
        return
    most = max(point.y for one in series for point in one.points)
    over_link = [one.moved_bytes is not None and one.moved_bytes.link for one in measured]
    if not any(over_link) and facts.dram_peak > 0 and most >= _PEAK_SHOWN * facts.dram_peak:
        yield Ceiling(facts.dram_peak, f"peak of {'the model' if facts.simulated else 'DRAM'}")
    if all(over_link) and facts.link_bandwidth and most >= _PEAK_SHOWN * facts.link_bandwidth:
        yield Ceiling(facts.link_bandwidth, facts.link or "host link")


def caption_of(family: FamilyPlot) -> str:
    """The caption of a plot: the figures, and the range of the number."""
    xs = [point.x for one in family.series for point in one.points]
    low, high = min(xs), max(xs)
    if family.x_unit == _BYTES_NAME:
        return f"{family.y_name} over {format_bytes(round(low * MiB))} to {format_bytes(round(high * MiB))}"
    if family.x_unit == _UNNAMED:
        return f"{family.y_name} by its parameter, {svg.short(low)} to {svg.short(high)}"
    return f"{family.y_name} over {svg.short(low)} to {svg.short(high)} {family.x_unit}"
