"""Text of a terminal: its width, wrapped sentences, tables, and the header of a session."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, TextIO

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.settings import Settings
from pytest_gpumem.units import format_bytes, format_rate, format_share, format_time

if TYPE_CHECKING:
    from rich.text import Text

STYLES: Mapping[Outcome, str] = {
    Outcome.FAIL: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.ACCEPTED: "magenta",
    Outcome.NEW: "cyan",
    Outcome.PASS: "green",
    Outcome.MEASURED: "dim",
}
"""Colours, as rich names them."""
_TRAILING = re.compile(r" +((?:\x1b\[[\d;]*m)*)$")  # blanks at the end of a line, before colours
LEAST_NAME = 14  # columns that names get in any case
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[num]?s|[KMGT]?i?B(?:/s)?|MHz)\b)")


def columns() -> int:
    """The columns of the terminal; 120 where the output is no terminal."""
    return shutil.get_terminal_size((120, 24)).columns


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """True on a terminal, unless NO_COLOR is set (https://no-color.org) or it is dumb."""
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def table_of_tests(
    headings: Sequence[str],
    lines: Sequence[tuple[str, Sequence[str], Text]],
    width: int,
    colour: bool,
) -> str:
    """Draw names, figures under those headings that have some, and verdicts. Nothing is cut: a name
    that does not fit has a line above its figures."""
    from rich.cells import cell_len
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    table.add_column("test", no_wrap=True)
    shown = []
    longest = max(len(verdict) for _, _, verdict in lines)
    room = width - max(longest, len("verdict")) - 2  # for the names
    for index, heading in enumerate(headings):
        longest = max(len(figures[index]) for _, figures, _ in lines)
        if longest:
            shown.append(index)
            room -= max(longest, len(heading)) + 2
            table.add_column(heading, no_wrap=True, justify="right")
    table.add_column("verdict", no_wrap=True)
    room = max(LEAST_NAME, room)
    for name, figures, verdict in lines:
        fitting = name if cell_len(name) <= room else ""
        table.add_row(fitting, *(figures[index] for index in shown), verdict)
    heading, *rows = _printed(table, colour)
    drawn = [heading, "-" * max(map(cell_len, _printed(table, False)))]
    for (name, _, _), row in zip(lines, rows, strict=True):
        if cell_len(name) > room:
            drawn.append(name)
        drawn.append(row)
    return "\n".join(drawn)


def _printed(renderable: object, colour: bool) -> list[str]:
    """What rich draws, in lines that are not broken."""
    from rich.console import Console

    console = Console(
        file=StringIO(),
        width=10_000,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        markup=False,  # brackets in ids
        emoji=False,
    )
    with console.capture() as capture:
        console.print(renderable, soft_wrap=True)
    return [_TRAILING.sub(r"\1", line) for line in capture.get().splitlines()]


def wrapped(sentence: str, width: int, first: str = "", indent: str = "  ") -> list[str]:
    """A sentence in lines of at most `width` characters where its words allow it."""
    # A number stays with its unit; an id is never cut, so that it can be copied.
    kept = _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", sentence)
    lines = textwrap.wrap(
        kept,
        max(width, len(first) + LEAST_NAME),
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def hanging(first: str, words: str, width: int) -> list[str]:
    """Words in lines of at most `width` characters, all as far right as after `first`."""
    return wrapped(words, width, first, " " * len(first)) or [first.rstrip()]


# The header of a session

_PLAN = (
    *("mode", "sampler", "placements", "precision", "budget", "total_budget", "processes"),
    *("max_regression", "min_bandwidth", "max_latency", "strict"),
)


def header(
    facts: DeviceFacts,
    settings: Mapping[str, object],
    baseline: str = "",
    *,
    fallback_reason: str | None = None,
) -> list[str]:
    """Lines about the device, the settings that are not the default, and the baseline.
    `fallback_reason`: why the device is simulated, if nobody chose that."""
    device = device_text(facts)
    if facts.simulated:
        why = f" ({fallback_reason})" if fallback_reason else ""
        device = f"SIMULATED {facts.name}: no GPU is measured, times come from a model{why}"
    parts = []
    for name in _PLAN:
        value = settings.get(name)
        if value is not None and (name == "mode" or value != Settings._field_defaults.get(name)):
            if isinstance(value, float):
                value = format_share(value) if name == "precision" else format_time(value)
            parts.append(f"{name} {value}".removesuffix(" True"))
    plan = ", ".join(parts)
    if baseline:
        plan += f"; baseline: {baseline}"
    lines = [f"gpumem: {device}"]
    if plan:
        lines.append(f"  {plan}")
    return printable(lines)


def device_text(facts: DeviceFacts) -> str:
    parts = [
        facts.name,
        f"driver {facts.driver or 'unknown'}",
        f"CUDA {facts.cuda or 'unknown'}",
        f"peak {format_rate(facts.dram_peak) if facts.dram_peak else 'unknown'}",
        f"{facts.memory_bytes / 2**30:.1f} GiB",
        f"L2 {format_bytes(facts.l2_bytes)}",
    ]
    if facts.mig_profile:
        parts.append(f"MIG {facts.mig_profile}")
    if facts.ecc is False:
        parts.append("ECC off")
    if facts.mps:
        parts.append("MPS on")
    if facts.link:
        parts.append(facts.link)
    return ", ".join(parts)
