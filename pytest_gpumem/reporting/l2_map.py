"""The map of a sweep of persisting L2: as plain text, and as a picture where matplotlib is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from pytest_gpumem.records.l2_sweep import Point, Setting, Sweep
from pytest_gpumem.reporting.drawing import drawn_as_text, ruled, wrapped
from pytest_gpumem.units import MiB, format_bytes, format_time

FITTED = "fitted"
"""Row of the hit ratios that depend on the set-aside."""
WIDE = 110
"""Columns from which gains have a decimal."""


def drawn(name: str, sweep: Sweep, *, width: int, colour: bool) -> str:
    """The map and what it says, without a trailing line break. ASCII only.

    A column for each set-aside that was measured, a row for each hit ratio; a figure is the gain against off, in percent. The best
    setting has a star.

    Args:
        name: the test.
        sweep: what was found.
        width: columns of the terminal.
        colour: with ANSI escape sequences.
    """
    on = [point for point in sweep.points if point.setting.set_aside]
    off = off_latency(sweep)
    columns = sorted({point.setting.set_aside for point in on})
    rows = sorted({row_name(sweep, point.setting) for point in on}, key=rank, reverse=True)
    shown = {(row_name(sweep, point.setting), point.setting.set_aside): point for point in on}
    table = ruled()
    table.add_column("hit ratio", no_wrap=True)
    for set_aside in columns:
        table.add_column(f"{set_aside / MiB:.3g}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row, *(_cell(sweep, shown.get((row, set_aside)), off, width >= WIDE) for set_aside in columns))
    simulated = " (simulated)" if sweep.simulated else ""
    heading = (
        f"{name}: {sweep.target} on {sweep.device}{simulated}, window {format_bytes(sweep.window_bytes)}; gain in % against off "
        f"({format_time(off)}) by set-aside in MiB, * the best"
    )
    return "\n".join(
        [
            *wrapped(heading, width),
            drawn_as_text(table, width, colour),
            *(line for sentence in sweep.sentences for line in wrapped(sentence, width)),
            *wrapped(f"recommended: persisting_stream(buffer, {_arguments(sweep)})", width),
        ]
    )


def undrawable(path: Path) -> str | None:
    """Why no picture can be written to `path`, with the remedy; None if nothing speaks against it. For a look before long work."""
    try:
        there = importlib.util.find_spec("matplotlib.figure") is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        return "matplotlib is not installed; python -m pip install matplotlib"
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if path.is_dir():
        return "it is a folder"
    # What is there is replaced in place; else the folder takes a new file.
    target = path if path.exists() else folder
    return None if os.access(target, os.W_OK) else f"no permission to write {target}"


def picture(sweeps: Sequence[tuple[str, Sweep]], path: Path) -> None:
    """Write the maps of several tests into one file, PNG or SVG by its name.

    Args:
        sweeps: each with its test's name; at least one.
        path: the file.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    # Neither pyplot nor a backend: nothing of matplotlib's state, which may be the tests' own, is touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6 * len(sweeps)), layout="constrained")
    for axes, (name, sweep) in zip(figure.subplots(len(sweeps), squeeze=False)[:, 0], sweeps, strict=True):
        on = [point for point in sweep.points if point.setting.set_aside]
        off = off_latency(sweep)
        gains = [100 * (off / point.latency - 1) for point in on]
        most = max(map(abs, gains)) or 1.0
        x, y = [p.setting.set_aside / MiB for p in on], [p.setting.hit_ratio for p in on]
        dots = axes.scatter(x, y, c=gains, s=420, cmap="RdYlGn", vmin=-most, vmax=most, edgecolors="black", linewidths=0.5)
        for i, gain in enumerate(gains):
            axes.annotate(f"{round(gain) + 0:+d}", (x[i], y[i]), ha="center", va="center", fontsize=7)
        best = sweep.best.setting
        axes.scatter([best.set_aside / MiB], [best.hit_ratio], s=800, facecolors="none", edgecolors="black", linewidths=1.5)
        axes.set(xlabel="set-aside, MiB", ylabel="hit ratio", ylim=(0, 1.15), xlim=(0, 1.1 * max(x)))
        simulated = " (simulated)" if sweep.simulated else ""
        axes.set_title(f"{name}\n{sweep.target} on {sweep.device}{simulated}, window {format_bytes(sweep.window_bytes)}", fontsize=9)
        figure.colorbar(dots, ax=axes, label="gain against off, %")
    figure.savefig(path, dpi=150)


def off_latency(sweep: Sweep) -> float:
    """Seconds without a set-aside as the search measured them, like the map's other figures."""
    return next(point.latency for point in sweep.points if not point.setting.set_aside)


def row_name(sweep: Sweep, setting: Setting) -> str:
    """The map's row that a setting is in: its hit ratio, or that it is the fitted one."""
    return FITTED if sweep.fitted(setting) and setting.hit_ratio < 1 else f"{setting.hit_ratio:.3g}"


def rank(row: str) -> float:
    """The order of rows, the highest on top."""
    return 2.0 if row == FITTED else float(row)


def _cell(sweep: Sweep, point: Point | None, off: float, wide: bool) -> Text:
    if point is None:
        return Text(".", style="dim")
    gain = 100 * (off / point.latency - 1)
    best = point.setting == sweep.best.setting
    style = "green" if gain >= 1 else "red" if gain <= -1 else ""
    return Text(
        f"{round(gain, 1) + 0.0:+.1f}{'*' * best}" if wide else f"{round(gain) + 0:+d}{'*' * best}",
        style=f"bold {style}" if best else style,
    )


def _arguments(sweep: Sweep) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sweep.recommend().items())
