"""Lines of text of a given width: what every table and sentence in a terminal is made with. ASCII only."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
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


_CUT = "..."
_SHARES = (2 / 3, 1 / 3, 5 / 6, 1 / 6)
"""Of a name that has to be cut, how much of what is left is its end, which mostly tells tests apart."""


def shortened(name: str, width: int, *, share: float = _SHARES[0]) -> str:
    """`name` in at most `width` characters. What tells tests apart goes last: folders from the left, the file, then words in the middle.

    Args:
        name: of a test, its node id or any text.
        width: at least 4.
        share: of what is left of a name without its middle, how much is its end, roughly.
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


def _without_middle(name: str, width: int, share: float) -> str:
    if len(name) <= width:
        return name
    room = width - len(_CUT)
    end = round(room * share)
    head, tail = _between_words(name, room, end) or (room - end, end)
    return f"{name[:head]}{_CUT}{name[len(name) - tail :]}"


def shortened_apart(names: Sequence[str], width: int) -> list[str]:
    """Names of one list as `shortened` gives them, cut elsewhere, or with their file, where two of them would look the same."""
    wanted = len(set(names))
    first = [shortened(name, width) for name in names]
    others = ([cut(name, width, share=share) for name in names] for cut in (shortened, _without_middle) for share in _SHARES)
    return first if len(set(first)) == wanted else next((cut for cut in others if len(set(cut)) == wanted), first)


def _between_words(name: str, room: int, end: int) -> tuple[int, int] | None:
    """How many characters of the beginning and of the end to keep so that no word is cut; None where words are too long for that.

    As many as fit, with the end within a quarter of the room about `end`; brackets at the end stay whole where they can.
    """
    first = next((index for index, letter in enumerate(name) if letter.isalnum()), room)
    before = [index for index in range(first + 1, room) if not name[index - 1].isalnum()]
    after = [len(name) - index for index in range(len(name) - room, len(name)) if not name[index].isalnum()]
    fitting = [(head, tail) for tail in after if abs(tail - end) <= room / 4 for head in before if head + tail <= room]
    bracket = len(name) - name.find("[") if name.endswith("]") and "[" in name else 0
    fitting = [(head, tail) for head, tail in fitting if tail >= bracket] or fitting
    best = max(fitting, key=lambda kept: (sum(kept), -abs(kept[1] - end)), default=(0, 0))
    return best if sum(best) >= room / 2 else None


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
