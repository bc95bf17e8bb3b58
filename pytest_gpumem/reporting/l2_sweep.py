"""The result of a sweep of persisting L2: in words, as a map in plain text, as a plot of the HTML page, and as an SVG file."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup, escape
from rich.text import Text

from pytest_gpumem.printable import printable
from pytest_gpumem.records.l2_sweep import LEAST_GAIN, Change, Point, Setting, Sweep, Textbook
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.plots.svg import CHARACTER, WIDTH, box, drawing, fitted, number, static, text
from pytest_gpumem.units import MiB, format_bytes, format_share, format_shares, format_time


def setting_text(setting: Setting) -> str:
    """Such as "9.375 MiB at hit ratio 0.8", or "off"."""
    return f"{format_bytes(setting.set_aside)} at hit ratio {setting.hit_ratio:.3g}" if setting.set_aside else "off"


def sweep_sentence(sweep: Sweep) -> str:
    """Whether persistence pays, with the gain of the best setting."""
    gain = f"{format_share(sweep.gain.share, sign=True)} against off, 95 % interval {_interval(sweep.gain)}"
    best = setting_text(sweep.best.setting)
    if sweep.pays:
        return f"persistence pays: {best} gains {gain}"
    if sweep.gain.high < 0:
        why = "it costs"
    elif sweep.gain.low <= 0:
        why = "the interval of the gain includes 0"
    else:
        why = f"the gain is below {format_share(LEAST_GAIN)}"
    return f"persistence does not pay, leave it off: {why}; the best setting, {best}, gains {gain}"


def sweep_sentences(sweep: Sweep) -> tuple[str, ...]:
    """The result, the loss of the textbook's settings, the size of the search, and notes."""
    losses = (f"{book.name}, {setting_text(book.point.setting)}: {_loss(sweep, book)}" for book in sweep.textbook)
    took = f"{len(sweep.points)} of {sweep.grid} settings measured; the gains in words are from fresh samples"
    return (sweep_sentence(sweep), *losses, took, *sweep.notes)


def _loss(sweep: Sweep, book: Textbook) -> str:
    if sweep.pays and book.point.setting == sweep.best.setting:
        return "it is what is recommended"
    return f"latency {format_share(book.loss.share, sign=True)} against what is recommended, 95 % interval {_interval(book.loss)}"


def _interval(change: Change) -> str:
    return " to ".join(format_shares(change.low, change.high))


FITTED = "fitted"  # row of the hit ratios that depend on the set-aside
WIDE = 110  # columns of a terminal from which on gains have a decimal
_NAMES = 62.0
_CELL = 28.0
_TOP = 20.0
_SHADES = (1, 5, 20)  # gains and losses in percent from which on a cell has the next darker shade: classes up1, up2, up3, down1 ..


