"""Lines of text of a given width: what every table and sentence in a terminal is made with. ASCII only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from io import StringIO

from rich.box import Box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Only a rule under the heading.
_RULE = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)

GAP = 2
"""Blanks between columns."""

_UNBOUNDED = 1000
"""Columns given to rich, so that it never cuts a figure: the widths are worked out by whoever draws."""


def shortened(name: str, width: int) -> str:
    """`name` in at most `width` characters: the middle goes, and of the rest two thirds are the end, which tells tests apart."""
    if len(name) <= width:
        return name
    end = (width - 3) * 2 // 3
    return f"{name[: width - 3 - end]}...{name[-end:]}"


def ruled() -> Table:
    """An empty table with nothing but a rule under its heading."""
    return Table(box=_RULE, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold", collapse_padding=True)


def drawn_as_text(drawn: Table, width: int, colour: bool) -> str:
    """A table as lines without trailing blanks, wider than `width` where its figures need more."""
    return _printed([drawn], width, colour)


def lines_as_text(lines: Iterable[Text], width: int, colour: bool) -> str:
    """Styled lines as text without trailing blanks, none of them broken."""
    return _printed(lines, width, colour)


def _printed(what: Iterable[Table | Text], width: int, colour: bool) -> str:
    console = Console(
        file=StringIO(),
        width=max(width, _UNBOUNDED),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for one in what:
            console.print(one, soft_wrap=isinstance(one, Text))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def wrapped(sentence: str, width: int) -> list[str]:
    """A sentence in lines of at most `width` characters where its words allow it, further lines indented."""
    # A number stays with its percent sign; an id is never cut, so that it can be copied.
    kept = sentence.replace(" %", "\N{NO-BREAK SPACE}%")
    lines = textwrap.wrap(kept, width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]
