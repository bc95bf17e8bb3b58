"""Text tables and wrapped sentences of a given width, for terminals and logs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_TRAILING = re.compile(r" +((?:\x1b\[[\d;]*m)*)$")  # blanks at the end of a line, before colours
LEAST_NAME = 14  # columns that names get in any case
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[num]?s|[KMGT]?i?B(?:/s)?|MHz)\b)")


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
        legacy_windows=False,
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