class _Map:
    """The grid of a sweep: a column for each set-aside that was measured, a row for each hit ratio."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.points = [point for point in sweep.points if point.setting.set_aside]
        # As the search measured it, like the figures of the map; `Sweep.off` is on fresh samples.
        self.off = next(point.latency for point in sweep.points if not point.setting.set_aside)
        self.columns = sorted({point.setting.set_aside for point in self.points})
        rows = {self.row(point.setting) for point in self.points}
        self.rows = sorted(rows, key=lambda row: 2.0 if row == FITTED else float(row), reverse=True)

    def row(self, setting: Setting) -> str:
        """The row of a setting: its hit ratio, or `FITTED`."""
        return FITTED if self.sweep.fitted(setting) and setting.hit_ratio < 1 else f"{setting.hit_ratio:.3g}"

    def gain(self, point: Point) -> float:
        """Percent against off."""
        return 100 * (self.off / point.latency - 1)

    def is_best(self, point: Point) -> bool:
        return point.setting == self.sweep.best.setting

    @property
    def title(self) -> str:
        """Kernel, device and window."""
        simulated = " (simulated)" if self.sweep.simulated else ""
        return f"{self.sweep.target} on {self.sweep.device}{simulated}, window {format_bytes(self.sweep.window_bytes)}"


def drawn(name: str, sweep: Sweep, *, width: int, colour: bool) -> str:
    """The map and its sentences as plain text, without a trailing line break. ASCII only. A figure is the gain against off, in percent. The
    best setting has a star."""
    grid = _Map(sweep)
    found = {(grid.row(point.setting), point.setting.set_aside): point for point in grid.points}
    lines = [Line(row, [_cell(grid, found.get((row, set_aside)), width >= WIDE) for set_aside in grid.columns]) for row in grid.rows]
    table = Columns("hit ratio", [f"{set_aside / MiB:.3g}" for set_aside in grid.columns], "", lines)
    heading = f"{name}: {grid.title}; gain in % against off ({format_time(grid.off)}) by set-aside in MiB, * the best"
    arguments = ", ".join(f"{name}={value!r}" for name, value in sweep.recommend().items())
    sentences = [*sweep_sentences(sweep), f"recommended: persisting_stream(buffer, {arguments})"]
    below = [line for sentence in sentences for line in wrapped(sentence, width)]
    return "\n".join([*wrapped(heading, width), table.drawn(width, colour), *below])


def _cell(grid: _Map, point: Point | None, wide: bool) -> Text:
    if point is None:
        return Text(".", style="dim")
    gain, best = grid.gain(point), grid.is_best(point)
    style = "green" if gain >= 1 else "red" if gain <= -1 else ""
    figure = f"{round(gain, 1) + 0.0:+.1f}" if wide else f"{round(gain) + 0:+d}"
    return Text(f"{figure}{'*' * best}", style=f"bold {style}" if best else style)


def l2_grid(sweep: Sweep) -> Markup:
    """The map as a plot: gains in percent against off; the best setting has a frame."""
    height, parts = _plot(_Map(sweep))
    return drawing(height, parts, f"gain of persisting L2 by set-aside and hit ratio, window {format_bytes(sweep.window_bytes)}")


def l2_svg(sweeps: Sequence[tuple[str, Sweep]]) -> str:
    """The maps of several tests as the text of one SVG file. `sweeps`: each with its test's name; at least one."""
    top, parts = 0.0, list[str]()
    for name, sweep in printable(list(sweeps)):
        grid = _Map(sweep)
        height, plot = _plot(grid)
        parts += [text(8, top + 18, fitted(name, WIDTH - 16)), text(8, top + 34, fitted(grid.title, WIDTH - 16), style="unit")]
        parts.append(f'<g transform="translate(0 {number(top + 40)})">{"".join(plot)}</g>')
        top += height + 52
    page = f"<style>{escape(_style())}</style>{box(0, 0, WIDTH, top, 'page')}"
    return drawing(top, [page, *parts], "gain of persisting L2 by set-aside and hit ratio", ' xmlns="http://www.w3.org/2000/svg"') + "\n"


def _style() -> str:
    """The rules of the page's style sheet for drawings, in the colours of its light theme: few viewers know CSS variables."""
    sheet = static("report.css")
    values = dict(re.findall(r"--(\w+): ([^;]+);", sheet.partition("}")[0]))
    rules = [".page { fill: var(--page) }", *re.findall(r"^svg (?:text|.unit|.cell|.up1|.down1|.best).*", sheet, re.MULTILINE)]
    return "\n".join(re.sub(r"var\(--(\w+)\)", lambda name: values[name[1]], rule) for rule in rules)


def _plot(grid: _Map) -> tuple[float, list[str]]:
    """Height and shapes of the plot."""
    width = min(48.0, (WIDTH - _NAMES) / max(1, len(grid.columns)))
    parts = []
    for point in grid.points:
        x = _NAMES + grid.columns.index(point.setting.set_aside) * width
        y = _TOP + grid.rows.index(grid.row(point.setting)) * _CELL
        gain = grid.gain(point)
        shade = sum(abs(gain) >= least for least in _SHADES)
        style = f"{'up' if gain > 0 else 'down'}{shade}" if shade else "even"
        tip = f"{setting_text(point.setting)}: {format_time(point.latency)}, {gain:+.1f} % against off"
        parts.append(box(x + 1, y + 1, width - 2, _CELL - 2, f"cell {style}{' best' * grid.is_best(point)}", tip))
        figure = f"{round(gain) + 0:+d}"
        if len(figure) * CHARACTER < width:
            parts.append(text(x + width / 2, y + _CELL / 2 + 4, figure, anchor="middle"))
    for index, name in enumerate(grid.rows):
        parts.append(text(_NAMES - 8, _TOP + (index + 0.5) * _CELL + 4, name, anchor="end"))
    bottom = _TOP + len(grid.rows) * _CELL
    free = -1e9
    for index, set_aside in enumerate(grid.columns):
        label, at = f"{set_aside / MiB:.3g}", _NAMES + (index + 0.5) * width
        if at - len(label) * CHARACTER / 2 >= free:
            parts.append(text(at, bottom + 15, label, anchor="middle"))
            free = at + len(label) * CHARACTER / 2 + 4
    parts.append(text(_NAMES - 8, _TOP - 7, "hit ratio", anchor="end", style="unit"))
    parts.append(text(_NAMES, bottom + 30, "set-aside in MiB; gain in % against off", style="unit"))
    return bottom + 36, parts
