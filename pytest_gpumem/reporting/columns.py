"""Text tables and wrapped sentences of a given width, for terminals and logs. ASCII only."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

LEAST_NAME = 14  # columns that names get in any case
_BLANK = "  "
_CUT = "..."
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[num]?s|[KMGT]?i?B(?:/s)?|MHz)\b)")
_SHARES = (2 / 3, 1 / 3, 5 / 6, 1 / 6)
"""Share of a cut name that its end gets, in the order in which they are tried. The end mostly tells tests apart."""


@dataclass(frozen=True)
class Line:
    """One row of a table."""

    name: str
    figures: Sequence[str | Text] = ()  # as many as the table has columns of figures
    last: str | Text = ""  # such as the verdict
    below: Sequence[str] = ()  # lines under the name, indented and dim


@dataclass(frozen=True)
class Columns:
    """A table: names, figures aligned right, and a last column. Columns of figures without any text are left out. Figures are never cut:
    names are shortened, and the table gets wider than asked for where `LEAST_NAME` does not fit."""

    name: str  # heading of the names
    figures: Sequence[str]  # headings of the figures
    last: str  # heading of the last column; empty if there is none
    lines: Sequence[Line | Text]  # rows, and texts that take the room of all columns

    @cached_property
    def rows(self) -> list[Line]:
        """The lines that are rows."""
        return [line for line in self.lines if isinstance(line, Line)]

    @cached_property
    def shown(self) -> list[int]:
        """Indices of the columns of figures that have any text."""
        return [
            index
            for index in range(len(self.figures))
            if any(len(row.figures[index]) for row in self.rows)
        ]

    @cached_property
    def _widths(self) -> list[int]:
        """Of the shown columns of figures."""
        return [
            max(len(self.figures[index]), *(len(row.figures[index]) for row in self.rows))
            for index in self.shown
        ]

    @cached_property
    def _others(self) -> int:
        """Columns that everything but the names takes."""
        last = [len(self.last), *(len(row.last) for row in self.rows)] if self.last else []
        return sum(width + len(_BLANK) for width in (*self._widths, *([max(last)] if last else [])))

    def fits(self, width: int, least: int) -> bool:
        """True if `width` leaves the names so many columns, or as many as the longest of them needs."""
        return width - self._others >= min(
            least, max((_columns(row.name) for row in self.rows), default=0)
        )

    def name_width(self, width: int) -> int:
        """Columns of the names in a table of that width."""
        longest = max(len(self.name), *(_columns(row.name) for row in self.rows))
        return min(longest, max(LEAST_NAME, width - self._others))

    def drawn(self, width: int, colour: bool) -> str:
        """The table in lines without trailing blanks."""
        from rich.text import Text

        cut = shortened_apart([row.name for row in self.rows], self.name_width(width))
        name_width = max([len(self.name), *map(_columns, cut)])
        headings = [
            self.figures[index].rjust(wide)
            for index, wide in zip(self.shown, self._widths, strict=True)
        ]
        lines = [
            Text(_BLANK.join([self.name.ljust(name_width), *headings, self.last]), style="bold")
        ]
        lines.append(Text("-" * (name_width + self._others)))
        names = (name + " " * (name_width - _columns(name)) for name in cut)
        for line in self.lines:
            if isinstance(line, Text):
                lines.append(Text(shortened(line.plain, max(width, name_width)), style=line.style))
                continue
            text = Text(next(names))
            for index, wide in zip(self.shown, self._widths, strict=True):
                figure = line.figures[index]
                text.append(_BLANK + " " * (wide - len(figure))).append(figure)
            lines.append(text.append(_BLANK).append(line.last))
            indent = _BLANK + _BLANK * line.name.startswith(_BLANK)
            lines += [Text(shortened(indent + below, width), style="dim") for below in line.below]
        return _printed(lines, colour)


def _columns(text: str) -> int:
    """How many columns a terminal draws a text in: two for a CJK character."""
    from rich.cells import cell_len

    return cell_len(text)


def narrowed(
    parts: Sequence[tuple[str, int]], width: int, made: Callable[[Sequence[str]], Columns]
) -> tuple[Columns, list[str]]:
    """The table that fits into `width`, and the parts that it lacks.
    `parts`: parts that are left out one after the other, each if names have less than so many columns.
    `made`: gives the table without some parts.
    """
    names = [name for name, _ in parts]
    for count, least in enumerate([*(least for _, least in parts), 0]):
        found = made(names[:count])
        if found.fits(width, least):
            break
    return found, names[:count]


def wrapped(sentence: str, width: int, first: str = "", indent: str = "  ") -> list[str]:
    """A sentence in lines of at most `width` characters where its words allow it.
    `sentence`: one line; it keeps blanks at its begin.
    `first`: before the first line.
    `indent`: before the further ones.
    """
    # A number stays with its unit; an id is never cut, so that it can be copied.
    kept, width = (
        _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", sentence),
        max(width, len(first) + LEAST_NAME),
    )
    lines = textwrap.wrap(
        kept,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


_COMMAND = re.compile(
    r"""(?P<said>.*?: )(?P<command>(?:gpumem|pytest)(?: (?:[^\s'",;]|'[^']*'|"[^"]*")+)+)"""
)
_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def fitted(line: str, width: int) -> list[str]:
    """A line as `wrapped`. A command at its end is one that a shell takes: it is continued with a backslash."""
    if len(line) <= width or (found := _COMMAND.fullmatch(line)) is None:
        return wrapped(line, width, indent="    ")
    program, *words = _WORD.findall(found["command"])
    lines = [f"{found['said']}{program} {words.pop(0)}"]
    while words:
        word = words.pop(0)
        if (
            words
            and word.startswith("-")
            and "=" not in word
            and not words[0].startswith("-")
            and len(word) + len(words[0]) + 7 <= width
        ):
            word += f" {words.pop(0)}"  # an option stays with its value
        if len(lines[-1]) + len(word) + 3 <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"    {word}")
    return lines


def hanging(first: str, words: str, width: int) -> list[str]:
    """Words in lines of at most `width` characters, all as far to the right as the first, which follows `first`."""
    return wrapped(words, width, first, " " * len(first)) or [first.rstrip()]


def shortened(name: str, width: int, *, share: float = _SHARES[0]) -> str:
    """`name` in at most `width` characters: first without folders from the left, then without the file, then without its middle.
    `name`: of a test, its node id or any text.
    `width`: at least 4.
    `share`: share of a name without its middle that its end gets, roughly.
    """
    if len(name) <= width:
        return name
    file, colons, test = name.partition("::")
    if colons and "[" not in file:
        folders = file.split("/")
        for first in range(1, len(folders)):
            without = f"{_CUT}/{'/'.join(folders[first:])}::{test}"
            if len(without) <= width:
                return without
        return shortened(test, width, share=share)
    return _without_middle(name, width, share)


def shortened_apart(names: Sequence[str], width: int) -> list[str]:
    """Names as `shortened` gives them; names that would look the same are cut elsewhere, or keep their file."""
    found = {name: shortened(name, width) for name in names}
    alike: dict[str, list[str]] = {}
    for name, cut in found.items():
        alike.setdefault(cut, []).append(name)
    for group in alike.values():
        others = (
            {name: cut(name, width, share=share) for name in group}
            for cut in (shortened, _without_middle)
            for share in _SHARES
        )
        found |= next((cuts for cuts in others if len(set(cuts.values())) == len(group)), {})
    return [found[name] for name in names]


def _without_middle(name: str, width: int, share: float) -> str:
    if len(name) <= width:
        return name
    room = width - len(_CUT)
    end = round(room * share)
    head, tail = _between_words(name, room, end) or (room - end, end)
    return f"{name[:head]}{_CUT}{name[len(name) - tail :]}"


def _between_words(name: str, room: int, end: int) -> tuple[int, int] | None:
    """How many characters of the beginning and of the end to keep so that no word is cut; None where words are too long for that. As many
    as fit, with the end within a quarter of the room about `end`; brackets at the end stay whole where they can."""
    first = next((index for index, letter in enumerate(name) if letter.isalnum()), room)
    before = [index for index in range(first + 1, room) if not name[index - 1].isalnum()]
    after = [
        len(name) - index
        for index in range(len(name) - room, len(name))
        if not name[index].isalnum()
    ]
    fitting = [
        (head, tail)
        for tail in after
        if abs(tail - end) <= room / 4
        for head in before
        if head + tail <= room
    ]
    bracket = len(name) - name.find("[") if name.endswith("]") and "[" in name else 0
    fitting = [(head, tail) for head, tail in fitting if tail >= bracket] or fitting
    best = max(fitting, key=lambda kept: (sum(kept), -abs(kept[1] - end)), default=(0, 0))
    return best if sum(best) >= room / 2 else None


def _printed(lines: Iterable[Text], colour: bool) -> str:
    """Styled lines as text without trailing blanks, none of them broken."""
    from rich.console import (
        Console,
    )  # here: it takes long to import, and the session's header, which is first, needs none

    console = Console(
        file=StringIO(),
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
        highlight=False,
        emoji=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
