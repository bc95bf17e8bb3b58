"""The result of a sweep of persisting L2: in words, and as a map in plain text."""

from __future__ import annotations

from rich.text import Text

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.records.l2_sweep import LEAST_GAIN, Change, Point, Setting, Sweep, Textbook
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.units import MiB, format_bytes, format_share, format_shares, format_time


def setting_text(setting: Setting) -> str:
    """Such as "9.375 MiB at hit ratio 0.8", or "off"."""
    return (
        f"{format_bytes(setting.set_aside)} at hit ratio {setting.hit_ratio:.3g}"
        if setting.set_aside
        else "off"
    )


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
    losses = (
        f"{book.name}, {setting_text(book.point.setting)}: {_loss(sweep, book)}"
        for book in sweep.textbook
    )
    took = f"{len(sweep.points)} of {counted(sweep.grid, 'setting')} measured; the gains in words are from fresh samples"
    return (sweep_sentence(sweep), *losses, took, *sweep.notes)


def _loss(sweep: Sweep, book: Textbook) -> str:
    if sweep.pays and book.point.setting == sweep.best.setting:
        return "it is what is recommended"
    return f"latency {format_share(book.loss.share, sign=True)} against what is recommended, 95 % interval {_interval(book.loss)}"


def _interval(change: Change) -> str:
    return " to ".join(format_shares(change.low, change.high))


FITTED = "fitted"  # row of the hit ratios that depend on the set-aside
WIDE = 110  # columns of a terminal from which on gains have a decimal


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
        return (
            FITTED
            if self.sweep.fitted(setting) and setting.hit_ratio < 1
            else f"{setting.hit_ratio:.3g}"
        )

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
    lines = [
        Line(
            row,
            [_cell(grid, found.get((row, set_aside)), width >= WIDE) for set_aside in grid.columns],
        )
        for row in grid.rows
    ]
    table = Columns(
        "hit ratio", [f"{set_aside / MiB:.3g}" for set_aside in grid.columns], "", lines
    )
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
