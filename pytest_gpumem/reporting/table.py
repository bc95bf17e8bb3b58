"""The table of results, as plain text of a given width. ASCII only, so that any terminal and log shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rich.text import Text

from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.reporting.cells import HEADINGS, Cells, access_interval, cells_of, names_of, sectors, split_names
from pytest_gpumem.reporting.drawing import GAP, lines_as_text, shortened, shortened_apart, wrapped
from pytest_gpumem.reporting.groups import by_function, ordered
from pytest_gpumem.reporting.sentences import sentences, usual_way

_STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.NEW: "cyan",
}

_LEAST_NAME = 14
_TELLING_NAME = 28
"""Columns that a name gets before what is nice to have gives way."""
_SHORT_NAME = 20
"""Columns that a name gets before figures give way."""
_INDENT = "  "


@dataclass(frozen=True)
class _Look:
    """What of a row is shown."""

    least_name: int
    """Columns of a name below which the next look is taken."""
    without: tuple[str, ...] = ()
    """Headings of columns that are left out."""
    bars: bool = True
    intervals: bool = True
    """Of changes."""
    short_verdict: bool = False
    """ "sim" in place of "simulated"."""


def _looks(changes: bool) -> Iterator[_Look]:
    """From the widest to the narrowest. A change has an interval of its own, which makes the noise dispensable sooner."""
    yield _Look(_TELLING_NAME)
    yield _Look(_TELLING_NAME, short_verdict=True)
    yield _Look(_TELLING_NAME, bars=False, short_verdict=True)
    gone: tuple[str, ...] = ()
    for heading in ("of peak", "noise") if changes else ("of peak",):
        gone += (heading,)
        yield _Look(_TELLING_NAME if heading == "of peak" else _SHORT_NAME, gone, bars=False, short_verdict=True)
    for heading in ("bandwidth",) if changes else ("noise", "bandwidth"):
        gone += (heading,)
        yield _Look(_LEAST_NAME if heading == "bandwidth" else _SHORT_NAME, gone, bars=False, short_verdict=True)
    yield _Look(0, gone, bars=False, intervals=False, short_verdict=True)


@dataclass
class _Line:
    """One line of the table: a heading across all columns, or a row."""

    name: str
    cells: Cells | None = None
    parts: tuple[str, str] = ("", "")
    """Of the only row of its test: the test, and the indented rest of the name, which get lines of their own where one is too short."""
    style: str = ""
    outcome: Outcome = Outcome.PASS
    beside: list[str] = field(default_factory=list)
    """What stands below the name."""


def table(rows: Sequence[Row], facts: DeviceFacts, *, width: int, colour: bool, notes: bool = True, grouped: bool = False) -> str:
    """The table and the sentences under it, without a trailing line break.

    The rows of one test stand under its name. A column in which no row has a figure is left out. Where names would get too short to
    tell tests apart, these give way, one after the other: the word "simulated", the bars, `of peak`, the noise where there are
    changes, the bandwidth, the intervals of changes; what still has a column is never cut, and the table gets wider than `width` where
    the last look needs more. `of peak` has a figure only where `Measurement.share_of_peak` has one. Names go without their file where
    they are unique without it. A name that is too long gets a line for its test and one for what is in its brackets, then loses words
    in the middle.

    Args:
        rows: in the order in which they are shown, unless `grouped`.
        facts: the device that was measured.
        width: columns of the terminal.
        colour: with ANSI escape sequences.
        notes: spell out what each measurement notes, else only how many there are; under a name, sectors of a request that are not
            coalesced, and the interval of a latency per access.
        grouped: by kind of test, and what got worse first, then the slowest.
    """
    if not rows:
        return ""
    rows, facts = printable(rows), printable(facts)
    usual = usual_way(rows)
    groups = [(kind.value, of) for kind, of in ordered(rows, facts)] if grouped else [("", list(rows))]
    named = {id(row): (whole, *parts) for row, whole, parts in zip(rows, names_of(rows), split_names(rows), strict=True)}
    lines: list[_Line] = []
    for kind, of in groups:
        if len(groups) > 1:
            lines.append(_Line(f"-- {kind}", style="bold"))
        for test in by_function(of):
            lines += _of_test(test, [named[id(row)] for row in test], facts, usual, notes)
    look, columns = _fitting([line for line in lines if line.cells is not None], width)
    drawn = lines_as_text(_drawn(lines, look, columns, width), width, colour)
    short = look.short_verdict and any(line.cells is not None and ", simulated" in line.cells.verdict for line in lines)
    said = sentences(rows, facts, columns=[heading for heading, _ in columns], notes=notes, short=short)
    return "\n".join([drawn, *(line for sentence in said for line in wrapped(sentence, width))])


def _of_test(
    rows: list[Row], names: list[tuple[str, str, str]], facts: DeviceFacts, usual: tuple[str, str] | None, notes: bool
) -> list[_Line]:
    """The lines of one test: one for its only row, else its name and below it what tells its rows apart.

    Names are whole ones, those of the function, and what tells rows apart.
    """
    hows = {_how(row, usual) for row in rows}
    shared = hows.pop() if len(hows) == 1 and len(rows) > 1 else ""
    lines = []
    for row, (whole, function, apart) in zip(rows, names, strict=True):
        name = whole if len(rows) == 1 else _INDENT + apart if apart else function
        cells = cells_of(row, facts, name)
        below = [] if shared else [_how(row, usual)]
        if row.measurement is not None and notes:
            below += [sectors(row.measurement) or "", access_interval(row.measurement) or ""]
        outcome = Outcome.FAIL if row.failed else cells.outcome
        parts = (function, _INDENT + apart) if len(rows) == 1 and apart else ("", "")
        lines.append(_Line(name, cells, parts, outcome=outcome, beside=[line for line in below if line]))
    if len(rows) > 1:
        lines.insert(0, _Line(names[0][1] + (f" ({shared})" if shared else "")))
    return lines


def _how(row: Row, usual: tuple[str, str] | None) -> str:
    """How a row was measured, where that is unusual."""
    if row.measurement is None or (row.measurement.mode, row.measurement.sampler) == usual:
        return ""
    return f"{row.measurement.mode}, {row.measurement.sampler}"


def _fitting(lines: Sequence[_Line], width: int) -> tuple[_Look, list[tuple[str, list[str]]]]:
    """The widest look that leaves names enough room, and its columns: heading and texts, the verdict last."""
    cells = [line.cells for line in lines if line.cells is not None]
    longest = max(len(line.name) for line in lines)
    for look in _looks(any(cell.change for cell in cells)):
        columns = [(heading, texts) for heading in HEADINGS if heading not in look.without and any(texts := _texts(heading, cells, look))]
        columns.append(("verdict", [_verdict(cell, look) for cell in cells]))
        if width - _room(columns) >= min(longest, look.least_name):
            break
    return look, columns


def _room(columns: Sequence[tuple[str, list[str]]]) -> int:
    return sum(max(len(heading), *map(len, texts)) + GAP for heading, texts in columns)


def _texts(heading: str, cells: Sequence[Cells], look: _Look) -> list[str]:
    if heading == "change" and not look.intervals:
        return [cell.short_change for cell in cells]
    texts = [cell.figures[HEADINGS.index(heading)] for cell in cells]
    if heading == "of peak" and look.bars:
        return [f"{text} {cell.bar}" if text else "" for text, cell in zip(texts, cells, strict=True)]
    return texts


def _verdict(cell: Cells, look: _Look) -> str:
    return cell.verdict.replace(", simulated", " (sim)") if look.short_verdict else cell.verdict


def _drawn(lines: Sequence[_Line], look: _Look, columns: Sequence[tuple[str, list[str]]], width: int) -> Iterator[Text]:
    rows = [line for line in lines if line.cells is not None]
    longest = max(4, *(len(line.name) for line in rows))  # no narrower than its heading
    name_width = max(min(longest, _LEAST_NAME), min(longest, width - _room(columns)))
    widths = [max(len(heading), *map(len, texts)) for heading, texts in columns]
    headings = [heading.rjust(w) for (heading, _), w in zip(columns[:-1], widths, strict=False)]
    blank = " " * GAP
    lines = [part for line in lines for part in _parted(line, name_width)]
    names = iter(_shortened(lines, name_width))
    yield Text(blank.join(["test".ljust(name_width), *headings, "verdict"]), style="bold")
    yield Text("-" * (name_width + _room(columns)))
    at = 0
    for line in lines:
        if line.cells is None:
            # A heading may take the room of all columns.
            yield Text(shortened(line.name, max(width, name_width)), style=line.style)
            continue
        figures = [texts[at].rjust(w) for (_, texts), w in zip(columns[:-1], widths, strict=False)]
        text = Text(blank.join([next(names).ljust(name_width), *figures, ""]))
        yield text.append(columns[-1][1][at], style=_STYLES[line.outcome])
        indent = _INDENT + _INDENT * line.name.startswith(_INDENT)
        yield from (Text(shortened(indent + below, width), style="dim") for below in line.beside)
        at += 1


def _parted(line: _Line, width: int) -> list[_Line]:
    """The line, or where its name is too long for it two: its test, and what stands under tests of several rows."""
    function, apart = line.parts
    return [line] if len(line.name) <= width or not apart else [_Line(function), replace(line, name=apart)]


def _shortened(lines: Sequence[_Line], width: int) -> list[str]:
    """The names of the rows in at most `width` characters, those under one heading told apart, and those without one."""
    found = [""] * sum(line.cells is not None for line in lines)
    groups: dict[int | None, list[tuple[int, str]]] = {}
    heading, at = 0, 0
    for number, line in enumerate(lines):
        if line.cells is None:
            heading = number
            continue
        groups.setdefault(heading if line.name.startswith(_INDENT) else None, []).append((at, line.name))
        at += 1
    for group in groups.values():
        for (place, _), name in zip(group, shortened_apart([name for _, name in group], width), strict=True):
            found[place] = name
    return found
