"""Text tables and wrapped sentences of a given width, for terminals and logs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

_TRAILING = re.compile(r" +((?:\x1b\[[\d;]*m)*)$")  # blanks at the end of a line, before colours
LEAST_NAME = 14  # columns that names get in any case
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[num]?s|[KMGT]?i?B(?:/s)?|MHz)\b)")


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    name: str
    figures: Sequence[str | Text] = ()  # as many as the table has columns of figures
    last: str | Text = ""  # such as the verdict


@dataclass(frozen=True)
class Columns:
    """A table: names, figures aligned right, and a last column, without empty columns. Nothing is
    cut: a name that does not fit has a line above its figures."""

    name: str  # heading of the names
    figures: Sequence[str]  # headings of the figures
    last: str  # heading of the last column; empty if there is none
    lines: Sequence[Line | Text]  # rows, and texts that take the room of all columns

    def drawn(self, width: int, colour: bool) -> str:
        """The table in lines without trailing blanks."""
        from rich.cells import cell_len
        from rich.table import Table

        room = width  # for the names
        table = Table(box=None, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        table.add_column(self.name, no_wrap=True)
        shown = []
        for index, heading in enumerate((*self.figures, self.last)):
            longest = self._longest(index)
            if longest:
                shown.append(index)
                room -= max(longest, len(heading)) + 2
                last = index == len(self.figures)
                table.add_column(heading, no_wrap=True, justify="left" if last else "right")
        room = max(LEAST_NAME, room)
        for line in self.lines:
            if isinstance(line, Line):
                cells = [line.name if cell_len(line.name) <= room else ""]
                figures = (*line.figures, line.last)
                table.add_row(*cells, *(figures[index] for index in shown))
        heading, *drawn = _printed(table, colour)
        lines = [heading, "-" * max(map(cell_len, _printed(table, False)))]
        for line in self.lines:
            if not isinstance(line, Line):
                lines += _printed(line, colour)
                continue
            if cell_len(line.name) > room:
                lines.append(line.name)
            lines.append(drawn.pop(0))
        return "\n".join(lines)

    def _longest(self, index: int) -> int:
        longest = 0
        for line in self.lines:
            if isinstance(line, Line):
                longest = max(longest, len((*line.figures, line.last)[index]))
        return longest


def _printed(renderable: object, colour: bool) -> list[str]:
    """What rich draws, in lines without trailing blanks, none of them broken."""
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
    """A sentence in lines of at most `width` characters where its words allow it. `first` stands
    before the first line, `indent` before the further ones."""
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
