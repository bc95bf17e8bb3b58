"""The table of results in a terminal with the sentences under it. ASCII only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import Columns, Line, narrowed, wrapped
from pytest_gpumem.reporting.groups import by_function, ordered
from pytest_gpumem.reporting.row_facts import (
    HEADINGS,
    UNCHECKED,
    RowFacts,
    interval_text,
    row_facts,
    sectors_text,
)
from pytest_gpumem.reporting.summary import remedies, since_the_baseline

_SIMULATED, _BARS, _INTERVALS = "(simulated)", "bars", "intervals"
_LEFT_OUT = (
    *(
        (_SIMULATED, 28),
        (_BARS, 28),
        ("of peak", 28),
        ("noise", 28),
        ("bandwidth", 20),
        (_INTERVALS, 14),
    ),
    *(("kept", 14), ("peak memory", 14)),
)
"""Parts of the table that are left out one after the other, each if names have less than so many columns."""
_BAR = 10  # characters of the bar of a whole share of the peak
_INDENT = "  "
_FIGURE = re.compile(r"\d[\d.]*( [num]?s\b| [KMGT]?i?B\b)?")


@dataclass(frozen=True)
class _Shown:
    """A row of the table, and how its name is drawn."""

    facts: RowFacts
    name: str
    below: tuple[str, ...]
    alone: bool  # True if it is the only row of its test, so that its name is not under a heading


def table(
    rows: Sequence[Row],
    facts: DeviceFacts,
    *,
    width: int,
    colour: bool,
    notes: bool = True,
    saved: bool = False,
    memory: bool = False,
) -> str:
    """The table and the sentences under it, without a trailing line break.

    Rows are grouped by kind of test; what got worse is first, then the slowest. The rows of one test are under its name. Columns without
    any figure are left out. Where names would get too short to tell tests apart, the parts of `_LEFT_OUT` go, one after the other; the
    other columns are never cut, so the table may get wider than `width`. A name that is too long gets a line for its test and one for its
    parameters, then loses words in its middle.
    `notes`: show each measurement's notes, sectors of requests that are not coalesced, and intervals of latencies per access; if False,
    only the number of notes.
    `saved`: as for `summary`.
    `memory`: as `RowFacts.memory`.
    """
    if not rows:
        return ""
    rows, facts = printable(rows), printable(facts)
    usual = _usual_way(rows)
    groups = ordered(rows, facts)
    facts_of = {id(one.row): one for one in row_facts(rows, facts, memory=memory)}
    lines: list[_Shown | Text] = []
    for kind, of in groups:
        if len(groups) > 1:
            lines.append(Text(f"-- {kind.value}", style="bold"))
        for test in by_function(of):
            lines += _of_test([facts_of[id(row)] for row in test], usual, notes)
    drawn, without = narrowed(_LEFT_OUT, width, lambda without: _columns(lines, without))
    name_width = drawn.name_width(width)
    drawn = _columns([part for line in lines for part in _parted(line, name_width)], without)
    columns = [HEADINGS[index] for index in drawn.shown]
    short = _SIMULATED in without and any(one.simulated for one in facts_of.values())
    below = _sentences(
        list(facts_of.values()), columns=columns, notes=notes, short=short, saved=saved
    )
    return "\n".join(
        [
            drawn.drawn(width, colour),
            *(line for sentence in below for line in wrapped(sentence, width)),
        ]
    )


def _of_test(
    rows: list[RowFacts], usual: tuple[str, str] | None, notes: bool
) -> Iterator[_Shown | Text]:
    """The lines of one test: one for its only row, else its name and below it what tells its rows apart. A row of the whole test is first,
    and has the line of the name."""
    ways = {_way(one.row, usual) for one in rows}
    shared = ways.pop() if len(ways) == 1 and len(rows) > 1 else ""
    rows = sorted(rows, key=lambda one: bool(one.apart))
    if len(rows) > 1 and rows[0].apart:
        yield Text(rows[0].function + (f" ({shared})" if shared else ""))
    for one in rows:
        below = [] if shared and rows[0].apart else [_way(one.row, usual)]
        if one.row.measurement is not None and notes:
            below += [sectors_text(one.row.measurement), interval_text(one.row.measurement)]
        name = one.name if len(rows) == 1 else _INDENT + one.apart if one.apart else one.function
        yield _Shown(one, name, tuple(line for line in below if line), alone=len(rows) == 1)


def _way(row: Row, usual: tuple[str, str] | None) -> str:
    """Mode and sampler of a row, if they are not the usual ones."""
    if row.measurement is None or (row.measurement.mode, row.measurement.sampler) == usual:
        return ""
    return f"{row.measurement.mode}, {row.measurement.sampler}"


def _columns(lines: Sequence[_Shown | Text], without: Collection[str]) -> Columns:
    """The table without some of the parts of `_LEFT_OUT`."""
    drawn: list[Line | Text] = []
    for line in lines:
        if isinstance(line, Text):
            drawn.append(line)
            continue
        facts = line.facts
        figures = [
            "" if heading in without else _figure(heading, facts, without) for heading in HEADINGS
        ]
        simulated = ("(sim)" if _SIMULATED in without else "(simulated)") if facts.simulated else ""
        verdict = Text(f"{facts.verdict} {simulated}".rstrip(), style=facts.outcome.style)
        drawn.append(Line(line.name, figures, verdict, line.below))
    return Columns("test", HEADINGS, "verdict", drawn)


def _figure(heading: str, facts: RowFacts, without: Collection[str]) -> str:
    figure = facts.figures[heading]
    if heading == "of peak" and figure.value is not None and _BARS not in without:
        full = round(min(max(figure.value, 0.0), 1.0) * _BAR)
        return f"{figure.text} {'#' * full}{'.' * (_BAR - full)}"
    return figure.short if heading == "change" and _INTERVALS in without else figure.text


def _parted(line: _Shown | Text, width: int) -> list[_Shown | Text]:
    """The line, or two lines if it is of a test's only row and its name is too long: the test, and parameters and label under it."""
    if isinstance(line, Text) or not line.alone or not line.facts.apart or len(line.name) <= width:
        return [line]
    return [
        Text(line.facts.function),
        _Shown(line.facts, _INDENT + line.facts.apart, line.below, alone=False),
    ]


