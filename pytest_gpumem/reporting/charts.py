"""The charts of a run: one for each parametrised test, and one for the saved runs of a row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.row import Past, Row
from pytest_gpumem.reporting.row import RowView, function_of
from pytest_gpumem.reporting.svg import Point, curves
from pytest_gpumem.units import format_rate, format_time, parse_bytes

_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?([KMGT]?i?B)?(?![\w.])")


@dataclass(frozen=True)
class Chart:
    """A chart with its caption and the names of its series."""

    caption: str
    plot: Markup
    series: tuple[str, ...] = ()


def of_tests(shown: Sequence[RowView]) -> list[Chart]:
    """A chart for each parametrised test, in the order of the rows: of its bandwidth if all rows
    have one, else of its latency."""
    tests: dict[str, list[RowView]] = {}
    for view in shown:
        if view.row.measurement is not None:
            tests.setdefault(function_of(view.row), []).append(view)
    charts = []
    for function, of in tests.items():
        if len(of) > 1:
            charts.append(_of_test(function, of))
    return charts


def _of_test(function: str, shown: Sequence[RowView]) -> Chart:
    names = [_parameters(view.row) for view in shown]
    figure = "bandwidth"
    write: Callable[[float], str] = format_rate
    for view in shown:
        rate = view.figures.get("bandwidth")
        if rate is None or not math.isfinite(rate.value):
            figure, write = "latency", format_time
    place = _number_of(names)
    series: dict[str, list[Point]] = {}
    for index, (name, view) in enumerate(zip(names, shown, strict=True)):
        x, label, rest = float(index), "", name  # without a number, each row is a series
        if place is not None:
            match = list(_NUMBER.finditer(name))[place]
            label = match[0]
            x = float(match[1])
            if match[2]:
                x = float(parse_bytes(f"{match[1]} {match[2]}"))
            rest = f"{name[: match.start()]} {name[match.end() :]}".strip(" -,_=[]")
        y, half = view.figures[figure], 0.0
        if view.row.measurement is not None:
            half = y.value * (view.row.measurement.noise or 0.0)
        series.setdefault(rest, []).append(Point(x, y.value, label, f"{name}: {y.text}", half))
    for points in series.values():
        points.sort(key=lambda point: point.x)
    caption = f"{function}: {figure}"
    return Chart(caption, curves(list(series.values()), write, caption), tuple(series))


def _parameters(row: Row) -> str:
    """Parameters and label of a row: what tells the rows of its test apart."""
    inside = row.nodeid[len(function_of(row)) :].removeprefix("[").removesuffix("]")
    # A dash after a letter or a digit separates two parameters.
    inside = re.sub(r"(?<=\w)-(?=\w)", ", ", inside)
    return ", ".join(filter(None, (inside, row.label))) or "alone"


def _number_of(names: Sequence[str]) -> int | None:
    """The place of the number with the most values, of those that all rows have; None without a
    number of three values or more."""
    numbers = [_NUMBER.findall(name) for name in names]
    best, most = None, 2
    for place in range(min(len(of_name) for of_name in numbers)):
        values = {of_name[place] for of_name in numbers}
        if len(values) > most:
            best, most = place, len(values)
    return best


def of_saved_runs(row: Row, past: Sequence[Past]) -> Chart | None:
    """The saved runs of a row, oldest first, and this one; None without any."""
    if row.measurement is None or not past:
        return None
    points = []
    for index, run in enumerate(past):
        tip = f"{run.utc:%Y-%m-%d} {(run.revision or '')[:7]}: {format_time(run.latency)}"
        points.append(Point(index, run.latency, f"{run.utc:%m-%d}", tip, run.half_width or 0.0))
    latency = row.measurement.latency
    now = Point(len(past), latency, "this run", f"this run: {format_time(latency)}")
    caption = f"{counted(len(past), 'saved run')} and this one"
    return Chart(caption, curves([points, [now]], format_time, caption), ("saved", "this run"))
