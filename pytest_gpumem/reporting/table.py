"""The table of results in a terminal, with the sentences under it, and what was not judged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_gpumem.judging.finding import mark, no_share_of_peak
from pytest_gpumem.judging.footprint import place_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import ACCEPTED, LOST, NOT_RUN, ROW, TEST, UNDECIDED, Omission, Row
from pytest_gpumem.reporting.columns import table_of_tests, wrapped
from pytest_gpumem.reporting.row import RowView, attention, headings_of, views
from pytest_gpumem.units import counted

STYLES: Mapping[Outcome, str] = {
    Outcome.FAIL: "bold red",
    Outcome.UNDECIDED: "yellow",
    Outcome.ACCEPTED: "magenta",
    Outcome.NEW: "cyan",
    Outcome.PASS: "green",
    Outcome.MEASURED: "dim",
}
"""Colours, as rich names them."""
MOST = 40  # rows that a table has without -v: what needs a look, then the others as they ran
LISTED = 20  # lost measurements that are listed; the results have all
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
    """The table, the sentences under it, and the counts.

    `every`: list every row, with its notes; else at most `MOST`, what needs a look first.
    `saved`: nobody needs to store NEW rows. `memory`: show every peak.
    """
    rows, facts = printable((list(rows), facts))
    measured = [row for row in rows if row.measured_something]
    listed = shown = views(measured, facts, memory=memory)
    if not every:
        shown.sort(key=lambda view: attention(view.row))
        listed = shown[:MOST]
    lines, sentences = list[str](), list[str]()
    if listed:
        lines.append(_drawn(listed, width, colour))
    if len(shown) > len(listed):
        sentences.append(f"and {counted(len(shown) - len(listed), 'further row')}: -v lists them")
    if every:
        sentences += _notes(measured, facts)
    sentences += remedies(measured, store=not saved)
    sentences += wait_totals(measured)
    sentences.append(counts_text(rows))
    for sentence in sentences:
        lines += wrapped(sentence, width)
    return "\n".join(lines)


def _drawn(shown: Sequence[RowView], width: int, colour: bool) -> str:
    from rich.text import Text

    headings = headings_of(shown)
    lines = []
    for view in shown:
        sim = " (sim)" if view.simulated else ""
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


def remedies(rows: Iterable[Row], *, store: bool = True) -> list[str]:
    """A sentence for each reason that leaves rows without a verdict. It says what decides them.
    `store`: name the command that stores NEW rows."""
    groups: dict[tuple[Outcome, Code | None, str], list[Row]] = {}
    for row in rows:
        outcome = row.verdict.outcome
        if outcome in (Outcome.UNDECIDED, Outcome.ACCEPTED, Outcome.NEW) and not row.test_error:
            # The reason of a NEW row has no figures: rows share it.
            reason = row.verdict.reason if outcome is Outcome.NEW else ""
            groups.setdefault((outcome, row.verdict.code, reason), []).append(row)
    sentences = []
    for outcome in (Outcome.UNDECIDED, Outcome.ACCEPTED, Outcome.NEW):
        of_outcome = [those for key, those in groups.items() if key[0] is outcome]
        for those in of_outcome:
            which = those[0].key
            if len(those) > 1:
                which = f"{counted(len(those), 'row')}, such as {which}"
            sentences.append(f"{outcome.word} {which}: {those[0].verdict.reason}")
        if outcome is Outcome.NEW and store and of_outcome:
            sentences[-1] += (
                "; to store this state: pytest --gpumem --gpumem-save --gpumem-processes 3"
            )
    return sentences


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


def counts_text(rows: Sequence[Row]) -> str:
    """Such as "9 rows (simulated): 1 FAIL, 2 PASS; 1 test failed without a measurement"."""
    counts: Counter[Outcome] = Counter()
    by_error, nothing, simulated = set[str](), set[str](), False
    for row in rows:
        simulated = simulated or row.verdict.simulated
        if not row.measured_something:
            nothing.add(row.nodeid)
            continue
        counts[row.verdict.outcome] += 1
        if row.test_error:
            by_error.add(row.nodeid)
    outcomes = []
    for outcome in sorted(counts, key=lambda outcome: outcome.rank):
        outcomes.append(f"{counts[outcome]} {outcome.word}")
    parts = [f"{counted(counts.total(), 'row')}{mark(simulated)}"]
    if outcomes:
        parts[0] += f": {', '.join(outcomes)}"
    if by_error:
        parts.append(f"{counted(len(by_error), 'test')} failed by an assertion or an error")
    if nothing:
        parts.append(f"{counted(len(nothing), 'test')} failed without a measurement")
    return "; ".join(parts)


def missing_lines(missing: Sequence[Omission]) -> list[str]:
    names = {LOST: "lost", ACCEPTED: "accepted", UNDECIDED: "not judged"}
    things = {ROW: "measurement of the baseline", TEST: "test"}
    crashed: dict[str, set[str]] = defaultdict(set)
    not_run: dict[str, Counter[str]] = defaultdict(Counter)
    listed: dict[str, list[str]] = defaultdict(list)
    for omission in missing:
        reason, lost = omission.reason, omission.status == LOST
        if omission.status == NOT_RUN:
            not_run[things.get(omission.what, "limit")][reason] += 1
        elif lost and omission.how == "not reached":
            crashed["not reached, because the session ended before"].add(omission.nodeid)
        elif lost and omission.how == "did not run":
            crashed[f"did not run because {reason}"].add(omission.nodeid)
        else:
            name = names[omission.status]
            limit = "" if omission.what in things else f", {omission.what}"
            listed[name].append(f"{name}: {omission.key}{limit}: {reason}")
    lines = []
    for why, tests in crashed.items():
        count = counted(len(tests), "test")
        lines.append(f"lost: {count} {why}; --gpumem-isolate runs them all the same")
    for name, entries in listed.items():
        lines += entries[:LISTED]
        if len(entries) > LISTED:
            lines.append(f"{name}: {len(entries) - LISTED} further")
    for thing, reasons in not_run.items():
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        what, _, of = thing.partition(" ")
        lines.append(f"not run: {counted(reasons.total(), what)} {of}".rstrip() + f" ({counts})")
    return lines


def profiled_lines(rows: Sequence[Row]) -> list[str]:
    """Lines about a session under a profiler, whose times are not comparable with others."""
    tests = {row.nodeid: None for row in rows if row.measurement is not None}
    count = counted(len(tests), "test")
    names = [f"  {printable(test)}" for test in tests]
    return [f"profiled: {count}; times under a profiler are not judged", *names]