def _usual_way(rows: Sequence[Row]) -> tuple[str, str] | None:
    """Mode and sampler of most rows; None if nothing was measured."""
    most = Counter(
        (row.measurement.mode, row.measurement.sampler)
        for row in rows
        if row.measurement is not None
    ).most_common(1)
    return most[0][0] if most else None


def _sentences(
    shown: Sequence[RowFacts], *, columns: Collection[str], notes: bool, short: bool, saved: bool
) -> list[str]:
    """The sentences under a table: how the figures were taken, and the reason of every doubt. Without full stops.
    `shown`: the rows, in the order in which they are shown.
    `notes`: show each measurement's notes; if False, only their number.
    `short`: the table has "sim" for "simulated".
    `saved`: as for `summary`.
    """
    rows = [one.row for one in shown]
    text = ["sim: simulated, no GPU was measured"] if short else []
    if (usual := _usual_way(rows)) is not None:
        others = any(_way(row, usual) for row in rows)
        way = f"{usual[0]}, sampler {usual[1]}{', unless noted otherwise' if others else ''}"
        text.append(
            f"{way}; noise is half of the 95 % interval over placements"
            if "noise" in columns
            else way
        )
    if "bandwidth" in columns and any(map(_asks, rows)):
        text.append("asked: by the threads, over and over; caches and memory serve it together")
    text += [*_compared(rows), *since_the_baseline(rows)]
    text += [
        f"{row.verdict.outcome.value} {row.key}: {row.verdict.reason}"
        for row in rows
        if _gives_reason(row)
    ]
    noted = _notes(shown)
    if notes:
        for first, *more in noted:
            text.append(
                first + (f" ({counted(len(more), 'row')} more with such a note)" if more else "")
            )
    elif noted:
        text.append(
            f"{counted(len(noted), 'note')} on how it was measured; -v shows {'them' if len(noted) > 1 else 'it'}"
        )
    return [
        *text,
        *remedies(row for row in rows if row.verdict.outcome is Outcome.NEW and not saved),
    ]


def _asks(row: Row) -> bool:
    return row.measurement is not None and row.measurement.asked_bandwidth is not None


def _gives_reason(row: Row) -> bool:
    # pytest shows the reason of a FAIL, unless the test failed by another error too. The rest of NEW rows have one in common.
    outcome = row.verdict.outcome
    return outcome in (Outcome.UNDECIDED, Outcome.ACCEPTED) or (
        outcome is Outcome.FAIL and row.test_error is True
    )


def _compared(rows: Sequence[Row]) -> Iterator[str]:
    """How to read a change."""
    if any(row.verdict.comparison is not None for row in rows):
        yield "change is against the mean of the baseline's processes"


def _notes(shown: Sequence[RowFacts]) -> list[list[str]]:
    """The notes on measurements: many rows may have the same one with other figures."""
    noted: dict[str, list[str]] = {}
    for one in shown:
        for term, fact in one.facts():
            if term in ("note", "pages", UNCHECKED):
                told = f"{term} {one.name}: {fact}"
                noted.setdefault(told if term == "pages" else _FIGURE.sub("", fact), []).append(
                    told
                )
    return list(noted.values())
