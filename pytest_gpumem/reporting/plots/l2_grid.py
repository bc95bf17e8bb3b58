"""The map of a sweep of persisting L2: the gain at each set-aside and hit ratio."""

from __future__ import annotations

from markupsafe import Markup

from pytest_gpumem.records.l2_sweep import Sweep
from pytest_gpumem.reporting.l2_map import off_latency, rank, row_name
from pytest_gpumem.reporting.plots.svg import CHARACTER, WIDTH, box, drawing, text
from pytest_gpumem.units import MiB, format_bytes, format_time

_NAMES = 62.0
_CELL = 28.0
_TOP = 20.0
_SHADES = (1, 5, 20)
"""Gains in percent from which on a cell has the next darker shade, up as down: classes up1, up2, up3, down1 ..."""


def l2_grid(sweep: Sweep) -> Markup:
    """The plot: a column for each set-aside, a row for each hit ratio, figures in percent against off; the best has a frame."""
    on = [point for point in sweep.points if point.setting.set_aside]
    off = off_latency(sweep)
    columns = sorted({point.setting.set_aside for point in on})
    rows = sorted({row_name(sweep, point.setting) for point in on}, key=rank, reverse=True)
    width = min(48.0, (WIDTH - _NAMES) / max(1, len(columns)))
    parts = []
    for point in on:
        column, row = columns.index(point.setting.set_aside), rows.index(row_name(sweep, point.setting))
        x, y = _NAMES + column * width, _TOP + row * _CELL
        gain = 100 * (off / point.latency - 1)
        shade = sum(abs(gain) >= least for least in _SHADES)
        style = f"{'up' if gain > 0 else 'down'}{shade}" if shade else "even"
        tip = f"{point.setting}: {format_time(point.latency)}, {gain:+.1f} % against off"
        best = " best" if point.setting == sweep.best.setting else ""
        parts.append(box(x + 1, y + 1, width - 2, _CELL - 2, f"cell {style}{best}", tip))
        said = f"{round(gain) + 0:+d}"
        if len(said) * CHARACTER < width:
            parts.append(text(x + width / 2, y + _CELL / 2 + 4, said, anchor="middle"))
    for index, name in enumerate(rows):
        parts.append(text(_NAMES - 8, _TOP + (index + 0.5) * _CELL + 4, name, anchor="end"))
    bottom = _TOP + len(rows) * _CELL
    free = -1e9
    for index, set_aside in enumerate(columns):
        label, at = f"{set_aside / MiB:.3g}", _NAMES + (index + 0.5) * width
        if at - len(label) * CHARACTER / 2 >= free:
            parts.append(text(at, bottom + 15, label, anchor="middle"))
            free = at + len(label) * CHARACTER / 2 + 4
    parts.append(text(_NAMES - 8, _TOP - 7, "hit ratio", anchor="end", style="unit"))
    parts.append(text(_NAMES, bottom + 30, "set-aside in MiB; gain in % against off", style="unit"))
    return drawing(bottom + 36, parts, f"gain of persisting L2 by set-aside and hit ratio, window {format_bytes(sweep.window_bytes)}")
