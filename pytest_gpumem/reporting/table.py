"""The table of results in a terminal, with the sentences under it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from pytest_gpumem.judging.finding import no_share_of_peak
from pytest_gpumem.judging.footprint import place_of
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.conclusion import remedies
from pytest_gpumem.reporting.row import RowView, attention, headings_of, views
from pytest_gpumem.reporting.terminal import STYLES, table_of_tests, wrapped
from pytest_gpumem.units import counted

MOST = 40  # rows that a table has without -v: what needs a look, then the others as they ran
LARGEST = 3  # lines that the totals of waits name


def table(
    rows: Sequence[Row],
    facts: DeviceFacts,
    *,
    width: int,
    colour: bool,
    every: bool = True,
    saved: bool = False,
    memory: bool = False,
) -> str:
    """The table, and the sentences under it.

    `every`: list every row, with its notes; else at most `MOST`, what needs a look first.
    `saved`: nobody needs to store NEW rows. `memory`: show every peak.
    """
    rows, facts = printable((list(rows), facts))
    measured = [row for row in rows if row.measured_something]
    listed = shown = views(measured, facts, memory=memory)
    if not every:
        shown.sort(key=lambda view: attention(view.row))
        listed = shown[:MOST]
    lines = [_drawn(listed, width, colour)] if listed else []
    sentences = list[str]()
    if len(shown) > len(listed):
        sentences.append(f"and {counted(len(shown) - len(listed), 'further row')}: -v lists them")
    if every:
        sentences += _notes(measured, facts)
    sentences += remedies(measured, store=not saved)
    sentences += wait_totals(measured)
    for sentence in sentences:
        lines += wrapped(sentence, width)
    return "\n".join(lines)


def _drawn(shown: Sequence[RowView], width: int, colour: bool) -> str:
    from rich.text import Text

    headings = headings_of(shown)
    lines = []
    for view in shown:
        sim = " (sim)" if view.row.verdict.simulated else ""
        verdict = Text(view.verdict + sim, style=STYLES[view.outcome])
        lines.append((view.name, view.texts(headings), verdict))
    return table_of_tests(headings, lines, width, colour)


def _notes(rows: Sequence[Row], facts: DeviceFacts) -> Iterator[str]:
    notes: dict[str, list[Row]] = {}
    no_share: dict[str, list[Row]] = {}
    unchecked = 0
    for row in rows:
        if row.measurement is None:
            continue
        unchecked += not row.measurement.checked
        for note in row.measurement.notes:
            notes.setdefault(note, []).append(row)
        reason = no_share_of_peak(row.measurement, facts)
        if reason is not None and row.measurement.bandwidth:
            no_share.setdefault(reason, []).append(row)
    for note, those in notes.items():
        yield f"note: {_which(those)}: {note}"
    for reason, those in no_share.items():
        yield f"no % of peak: {_which(those)}: {reason}"
    if unchecked:
        yield f"{counted(unchecked, 'row')} measured without a check of the result"


def _which(rows: Sequence[Row]) -> str:
    return rows[0].key if len(rows) == 1 else f"{rows[0].key} and {len(rows) - 1} more"


def wait_totals(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence on the lines at which the host waits most; none where it does not wait."""
    lines: Counter[str] = Counter()
    tests = 0
    for row in rows:
        if row.footprint is None or row.footprint.waits is None:
            continue
        tests += bool(row.footprint.waits.lines)
        for line in row.footprint.waits.lines:
            lines[place_of(line)] += line.count
    if lines:
        most = ", ".join(f"{place} {count} x" for place, count in lines.most_common(LARGEST))
        times, places = counted(lines.total(), "time"), counted(len(lines), "line")
        yield f"the host waits {times} in {counted(tests, 'test')}, at {places}: {most}"


def profiled_lines(rows: Sequence[Row]) -> list[str]:
    """Lines about a session under a profiler, whose times are not comparable with others."""
    tests = {row.nodeid: None for row in rows if row.measurement is not None}
    count = counted(len(tests), "test")
    names = [f"  {printable(test)}" for test in tests]
    return [f"profiled: {count}; times under a profiler are not judged", *names]
