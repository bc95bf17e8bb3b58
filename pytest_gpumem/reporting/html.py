"""One self-contained HTML page of a run: nothing from the network, all text escaped.

Charts are SVG: of each parametrised test, and of the saved runs of a row.

A content security policy names its script and its style sheet by their digests: a browser runs
nothing else, whatever a name or a file contains.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from pytest_gpumem.judging.finding import mark
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records import function_of
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Past, Row
from pytest_gpumem.reporting.conclusion import Run, counts_text, run_lines
from pytest_gpumem.reporting.details import details
from pytest_gpumem.reporting.row import RowView, headings_of, views, worst_first
from pytest_gpumem.reporting.terminal import header
from pytest_gpumem.units import counted, format_rate, format_time, parse_bytes

TEMPLATES = Path(__file__).parent / "templates"
WIDTH = 120  # columns of the conclusion
_CLASSES = {Outcome.PASS: "pass", Outcome.FAIL: "fail", Outcome.MEASURED: "measured"}
CHART = (520, 230)  # units across and down a chart
LEFT, RIGHT, TOP, BOTTOM = 78, 506, 12, 206  # edges of its plot
COLOURS = 4  # classes s0, s1 ... of the style sheet
CHARACTER = 7.0  # units across a character, on average
LOG_FROM = 20.0  # ratio of the largest to the smallest x from which on the axis is logarithmic
_NUMBER = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?) ?([KMGT]?i?B)?(?![\w.])")


def anchor(key: str) -> str:
    """The element of a row, by `Row.key`: the same in every page, so that links stay valid."""
    return f"t-{hashlib.sha256(key.encode(errors='surrogatepass')).hexdigest()[:12]}"


def page(run: Run) -> str:
    rows, facts, past = printable((list(run.rows), run.facts, dict(run.past)))
    shown = views(worst_first(rows), facts)
    headings = headings_of(shown)
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    counts = Counter((view.outcome.rank, view.verdict, _css(view)) for view in shown)
    # Names of tests and labels come from anybody: nothing reaches the page unescaped.
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("report.html").render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        title=f"{facts.name}{mark(facts.simulated)}",
        simulated=facts.simulated,
        taken=printable(f"{run.utc[:16].replace('T', ' ')} UTC, revision {run.revision}"),
        header=header(facts, run.settings),
        counts=[(verdict, count, css) for (_, verdict, css), count in sorted(counts.items())],
        headings=headings,
        conclusion="\n".join(run_lines(run, WIDTH)),
        summary=counts_text(rows),
        rows=[_line(view, headings) for view in shown],
        charts=_charts_of_tests(views(rows, facts)),
        sections=[_section(view, facts, past.get(view.row.key, ())) for view in shown],
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _css(view: RowView) -> str:
    return _CLASSES.get(view.outcome, "doubt")


def _line(view: RowView, headings: Sequence[str]) -> dict[str, object]:
    """A row of the table of results, with values to sort by."""
    cells = []
    for heading in headings:
        cell = view.figures.get(heading)
        cells.append((heading, cell.text, f"{cell.value:.6g}") if cell else (heading, "", ""))
    checked = view.row.measurement is None or view.row.measurement.checked
    return {
        "name": view.name,
        "target": anchor(view.row.key),
        "figures": cells,
        "verdict": view.verdict,
        "style": _css(view),
        "unchecked": not checked,
    }


def _section(view: RowView, facts: DeviceFacts, past: Sequence[Past]) -> dict[str, object]:
    terms = [("test", view.row.key), ("verdict", view.row.verdict.reason)]
    terms += details(view.row, facts)
    return {
        "target": anchor(view.row.key),
        "name": view.name,
        "verdict": view.verdict,
        "style": _css(view),
        "details": terms,
        "chart": _chart_of_saved_runs(view.row, past),
    }


# Charts


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    label: str  # of x
    tip: str  # shown while the pointer rests on it
    half_width: float = 0.0  # of its interval


@dataclass(frozen=True)
class Chart:
    """A chart with its caption and the names of its series."""

    caption: str
    plot: Markup
    series: tuple[str, ...] = ()


def _charts_of_tests(shown: Sequence[RowView]) -> list[Chart]:
    """A chart of each parametrised test: the bandwidth if all rows have one, or the latency."""
    tests: dict[str, list[RowView]] = {}
    for view in shown:
        if view.row.measurement is not None:
            tests.setdefault(function_of(view.row.nodeid), []).append(view)
    return [_chart_of_test(function, of) for function, of in tests.items() if len(of) > 1]


def _chart_of_test(function: str, shown: Sequence[RowView]) -> Chart:
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
    return Chart(caption, _curves(list(series.values()), write, caption), tuple(series))


def _parameters(row: Row) -> str:
    """Parameters and label of a row: what tells the rows of its test apart."""
    inside = row.nodeid[len(function_of(row.nodeid)) :].removeprefix("[").removesuffix("]")
    # A dash after a letter or a digit separates two parameters.
    inside = re.sub(r"(?<=\w)-(?=\w)", ", ", inside)
    return ", ".join(filter(None, (inside, row.label))) or "alone"


def _number_of(names: Sequence[str]) -> int | None:
    """The place of the number with the most values, three or more."""
    numbers = [_NUMBER.findall(name) for name in names]
    best, most = None, 2
    for place in range(min(len(of_name) for of_name in numbers)):
        values = {of_name[place] for of_name in numbers}
        if len(values) > most:
            best, most = place, len(values)
    return best


def _chart_of_saved_runs(row: Row, past: Sequence[Past]) -> Chart | None:
    """The saved runs of a row, oldest first, and this run; None without any."""
    if row.measurement is None or not past:
        return None
    points = []
    for index, run in enumerate(past):
        tip = f"{run.utc:%Y-%m-%d} {(run.revision or '')[:7]}: {format_time(run.latency)}"
        points.append(Point(index, run.latency, f"{run.utc:%m-%d}", tip, run.half_width or 0.0))
    latency = row.measurement.latency
    now = Point(len(past), latency, "this run", f"this run: {format_time(latency)}")
    caption = f"{counted(len(past), 'saved run')} and this run"
    return Chart(caption, _curves([points, [now]], format_time, caption), ("saved", "this run"))


# Curves. Every text is escaped.


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(content)}</text>'


def _path(style: str, places: Sequence[tuple[float, float]]) -> str:
    return f'<path class="{style}" d="M{"L".join(f"{x} {y}" for x, y in places)}"/>'


def _ticks(high: float) -> list[float]:
    """Round values from zero to `high`, at most six."""
    step = 10.0 ** math.floor(math.log10(high / 5))
    for factor in (1, 2, 5, 10):
        if high / (step * factor) <= 6:
            step *= factor
            break
    return [index * step for index in range(int(high / step * (1 + 1e-9)) + 1)]


def _curves(
    series: Sequence[Sequence[Point]], write: Callable[[float], str], description: str
) -> Markup:
    """Curves, from zero, with the intervals of their points. `write`: the text of a figure."""
    points = [point for of in series for point in of]
    high = max(point.y + point.half_width for point in points) * 1.08 or 1.0
    xs = sorted({point.x for point in points})
    log = xs[0] > 0 and xs[-1] / xs[0] >= LOG_FROM

    def x_of(value: float) -> float:
        low, most = xs[0], xs[-1]
        if log:
            low, most, value = math.log(low), math.log(most), math.log(value)
        share = (value - low) / ((most - low) or 1.0)
        return round(LEFT + 20 + share * (RIGHT - LEFT - 40), 1)

    def y_of(value: float) -> float:
        return round(BOTTOM - max(value, 0.0) / high * (BOTTOM - TOP), 1)

    parts = []
    for tick in _ticks(high):
        parts.append(_path("grid", [(LEFT, y_of(tick)), (RIGHT, y_of(tick))]))
        parts.append(_text(LEFT - 6, y_of(tick) + 4, write(tick) if tick else "0", "end"))
    free = 0.0
    for point in sorted(points, key=lambda point: point.x):
        half = len(point.label) * CHARACTER / 2
        if x_of(point.x) - half >= free:
            parts.append(_text(x_of(point.x), BOTTOM + 16, point.label, "middle"))
            free = x_of(point.x) + half + 6
    for index, of in enumerate(series):
        colour = f"s{index % COLOURS}"
        parts.append(_path(f"{colour} curve", [(x_of(point.x), y_of(point.y)) for point in of]))
        for point in of:
            x, half = x_of(point.x), point.half_width
            if half:
                ends = [(x, y_of(point.y - half)), (x, y_of(point.y + half))]
                parts.append(_path(colour, ends))
            circle = f'<circle class="{colour} dot" cx="{x}" cy="{y_of(point.y)}" r="3.4">'
            parts.append(f"{circle}<title>{escape(point.tip)}</title></circle>")
    width, height = CHART
    # This module made what is inside, and escaped every text.
    start = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(description)}">'
    return Markup(f"{start}{''.join(parts)}</svg>")
